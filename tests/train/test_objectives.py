"""Each objective against a float64 numpy version of its paper's formula, written as plain loops over tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mllm.config.grpo import GrpoConfig
from mllm.rl.reward_worker import LARGEST
from mllm.train import objectives
from mllm.train.objectives import (
    GrpoObjective,
    advantages,
    gspo,
    policy_metrics,
    sampling_metrics,
    sequence_importance_weights,
    sequence_weights,
)

GROUPS, GROUP, LENGTH = 3, 4, 6
ROWS = GROUPS * GROUP
LONGEST = 8  # max_completion_length
LOSS_TYPES = ("grpo", "dapo", "prompt_mean", "dr_grpo")
OFF_POLICY = {"steps_per_generation": 2}
KL = {"beta": 0.1, "reference": "initial"}
EVERYTHING = {
    **OFF_POLICY,
    **KL,
    "entropy_coef": 0.05,
    "importance_cap": 1.2,
    "epsilon": 0.2,
    "epsilon_high": 0.3,
    "dual_clip": 1.4,
}


def objective(**settings):
    return GrpoObjective(GrpoConfig(**settings))


def make_batch(seed=0):
    """Rows of different lengths, one of them empty, and policies far enough apart that both clips apply."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, LENGTH + 1, ROWS)
    lengths[2] = 0
    mask = np.arange(LENGTH) < lengths[:, None]
    logprob = rng.uniform(-3, -0.1, mask.shape)
    per_row = np.broadcast_to(rng.normal(size=(ROWS, 1)), mask.shape)
    old, sampler, reference = (logprob + rng.normal(scale=0.4, size=mask.shape) for _ in range(3))
    entropy = rng.uniform(0, 2, mask.shape)
    return mask, logprob, entropy, (per_row, old, sampler, reference)


def reference_token(weight, log_ratio, logprob, entropy, advantage, old, sampler, reference):
    """PPO eq. 7 with the dual clip, times an importance weight (None: min(old / sampler, cap)), plus beta k3, minus the
    entropy bonus; one token, float64.
    """
    ratio = np.exp(log_ratio)
    clipped = min(max(ratio, 0.8), 1.3)
    surrogate = min(ratio * advantage, clipped * advantage)
    if advantage < 0:
        surrogate = max(surrogate, 1.4 * advantage)
    surrogate *= min(np.exp(old - sampler), 1.2) if weight is None else weight
    k3 = np.exp(reference - logprob) - (reference - logprob) - 1
    return -surrogate + 0.1 * k3 - 0.05 * entropy


def reference_loss(loss_type, mask, logprob, entropy, operands, sequence_mask=False):
    """The papers' means, as loops over groups, completions and tokens."""
    _, old, sampler, _ = operands
    losses = []  # [group][completion][token]
    for group in np.split(np.arange(ROWS), GROUPS):
        completions = []
        for row in group:
            active = np.flatnonzero(mask[row])
            log_ratios = (logprob - old)[row, active]
            if loss_type == "gspo" and active.size:
                log_ratios = np.full(active.size, log_ratios.mean())
            product = np.exp((old - sampler)[row, active].sum())
            weight = (product if product <= 1.2 else 0) if sequence_mask else None
            completions.append(
                [
                    reference_token(weight, x, logprob[row, t], entropy[row, t], *(each[row, t] for each in operands))
                    for x, t in zip(log_ratios, active, strict=True)
                ]
            )
        losses.append(completions)
    match loss_type:
        case "grpo" | "gspo":
            return sum(sum(c) / max(len(c), 1) for group in losses for c in group) / ROWS
        case "dapo":
            return sum(sum(c) for group in losses for c in group) / mask.sum()
        case "dr_grpo":
            return sum(sum(c) for group in losses for c in group) / (ROWS * LONGEST)
        case "prompt_mean":
            return sum(sum(map(sum, group)) / sum(map(len, group)) for group in losses) / GROUPS


def token_weights(loss_type, mask, group=GROUP):
    """The weights of all tokens."""
    return sequence_weights(loss_type, mask.sum(-1), group, LONGEST)[:, None] * mask


def packed(array, per_row):
    """The sequences with `per_row` of them in a row."""
    return array.reshape(-1, per_row * LENGTH)


def segments(sequences, per_row):
    return packed(np.tile(np.repeat(np.arange(per_row) + 1, LENGTH), sequences // per_row), per_row)


def our_loss(loss_type, per_row, *arrays, sequence_mask=False):
    weights, logprob, entropy, *operands = (packed(array, per_row) for array in arrays)
    place, settings = jnp.asarray(segments(len(arrays[0]), per_row)), {**EVERYTHING, "loss_type": loss_type}
    if sequence_mask:
        settings["importance_sampling"] = "sequence_mask"
        operands[2] = sequence_importance_weights(operands[1], operands[2], weights > 0, place, cap=1.2)
        assert 0 < np.mean(np.asarray(operands[2])[np.asarray(weights > 0)] == 0) < 1
    if loss_type == "gspo":
        return gspo(objective(**settings), logprob, entropy, weights, place, *operands)
    return jnp.sum(weights * objective(**settings)(logprob, entropy, *operands))


def numerical_gradient(f, x, step=1e-6):
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (f(up) - f(down)) / (2 * step)
    return gradient


def as_float32(*arrays):
    return [jnp.asarray(array, jnp.float32) for array in arrays]


def test_sft_is_cross_entropy():
    assert objectives.sft(jnp.array([-2.0]), jnp.array([1.0])) == 2.0


@pytest.mark.parametrize("sequence_mask", [False, True], ids=["token_truncate", "sequence_mask"])
@pytest.mark.parametrize("per_row", [1, 3])
@pytest.mark.parametrize("loss_type", [*LOSS_TYPES, "gspo"])
def test_loss_and_gradients_are_those_of_the_paper(loss_type, per_row, sequence_mask):
    mask, logprob, entropy, operands = make_batch()
    arrays = as_float32(token_weights(loss_type, mask), logprob, entropy, *operands)
    ours = partial(our_loss, sequence_mask=sequence_mask)
    loss, (by_logprob, by_entropy) = jax.value_and_grad(ours, argnums=(3, 4))(loss_type, per_row, *arrays)

    def paper(logprob, entropy):
        return reference_loss(loss_type, mask, logprob, entropy, operands, sequence_mask)

    assert loss == pytest.approx(paper(logprob, entropy), rel=1e-5)
    expected = numerical_gradient(lambda x: paper(x, entropy), logprob)
    np.testing.assert_allclose(by_logprob, expected, rtol=1e-4, atol=1e-6)
    expected = numerical_gradient(lambda x: paper(logprob, x), entropy)
    np.testing.assert_allclose(by_entropy, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "operands"),
    [
        ({"importance_cap": None}, ()),
        ({"importance_cap": None, "num_iterations": 2}, ("old_logprobs",)),
        ({}, ("sampler_logprobs",)),
        ({"importance_sampling": "sequence_mask"}, ("importance_weights",)),
        ({"importance_cap": None, **KL}, ("reference_logprobs",)),
        ({**KL, **OFF_POLICY}, ("old_logprobs", "sampler_logprobs", "reference_logprobs")),
    ],
)
def test_the_settings_determine_the_operands_of_an_objective(settings, operands):
    of_settings = objective(**settings)
    assert of_settings.operands == ("advantages", *operands)
    arrays = [jnp.full(3, -1.0)] * len(of_settings.operands)
    assert of_settings(jnp.full(3, -1.0), jnp.ones(3), *arrays).shape == (3,)
    with pytest.raises(ValueError, match="argument 2 is longer"):
        of_settings(jnp.full(3, -1.0), jnp.ones(3), *arrays, jnp.ones(3))


@pytest.mark.parametrize(
    ("settings", "clip_range"),
    [
        ({}, (0.8, 1.2)),
        ({"epsilon_high": 0.28}, (0.8, 1.28)),
        ({"epsilon": 0.1}, (0.9, 1.1)),
        ({"loss_type": "gspo"}, (1 - 3e-4, 1 + 4e-4)),
        ({"loss_type": "gspo", "epsilon": 1e-3}, (1 - 1e-3, 1 + 1e-3)),
        ({"loss_type": "gspo", "epsilon_high": 1e-3}, (1 - 3e-4, 1 + 1e-3)),
    ],
)
def test_the_clip_range_s_default_is_that_of_the_loss_type(settings, clip_range):
    assert GrpoConfig(**settings, **OFF_POLICY).clip_range == pytest.approx(clip_range, abs=1e-9)


def test_dr_grpo_s_advantages_are_not_scaled_unless_that_is_set():
    scales = [GrpoConfig(loss_type=loss).reward_scale for loss in LOSS_TYPES]
    assert scales == ["group", "group", "group", "none"]
    assert GrpoConfig(loss_type="dr_grpo", scale_rewards="batch").reward_scale == "batch"


def gradient(objective, logprob, *operands):
    return float(jax.grad(lambda x: objective(x, jnp.zeros(()), *map(jnp.asarray, operands)))(jnp.asarray(logprob)))


def test_without_old_logprobs_the_gradient_is_the_policy_gradient():
    assert gradient(objective(importance_cap=None), -1.7, 0.6) == pytest.approx(-0.6)


def test_the_importance_weight_is_truncated_and_has_no_gradient():
    truncated = objective(importance_cap=2.0)
    assert gradient(truncated, -1.0, 1.0, -1.0 + np.log(2)) == pytest.approx(-0.5, rel=1e-5)
    assert gradient(truncated, -1.0, 1.0, -1.0 - np.log(8)) == pytest.approx(-2.0, rel=1e-5)


def test_masked_completions_and_groups_still_count_in_the_means_and_nothing_that_counts_is_no_division_by_zero():
    mask = np.array([[1, 1], [0, 0]], bool)
    for loss_type, weight in {"grpo": 1 / 4, "dapo": 1 / 2, "prompt_mean": 1 / 2, "dr_grpo": 1 / 16}.items():
        np.testing.assert_allclose(token_weights(loss_type, mask, group=2), [[weight] * 2, [0, 0]])
        assert not np.asarray(token_weights(loss_type, 0 * mask, group=2)).any()
    mask = np.array([[1, 1], [1, 0], [0, 0], [0, 0]], bool)
    assert float(token_weights("prompt_mean", mask, group=2).sum()) == pytest.approx(1 / 2)


def test_sequences_that_are_not_whole_groups_are_refused():
    with pytest.raises(ValueError, match="3 sequences are not divisible into groups of 2"):
        sequence_weights("dapo", np.ones(3, int), 2, LONGEST)


def reference_advantages(rewards, scale):
    """DeepSeekMath section 4.1.2 with TRL's deviation of the sample, NaN left out; float64."""
    result = np.zeros(rewards.shape)
    for g, group in enumerate(rewards):
        present = ~np.isnan(group)
        if len(set(group[present])) < 2:
            continue
        among = {"group": group[present], "batch": rewards[~np.isnan(rewards)], "none": None}[scale]
        divisor = 1.0 if among is None else among.std(ddof=1) + 1e-4
        result[g, present] = (group[present] - group[present].mean()) / divisor
    return result


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_distances_to_the_mean_of_the_group(scale):
    rewards = np.random.default_rng(0).normal(size=(5, 4))
    rewards[1, 2] = rewards[2, :3] = np.nan
    result = advantages(rewards, scale)
    np.testing.assert_allclose(result.values, reference_advantages(rewards, scale), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_failed_and_extreme_rewards_have_finite_advantages_and_the_first_two_none(scale):
    equal = np.array([[0.1] * 7, [0, 0, 0, 1, 1, 1, 1.0]])  # the mean of seven 0.1 is not 0.1
    result = advantages(equal, scale)
    assert not result.values[0].any()
    assert result.values[1].all()
    failed = advantages(np.full((2, 3), np.nan), scale)
    assert not failed.values.any()
    assert failed.equal.all()
    extreme = advantages(np.array([[LARGEST, -LARGEST, LARGEST, 0.0], [0.0, 1.0, 2.0, 3.0]]), scale).values
    assert np.isfinite(extreme).all()
    assert extreme[0, 0] > 0 > extreme[0, 1]


def test_group_statistics_leave_failed_rewards_out():
    rewards = np.array([[0.0, 1.0, np.nan], [1.0, 1.0, 1.0], [np.nan] * 3, [np.nan, np.nan, 0.5]])
    result = advantages(rewards, "group")
    assert result.reward == pytest.approx(4.5 / 6)
    assert result.reward_std == pytest.approx(np.std([0, 1], ddof=1) / 4)
    assert result.equal.tolist() == [False, True, True, True]


@pytest.mark.parametrize("in_row", [1, 3])
@pytest.mark.parametrize("loss_type", ["grpo", "gspo"])
def test_policy_metrics_are_means_over_the_tokens_or_sequences_that_count(loss_type, in_row):
    mask, logprob, entropy, operands = make_batch()
    per_row, old, _, reference = operands
    sequences = [row for row in range(ROWS) if mask[row].any()]
    settings = {**EVERYTHING, "loss_type": loss_type, "importance_sampling": "sequence_mask"}
    weights = np.where(np.arange(ROWS) % 3 == 0, 0.0, 0.9)
    by_token = np.broadcast_to(weights[:, None], mask.shape)
    arrays = [*as_float32(logprob, entropy), jnp.asarray(mask), *as_float32(per_row, old, by_token, reference)]
    arrays = [packed(array, in_row) for array in arrays]
    metrics = policy_metrics(objective(**settings), *arrays[:3], jnp.asarray(segments(ROWS, in_row)), *arrays[3:])
    ratio, advantage = np.exp(logprob - old)[mask], per_row[mask]
    if loss_type == "gspo":
        ratio = np.exp([(logprob - old)[row, mask[row]].mean() for row in sequences])
        advantage = per_row[sequences, 0]
    low = np.mean((ratio < 0.8) & (advantage < 0))
    high = np.mean((ratio > 1.3) & (advantage > 0))
    difference = (reference - logprob)[mask]
    assert low > 0
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {
            "entropy": entropy[mask].mean(),
            "kl": np.mean(np.exp(difference) - difference - 1),
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
            "clip_ratio/dual_mean": np.mean((ratio > 1.4) & (advantage < 0)),
            "sampling/masked_sequences": np.mean(weights[sequences] == 0),
        },
        rel=1e-5,
    )


def test_sampling_metrics_measure_how_far_trainer_and_sampler_are_apart():
    mask, trainer, _, (_, _, sampler, _) = make_batch()
    metrics = sampling_metrics(*as_float32(trainer, sampler), jnp.asarray(mask))
    difference = (trainer - sampler)[mask]
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {
            "sampling/sampling_logp_difference/mean": np.abs(difference).mean(),
            "sampling/sampling_logp_difference/max": np.abs(difference).max(),
            "sampling/importance_sampling_ratio/mean": np.exp(difference).mean(),
        },
        rel=1e-5,
    )
