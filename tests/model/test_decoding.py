"""Decode steps against one pass over whole sequences, and what a loop of them holds in memory."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_model import fixture, logits_alone
from tiny import config as tiny_config

from mllm.model.decoder import Decoder
from mllm.model.decoding import abstract_cache, abstract_decoding_weights, decode_token, decoding_weights
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh

NAME = "grouped_bfloat16"


def test_decode_steps_of_rows_that_begin_at_different_places_match_one_pass():
    """For the other families, tests/rl/test_rollout.py compares greedy completions with transformers'."""
    config, params, tokens, _, _ = fixture(NAME)
    graphdef, _ = nnx.split(Decoder.abstract(config, dtype=jnp.float32))
    batch, time = tokens.shape
    weights = decoding_weights(graphdef, params)
    cache = jax.tree.map(lambda x: jnp.full(x.shape, 9.0), abstract_cache(nnx.merge(graphdef, params), batch, time + 3))
    step = jax.jit(partial(decode_token, graphdef))
    lengths, pieces = np.array([0, -3]), []  # row 1 begins three places later
    for place in range(time):
        now = np.where(lengths >= 0, tokens[np.arange(batch), np.maximum(lengths, 0)], 1)
        hidden, cache = step(weights, cache, now, np.maximum(lengths, 0), np.int32(place))
        pieces.append(hidden @ nnx.merge(graphdef, params).head_weight.T)
        lengths += 1
    decoded = np.stack(pieces, axis=1)
    first, second = logits_alone(NAME, tokens[0], tokens[1, :-3])
    np.testing.assert_allclose(decoded[0], first, atol=1e-5, rtol=0)
    np.testing.assert_allclose(decoded[1, 3:], second, atol=1e-5, rtol=0)


def test_a_loop_of_decode_steps_does_not_copy_the_cache():
    config = dataclasses.replace(fixture(NAME).config, num_hidden_layers=8)
    model = Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.float32)
    graphdef, params = nnx.split(model)
    cache, weights = abstract_cache(model, 2, 4096), decoding_weights(graphdef, params)
    rows = jnp.zeros(2, jnp.int32)

    def decode(cache):
        def step(end, cache):
            return decode_token(graphdef, weights, cache, rows, rows + end, end)[1]

        return jax.lax.fori_loop(0, 4096, step, cache)

    memory = jax.jit(decode, donate_argnums=0).lower(cache).compile().memory_analysis()
    # Attention may copy the layer that it reads, an eighth of the cache's keys and values, and no more.
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 2


@pytest.mark.parametrize(("mesh", "model"), [({"tp": 2}, {}), ({"fsdp": 2}, {}), ({}, {"dtype": "bfloat16"})], ids=str)
def test_embedding_and_norm_are_copied_only_where_decoding_reads_them_in_another_dtype_or_sharding(mesh, model):
    policy = load_policy(settings := tiny_config(mesh=mesh, model=model), make_mesh(settings.mesh))
    params = policy.initial_params()
    outer = decoding_weights(policy.graphdef, params).outer
    _, shared = abstract_decoding_weights(nnx.merge(policy.graphdef, policy.params), policy.params)
    assert set(shared) == ({"embed", "norm"} if "tp" in mesh else set())
    assert {name for name in outer if outer[name][...] is params[name][...]} == set(shared)
