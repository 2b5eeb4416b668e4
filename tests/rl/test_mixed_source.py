"""Distillation's two sources in one: where a run may stop, and what is held out."""

import pytest
from rollouts import grpo_source

from mllm.data.sft_source import SftSource
from mllm.rl.mixed_source import MixedSource


@pytest.fixture
def mixed():
    """Two updates to a rollout."""
    given = SftSource.__new__(SftSource)
    given.validation = "held out"
    return MixedSource(grpo_source(num_iterations=2), given, 0.5, seed=0)


def test_a_run_may_stop_between_rollouts_alone_also_where_given_completions_take_their_place(mixed):
    assert [mixed.resumable(step) for step in range(5)] == [True, False, True, False, True]


def test_what_is_held_out_of_the_given_completions_is_validated(mixed):
    assert mixed.validation == "held out"
