"""Every family's decoder against transformers' decoder, its rematerialisation, and its rounding.

Expected logits: tests/fixtures/README.md; tests/algorithms/test_packed_update.py has packed rows, and
tests/sampler/test_rollout.py what decode steps compute.
"""

import dataclasses
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.tree_util import tree_leaves_with_path
from tiny import ARCHITECTURE, FIXTURES, config, load_weights, logits

from mllm.config.model import ModelConfig
from mllm.errors import UserError
from mllm.model import decoder, layer, weights
from mllm.model.architecture import SMALLEST, Architecture
from mllm.model.decoder import Decoder
from mllm.model.layer import rms_norm, rotate_by_product, rotate_halves
from mllm.model.layout import parameter_name
from mllm.model.load import find_model, load_policy
from mllm.model.presets import PRESETS
from mllm.parallel.mesh import make_mesh

NAMES = ("tied", "untied_sharded", "grouped_bfloat16", "qwen3", "llama", "gemma3", "smollm3", "olmo2", "qwen3_5")
QUICK = ("gemma3", "qwen3_5")
FAMILIES = [*QUICK, pytest.param("qwen3", marks=pytest.mark.slow)]
FAMILIES += [pytest.param(name, marks=pytest.mark.nightly) for name in NAMES if name not in (*QUICK, "qwen3")]


@cache
def fixture(name: str) -> tuple[Architecture, nnx.State, jax.Array, jax.Array, np.ndarray]:
    """Sizes, parameters, tokens, positions, and the logits of transformers."""
    expected = np.load(FIXTURES / name / "expected.npz")
    inputs = (jnp.asarray(expected[key]) for key in ("tokens", "positions"))
    return weights.read_config(FIXTURES / name), load_weights(FIXTURES / name), *inputs, expected["logits"]


def logits_of(config: Architecture, params: nnx.State, *inputs: Any) -> Any:
    return logits(nnx.split(Decoder.abstract(config, dtype=jnp.float32))[0], params, *inputs)


def gradient(name: str, *, remat: Any = None, **dtypes: Any) -> Callable[[nnx.State], nnx.State]:
    """The gradient of a loss as a function of the parameters. Without `remat` every activation is kept."""
    config, _, tokens, positions, _ = fixture(name)
    graphdef, _ = nnx.split(Decoder.abstract(config, **{"dtype": jnp.float32, **dtypes}, remat=remat or "full"))

    def loss(params: nnx.State) -> jax.Array:
        model = nnx.merge(graphdef, params)
        with nullcontext() if remat else patch.object(decoder, "rematerialize", lambda step, *_: step):
            hidden = model(tokens, positions, jnp.ones_like(tokens))
        return jnp.mean(jnp.sin(hidden.astype(jnp.float32) @ model.head_weight.T))

    return jax.grad(loss)


@cache
def gradients(name: str, **options: Any) -> nnx.State:
    return jax.jit(gradient(name, **options))(fixture(name)[1])


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_agree_with_transformers(name: str) -> None:
    config, params, tokens, positions, expected = fixture(name)
    result = logits_of(config, params, tokens, positions)
    assert np.std(expected) > 1, "logits this small would hide a wrong layer"
    np.testing.assert_allclose(result, expected, atol=1e-4, rtol=0)


def test_the_norm_rounds_once() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 8, 64)), jnp.float32)
    weight = nnx.Param(jnp.asarray(rng.uniform(0.5, 4, 64), jnp.bfloat16))
    wide = np.asarray(x, np.float64)
    exact = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-6) * np.asarray(weight[...], np.float64)
    normed = rms_norm(x, weight, SMALLEST, jnp.bfloat16)
    assert normed.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(normed, np.float64), exact, rtol=1.001 * 2**-8, atol=0)


@pytest.mark.slow
def test_the_residual_stream_is_summed_in_float32() -> None:
    """docs/log.md has the cost of rounding to bfloat16. `project` and `add_feed_forward` narrow their operands."""
    config, params, tokens, *_ = fixture("grouped_bfloat16")
    model = nnx.merge(nnx.split(Decoder.abstract(config, dtype=jnp.bfloat16))[0], params)
    one = nnx.merge(nnx.split(model.layers)[0], jax.tree.map(lambda x: x[0], nnx.state(model.layers)))
    stream = model.look_up(tokens)
    assert stream.dtype == jnp.float32
    attended = jnp.ones((*tokens.shape, config.num_attention_heads, config.head_dim), jnp.bfloat16)
    for add, *operands in ((one.add_attention, stream, attended), (one.add_feed_forward, stream)):
        traced = jax.make_jaxpr(add)(*operands)
        *_, last = (call for call in traced.eqns if call.primitive.name == "custom_vjp_call")
        assert [out.aval.dtype for out in (*last.outvars, *traced.jaxpr.outvars)] == [jnp.float32] * 2, add


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("qwen3", "products"), ("qwen3", "full"), ("qwen3_5", "products")])
def test_remat_keeps_the_gradient_of_each_parameter(name: str, kind: str) -> None:
    plain, again = (gradients(name, remat=remat) for remat in (None, kind))
    for (path, expected), leaf in zip(tree_leaves_with_path(plain), jax.tree.leaves(again), strict=True):
        assert np.abs(expected).max() > 1e-6, parameter_name(path)
        near = 1e-7 if name == "qwen3" else 2e-5 * np.abs(expected).max()
        np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=near, err_msg=parameter_name(path))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", pytest.param("tied", marks=pytest.mark.nightly)])
def test_a_tpu_shapes_products_by_heads_and_gives_the_same_gradients(name: str, monkeypatch) -> None:
    expected = gradients(name, remat="full")
    monkeypatch.setattr(layer, "traced_platform", lambda: "tpu")
    mine = jax.jit(gradient(name, remat="full"))(fixture(name)[1])
    for (path, right), leaf in zip(tree_leaves_with_path(expected), jax.tree.leaves(mine), strict=True):
        np.testing.assert_allclose(
            leaf, right, rtol=1e-5, atol=2e-5 * np.abs(right).max(), err_msg=parameter_name(path)
        )


def test_kept_products_are_not_computed_again() -> None:
    """Of a layer's nine products the backward pass recomputes attention's two, or all."""
    kept, products, full = (
        str(jax.make_jaxpr(gradient("qwen3", remat=remat))(fixture("qwen3")[1])).count("dot_general[")
        for remat in (None, "products", "full")
    )
    assert (products - kept, full - kept) == (2, 9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pairs", [8, 32])
def test_a_tpu_rotates_to_the_same_bits(dtype, pairs) -> None:
    """The first 2 * pairs of a head's 64 dims are rotated."""
    x, dy, angles = (
        jax.random.normal(jax.random.key(i), (2, 5, *size)) for i, size in enumerate([(3, 64), (3, 64), (1, 32)])
    )
    rotation = 1.3 * jnp.stack([jnp.cos(angles[..., :pairs]), jnp.sin(angles[..., :pairs])])
    mine, right = (
        jax.vjp(partial(way, rotation=rotation), x.astype(dtype)) for way in (rotate_by_product, rotate_halves)
    )
    np.testing.assert_array_equal(mine[0], right[0])
    np.testing.assert_array_equal(*(pull(dy.astype(dtype))[0] for _, pull in (mine, right)))


@pytest.mark.slow
def test_bfloat16_gives_unrounded_float32_gradients() -> None:
    """A residual stream in bfloat16 makes the gradients no worse."""

    def flat(**options: Any) -> np.ndarray:
        leaves = jax.tree.leaves(gradients("qwen3", **options))
        assert all(leaf.dtype == jnp.float32 and (leaf != leaf.astype(jnp.bfloat16)).any() for leaf in leaves)
        return np.concatenate([leaf.ravel() for leaf in leaves])

    exact = flat()
    whole, kept = (np.linalg.norm(flat(remat=remat, dtype=jnp.bfloat16) - exact) for remat in (None, "full"))
    assert kept < 1.2 * whole < 0.1 * np.linalg.norm(exact)


def test_a_token_outside_the_vocabulary_gives_nan() -> None:
    config, params, tokens, positions, _ = fixture("tied")
    result = logits_of(config, params, tokens.at[0, -1].set(96), positions)
    assert np.isnan(result[0, -1]).all()
    assert np.isfinite(result[1]).all()


@pytest.mark.slow
def test_a_fresh_model_has_normal_matrices_and_unit_norms() -> None:
    config = dataclasses.replace(fixture("untied_sharded")[0], hidden_size=64, initializer_range=0.02)
    for path, leaf in tree_leaves_with_path(jax.jit(lambda: nnx.state(Decoder(config, rngs=nnx.Rngs(0))))()):
        name = parameter_name(path)
        if name.endswith(("norm", "bias")):
            assert (leaf == name.endswith("norm")).all(), name
        else:
            assert 0.019 < leaf.std() < 0.021, name
            firsts = leaf.reshape(len(leaf), -1)[:, 0]
            assert len(np.unique(firsts)) == len(leaf), f"{name}: layers or rows repeat"


def policy_of(settings):
    return load_policy(settings, make_mesh(settings.mesh))


def test_a_random_model_can_take_sizes_from_a_bare_folder():
    folder, sizes = find_model(ModelConfig(init="random", source=str(FIXTURES / "tied"), tokenizer="bytes"))
    assert (folder, sizes.vocab_size) == (FIXTURES / "tied", 96)
    with pytest.raises(UserError, match=r"model.source: Qwen/Qwen9 is neither a folder nor one of"):
        find_model(ModelConfig(init="random", source="Qwen/Qwen9"))


def test_the_seed_alone_decides_the_first_parameters():
    settings = config(), config(mesh={"dp": 2, "fsdp": 2, "tp": 2}), config(seed=1)
    first, again, other = (policy_of(one).initial_params() for one in settings)
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (again, first)))
    assert not np.array_equal(other["embed"][...], first["embed"][...])


@pytest.mark.parametrize("section", [{"data": {"max_length": 49}}, {"rollout": {"max_prompt_length": 45}}], ids=str)
def test_rows_longer_than_the_models_positions_are_refused(section):
    architecture = {**ARCHITECTURE, "max_position_embeddings": 48}
    assert policy_of(config("sft", model={"architecture": architecture})).architecture.max_position_embeddings == 48
    with pytest.raises(UserError, match=r"49 tokens, but the model has max_position_embeddings 48"):
        policy_of(config("sft", model={"architecture": architecture}, **section))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("published", "parameters"),
    [
        ("Qwen/Qwen2.5-3B", 3_085_938_688),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("Qwen/Qwen3.5-0.8B", 0.75e9),  # and the sizes of the text part
        ("Qwen/Qwen3.5-4B", 4.2e9),
        ("Qwen/Qwen3.5-9B", 9e9),
        ("Qwen/Qwen3.5-27B", 26.9e9),
    ],
)
def test_presets_have_the_parameters_of_published_checkpoints(published: str, parameters: float) -> None:
    assert published in PRESETS
    for name in {published, f"{published}-Instruct"} & PRESETS.keys():
        leaves = jax.tree.leaves(nnx.state(Decoder.abstract(PRESETS[name])))
        exact = isinstance(parameters, int)
        assert sum(math.prod(leaf.shape) for leaf in leaves) == pytest.approx(parameters, rel=0 if exact else 0.02)
