"""Every mesh gives the loss, gradients and log-probabilities of one device, to rounding.

Each mesh has a model of another family. Rollouts on a mesh: tests/rl/test_rollout.py.
"""

from functools import cache

import jax
import numpy as np
import pytest
from tiny import ARCHITECTURE, config, forward_of, random_batch

from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh, shard_batch
from mllm.train.step import accumulate, make_logprob_pass

MESHES = {"qwen3": (2, 2, 2), "qwen2": (1, 1, 8)}
"""All axes at once, and tp as far as it goes. dp or fsdp alone exchanges nothing else than in the first."""
ROWS, LENGTH = 16, 16
MODEL = {**ARCHITECTURE, "vocab_size": 264, "num_attention_heads": 8, "initializer_range": 0.2, "head_dim": 4}
"""With 2 heads of keys and values, which tp = 8 does not divide."""
GRPO = {"num_iterations": 2, "beta": 0.1, "reference": "initial", "entropy_coef": 0.01}


def make_settings(family, shape):
    mesh, model = dict(zip(("dp", "fsdp", "tp"), shape, strict=True)), {"architecture": {**MODEL, "model_type": family}}
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


@pytest.mark.parametrize(("family", "shape"), MESHES.items())
def test_loss_gradients_and_log_probabilities_are_those_of_one_device(family, shape):
    (loss, gradients, logprobs), (expected_loss, expected, expected_logprobs) = (
        compute_results(family, one) for one in (shape, (1, 1, 1))
    )
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for leaf, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=0, atol=2e-5 * np.abs(other).max())
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=2e-5)
