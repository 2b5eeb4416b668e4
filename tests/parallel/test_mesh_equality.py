"""Every mesh gives the losses, gradients, log-probabilities and sampled tokens of one device, to rounding.

Each mesh has a model of another family.
"""

from functools import cache
from typing import NamedTuple

import jax
import numpy as np
import pytest
from tiny import ARCHITECTURE, config, make_forward, random_batch

from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh, shard_batch
from mllm.rl.rollout import Completions, generate
from mllm.train.step import accumulate, make_logprob_pass

MESHES = {"qwen3": (2, 2, 2), "llama": (1, 8, 1), "qwen2": (1, 1, 8)}
"""All axes at once; fsdp and tp as far as they go. dp alone exchanges nothing else than in the first."""
SAMPLING = ("qwen3", "qwen2")
"""A rollout with fsdp alone exchanges nothing else than in the first."""
ROWS, LENGTH = 16, 16
MODEL = {**ARCHITECTURE, "vocab_size": 264, "num_attention_heads": 8, "initializer_range": 0.2, "head_dim": 4}
"""With 2 heads of keys and values, which tp = 8 does not divide."""
GRPO = {"num_iterations": 2, "beta": 0.1, "reference": "initial", "entropy_coef": 0.01}
ROLLOUT = {"max_prompt_length": 8, "max_completion_length": 8, "temperature": 0.9, "top_k": 50, "top_p": 0.9}
STOPS = tuple(range(3, 40))
PROMPTS = [list(range(1 + row, 3 + row + row % 6)) for row in range(13)]
"""A number of prompts that no mesh divides."""


class Results(NamedTuple):
    sft: tuple
    """Loss and gradients."""
    grpo: tuple
    logprobs: np.ndarray
    completions: Completions | None


def make_settings(algorithm, family, shape):
    mesh, model = dict(zip(("dp", "fsdp", "tp"), shape, strict=True)), {"architecture": {**MODEL, "model_type": family}}
    sections = {"model": model, "mesh": mesh, "batch_size": ROWS, "rollout": ROLLOUT}
    if algorithm == "grpo":
        sections |= {"grpo": GRPO, "micro_batch_size": ROWS // 2}
    return config(algorithm, **sections)


@cache
def initial(family):
    """The parameters, on one device."""
    settings = make_settings("sft", family, (1, 1, 1))
    return load_policy(settings, make_mesh(settings.mesh)).initial_params()


@cache
def compute_results(family, shape=(1, 1, 1)):
    """The results of a step: SFT on the whole batch, GRPO in two micro-batches, log-probabilities and a rollout."""
    sft, grpo = (make_settings(algorithm, family, shape) for algorithm in ("sft", "grpo"))
    mesh = make_mesh(grpo.mesh)
    policy = load_policy(grpo, mesh)
    params = jax.device_put(initial(family), jax.tree.map(lambda leaf: leaf.sharding, policy.params))
    forwards = [make_forward(settings, policy.graphdef, mesh) for settings in (sft, grpo)]

    @jax.jit
    def gradients(params, batch):
        loss, _, first = accumulate(forwards[0].loss, params, batch, ROWS)
        other_loss, _, second = accumulate(forwards[1].loss, params, batch, ROWS // 2)
        return (loss, first), (other_loss, second)

    batch = random_batch(ROWS, LENGTH)
    logprobs = make_logprob_pass(forwards[1])(params, batch)
    options = {"options": grpo.rollout, "stop_ids": STOPS, "pad_id": 0, "seed": 1, "step": 2}
    sampled = generate(policy.graphdef, params, PROMPTS, **options) if family in SAMPLING else None
    return jax.device_get(Results(*gradients(params, shard_batch(mesh, batch)), logprobs, sampled))


@pytest.fixture(params=MESHES, ids=lambda family: f"{family} on {MESHES[family]}")
def both(request):
    return compute_results(request.param, MESHES[request.param]), compute_results(request.param)


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_loss_and_gradients_are_those_of_one_device(both, algorithm):
    (loss, gradients), (expected_loss, expected) = (getattr(results, algorithm) for results in both)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for leaf, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=0, atol=2e-5 * np.abs(other).max())


def test_log_probabilities_are_those_of_one_device(both):
    np.testing.assert_allclose(*(results.logprobs for results in both), atol=2e-5)


@pytest.mark.parametrize("both", SAMPLING, indirect=True)
def test_completions_are_those_of_one_device(both):
    got, expected = (results.completions for results in both)
    assert len(set(expected.lengths.tolist())) > 3
    for name in ("tokens", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=2e-5)
