"""Rewards of groups of completions: the advantages that are learned from, and their metrics. NumPy only.

DeepSeekMath: Shao et al. 2024, section 4.1.2. Dr. GRPO: Liu et al. 2025, section 3.2. MaxRL: Tajwar et al. 2026,
Maximum likelihood reinforcement learning, arXiv:2602.02710.
"""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from mllm.algorithms.grpo.settings import RewardScale
from mllm.errors import UserError

STD_EPSILON = 1e-4  # TRL's: beside the standard deviation that rewards are divided by


def equal_rewards(rewards: Float[np.ndarray, "G n"]) -> Bool[np.ndarray, "G"]:
    """Which groups have no two different rewards, NaN aside, so that no advantage can be learned from."""
    highest = np.where(np.isnan(rewards), -np.inf, rewards).max(-1)
    lowest = np.where(np.isnan(rewards), np.inf, rewards).min(-1)
    return highest <= lowest  # also in a group without any reward: -inf <= inf


def group_deviations(rewards: Float[np.ndarray, "G n"]) -> tuple[Float[np.ndarray, "G n"], Float[np.ndarray, "G 1"]]:
    """Each reward's distance to the mean of its group, and the group's standard deviation (of the sample, n - 1).

    Rewards that failed are NaN: they enter neither mean nor deviation, and have distance 0. Distances and deviation
    are exactly 0 in a group of equal rewards, whose mean may be off by a rounding.
    """
    present, equal = ~np.isnan(rewards), equal_rewards(rewards)[:, None]
    count = np.maximum(present.sum(-1, keepdims=True), 1)
    mean = np.where(present, rewards, 0.0).sum(-1, keepdims=True) / count
    deviation = np.where(present & ~equal, rewards - mean, 0.0)
    return deviation, sample_std(np.sum(deviation**2, -1, keepdims=True), count)


def advantages(rewards: Float[np.ndarray, "G n"], scale: RewardScale) -> Float[np.ndarray, "G n"]:
    """How much better each completion is than the mean of its group, for G prompts with n completions each.

    `scale` divides it by the standard deviation (of the sample, n - 1, plus 1e-4, as TRL) of the `group` (DeepSeekMath,
    section 4.1.2) or of the whole `batch`, by the group's `mean` (MaxRL), or by nothing (`none`, Dr. GRPO). A reward
    that failed is NaN and gets 0; so does, exactly, a group of equal rewards. UserError is raised for a reward below 0
    with `mean`.
    """
    deviation, std = group_deviations(rewards)
    match scale:
        case "group":
            return deviation / (std + STD_EPSILON)
        case "mean":
            if (rewards < 0).any():
                raise UserError("grpo.scale_rewards: mean is for rewards of 0 or more: remove it")
            mean = np.nansum(rewards, -1, keepdims=True) / np.maximum((~np.isnan(rewards)).sum(-1, keepdims=True), 1)
            return np.divide(deviation, mean, out=np.zeros_like(deviation), where=mean > 0)
        case "batch":
            present = rewards[~np.isnan(rewards)]
            mean = present.mean() if present.size else np.nan
            return deviation / (sample_std(np.sum((present - mean) ** 2), np.asarray(present.size)) + STD_EPSILON)
        case "none":
            return deviation


def group_metrics(rewards: Float[np.ndarray, "G n"]) -> dict[str, float]:
    """The mean reward (NaN if all failed), the mean of the groups' deviations, and the share of groups without one."""
    present, (_, std) = rewards[~np.isnan(rewards)], group_deviations(rewards)
    return {
        "reward": float(present.mean()) if present.size else float("nan"),
        "reward_std": float(std.mean()),
        "frac_reward_zero_std": float(equal_rewards(rewards).mean()),
    }


def sample_std(squares: Float[Any, "*S"], count: Int[Any, "*S"]) -> Float[Any, "*S"]:
    """The standard deviation of `count` numbers whose squared distances to their mean add up to `squares`."""
    return np.sqrt(squares / np.maximum(count - 1, 1))
