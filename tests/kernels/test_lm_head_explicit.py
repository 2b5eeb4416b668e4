"""The head on JAX's default mesh, whose axes are Explicit: the layout comes from types, or from `HeadSharding`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lm_head_cases import assert_near

from kernels.lm_head import HeadSharding, token_logprobs, token_loss

MESH = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(4, 6, 8)).astype(np.float32)
WEIGHT = RNG.normal(size=(12, 8)).astype(np.float32)
LABELS = RNG.integers(0, 12, (4, 6)).astype(np.int32)
OPERAND = RNG.normal(size=(4, 6)).astype(np.float32)
SCALE = np.float32(0.5)


def total(hidden, weight, operand, scale, labels, **options):
    """A loss whose objective closes over `scale`, and a function of all statistics."""

    def objective(logprob, entropy, operand):
        return -operand * jnp.exp(scale * jnp.clip(logprob, -3, 0)) - 0.1 * entropy

    loss, tokens = token_loss(hidden, weight, labels, objective, operand, **options)
    statistics = token_logprobs(hidden, weight, labels, **options)
    return loss + (statistics.logprob * statistics.entropy).sum() + jnp.sin(statistics.lse).sum(), tokens


def differentiated(**options):
    return jax.jit(jax.value_and_grad(lambda *args: total(*args, **options), (0, 1, 2, 3), has_aux=True))


@pytest.fixture(scope="module")
def on_one_device():
    return differentiated()(HIDDEN, WEIGHT, OPERAND, SCALE, LABELS)


def laid_out(tokens, weight):
    specs = (tokens, weight, tokens, P(), tokens)
    arrays = (HIDDEN, WEIGHT, OPERAND, SCALE, LABELS)
    return [jax.device_put(x, NamedSharding(MESH, spec)) for x, spec in zip(arrays, specs, strict=True)]


LAYOUTS = {
    "vocabulary": (P("data"), P("model")),
    "vocabulary over the tokens' axis": (P("data"), P("data")),
    "vocabulary and features": (P("data"), P("model", "data")),
    "rows and columns of tokens": (P("data", "model"), P()),
    "replicated": (P(), P()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_jit_of_sharded_arguments_gives_the_results_of_one_device_laid_out_like_the_arguments(layout, on_one_device):
    arguments = laid_out(*LAYOUTS[layout])
    got = differentiated()(*arguments)
    assert_near(got, on_one_device)
    (_, tokens), gradients = got
    assert all(x.sharding.is_equivalent_to(arguments[4].sharding, 2) for x in tokens)
    for gradient, argument in zip(gradients, arguments[:4], strict=True):
        assert gradient.sharding.is_equivalent_to(argument.sharding, gradient.ndim)


@pytest.mark.parametrize("impl", [None, "full_logits"])
def test_the_mesh_may_be_set_and_a_sharding_may_name_its_axes(impl, on_one_device):
    sharding = HeadSharding(MESH, tokens=("data",), vocabulary="model")
    with jax.set_mesh(MESH):
        assert_near(differentiated(impl=impl)(*laid_out(P("data"), P("model"))), on_one_device)
        assert_near(differentiated(impl=impl, sharding=sharding)(HIDDEN, WEIGHT, OPERAND, SCALE, LABELS), on_one_device)


def test_a_sharding_on_another_mesh_than_the_arguments_is_refused():
    other = HeadSharding(jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]), tokens=("data",))
    with pytest.raises(ValueError, match=r"sharding: its mesh .* is not the arguments'"):
        differentiated(sharding=other)(*laid_out(P("data"), P("model")))


def test_the_work_is_divided_as_the_types_say():
    """A device multiplies its own tokens with its own rows of the weight."""
    text = differentiated(impl="full_logits").lower(*laid_out(P("data"), P("model"))).as_text()
    assert "tensor<12x6xf32>" in text
    assert "tensor<24x12xf32>" not in text
