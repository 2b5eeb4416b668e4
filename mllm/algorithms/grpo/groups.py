"""Advantages of groups of completions from their rewards, and the rewards' metrics. NumPy only.

DeepSeekMath: Shao et al. 2024, section 4.1.2. Dr. GRPO: Liu et al. 2025, section 3.2. MaxRL: Tajwar et al. 2026,
Maximum likelihood reinforcement learning, arXiv:2602.02710. Optimal token baseline: arXiv:2602.07078.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from mllm.algorithms.grpo.settings import RewardScale
from mllm.errors import StepError

STD_EPSILON = 1e-4  # TRL's: added to the standard deviation that divides the advantages


def equal_rewards(rewards: Float[np.ndarray, "G n"]) -> Bool[np.ndarray, "G"]:
    """Whether all rewards of a group are equal, ignoring NaN: its advantages are then 0."""
    highest = np.where(np.isnan(rewards), -np.inf, rewards).max(-1)
    lowest = np.where(np.isnan(rewards), np.inf, rewards).min(-1)
    return highest <= lowest  # also in a group without any reward: -inf <= inf


def group_deviations(rewards: Float[np.ndarray, "G n"]) -> tuple[Float[np.ndarray, "G n"], Float[np.ndarray, "G 1"]]:
    """Each reward minus its group's mean, and the group's sample standard deviation (n - 1).

    Failed rewards are NaN: they enter neither mean nor deviation, and their difference is 0. In a group of equal
    rewards differences and deviation are exactly 0, although the mean may be rounded.
    """
    present, equal = ~np.isnan(rewards), equal_rewards(rewards)[:, None]
    count = np.maximum(present.sum(-1, keepdims=True), 1)
    mean = np.where(present, rewards, 0.0).sum(-1, keepdims=True) / count
    deviation = np.where(present & ~equal, rewards - mean, 0.0)
    return deviation, sample_std(np.sum(deviation**2, -1, keepdims=True), count)


def advantages(rewards: Float[np.ndarray, "G n"], scale: RewardScale) -> Float[np.ndarray, "G n"]:
    """Each completion's advantage over the mean reward of its group, for G prompts with n completions each.

    `scale` names the divisor. `group` (DeepSeekMath, section 4.1.2) and `batch`: the standard deviation of the group or
    the batch with n - 1, plus 1e-4, as in TRL. `mean`: the group's mean (MaxRL). `none`: 1 (Dr. GRPO). A failed reward
    is NaN and gets 0. A group of equal rewards gets exactly 0. StepError is raised for a reward below 0 with `mean`.
    """
    return group_deviations(rewards)[0] / divisors(rewards, scale)


def token_advantages(
    rewards: Float[np.ndarray, "G n"], scale: RewardScale, norms: Sequence[Float[np.ndarray, " _"]]
) -> list[Float[np.ndarray, " _"]]:
    """Each token's advantage over the optimal token baseline; `norms` has one array for each of the G * n completions.

    The baseline of token t is the weighted mean reward of the group's completions with t tokens or more. The formula is
    sum_i W_it r_i / sum_i W_it, where W_it is the sum of completion i's `norms` up to t. This baseline minimises the
    variance of the gradient with respect to the logits. `scale`, and the completions with advantage 0, are as in
    `advantages`.
    """
    lengths = np.array([len(part) for part in norms]).reshape(rewards.shape)
    sums = np.zeros((*rewards.shape, lengths.max()))  # W_it; 0 behind a completion's end, and for a failed reward
    for index, part in zip(np.ndindex(rewards.shape), norms, strict=True):
        if not np.isnan(rewards[index]):
            sums[index][: len(part)] = np.cumsum(part, dtype=np.float64)
    present, total = np.nan_to_num(rewards), sums.sum(1)
    # Where every completion of that length was certain, no token has a gradient.
    baseline = np.einsum("gn,gnt->gt", present, sums) / np.where(total > 0, total, 1.0)
    counts = ~np.isnan(rewards) & ~equal_rewards(rewards)[:, None]
    advantages = np.where(counts[:, :, None], present[:, :, None] - baseline[:, None], 0.0)
    advantages /= divisors(rewards, scale)[:, :, None]
    return [advantages[index][: lengths[index]] for index in np.ndindex(rewards.shape)]


def divisors(rewards: Float[np.ndarray, "G n"], scale: RewardScale) -> Float[np.ndarray, "G 1"]:
    """The divisor of each group's advantages, by `scale`."""
    _, std = group_deviations(rewards)
    match scale:
        case "group":
            return std + STD_EPSILON
        case "mean":
            if (rewards < 0).any():
                raise StepError("grpo.scale_rewards: mean is for rewards of 0 or more: remove it")
            mean = np.nansum(rewards, -1, keepdims=True) / np.maximum((~np.isnan(rewards)).sum(-1, keepdims=True), 1)
            return np.where(mean > 0, mean, 1.0)
        case "batch":
            present = rewards[~np.isnan(rewards)]
            mean = present.mean() if present.size else np.nan
            whole = sample_std(np.sum((present - mean) ** 2), np.asarray(present.size)) + STD_EPSILON
            return np.full_like(std, whole)
        case "none":
            return np.ones_like(std)


def group_metrics(rewards: Float[np.ndarray, "G n"]) -> dict[str, float]:
    """The mean reward, the mean standard deviation of the groups, and the share of groups with equal rewards.

    Completions and groups without a reward are left out; NaN if there is no reward.
    """
    scored = rewards[~np.isnan(rewards).all(axis=1)]
    if not scored.size:
        return dict.fromkeys(("reward", "reward_std", "frac_reward_zero_std"), float("nan"))
    _, std = group_deviations(scored)
    return {
        "reward": float(scored[~np.isnan(scored)].mean()),
        "reward_std": float(std.mean()),
        "frac_reward_zero_std": float(equal_rewards(scored).mean()),
    }


def sample_std(squares: Float[Any, "*S"], count: Int[Any, "*S"]) -> Float[Any, "*S"]:
    """The standard deviation of `count` numbers; `squares` is the sum of squared distances to their mean."""
    return np.sqrt(squares / np.maximum(count - 1, 1))
