"""A bfloat16 model moves as its float32 masters do from the first step, in the trainer and in the sampler.

The gain is the change of the mean log-probability over float32's, where parameters move a little from bfloat16's grid
along the signs of their gradient, as AdamW's first steps do.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import ARCHITECTURE, config, forward_of, random_batch

from mllm.algorithms.sft.algorithm import make_validation
from mllm.model.architecture import Architecture
from mllm.model.compute_copy import Rounding, compute_copy
from mllm.model.layer import AttentionLayer
from mllm.model.layout import map_parameters
from mllm.model.load import load_policy
from mllm.model.lora import Lora
from mllm.model.tokenizer import Renderer, bytes_tokenizer
from mllm.parallel.mesh import make_mesh
from mllm.sampler import sampling
from mllm.sampler.sampler import Sampler

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "initializer_range": 0.08}
LORA = {"rank": 8, "alpha": 16.0, "targets": ("q", "k", "v", "o", "gate", "up", "down", "head")}
ROUNDINGS = ("dithered", "nearest")
ROWS, PROMPT = random_batch(16, 64), 6
COUNTED = ROWS.weights[:, PROMPT - 1 : -1] > 0


class Model:
    """A model in a dtype; its parameters are passed in float32, and frozen ones are cast as they are stored."""

    def __init__(self, dtype, rounding="dithered", lora=False, weights=None):
        model = {"architecture": {**ARCHITECTURE, **SIZES}, "dtype": dtype, "compute_rounding": rounding}
        lengths = {"max_prompt_length": PROMPT, "max_completion_length": 64 - PROMPT, "weights": weights}
        self.settings = config(model=model | {"lora": LORA if lora else None}, rollout=lengths)
        self.lora, mesh = lora, make_mesh(self.settings.mesh)
        self.policy = load_policy(self.settings, mesh)
        forward = forward_of(self.policy.graphdef, mesh, self.settings)

        def mean(trained, frozen, batch):
            logprobs = forward.logprobs(self.policy.join(trained, frozen), batch).logprob
            return jnp.vdot(logprobs, batch.weights), logprobs[:, PROMPT - 1 : -1]

        self.differentiated = jax.jit(jax.value_and_grad(mean, has_aux=True))
        self.validate = make_validation(forward, lambda: [ROWS], lambda: None)

    def stored(self, params):
        return jax.tree.map(lambda x, like: x.astype(like.dtype), params, self.policy.params)

    def run(self, params):
        """The trainer's log-probabilities of the tokens that count, and the gradient of their mean."""
        batch = jax.tree.map(jnp.asarray, ROWS)
        (_, logprobs), gradient = self.differentiated(*self.policy.split(self.stored(params)), batch)
        return np.asarray(logprobs)[COUNTED], gradient

    def trained(self, params):
        return self.run(params)[0]

    def validated(self, params):
        return np.array(list(self.validate(self.stored(params), 0).values()))

    def sampled(self, params):
        """The sampler's log-probabilities, where it draws these tokens."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "sequence_keys", lambda seed, step, sequences: sequences)
            patch.setattr(sampling, "sample", draw)
            sampler = Sampler(self.policy.graphdef, Renderer(bytes_tokenizer()), (-1,), self.settings.rollout, 0)
            found = sampler.complete(self.stored(params), ROWS.tokens[:, :PROMPT].tolist(), step=0)
        return np.array([one.logprobs for one in found])[COUNTED]


model = cache(Model)


def draw(logits, sequences, positions, options):
    tokens = jnp.asarray(ROWS.tokens)[sequences, PROMPT + positions]
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return sampling.Draw(tokens, jnp.take_along_axis(logprobs, tokens[:, None], 1)[:, 0], None)


def is_matrix(name):
    return name == "embed" or name.endswith("_weight")


@cache
def base(lora=False):
    """Parameters on bfloat16's grid, with outliers in some columns, and the signs of the trained ones' gradient."""
    exact, rng = model("float32", lora=lora), np.random.default_rng(1)

    def on_grid(values, name):
        scale = np.where(rng.random(values.shape[-1]) < 0.02, 4, 1) if is_matrix(name) else 1
        return (values * scale).astype(jnp.bfloat16).astype(jnp.float32)

    params = map_parameters(on_grid, exact.policy.initial_params())
    return params, jax.tree.map(jnp.sign, exact.run(params)[1])


def gains(subject, distance, chosen=lambda name: True):
    """The gains of trainer and sampler, where the chosen parameters move so far to either side."""
    exact, (params, signs) = model("float32", lora=subject.lora), base(subject.lora)
    own, frozen = exact.policy.split(params)
    steps = map_parameters(lambda sign, name: distance * sign * chosen(name), signs)

    def change(logprobs):
        moved = [jax.tree.map(lambda x, step: x + side * step, own, steps) for side in (1, -1)]  # noqa: B023
        return np.subtract(*(logprobs(exact.policy.join(one, frozen)).mean(dtype=np.float64) for one in moved))

    expected = change(exact.trained)
    return [change(of) / expected for of in (subject.trained, subject.sampled)]


@pytest.mark.nightly
def test_a_dithered_model_moves_as_float32_does_and_one_rounded_to_nearest_hardly():
    assert all(0.9 < gain < 1.1 for gain in gains(model("bfloat16"), 1e-5))
    assert all(gain < 0.3 for gain in gains(model("bfloat16", "nearest"), 1e-5))


@pytest.mark.slow
@pytest.mark.nightly
def test_a_sampler_in_int8_moves_as_float32_does():
    assert 0.8 < gains(model("bfloat16", weights="int8"), 3e-5)[1] < 1.2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["layers.q_bias", "layers.attention_norm", "layers.mlp_norm", "norm"])
def test_norms_and_biases_are_not_rounded(kind):
    """From 1 the next number in bfloat16 is 1 + 2^-7."""
    ones = map_parameters(lambda x, name: x if is_matrix(name) else jnp.ones_like(x), base()[0])
    above = map_parameters(lambda x, name: x + 2**-10 if name == kind else x, ones)
    for of in (model("bfloat16").trained, model("bfloat16").sampled):
        assert (of(above) != of(ones)).mean() > 0.9


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "distance"), [("_b", 1e-4), ("head_b", 3e-4)])
def test_adapters_of_a_bfloat16_model_move_it_as_float32_does(kind, distance):
    """Rounded a second time, or merged into matrices of bfloat16, half of what they add is lost, and more."""
    found = gains(model("bfloat16", lora=True), distance, lambda name: name.endswith(kind))
    assert all(0.9 < gain < 1.15 for gain in found)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["q", "v"])
def test_a_product_is_rounded_once_after_bias_and_adapter_and_has_the_gradients_of_float64(target):
    """The product is q, with an adapter or without. Operands are on the grid, but x a^T, which is small, is rounded."""
    sizes, lora = Architecture.from_hf(ARCHITECTURE, "test"), Lora(8, 16.0, (target,))
    graphdef, params = nnx.split(
        AttentionLayer(sizes, sizes.num_hidden_layers, jnp.bfloat16, jnp.float32, nnx.Rngs(0), lora)
    )
    rng, names = np.random.default_rng(3), ["q_weight", "q_bias", "q_a", "q_b"][: 4 if target == "q" else 2]
    shapes = {(32, 32): 0.1, (32,): 0.1, (8, 32): 0.1, (32, 8): 0.003, (1, 90, 32): 1, (90, 32): 1}
    arrays = [jnp.asarray(rng.normal(size=shape) * scale, jnp.bfloat16) for shape, scale in shapes.items()]

    def product(x, *numbers):
        given = dict(zip(names, numbers, strict=True))
        return nnx.merge(graphdef, nnx.State({**params, **given})).product("q", x)[0]

    y, pull = jax.vjp(product, arrays[4], *(array.astype(jnp.float32) for array in arrays[: len(names)]))
    w, bias, a, b, (x,), dy = map(np.float64, arrays)
    b *= 2 * (target == "q")  # the scale
    exact = x @ w.T + bias + x @ a.T @ b.T
    half_ulp, of_low = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 8), 2**-8 * np.abs(x @ a.T) @ np.abs(b.T)
    assert (np.abs(np.float64(y) - exact) <= half_ulp + of_low + 1e-6).all()
    wanted = [dy @ w + dy @ b @ a, dy.T @ x, dy.sum(0), b.T @ dy.T @ x, 2 * dy.T @ (x @ a.T)][: len(names) + 1]
    for found, want in zip(pull(arrays[5]), wanted, strict=True):
        assert np.linalg.norm(np.float64(found).reshape(want.shape) - want) < 2**-8 * np.linalg.norm(want)


@pytest.mark.slow
def test_a_dithered_model_is_that_of_its_copies_to_the_bit():
    """Trainer, sampler and validation read nothing else of the matrices."""
    rng = np.random.default_rng(2)
    params = jax.tree.map(lambda x: x * (1 + 2**-8 * rng.uniform(-1, 1, x.shape).astype(np.float32)), base()[0])
    rounding = Rounding(jnp.dtype("bfloat16"), dithered=True)
    copies = map_parameters(
        lambda x, name: compute_copy(x, rounding, name).astype(jnp.float32) if is_matrix(name) else x, params
    )
    dithered, nearest = (model("bfloat16", rounding) for rounding in ROUNDINGS)
    for of in (Model.trained, Model.sampled, Model.validated):
        assert of(dithered, params).tobytes() == of(nearest, copies).tobytes() != of(nearest, params).tobytes()
