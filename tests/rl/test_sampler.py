"""The sampler with a real model: its texts, and its log-probabilities against those of the trainer."""

import numpy as np
import pytest
from rollouts import grpo_source
from tiny import ARCHITECTURE, config

from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh, shard_batch
from mllm.rl.sampler import Sampler
from mllm.stopwatch import Stopwatch
from mllm.train.optimizer import make_optimizer, make_schedule
from mllm.train.step import init_state, make_logprob_pass, make_train_step

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
def batch(policy):
    """A step's batch of completions that end with any ASCII character or special token."""
    sampler = RecordingSampler(policy.graphdef, policy.tokenizer, STOPS, SETTINGS.rollout, seed=0)
    return grpo_source(sampler=lambda *_: sampler).next(policy.initial_params(), 0, Stopwatch()).batch


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


def test_the_sampler_s_log_probabilities_are_those_of_the_log_prob_pass_and_of_the_update(policy, batch):
    """At a temperature other than 1, which is a part of the policy in all three."""
    mesh, counts = make_mesh(SETTINGS.mesh), batch.weights > 0
    logprobs = make_logprob_pass(policy.graphdef, SETTINGS, mesh)(policy.initial_params(), batch)
    np.testing.assert_allclose(np.asarray(logprobs)[counts], batch.sampler_logprobs[counts], atol=1e-4)
    assert batch.sampler_logprobs[counts].std() > 0.5

    optimizer = make_optimizer(SETTINGS.optimizer, SETTINGS.steps)
    schedule = make_schedule(SETTINGS.optimizer, SETTINGS.steps)
    train_step = make_train_step(policy.graphdef, optimizer, schedule, SETTINGS, mesh)
    _, metrics = train_step(init_state(policy.initial_params(), optimizer), shard_batch(mesh, batch))
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
