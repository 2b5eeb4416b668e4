"""Every mesh gives the loss, gradients and log-probabilities of one device, to rounding, and its compute copies' bits.

Each mesh has a model of another family. Rollouts on a mesh: tests/sampler/test_rollout.py.
"""

from functools import cache
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from runs import changed
from tiny import ARCHITECTURE, config, forward_of, random_batch

from mllm.model.layout import gather_layer_float32
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh, shard_batch
from mllm.sampler.decoding import decoding_weights
from mllm.training.step import accumulate, make_logprob_pass

MESHES = {"qwen3": (2, 2, 2), "qwen2": (1, 1, 8), "qwen3_5_text": (1, 2, 4)}
"""All axes at once, and tp as far as it goes. dp or fsdp alone exchanges nothing else than in the first."""
ROWS, LENGTH = 16, 16
MODEL = {**ARCHITECTURE, "vocab_size": 264, "num_attention_heads": 8, "initializer_range": 0.2, "head_dim": 4}
"""With 2 heads of keys and values, which tp = 8 does not divide."""
DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
DELTA |= {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
GRPO = {"num_iterations": 2, "beta": 0.1, "reference": "initial", "entropy_coef": 0.01}


def make_settings(family, shape):
    mesh, model = dict(zip(("dp", "fsdp", "tp"), shape, strict=True)), {"architecture": {**MODEL, "model_type": family}}
    if family == "qwen3_5_text":
        model["architecture"] |= DELTA
    return config(model=model, mesh=mesh, batch_size=ROWS, micro_batch_size=ROWS // 2, grpo=GRPO)


@cache
def initial(family):
    """The parameters, on one device."""
    settings = make_settings(family, (1, 1, 1))
    return load_policy(settings, make_mesh(settings.mesh)).initial_params()


def compute_results(family, shape):
    """Loss and gradients of a step in two micro-batches, and log-probabilities."""
    settings = make_settings(family, shape)
    mesh = make_mesh(settings.mesh)
    policy = load_policy(settings, mesh)
    params = jax.device_put(initial(family), jax.tree.map(lambda leaf: leaf.sharding, policy.params))
    forward, batch = forward_of(policy.graphdef, mesh, settings), random_batch(ROWS, LENGTH)
    gradients = jax.jit(lambda params, batch: accumulate(forward.loss, params, batch, ROWS // 2))
    loss, _, gradient = gradients(params, shard_batch(mesh, batch))
    return jax.device_get((loss, gradient, make_logprob_pass(forward)(params, batch)))


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        pytest.param("qwen3", MESHES["qwen3"], marks=pytest.mark.slow),
        pytest.param("qwen2", MESHES["qwen2"], marks=pytest.mark.nightly),
        pytest.param("qwen3_5_text", MESHES["qwen3_5_text"], marks=pytest.mark.nightly),
    ],
)
def test_loss_gradients_and_log_probabilities_are_those_of_one_device(family, shape):
    loss, gradients, logprobs = compute_results(family, shape)
    expected_loss, expected, expected_logprobs = compute_results(family, (1, 1, 1))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for leaf, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=0, atol=2e-5 * np.abs(other).max())
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=2e-5)


def compute_copies(shape):
    """What sampler and trainer multiply, of masters between bfloat16's numbers."""
    settings = make_settings("qwen3", shape)
    settings = changed(settings, model=settings.model.model_dump() | {"dtype": "bfloat16"})
    policy = load_policy(settings, mesh := make_mesh(settings.mesh))
    params = jax.device_put(initial("qwen3"), jax.tree.map(lambda leaf: leaf.sharding, policy.params))
    assert len(params["embed"][...].sharding.device_set) == mesh.size

    @jax.jit
    def of_trainer(params):
        model = nnx.merge(policy.graphdef, params)
        layers = [jax.tree.map(itemgetter(index), params["layers"]) for index in range(2)]
        layers = [
            gather_layer_float32(x, model.rounding, model.layout, jnp.asarray(i), "layers")
            for i, x in enumerate(layers)
        ]
        embedded = model.look_up(jnp.arange(264).reshape(2, -1)).reshape(264, -1)
        return layers, embedded, model.head_copy(model.head_weight)

    return jax.tree.map(np.asarray, (decoding_weights(policy.graphdef, params), of_trainer(params)))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [pytest.param((1, 8, 1), marks=pytest.mark.nightly), (2, 2, 2)])
def test_compute_copies_are_those_of_one_device_to_the_bit_in_sampler_and_trainer(shape):
    sampler, (layers, embedded, head) = expected = compute_copies((1, 1, 1))
    of_both = (layers, embedded, head), (sampler.layers["layers"], *[sampler.outer["embed"][...]] * 2)
    for one, other in ((compute_copies(shape), expected), of_both):
        for leaf, same in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(np.float32(leaf), np.float32(same))
    assert (np.float32(head) != initial("qwen3")["embed"][...].astype(jnp.bfloat16)).mean() > 0.2
