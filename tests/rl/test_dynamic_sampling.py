"""Dynamic sampling: which groups stay, which prompts are drawn when, and that a resumed run draws the same."""

import numpy as np
import pytest
from rollouts import GROUP, RandomCompletions, SquareRewards, grpo_source, sequences

from mllm.stopwatch import Stopwatch


class SomeRewards(SquareRewards):
    """The n-th group that is drawn has unequal rewards if n is in `unequal`."""

    def __init__(self, unequal):
        super().__init__()
        self.unequal = unequal
        self.drawn = []

    def score(self, samples):
        groups = range(len(self.drawn), len(self.drawn) + len(samples) // GROUP)
        self.drawn += [sample.example.prompt[-1]["content"] for sample in samples[::GROUP]]
        return [[("value", float(i * (group in self.unequal)))] for group in groups for i in range(GROUP)]


class Recorded(RandomCompletions):
    """Remembers the numbers of the sequences that it completed."""

    def complete(self, params, prompts, *, step, first_sequence=0, greedy=False):
        self.work.__dict__.setdefault("numbers", []).extend(range(first_sequence, first_sequence + len(prompts)))
        return super().complete(params, prompts, step=step, first_sequence=first_sequence)


def make_source(unequal, **settings):
    return grpo_source(rewards=SomeRewards(unequal), sampler=Recorded, **settings)


@pytest.mark.parametrize(
    ("limit", "unequal", "rounds", "drawn", "learned"),
    [
        (1, [0, 1, 2, 3], 1, 4, [0, 1, 2, 3]),
        (3, [0, 3, 4, 5], 2, 6, [0, 3, 4, 5]),
        (3, [1, 2, 3, 6], 3, 6, [1, 2, 3]),  # 1 is missing, and drawn twice
        (9, [5, 6, 7, 8, 9], 3, 9, [5, 6, 7, 8]),  # 4, then 4, then 1
        (2, [], 2, 8, []),
    ],
)
def test_groups_of_equal_rewards_are_drawn_again_until_the_batch_is_full_or_the_limit_reached(
    limit, unequal, rounds, drawn, learned
):
    source = make_source(unequal, dynamic_sampling=limit, steps_per_generation=2)
    steps = [source.next(np.float32(0), number, Stopwatch()) for number in range(2)]
    assert len(source.rewards.drawn) == drawn
    assert source.sampler.work.numbers == list(range(drawn * GROUP))
    # Every group of the batch is one of those that were drawn, in their order.
    parts = [[line["prompt"] for line in part.samples[::GROUP]] for part in source.parts]
    assert parts[0] == parts[1]
    assert [p for p in parts[0] if p in [source.rewards.drawn[n] for n in learned]] == [
        source.rewards.drawn[n] for n in learned
    ]
    assert len(parts[0]) == 4
    assert sum(len(sequences(step.batch)) for step in steps) == len(learned) * GROUP
    metrics = steps[0].metrics
    assert metrics["frac_reward_zero_std"] == pytest.approx(1 - sum(n < drawn for n in unequal) / drawn)
    if limit > 1:
        assert metrics["dynamic_sampling/rounds"] == rounds
        assert metrics["dynamic_sampling/frac_groups_kept"] == len(learned) / drawn


def test_advantages_are_scaled_by_the_rewards_of_the_groups_that_are_learned_from():
    """Six groups are drawn, two of them of equal rewards, which would lower the deviation."""
    source = make_source([0, 3, 4, 5], dynamic_sampling=3, steps_per_generation=2, scale_rewards="batch")
    steps = [source.next(np.float32(0), number, Stopwatch()) for number in range(2)]
    found = [fields[5, -1] for step in steps for fields in sequences(step.batch).values()]
    rewards = np.tile(np.arange(float(GROUP)), 4)
    assert sorted(found) == pytest.approx(sorted((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)))


def test_prompts_are_each_drawn_once_whatever_the_rounds_and_go_on_from_any_position():
    source = make_source([0, 3, 4, 6, 8, 9, 10, 11, 13], dynamic_sampling=4)
    whole = make_source(range(99))
    positions = []
    for step in range(6):
        source.next(np.float32(0), step, Stopwatch())
        positions.append((len(source.rewards.drawn), source.position()))
    for step in range(len(source.rewards.drawn) // 2 + 1):
        whole.next(np.float32(0), step, Stopwatch())
    assert source.rewards.drawn == whole.rewards.drawn[: len(source.rewards.drawn)]
    for drawn, position in positions:
        source.seek(position)
        assert next(source.prompts).example.prompt[-1]["content"] == whole.rewards.drawn[drawn]
