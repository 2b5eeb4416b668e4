"""Each objective against a float64 numpy version of its paper's formula, written as plain loops over tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import with_inputs

from mllm.algorithms.grpo import losses
from mllm.algorithms.grpo.groups import advantages, equal_rewards, group_metrics, token_advantages
from mllm.algorithms.grpo.inputs import PolicyInputs
from mllm.algorithms.grpo.losses import policy_metrics, sequence_weights
from mllm.algorithms.grpo.settings import GrpoConfig
from mllm.data.batch import Batch
from mllm.rewards.scores import LARGEST

GROUPS, GROUP, LENGTH = 3, 4, 6
ROWS = GROUPS * GROUP
IN_ROW = 3
"""Sequences that a row of the batch holds."""
LONGEST = 8  # max_completion_length
OFF_POLICY = {"updates_per_generation": 2}
KL = {"beta": 0.1, "reference": "initial"}
CLIPPING = {"importance_cap": 1.2, "epsilon": 0.2, "epsilon_high": 0.3, "dual_clip": 1.4}
EVERYTHING = {**OFF_POLICY, **KL, **CLIPPING, "entropy_coef": 0.05}


def make_config(loss_type, mode="token_truncate", **settings):
    """All settings that the loss type has, away from their defaults."""
    chosen = {**EVERYTHING, **settings, "loss_type": loss_type, "importance_sampling": mode}
    if loss_type in ("cispo", "sapo"):
        chosen = {name: value for name, value in chosen.items() if name not in ("epsilon", "epsilon_high", "dual_clip")}
    return GrpoConfig(**chosen | ({"epsilon_high": 1.3} if loss_type == "cispo" else {}))


def make_sequences(seed=0):
    """Sequences of different lengths, one of them empty and half of them with a given token between two sampled spans.

    Policies are far enough apart that both clips apply.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, LENGTH + 1, ROWS)
    lengths[2] = 0
    mask = np.arange(LENGTH) < lengths[:, None]
    mask[::2, 2] = False
    logprob = rng.uniform(-3, -0.1, mask.shape)
    advantage = np.broadcast_to(rng.normal(size=(ROWS, 1)), mask.shape)
    old, sampler, reference = (logprob + rng.normal(scale=0.4, size=mask.shape) for _ in range(3))
    entropy = rng.uniform(0, 2, mask.shape)
    return mask, logprob, entropy, (advantage, old, sampler, reference)


def reference_surrogate(loss_type, log_ratio, current, logprob, advantage):
    """PPO eq. 7 with the dual clip; MiniMax-M1 eq. 4 with its constant ratio; SAPO eq. 5; one token, float64."""
    ratio = np.exp(log_ratio)
    if loss_type == "cispo":
        return min(np.exp(current), 1.3) * advantage * logprob
    if loss_type == "sapo":
        temperature = 1.0 if advantage > 0 else 1.05
        return 4 / temperature / (1 + np.exp(-temperature * (ratio - 1))) * advantage
    clipped = min(max(ratio, 0.8), 1.3)
    surrogate = min(ratio * advantage, clipped * advantage)
    return max(surrogate, 1.4 * advantage) if advantage < 0 else surrogate


def reference_weight(mode, log_ratios, t):
    """The importance weight of token t of a sequence with the log-ratios of its tokens."""
    weight = np.exp(log_ratios.sum() if mode.startswith("sequence") else log_ratios[t])
    return weight if weight <= 1.2 else {"mask": 0, "truncate": 1.2}[mode.split("_")[1]]


def reference_loss(loss_type, mode, mask, constant, logprob, entropy, operands):
    """The papers' means over tokens, completions and groups, of losses from a loop over tokens.

    `constant` are the log-probabilities where they are not differentiated; with old None they are the old policy's.
    """
    advantage, old, sampler, reference = operands
    old = constant if old is None else old
    each, lengths = np.zeros(mask.shape), mask.sum(1)
    for row, t in np.argwhere(mask):
        active = mask[row]
        log_ratios, place = (logprob - old)[row, active], np.count_nonzero(active[:t])
        log_ratio = log_ratios.mean() if loss_type == "gspo" else log_ratios[place]
        current = (constant - old)[row, t]
        gain = reference_surrogate(loss_type, log_ratio, current, logprob[row, t], advantage[row, t])
        gain *= reference_weight(mode, (old - sampler)[row, active], place)
        apart = reference[row, t] - logprob[row, t]
        each[row, t] = -gain + 0.1 * (np.exp(apart) - apart - 1) - 0.05 * entropy[row, t]
    completions = each.sum(1)
    match loss_type:
        case "grpo" | "gspo" | "sapo":
            return np.mean(completions / np.maximum(lengths, 1))
        case "dapo" | "cispo":
            return completions.sum() / lengths.sum()
        case "dr_grpo":
            return np.mean(completions / LONGEST)


def token_weights(loss_type, mask):
    return sequence_weights(make_config(loss_type), mask.sum(-1), LONGEST)[:, None] * mask


def packed(array):
    """The sequences with several of them in a row, in the dtypes of a batch."""
    array = np.asarray(array)
    return jnp.asarray(array, jnp.int32 if array.dtype == int else jnp.float32).reshape(-1, IN_ROW * LENGTH)


def pack(weights, advantage, old, sampler, reference):
    segments = packed(np.tile(np.repeat(np.arange(IN_ROW) + 1, LENGTH), ROWS // IN_ROW))
    weights, advantage, sampler, old, reference = map(packed, (weights, advantage, sampler, old, reference))
    inputs = PolicyInputs(advantage, sampler, old, reference_logprobs=reference)
    return Batch(segments, segments, segments, segments, weights, inputs)


def our_loss(config, batch, logprob, entropy):
    inputs = losses.token_inputs(config, batch, jax.lax.stop_gradient(logprob))
    if config.loss_type == "gspo":
        each = losses.sequence_policy_loss(config, logprob, entropy, inputs, batch.weights > 0, batch.segments)
    else:
        each = losses.policy_loss(config, logprob, entropy, inputs)
    return jnp.sum(batch.weights * each)


def numerical_gradient(f, x, step=1e-6):
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (f(up) - f(down)) / (2 * step)
    return gradient


@pytest.mark.parametrize(
    ("loss_type", "mode", "updates"),
    [
        ("grpo", "token_truncate", 2),
        ("dapo", "sequence_truncate", 2),
        ("dr_grpo", "token_mask", 2),
        ("gspo", "sequence_mask", 2),
        ("cispo", "token_mask", 2),
        ("sapo", "sequence_truncate", 2),
        ("grpo", "sequence_mask", 1),
        ("dapo", "token_truncate", 1),
    ],
)
def test_loss_and_gradients_match_the_paper(loss_type, mode, updates):
    mask, logprob, entropy, operands = make_sequences()
    config = make_config(loss_type, mode)
    if updates == 1:  # the current policy has a ratio of 1
        operands = (operands[0], None, *operands[2:])
        kept = {"loss_type": loss_type, "importance_sampling": mode, "importance_cap": 1.2, "entropy_coef": 0.05}
        config = GrpoConfig(**kept, **KL)
    batch = pack(token_weights(loss_type, mask), *(logprob if x is None else x for x in operands))
    ours = partial(our_loss, config, batch if updates == 2 else with_inputs(batch, old_logprobs=None))
    loss, gradients = jax.value_and_grad(ours, argnums=(0, 1))(packed(logprob), packed(entropy))
    paper = partial(reference_loss, loss_type, mode, mask, logprob)
    assert loss == pytest.approx(paper(logprob, entropy, operands), rel=1e-5)
    by_logprob = numerical_gradient(lambda x: paper(x, entropy, operands), logprob)
    by_entropy = numerical_gradient(lambda x: paper(logprob, x, operands), entropy)
    for gradient, expected in zip(gradients, (by_logprob, by_entropy), strict=True):
        np.testing.assert_allclose(gradient, packed(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "gspo", "cispo"])
def test_marked_old_log_probs_equal_the_current_log_probs(loss_type):
    mask, logprob, entropy, (advantage, _, sampler, reference) = make_sequences()
    config, current = make_config(loss_type), packed(logprob)
    batch = pack(token_weights(loss_type, mask), advantage, logprob, sampler, reference)
    marked = with_inputs(batch, old_logprobs=jnp.zeros_like(current), is_current=jnp.ones_like(current))

    def results(batch):
        loss = jax.value_and_grad(our_loss, 2)(config, batch, current, packed(entropy))
        return jax.tree.leaves((loss, policy_metrics(config, current, packed(entropy), batch)))

    for one, other in zip(results(marked), results(batch), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["grpo", "gspo", "cispo", "sapo"])
def test_distant_policies_give_finite_losses_and_gradients(loss_type):
    """Trainer, sampler, old and reference policy differ by up to 1e12 nats; exp overflows float32 from 89 on."""
    mask, _, entropy, (advantage, *_) = make_sequences()
    config, rng = make_config(loss_type, "sequence_mask"), np.random.default_rng(0)
    compute = jax.jit(jax.value_and_grad(partial(our_loss, config), argnums=(1, 2)))
    distances = np.array([0, 30, 89, 1e4, 1e12])
    for _ in range(8):
        old, sampler, reference = rng.choice([*distances, *-distances], (3, *mask.shape)) - 5.5
        if loss_type == "gspo":
            old[:] = old[:, :1]  # for a sequence's mean to be as far away
        batch = pack(token_weights(loss_type, mask), advantage, old, sampler, reference)
        for logprob in (0.0, -1e12):
            current = jnp.full(batch.weights.shape, logprob)
            results = compute(batch, current, packed(entropy)), policy_metrics(config, current, packed(entropy), batch)
            assert all(np.isfinite(result).all() for result in jax.tree.leaves(results))


def test_clipping_and_scaling_default_by_the_loss_type():
    for settings, low, high, scale in (
        ({"epsilon": 0.1, "epsilon_high": 0.28, "scale_rewards": "none"}, 0.9, 1.28, "none"),
        ({"loss_type": "dr_grpo"}, 0.8, 1.2, "none"),
        ({"loss_type": "gspo"}, 1 - 3e-4, 1 + 4e-4, "group"),
        ({"loss_type": "cispo"}, 0, 5, "group"),
    ):
        config = GrpoConfig(**settings, **OFF_POLICY)
        assert config.clip_range == pytest.approx((low, high), abs=1e-9)
        assert config.reward_scale == scale


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_where_nothing_counts_no_weight_is_a_division_by_zero(loss_type):
    assert not np.asarray(token_weights(loss_type, np.zeros((2, 2), bool))).any()


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
    """An advantage is exactly 0 where the rewards are equal or failed."""
    rewards = np.random.default_rng(0).normal(size=(5, 7))
    rewards[1, 2] = rewards[2, :6] = rewards[4] = np.nan
    rewards[3] = 0.1  # the mean of seven 0.1 is not 0.1
    result = advantages(rewards, scale)
    np.testing.assert_allclose(result, reference_advantages(rewards, scale), rtol=1e-4, atol=1e-6)
    assert not result[2:].any()
    assert not advantages(np.full((2, 3), np.nan), scale).any()
    extreme = advantages(np.array([[LARGEST, -LARGEST, LARGEST, 0.0], [0.0, 1.0, 2.0, 3.0]]), scale)
    assert np.isfinite(extreme).all()
    assert extreme[0, 0] > 0 > extreme[0, 1]


def reference_token_advantages(rewards, norms):
    """sum_i W_it r_i / sum_i W_it over the completions that have a token t, subtracted from each one's reward."""
    result = []
    for reward, part in zip(rewards, norms, strict=True):
        result.append([])
        for t in range(len(part)):
            peers = [i for i, other in enumerate(norms) if len(other) > t and not np.isnan(rewards[i])]
            weights = [sum(map(float, norms[i][: t + 1])) for i in peers]
            mean = sum(w * rewards[i] for w, i in zip(weights, peers, strict=True)) / sum(weights)
            result[-1].append(0.0 if np.isnan(reward) else reward - mean)
    return result


def test_a_token_baseline_weighs_rewards_by_prefix_norms():
    rng = np.random.default_rng(0)
    rewards = rng.random((4, 5))
    rewards[1, 2] = np.nan
    rewards[2], rewards[3] = 0.1, np.nan
    norms = [rng.random(length, np.float32) for length in rng.integers(1, 9, 20)]
    for scale, divisor in {"none": np.ones(4), "mean": np.nanmean(rewards[:3], -1)}.items():
        result = token_advantages(rewards, scale, norms)
        assert [len(part) for part in result] == [len(part) for part in norms]
        for group in (0, 1):
            members = slice(5 * group, 5 * group + 5)
            expected = reference_token_advantages(rewards[group], norms[members])
            for part, values in zip(result[members], expected, strict=True):
                np.testing.assert_allclose(part, np.array(values) / divisor[group], rtol=1e-12, atol=1e-12)
        assert not any(part.any() for part in result[10:])
    certain = token_advantages(np.array([[0.0, 1.0]]), "group", [np.zeros(2, np.float32)] * 2)
    assert np.isfinite(certain).all()


def test_reward_statistics_leave_failed_rewards_out():
    rewards = np.array([[0.0, 1.0, np.nan], [1.0, 1.0, 1.0], [np.nan] * 3, [np.nan, np.nan, 0.5]])
    assert equal_rewards(rewards).tolist() == [False, True, True, True]
    expected = {"reward": 4.5 / 6, "reward_std": np.std([0, 1], ddof=1) / 3, "frac_reward_zero_std": 2 / 3}
    assert group_metrics(rewards) == pytest.approx(expected)
    assert np.isnan(group_metrics(np.full((2, 3), np.nan))["reward"])


@pytest.mark.parametrize("loss_type", ["grpo", "gspo"])
def test_policy_metrics_average_counted_tokens_or_sequences(loss_type):
    mask, logprob, entropy, operands = make_sequences()
    advantage, old, sampler, reference = operands
    config = make_config(loss_type, "sequence_mask")
    metrics = policy_metrics(config, packed(logprob), packed(entropy), pack(mask, *operands))
    sequences = [row for row in range(ROWS) if mask[row].any()]
    ratio, sign = np.exp(logprob - old)[mask], advantage[mask]
    if loss_type == "gspo":
        ratio = np.exp([(logprob - old)[row, mask[row]].mean() for row in sequences])
        sign = advantage[sequences, 0]
    low = np.mean((ratio < 0.8) & (sign < 0))
    high = np.mean((ratio > 1.3) & (sign > 0))
    importance = [reference_weight("sequence_mask", (old - sampler)[row, mask[row]], 0) for row in sequences]
    difference, mismatch = (reference - logprob)[mask], (old - sampler)[mask]
    assert low > 0
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {
            "entropy": entropy[mask].mean(),
            "kl": np.mean(np.exp(difference) - difference - 1),
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
            "clip_ratio/dual_mean": np.mean((ratio > 1.4) & (sign < 0)),
            "sampling/masked_sequences": np.mean(np.equal(importance, 0)),
            # The sampler is compared with the policy before the rollout's first update, not with the current policy.
            "sampling/sampling_logp_difference/mean": np.abs(mismatch).mean(),
            "sampling/sampling_logp_difference/max": np.abs(mismatch).max(),
            "sampling/importance_sampling_ratio/mean": np.exp(mismatch).mean(),
        },
        rel=1e-5,
    )
    batch = with_inputs(pack(mask, *operands), old_logprobs=None)  # one update to a rollout: the current policy is it
    alone = policy_metrics(GrpoConfig(), packed(logprob), packed(entropy), batch)
    mismatch = np.abs(logprob - sampler)[mask].mean()
    assert float(alone["sampling/sampling_logp_difference/mean"]) == pytest.approx(mismatch, rel=1e-5)


def test_cispo_counts_capped_ratios_and_sapo_clips_none():
    mask, logprob, entropy, operands = make_sequences()
    given = packed(logprob), packed(entropy), pack(mask, *operands)
    cispo, sapo = (policy_metrics(make_config(loss_type), *given) for loss_type in ("cispo", "sapo"))
    capped = np.mean(((np.exp(logprob - operands[1]) > 1.3) & (operands[0] > 0))[mask])
    assert capped > 0
    assert float(cispo["cispo_clip_ratio"]) == pytest.approx(capped, rel=1e-5)
    assert not [name for name in {**cispo, **sapo} if name.startswith("clip_ratio")]
