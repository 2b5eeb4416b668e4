"""GRPO's source: the batch token by token, failed rewards, several updates from a rollout, dynamic sampling."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from rollouts import GROUP, LIMIT, SquareRewards, grpo_source, linear_logprobs, sequences

from mllm.algorithms.grpo.groups import advantages as advantages_of
from mllm.algorithms.grpo.groups import token_advantages
from mllm.algorithms.rollouts import telling_samples
from mllm.data.source import FrozenModels
from mllm.errors import StepError
from mllm.parallel.processes import RowShare
from mllm.stopwatch import Stopwatch

REFERENCE = np.float32(7)
NONE = FrozenModels()


def next_of(source, step=0, params=0, frozen=NONE):
    return source.next(np.float32(params), step, Stopwatch(), frozen)


def roll_out(bad=(), weight=1.0, **options):
    """The first step's data, and the prompts and completions that it was made of."""
    source = grpo_source(rewards=SquareRewards(bad, weight), **options)
    position = source.position()
    step = next_of(source, frozen=FrozenModels(REFERENCE))
    source.seek(position)
    prompts = [prompt.tokens for prompt in islice(source.prompts, 2) for _ in range(GROUP)]
    return step, prompts, source.sampler.complete(None, prompts, step=0)


@pytest.mark.parametrize("baseline", ["group", "token"])
def test_each_completion_gets_its_weight_and_advantage(baseline):
    step, prompts, completions = roll_out(loss_type="grpo", baseline=baseline, scale_rewards="mean")
    packed, rewards = sequences(step.batch), np.arange(8.0).reshape(2, GROUP) ** 2
    advantages = advantages_of(rewards, "mean").reshape(-1)
    if baseline == "token":
        advantages = token_advantages(rewards, "mean", [np.float32(made.norms) for made in completions])
        assert any(len({*part}) > 1 for part in advantages)
    assert len(packed) == 2 * GROUP
    for prompt, made, advantage in zip(prompts, completions, advantages, strict=True):
        fields, learned = packed[*prompt, *made.tokens], np.s_[len(prompt) - 1 :]
        assert fields[3, learned].tolist() == made.tokens.tolist()
        np.testing.assert_array_equal(fields[4, learned], np.float32(1 / (8 * len(made.tokens))))
        np.testing.assert_array_equal(fields[5, learned], np.float32(advantage))
        np.testing.assert_array_equal(fields[6, learned], made.logprobs)
        assert not fields[3:5, : len(prompt) - 1].any()
    assert step.batch.inputs[2:] == (None,) * 4


def test_masked_truncated_and_failed_completions_are_left_out():
    step, prompts, completions = roll_out(mask_truncated_completions=True, bad=[2])
    finished = np.array([one.finished for one in completions])
    counts = finished & (np.arange(2 * GROUP) != 2)
    assert not finished.all()
    kept = {(*prompts[i], *completions[i].tokens) for i in np.flatnonzero(counts)}
    assert sequences(step.batch).keys() == kept
    assert step.metrics["frac_without_gradient"] == 1 - counts.mean()


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_a_failed_reward_leaves_other_groups_bit_identical(loss_type):
    sound, _, completions = roll_out(loss_type=loss_type)
    step, _, _ = roll_out(loss_type=loss_type, bad=[2])
    others, left = sequences(sound.batch), sequences(step.batch)
    assert len(left) == 2 * GROUP - 1
    changed = 0
    for tokens, fields in left.items():
        expected = others[tokens]
        expected[2] = fields[2]  # other neighbours in the row
        if loss_type == "dapo":  # the mean over the tokens that are left
            count = sum(len(one.tokens) for i, one in enumerate(completions) if i != 2)
            expected[4] = (expected[4] > 0) * np.float32(1 / count)
        changed += not np.array_equal(fields[5], expected[5])
        expected[5] = fields[5]  # another mean in the group
        np.testing.assert_array_equal(fields, expected)
    assert changed == GROUP - 1


def test_dr_grpo_divides_by_the_longest_allowed_completion():
    """The longest allowed completion is counted over all turns."""
    source = grpo_source(loss_type="dr_grpo")
    source.sampler = replace(source.sampler, options=source.sampler.options.model_copy(update={"max_turns": 4}))
    weights = {fields[4, -1] for fields in sequences(next_of(source).batch).values()}
    assert weights == {1 / (2 * GROUP * 4 * 2 * LIMIT)}


def test_more_than_half_of_the_completions_may_not_fail():
    assert roll_out(bad=range(4))[0].metrics["frac_groups_failed"] == 0.5
    message = "a reward failed for 5 of 8 completions, .*; exact_match raised 5 times, first: too many; correct it"
    with pytest.raises(StepError, match=message):
        roll_out(bad=range(5))


def test_distillation_learns_from_every_completion():
    """The rewards don't matter, and no policy pass is made."""
    step, *_ = roll_out(bad=range(8), algorithm="distill", num_iterations=2)
    assert len(sequences(step.batch)) == 2 * GROUP
    assert not step.batch.inputs.advantages.any()
    assert step.batch.inputs.old_logprobs is None
    assert (step.metrics["frac_groups_failed"], step.metrics["frac_without_gradient"]) == (1, 0)


def test_one_process_scores_a_group_at_any_process_count(monkeypatch):
    calls, part_of = [], RowShare.part_of
    monkeypatch.setattr(RowShare, "part_of", lambda self, *sizes: calls.append(sizes) or part_of(self, *sizes))
    roll_out()
    assert (2 * GROUP, GROUP) in calls
    assert [part_of(RowShare(share, 2), 3 * 4, 4) for share in range(2)] == [slice(0, 8), slice(8, 16)]


@pytest.mark.parametrize("penalty", [{"beta": 0.1, "reference": "initial"}, {"entropy_coef": 0.01}])
def test_a_kl_penalty_gives_a_gradient_without_an_advantage(penalty):
    """Failures of a reward of weight 0 leave no group out and stop nothing."""
    step, _, _ = roll_out(bad=range(8), weight=0.0, **penalty)
    assert (step.metrics["frac_groups_failed"], step.metrics["rewards/exact_match/raised"]) == (0, 8)
    assert len(sequences(step.batch)) == 2 * GROUP
    assert not step.batch.inputs.advantages.any()
    assert (step.batch.inputs.reference_logprobs is None) == ("beta" not in penalty)
    if "beta" in penalty:
        np.testing.assert_array_equal(step.batch.inputs.reference_logprobs, linear_logprobs(REFERENCE, step.batch))


def test_a_failed_reward_is_null_in_samples_and_in_no_mean():
    sound, _, _ = roll_out()
    step, _, completions = roll_out(bad=[2])
    assert step.metrics.keys() == sound.metrics.keys()
    scored = [i**2 for i in range(8) if i != 2]
    assert step.metrics["reward"] == step.metrics["rewards/exact_match/mean"] == pytest.approx(np.mean(scored))
    deviations = [np.std([0, 1, 9], ddof=1), np.std(scored[3:], ddof=1)]
    assert step.metrics["reward_std"] == pytest.approx(np.mean(deviations))
    assert step.metrics["rewards/exact_match/raised"] == 1
    assert len(sequences(step.batch)) == 7
    cut_off = np.mean([not one.finished for one in completions])
    assert step.metrics["completions/clipped_ratio"] == pytest.approx(cut_off)
    assert [sample["completion"] for sample in step.samples] == [*"01234567"]
    assert [sample["rewards"]["exact_match"] for sample in step.samples[:5]] == [0, 1, None, 9, 16]
    expected = [(one - 10 / 3) / (deviations[0] + 1e-4) for one in (0, 1, 9)]
    advantages = [sample["advantage"] for sample in step.samples[:GROUP]]
    assert advantages.pop(2) is None
    assert advantages == pytest.approx(expected)
    assert step.samples[GROUP]["advantage"] < 0
    assert len({sample["prompt"] for sample in step.samples[:GROUP]}) == 1


def test_logged_samples_are_the_best_and_worst_of_prompts():
    advantages = np.array([0.0, 1, -1, 0.5, 3, 2, 1, 4, 0, 0, 0, 0])
    several = {None: [*range(12)], 4: [1, 2, 6, 7], 5: [1, 2, 6, 7, 8], 9: [1, 2, 3, 4, 6, 7, 8, 9, 11], 0: []}
    for most, expected in several.items():
        assert telling_samples(advantages, 4, most) == expected


def test_values_logged_by_functions_are_in_metrics_and_samples():
    class Logging(SquareRewards):
        def score(self, samples):
            scores = super().score(samples)
            return [[(*own, ("extra", "call", n), ("metric", "calls", n))] for n, (own,) in enumerate(scores)]

    step = next_of(grpo_source(rewards=Logging()))
    assert step.metrics["rewards/exact_match/calls"] == 3.5
    assert [sample["extra"] for sample in step.samples] == [{"call": n} for n in range(8)]


def test_the_first_update_skips_an_unneeded_log_prob_pass():
    """Several iterations need the pass, and so do the weights of importance sampling."""
    for settings, passes in (
        ({}, 1),
        ({"num_iterations": 2}, 2),
        ({"importance_sampling": "sequence_mask"}, 2),
        ({"beta": 0.1, "reference": "initial"}, 3),
    ):
        calls = []
        counted = lambda params, batch, calls=calls: calls.append(1) or linear_logprobs(params, batch)  # noqa: E731
        source = grpo_source(updates_per_generation=2, logprobs=counted, **settings)
        first, second = (next_of(source, step, frozen=FrozenModels(REFERENCE)).batch for step in range(2))
        assert len(calls) == passes == source.config.passes
        assert (first.inputs.is_current is not None and first.inputs.is_current.all()) == source.config.first_is_current
        assert second.inputs.is_current is None or not second.inputs.is_current.any()
        assert (second.inputs.old_logprobs[:, 0] == 0).all()


def test_a_rollout_keeps_its_first_log_probs_for_all_updates():
    calls = []
    counted = lambda params, batch: calls.append(params) or linear_logprobs(params, batch)  # noqa: E731
    source = grpo_source(updates_per_generation=2, num_iterations=2, logprobs=counted)
    steps = [next_of(source, step, step) for step in range(5)]
    assert calls == [0, 0, 4, 4]
    for first, again in ((0, 2), (1, 3)):
        assert steps[first].batch is steps[again].batch
    assert all((step.batch.inputs.old_logprobs[:, 0] == 0).all() for step in steps[:4])
    assert (steps[4].batch.inputs.old_logprobs[:, 0] == -4).all()
    assert [len(step.samples) for step in steps] == [16, 0, 0, 0, 16]
    assert [source.resumable(step) for step in range(5)] == [True, False, False, False, True]
    assert len(next_of(grpo_source(updates_per_generation=2), step=3).samples) == 16  # in the middle of a rollout
    learned = [tuple(fields[3, fields[4] > 0]) for fields in sequences(steps[4].batch).values()]
    completions = source.sampler.complete(None, [None] * 16, step=4)  # other ones than in step 0
    assert sorted(learned) == sorted(tuple(one.tokens) for one in completions[:8])
    scored = [(sample.tokens, sample.truncated) for sample in source.rewards.samples]
    assert scored == [(one.tokens, not one.finished) for one in completions]
    kept = np.concatenate([one.kept for one in completions])
    assert steps[4].metrics["sampling/kept_probability/mean"] == pytest.approx(kept.mean())


def test_each_update_of_a_rollout_has_its_own_denominator():
    """By default every token of an update weighs the same."""
    source = grpo_source(updates_per_generation=2, epsilon=0.1, scale_rewards="batch")
    parts = [next_of(source, step) for step in range(2)]
    completions = source.sampler.complete(None, [None] * 4 * GROUP, step=0)
    rewards = np.arange(4.0 * GROUP).reshape(4, GROUP) ** 2
    deviation = rewards.std(ddof=1) + 1e-4  # the whole rollout's
    expected = ((rewards - rewards.mean(-1, keepdims=True)) / deviation).reshape(2, -1)
    completion_lengths = np.array([len(one.tokens) for one in completions]).reshape(2, -1)
    for part, advantages, lengths in zip(parts, expected, completion_lengths, strict=True):
        packed = sequences(part.batch).values()
        assert sorted(fields[5, -1] for fields in packed) == pytest.approx(sorted(advantages))
        assert [fields[4, -1] for fields in packed] == pytest.approx([1 / lengths.sum()] * 2 * GROUP)
        assert part.tokens == sum(fields.shape[1] + 1 for fields in packed)
    assert parts[0].metrics.keys() == parts[1].metrics.keys()
    assert parts[0].metrics["num_tokens"] == parts[0].tokens + parts[1].tokens


class SomeRewards(SquareRewards):
    """The n-th group that is drawn has unequal rewards if n is in `unequal`."""

    def __init__(self, unequal):
        super().__init__()
        self.unequal, self.drawn, self.sequences = unequal, [], []

    def score(self, samples):
        groups = range(len(self.drawn), len(self.drawn) + len(samples) // GROUP)
        self.sequences += [int(sample.completion) for sample in samples]
        self.drawn += [sample.example.prompt[-1]["content"] for sample in samples[::GROUP]]
        return [[("value", float(i * (group in self.unequal)))] for group in groups for i in range(GROUP)]


def make_source(unequal, **settings):
    return grpo_source(rewards=SomeRewards(unequal), **settings)


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
def test_groups_of_equal_rewards_are_redrawn_to_fill_the_batch(limit, unequal, rounds, drawn, learned):
    source = make_source(unequal, dynamic_sampling=limit, updates_per_generation=2)
    samples, sample = [], source.sample
    source.sample = lambda *given: samples.append(sample(*given)) or samples[-1]
    steps = [next_of(source, number) for number in range(2)]
    assert len(source.rewards.drawn) == drawn
    assert source.rewards.sequences == list(range(drawn * GROUP))
    # Every group of the batch was drawn, and the order stays.
    parts = [[line["prompt"] for line in part.samples[::GROUP]] for part in source.parts]
    assert parts[0] == parts[1]
    kept = [source.rewards.drawn[n] for n in learned]
    assert [prompt for prompt in parts[0] if prompt in kept] == kept
    assert len(parts[0]) == 4
    assert sum(len(sequences(step.batch)) for step in steps) == len(learned) * GROUP
    metrics = steps[0].metrics
    assert metrics["num_tokens"] == sum(len(trajectory.tokens) for trajectory in samples[0][0])
    assert metrics["rewards/exact_match/mean"] == pytest.approx(1.5 * sum(n < drawn for n in unequal) / drawn)
    assert metrics["frac_reward_zero_std"] == pytest.approx(1 - sum(n < drawn for n in unequal) / drawn)
    assert source.updates_without_gradient == sum(step.metrics["frac_without_gradient"] == 1 for step in steps)
    if limit > 1:
        assert metrics["dynamic_sampling/rounds"] == rounds
        assert metrics["dynamic_sampling/frac_groups_kept"] == len(learned) / drawn


def test_maxrl_advantages_are_relative_to_the_mean_reward():
    """MaxRL has no rewards below zero."""
    rewards = np.array([[1, 0, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0.5, np.nan, 0, 0.1]])
    expected = [[3, -1, -1, -1], [1 / 3, 1 / 3, -1, 1 / 3], 4 * [0], 4 * [0], [1.5, 0, -1, -0.5]]
    np.testing.assert_allclose(advantages_of(rewards, "mean"), expected, rtol=1e-15)
    with pytest.raises(StepError, match=r"grpo\.scale_rewards: mean is for rewards of 0 or more"):
        advantages_of(rewards - 0.5, "mean")


def test_advantages_are_scaled_by_the_learned_groups_only():
    """Six groups are drawn, two of them of equal rewards, which would lower the deviation."""
    source = make_source([0, 3, 4, 5], dynamic_sampling=3, updates_per_generation=2, scale_rewards="batch")
    steps = [next_of(source, number) for number in range(2)]
    values = [fields[5, -1] for step in steps for fields in sequences(step.batch).values()]
    rewards = np.tile(np.arange(float(GROUP)), 4)
    assert sorted(values) == pytest.approx(sorted((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)))


def test_prompts_are_drawn_once_and_resume_at_any_position():
    source = make_source([0, 3, 4, 6, 8, 9, 10, 11, 13], dynamic_sampling=4)
    whole, positions = make_source(range(99)), []
    for step in range(6):
        next_of(source, step)
        positions.append((len(source.rewards.drawn), source.position()))
    drawn = source.rewards.drawn
    for step in range(len(drawn) // 2 + 1):
        next_of(whole, step)
    assert drawn == whole.rewards.drawn[: len(drawn)]
    for count, position in positions:
        source.seek(position := {**position, "updates_without_gradient": count})
        assert source.position() == position
        assert next(source.prompts).example.prompt[-1]["content"] == whole.rewards.drawn[count]
