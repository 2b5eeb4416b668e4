"""What decoding holds in memory; tests/rl/test_rollout.py has what decode steps compute."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from test_model import fixture
from tiny import config as tiny_config

from mllm.model.decoder import Decoder
from mllm.model.decoding import abstract_cache, abstract_decoding_weights, decode_token, decoding_weights
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh


def test_a_loop_of_decode_steps_does_not_copy_the_cache():
    config = dataclasses.replace(fixture("grouped_bfloat16").config, num_hidden_layers=8)
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


@pytest.mark.parametrize(("mesh", "model"), [({"tp": 2}, {}), ({"fsdp": 2}, {"dtype": "bfloat16"})], ids=str)
def test_embedding_and_norm_are_copied_only_where_decoding_reads_them_in_another_dtype_or_sharding(mesh, model):
    policy = load_policy(settings := tiny_config(mesh=mesh, model=model), make_mesh(settings.mesh))
    params = policy.initial_params()
    outer = decoding_weights(policy.graphdef, params).outer
    _, shared = abstract_decoding_weights(nnx.merge(policy.graphdef, policy.params), policy.params)
    assert set(shared) == ({"embed", "norm"} if "tp" in mesh else set())
    assert {name for name in outer if outer[name][...] is params[name][...]} == set(shared)
