"""The sampler with a real model: its texts, and its log-probabilities against those of the trainer."""

import jax
import numpy as np
import pytest
from rollouts import grpo_source
from tiny import ARCHITECTURE, config, make_forward

from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh, shard_batch
from mllm.rl.sampler import Sampler
from mllm.stopwatch import Stopwatch

SETTINGS = config(
    rollout={"temperature": 0.7},
    model={"architecture": {**ARCHITECTURE, "initializer_range": 0.3}},  # far from uniform
)
STOPS = (*range(128), *range(256, 260))
"""ASCII and the special tokens of the bytes tokenizer: about half of what the random model says."""


class RecordingSampler(Sampler):
    """Keeps its completions and texts, and returns the numbers that `rollouts.SquareRewards` takes instead of texts."""

    texts = None
    completions = None

    def complete(self, *arguments, **settings):
        completions, texts = super().complete(*arguments, **settings)
        RecordingSampler.completions, RecordingSampler.texts = completions, texts
        return completions, [str(number) for number in range(len(texts))]


@pytest.fixture(scope="module")
def policy():
    return load_policy(SETTINGS, make_mesh(SETTINGS.mesh))


@pytest.fixture(scope="module")
def params(policy):
    return policy.initial_params()


@pytest.fixture(scope="module")
def batch(policy, params):
    """A step's batch of completions that end with any ASCII character or special token."""
    sampler = RecordingSampler(policy.graphdef, policy.tokenizer, STOPS, SETTINGS.rollout, seed=0)
    return grpo_source(sampler=lambda *_: sampler).next(params, 0, Stopwatch()).batch


def test_the_text_of_a_completion_has_all_tokens_but_the_stop_token(policy, batch):
    completions, texts = RecordingSampler.completions, RecordingSampler.texts
    assert set(completions.finished.tolist()) == {True, False}
    for text, tokens, length, finished in zip(
        texts, completions.tokens.tolist(), completions.lengths.tolist(), completions.finished, strict=True
    ):
        kept = tokens[: length - 1] if finished else tokens[:length]
        assert (tokens[length - 1] in STOPS) == finished
        assert text == policy.tokenizer.decode(kept)
        assert not any(character.isascii() for character in text)


def test_the_sampler_s_log_probabilities_are_those_of_the_log_prob_pass_and_of_the_update(policy, params, batch):
    """At a temperature other than 1, which is a part of the policy in all three."""
    mesh, counts = make_mesh(SETTINGS.mesh), batch.weights > 0
    forward = make_forward(SETTINGS, policy.graphdef, mesh)

    @jax.jit(compiler_options={"xla_backend_optimization_level": 0})  # compiled in half the time
    def logprobs(params, batch):
        return forward.logprobs(params, batch).logprob, forward.loss(params, batch)[1].logprob

    assert batch.sampler_logprobs[counts].std() > 0.5
    for of_trainer in logprobs(params, shard_batch(mesh, batch)):
        np.testing.assert_allclose(np.asarray(of_trainer)[counts], batch.sampler_logprobs[counts], atol=1e-4)
