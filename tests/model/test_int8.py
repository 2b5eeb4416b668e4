"""Matrices in int8: how they are rounded, and that decode steps compute with what they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import config

from mllm.model.int8 import Int8Matrix, quantize
from mllm.model.layout import QUANTIZED
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh
from mllm.sampler.decoding import Pages, abstract_cache, abstract_decoding_weights, apply_tokens, decoding_weights

LORA = {"rank": 4, "alpha": 8.0, "targets": ("q", "down")}


def random_matrix(seed=0, shape=(64, 512)):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def dequantized(matrix):
    return np.asarray(matrix.values, np.float32) * np.asarray(matrix.scales)[:, None]


def test_each_row_has_its_own_scale_and_nothing_is_off_by_more_than_half_a_step():
    exact = random_matrix() * 10.0 ** np.arange(-32, 32)[:, None]
    exact[3] = 0
    found = quantize(jnp.asarray(exact))
    assert (found.values.dtype, found.scales.dtype) == (jnp.int8, jnp.float32)
    np.testing.assert_allclose(found.scales, np.abs(exact).max(1) / 127, rtol=1e-6)
    assert (np.abs(dequantized(found) - exact) <= 0.501 * np.asarray(found.scales)[:, None]).all()


@pytest.mark.parametrize(
    ("mesh", "model"),
    [
        pytest.param({"fsdp": 2, "tp": 2}, {"lora": LORA}, marks=pytest.mark.nightly),
        pytest.param({}, {"architecture": {"tie_word_embeddings": False}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_decode_step_computes_with_the_matrices_that_int8_stands_for(mesh, model):
    tied = config().model.architecture
    model = {**model, "architecture": {**tied, **model.get("architecture", {})}}
    settings = config(mesh=mesh, model=model)
    policy = load_policy(settings, make_mesh(settings.mesh))
    params = policy.initial_params()
    weights = decoding_weights(policy.graphdef, params, int8=True)
    abstract = abstract_decoding_weights(nnx.merge(policy.graphdef, policy.params), policy.params, int8=True)[0]
    for leaf, like in zip(jax.tree.leaves(weights), jax.tree.leaves(abstract), strict=True):
        assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype)
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)

    def is_int8(x):
        return isinstance(x, Int8Matrix)

    def widened(x):
        return jnp.asarray(dequantized(x)) if is_int8(x) else x

    plain = jax.tree.map(widened, weights, is_leaf=is_int8)
    matrices = [x for x in jax.tree.leaves(weights, is_leaf=is_int8) if is_int8(x)]
    assert len(matrices) == 7 * 2 + len(QUANTIZED & set(weights.outer))
    tokens, none = jnp.asarray([5, 77, 258, 0]), jnp.zeros(4, jnp.int32)
    shapes = abstract_cache(nnx.merge(policy.graphdef, policy.params), [4], 32)
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    pages = (Pages(jnp.arange(4), none),)
    found, expected = (
        apply_tokens(policy.graphdef, x, cache, pages, cache, tokens[:, None], none, 0)[0] for x in (weights, plain)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_adapters_stay_as_they_are():
    settings = config(model={"lora": LORA, "dtype": "bfloat16"})
    policy = load_policy(settings, make_mesh(settings.mesh))
    layer = decoding_weights(policy.graphdef, policy.initial_params(), int8=True).layers["layers"][1]
    assert layer["q_a"].get_value().dtype == jnp.bfloat16
    assert layer["q_weight"].get_value().values.dtype == jnp.int8
