"""Distillation's two sources in one: where a run may stop, and what is held out."""

import numpy as np
import pytest
from rollouts import grpo_source

from mllm.algorithms.mixed_source import MixedSource, mixed_order
from mllm.algorithms.sft.source import SftSource


@pytest.fixture
def mixed():
    """Two updates to a rollout."""
    given = SftSource.__new__(SftSource)
    given.validation = "held out"
    return MixedSource(grpo_source(num_iterations=2), given, 0.5)


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5, 0.7])
def test_the_share_of_given_completions_is_spread_evenly(share):
    order = mixed_order(share)
    given = np.cumsum([order[rollout] for rollout in range(4000)])
    np.testing.assert_allclose(given, share * np.arange(1, 4001), atol=1 + 4000 * 0.002)


def test_a_run_may_stop_between_rollouts_alone_also_where_given_completions_take_their_place(mixed):
    assert [mixed.resumable(step) for step in range(5)] == [True, False, True, False, True]


def test_what_is_held_out_of_the_given_completions_is_validated(mixed):
    assert mixed.validation == "held out"
