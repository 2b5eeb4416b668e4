"""Each objective against a float64 numpy version of its paper's formula, written as plain loops over tokens."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mllm.rl.reward_worker import LARGEST
from mllm.train import objectives
from mllm.train.objectives import GrpoObjective, advantages, gspo, policy_metrics, sampling_metrics, sequence_weights

GROUPS, GROUP, LENGTH = 3, 4, 6
ROWS = GROUPS * GROUP
LONGEST = 8  # max_completion_length
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
EVERYTHING = GrpoObjective(
    epsilon=0.2, epsilon_high=0.3, beta=0.1, entropy_coef=0.05, importance_cap=1.2, num_iterations=2
)


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


def reference_token(o, log_ratio, logprob, entropy, advantage, old, sampler, reference):
    """PPO eq. 7, times min(old / sampler, cap), plus beta k3, minus the entropy bonus; one token, float64."""
    ratio = np.exp(log_ratio)
    clipped = min(max(ratio, 1 - o.epsilon), 1 + o.epsilon_high)
    surrogate = min(ratio * advantage, clipped * advantage) * min(np.exp(old - sampler), o.importance_cap)
    k3 = np.exp(reference - logprob) - (reference - logprob) - 1
    return -surrogate + o.beta * k3 - o.entropy_coef * entropy


def reference_loss(loss_type, o, mask, logprob, entropy, operands):
    """The papers' means, as loops over groups, completions and tokens."""
    _, old, _, _ = operands
    losses = []  # [group][completion][token]
    for group in np.split(np.arange(ROWS), GROUPS):
        completions = []
        for row in group:
            active = np.flatnonzero(mask[row])
            log_ratios = (logprob - old)[row, active]
            if loss_type == "gspo" and active.size:
                log_ratios = np.full(active.size, log_ratios.mean())
            completions.append(
                [
                    reference_token(o, x, logprob[row, t], entropy[row, t], *(each[row, t] for each in operands))
                    for x, t in zip(log_ratios, active, strict=True)
                ]
            )
        losses.append(completions)
    match loss_type:
        case "grpo" | "gspo":
            return sum(sum(c) / max(len(c), 1) for group in losses for c in group) / ROWS
        case "bnpo":
            return sum(sum(c) for group in losses for c in group) / mask.sum()
        case "dr_grpo":
            return sum(sum(c) for group in losses for c in group) / (ROWS * LONGEST)
        case "dapo":
            return sum(sum(map(sum, group)) / sum(map(len, group)) for group in losses) / GROUPS


def token_weights(loss_type, mask, group=GROUP):
    """The weights of all tokens."""
    return sequence_weights(loss_type, mask.sum(-1), group, LONGEST)[:, None] * mask


def packed(array, per_row):
    """The sequences with `per_row` of them in a row."""
    return array.reshape(-1, per_row * LENGTH)


def segments(sequences, per_row):
    return packed(np.tile(np.repeat(np.arange(per_row) + 1, LENGTH), sequences // per_row), per_row)


def our_loss(loss_type, per_row, *arrays):
    weights, logprob, entropy, *operands = (packed(array, per_row) for array in arrays)
    if loss_type == "gspo":
        place = jnp.asarray(segments(len(arrays[0]), per_row))
        return gspo(EVERYTHING, logprob, entropy, weights, place, *operands)
    return jnp.sum(weights * EVERYTHING(logprob, entropy, *operands))


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


@pytest.mark.parametrize("per_row", [1, 3])
@pytest.mark.parametrize("loss_type", [*LOSS_TYPES, "gspo"])
def test_loss_and_gradients_are_those_of_the_paper(loss_type, per_row):
    mask, logprob, entropy, operands = make_batch()
    arrays = as_float32(token_weights(loss_type, mask), logprob, entropy, *operands)
    loss, (by_logprob, by_entropy) = jax.value_and_grad(our_loss, argnums=(3, 4))(loss_type, per_row, *arrays)

    def paper(logprob, entropy):
        return reference_loss(loss_type, EVERYTHING, mask, logprob, entropy, operands)

    assert loss == pytest.approx(paper(logprob, entropy), rel=1e-5)
    expected = numerical_gradient(lambda x: paper(x, entropy), logprob)
    np.testing.assert_allclose(by_logprob, expected, rtol=1e-4, atol=1e-6)
    expected = numerical_gradient(lambda x: paper(logprob, x), entropy)
    np.testing.assert_allclose(by_entropy, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss_type", [*LOSS_TYPES, "gspo"])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_the_losses_of_micro_batches_add_up_to_that_of_the_batch(loss_type, rows):
    mask, logprob, entropy, operands = make_batch()
    arrays = as_float32(token_weights(loss_type, mask), logprob, entropy, *operands)
    starts = range(0, ROWS, rows)
    parts = [our_loss(loss_type, 1, *(array[start : start + rows] for array in arrays)) for start in starts]
    assert sum(parts) == pytest.approx(float(our_loss(loss_type, 1, *arrays)), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "operands"),
    [
        ({}, ("advantages",)),
        ({"num_iterations": 2}, ("advantages", "old_logprobs")),
        ({"importance_cap": 2.0}, ("advantages", "sampler_logprobs")),
        ({"beta": 0.1}, ("advantages", "reference_logprobs")),
        (
            {"beta": 0.1, "importance_cap": 2.0, "num_iterations": 2},
            ("advantages", "old_logprobs", "sampler_logprobs", "reference_logprobs"),
        ),
    ],
)
def test_the_settings_determine_the_operands_of_an_objective(settings, operands):
    objective = GrpoObjective(**settings)
    assert objective.operands == operands
    arrays = [jnp.full(3, -1.0)] * len(operands)
    assert objective(jnp.full(3, -1.0), jnp.ones(3), *arrays).shape == (3,)
    with pytest.raises(ValueError, match="argument 2 is longer"):
        objective(jnp.full(3, -1.0), jnp.ones(3), *arrays, jnp.ones(3))


def gradient(objective, logprob, *operands):
    return float(jax.grad(lambda x: objective(x, jnp.zeros(()), *map(jnp.asarray, operands)))(jnp.asarray(logprob)))


def test_without_old_logprobs_the_gradient_is_the_policy_gradient():
    assert gradient(GrpoObjective(), -1.7, 0.6) == pytest.approx(-0.6)


def test_the_importance_weight_is_truncated_and_has_no_gradient():
    objective = GrpoObjective(importance_cap=2.0)
    assert gradient(objective, -1.0, 1.0, -1.0 + np.log(2)) == pytest.approx(-0.5, rel=1e-5)
    assert gradient(objective, -1.0, 1.0, -1.0 - np.log(8)) == pytest.approx(-2.0, rel=1e-5)


@pytest.mark.parametrize("loss_type", [*LOSS_TYPES, "gspo"])
def test_a_batch_in_which_nothing_counts_has_no_loss_and_no_gradient(loss_type):
    _, logprob, entropy, operands = make_batch()
    arrays = as_float32(token_weights(loss_type, np.zeros(logprob.shape, bool)), logprob, entropy, *operands)
    loss, by_logprob = jax.value_and_grad(our_loss, argnums=3)(loss_type, 1, *arrays)
    assert loss == 0.0
    assert not by_logprob.any()


def test_a_masked_completion_still_counts_in_the_mean_over_completions():
    mask = np.array([[1, 1], [0, 0]], bool)
    for loss_type, weight in {"grpo": 1 / 4, "bnpo": 1 / 2, "dapo": 1 / 2, "dr_grpo": 1 / 16}.items():
        np.testing.assert_allclose(token_weights(loss_type, mask, group=2), [[weight] * 2, [0, 0]])


def test_a_masked_group_still_counts_in_the_mean_over_groups():
    mask = np.array([[1, 1], [1, 0], [0, 0], [0, 0]], bool)
    assert float(token_weights("dapo", mask, group=2).sum()) == pytest.approx(1 / 2)


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
    result = advantages(jnp.asarray(rewards), scale)
    np.testing.assert_allclose(result.values, reference_advantages(rewards, scale), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_the_advantages_of_a_group_of_equal_rewards_are_exactly_zero(scale):
    rewards = jnp.array([[0.1] * 7, [0, 0, 0, 1, 1, 1, 1.0]])  # the mean of seven 0.1 is not 0.1
    result = advantages(rewards, scale)
    assert not result.values[0].any()
    assert result.values[1].all()


def test_group_statistics_leave_failed_rewards_out():
    rewards = jnp.array([[0.0, 1.0, jnp.nan], [1.0, 1.0, 1.0], [jnp.nan] * 3, [jnp.nan, jnp.nan, 0.5]])
    result = advantages(rewards, "group")
    assert result.reward == pytest.approx(4.5 / 6)
    assert result.reward_std == pytest.approx(np.std([0, 1], ddof=1) / 4)
    assert result.frac_reward_zero_std == pytest.approx(3 / 4)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_when_every_reward_failed_all_advantages_are_zero(scale):
    result = advantages(jnp.full((2, 3), jnp.nan), scale)
    assert not result.values.any()
    assert result.frac_reward_zero_std == 1.0


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_rewards_as_large_as_they_may_be_give_finite_advantages(scale):
    result = advantages(jnp.array([[LARGEST, -LARGEST, LARGEST, 0.0], [0.0, 1.0, 2.0, 3.0]]), scale)
    assert np.isfinite(result.values).all()
    assert result.values[0, 0] > 0 > result.values[0, 1]


@pytest.mark.parametrize("in_row", [1, 3])
@pytest.mark.parametrize("loss_type", ["grpo", "gspo"])
def test_policy_metrics_are_means_over_the_tokens_or_sequences_that_count(loss_type, in_row):
    mask, logprob, entropy, operands = make_batch()
    per_row, old, _, reference = operands
    objective = replace(EVERYTHING, loss_type=loss_type)
    arrays = [*as_float32(logprob, entropy), jnp.asarray(mask), *as_float32(*operands)]
    arrays = [packed(array, in_row) for array in arrays]
    metrics = policy_metrics(objective, *arrays[:3], jnp.asarray(segments(ROWS, in_row)), *arrays[3:])
    ratio, advantage = np.exp(logprob - old)[mask], per_row[mask]
    if loss_type == "gspo":
        rows = [row for row in range(ROWS) if mask[row].any()]
        ratio = np.exp([(logprob - old)[row, mask[row]].mean() for row in rows])
        advantage = per_row[rows, 0]
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
