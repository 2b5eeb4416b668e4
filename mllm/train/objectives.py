"""The objectives of SFT and of GRPO and its kin: pure functions of log-probabilities, advantages and masks.

The loss of a step is the plain sum of `weights * objective` over all tokens. The weights carry the whole batch's
denominator, so neither loss nor gradient depends on how it is split. A sequence is one prompt and its completion; a row
holds several, each a segment.

PPO: Schulman et al. 2017, eq. 7. Dual clip: Ye et al. 2020, Mastering complex control in MOBA games. GRPO: Shao et al.
2024, DeepSeekMath, eq. 3 (loss), eq. 4 (KL: k3), section 4.1.2 (advantages). Dr. GRPO: Liu et al. 2025, Understanding
R1-Zero-like training, section 3.2. DAPO: Yu et al. 2025, eq. 8. GSPO: Zheng et al. 2025, eq. 5 and 7. Truncated
importance weights (TIS): Yao et al. 2025, Your efficient RL framework secretly brings you off-policy RL training, and
Espeholt et al. 2018, IMPALA, section 4.1. Masked ones (MIS): Liu et al. 2025, When speed kills stability.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from mllm.config.grpo import GrpoConfig, LossType

STD_EPSILON = 1e-4  # TRL's: beside the standard deviation that rewards are divided by
MAX_LOG_RATIO = 20.0  # as verl's: exp(20) = 5e8, nothing is learnt beyond, and exp(89) is infinite in float32


def sft(logprob: Float[jax.Array, "*S"], entropy: Float[jax.Array, "*S"]) -> Float[jax.Array, "*S"]:
    """Cross-entropy in nats."""
    return -logprob


@dataclass(frozen=True)
class GrpoObjective:
    """PPO's clipped ratio with truncated importance weights, KL penalty and entropy bonus, token by token.

    Called as `objective(logprob, entropy, *operands)` with the arrays that `operands` names, in that order; all of
    one shape, float32, nats. With `gspo` each sequence's ratio is clipped, not each token's. `sequence_weights` has the
    rest of the loss type.
    """

    config: GrpoConfig

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands that the settings need: the batch's fields, and `importance_weights`.

        With one update to a rollout, the old policy is the current one, and needs no operand.
        """
        weighted, by_sequence = self.config.importance_cap is not None, self.masks_sequences
        needed = {
            "advantages": True,
            "old_logprobs": self.config.updates_per_rollout > 1,
            "sampler_logprobs": weighted and not by_sequence,
            "importance_weights": by_sequence,
            "reference_logprobs": self.config.beta > 0,
        }
        return tuple(name for name in needed if needed[name])

    @property
    def masks_sequences(self) -> bool:
        return self.config.importance_sampling == "sequence_mask"

    def __call__(
        self,
        logprob: Float[jax.Array, "*S"],
        entropy: Float[jax.Array, "*S"],
        *operands: Float[jax.Array, "*S"],
    ) -> Float[jax.Array, "*S"]:
        """Each token's loss, with the ratio of its own probabilities (PPO, GRPO)."""
        given = self.unpack(logprob, operands)
        return self.loss(logprob - given["old_logprobs"], logprob, entropy, given)

    def unpack(
        self, logprob: Float[jax.Array, "*S"], operands: tuple[Float[jax.Array, "*S"], ...]
    ) -> dict[str, Float[jax.Array, "*S"]]:
        """The operands by name, `old_logprobs` always among them. Raises ValueError for a wrong number of them."""
        given = dict(zip(self.operands, operands, strict=True))
        return {"old_logprobs": jax.lax.stop_gradient(logprob), **given}

    def loss(
        self,
        log_ratio: Float[jax.Array, "*R"],
        logprob: Float[jax.Array, "*S"],
        entropy: Float[jax.Array, "*S"],
        given: dict[str, Float[jax.Array, "*S"]],
    ) -> Float[jax.Array, "*S"]:
        """Each token's loss, where `log_ratio` (the token's or its sequence's) says how far the policy has moved.

        As in TRL, the importance weight multiplies the clipped ratio, not the penalty and the bonus.
        """
        config, advantage = self.config, given["advantages"]
        ratio = bounded_exp(log_ratio)
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, *config.clip_range) * advantage)
        if config.dual_clip is not None:
            gain = jnp.where(advantage < 0, jnp.maximum(gain, config.dual_clip * advantage), gain)
        # The importance weight is constant: neither policy is the current one.
        if self.masks_sequences:
            gain *= given["importance_weights"]
        elif config.importance_cap is not None:
            gain *= jnp.minimum(bounded_exp(given["old_logprobs"] - given["sampler_logprobs"]), config.importance_cap)
        loss = -gain
        if config.beta > 0:
            loss += config.beta * k3(logprob, given["reference_logprobs"])
        if config.entropy_coef:
            loss -= config.entropy_coef * entropy
        return loss


def gspo(
    objective: GrpoObjective,
    logprob: Float[jax.Array, "B T"],
    entropy: Float[jax.Array, "B T"],
    weights: Float[jax.Array, "B T"],
    segments: Int[jax.Array, "B T"],
    *operands: Float[jax.Array, "B T"],
) -> Float[jax.Array, ""]:
    """GSPO's loss for some rows: one clipped ratio for each sequence, exp(mean_t(logprob - old)).

    `weights` come from `sequence_weights` over the whole batch. The gradient flows through the ratio to all tokens of
    the sequence. Importance weight, KL and entropy stay per token, as with TRL's
    `importance_sampling_level="sequence"`.
    """
    given = objective.unpack(logprob, operands)
    active = weights > 0
    log_ratio, _ = sequence_means(logprob - given["old_logprobs"], active, segments)
    return jnp.sum(jnp.where(active, weights * objective.loss(log_ratio, logprob, entropy, given), 0.0))


def k3(logprob: Float[jax.Array, "*S"], reference: Float[jax.Array, "*S"]) -> Float[jax.Array, "*S"]:
    """The KL divergence to the reference (DeepSeekMath, eq. 4), estimated from samples: unbiased, never negative."""
    difference = jnp.minimum(reference - logprob, MAX_LOG_RATIO)
    return jnp.exp(difference) - difference - 1


def bounded_exp(log_ratio: Float[jax.Array, "*S"]) -> Float[jax.Array, "*S"]:
    """exp, kept finite: infinity times an advantage of 0, or times a clip's gradient of 0, would be NaN."""
    return jnp.exp(jnp.minimum(log_ratio, MAX_LOG_RATIO))


def masked_mean(values: Float[jax.Array, "*S"], mask: Bool[jax.Array, "*S"]) -> Float[jax.Array, ""]:
    """The mean of the masked values; 0 where there are none."""
    return jnp.where(mask, values, 0.0).sum() / jnp.maximum(mask.sum(), 1)


def sequence_means(
    values: Float[jax.Array, "B T"], mask: Bool[jax.Array, "B T"], segments: Int[jax.Array, "B T"]
) -> tuple[Float[jax.Array, "B T"], Float[jax.Array, "B T"]]:
    """For each token the mean of the masked values of its sequence (0 without any), and the number of these values.

    Each row's segments are numbered from 1 on.
    """

    def sum_segments(values: Float[jax.Array, "T"], segments: Int[jax.Array, "T"]) -> Float[jax.Array, "T"]:
        return jax.ops.segment_sum(values, segments, segments.size + 1)[segments]

    counts = jax.vmap(sum_segments)(mask.astype(jnp.float32), segments)
    return jax.vmap(sum_segments)(jnp.where(mask, values, 0.0), segments) / jnp.maximum(counts, 1), counts


def sequence_importance_weights(
    trainer: Float[jax.Array, "B T"],
    sampler: Float[jax.Array, "B T"],
    mask: Bool[jax.Array, "B T"],
    segments: Int[jax.Array, "B T"],
    cap: float,
) -> Float[jax.Array, "B T"]:
    """At each token its completion's probability under the trainer over that under the sampler; 0 if above `cap`.

    As in TRL's `sequence_mask`: the product over the tokens that count (`mask`), not their geometric mean.
    """
    mean, tokens = sequence_means(trainer - sampler, mask, segments)
    weight = bounded_exp(mean * tokens)
    return jnp.where(weight <= cap, weight, 0.0)


def sequence_weights(
    loss_type: LossType, tokens: Int[np.ndarray, "B"], group_size: int, max_completion_length: int
) -> Float[np.ndarray, "B"]:
    """Each token's share of the loss, by its sequence, float32: one over the whole batch's denominator.

    `tokens` are the numbers of completion tokens that count, in all sequences of one update, 0 for a sequence that
    doesn't count; each `group_size` sequences in turn are a group.

    - `grpo`, `gspo`: the mean over each completion's tokens, then over completions (DeepSeekMath, eq. 3), as in TRL.
    - `dapo`: the mean over all tokens of the batch, as in TRL and verl.
    - `prompt_mean`: the mean over all tokens of a group, then over groups: DAPO's eq. 8 as it is written.
    - `dr_grpo`: the sum over tokens divided by the constant `max_completion_length`, then the mean over
      completions (Dr. GRPO), as in TRL.

    A completion or group without any token that counts (cut off and masked, failed reward) adds nothing, but the
    outer mean is still over it, as in TRL: what is left weighs the same without it, except under `dapo`.

    Raises ValueError where the sequences are not divisible into groups.
    """
    if tokens.size % group_size:
        raise ValueError(f"tokens: {tokens.size} sequences are not divisible into groups of {group_size}")
    match loss_type:
        case "grpo" | "gspo":
            denominator = tokens.size * tokens
        case "dapo":
            denominator = tokens.sum()
        case "prompt_mean":
            groups = tokens.size // group_size
            denominator = groups * np.repeat(tokens.reshape(groups, group_size).sum(-1), group_size)
        case "dr_grpo":
            denominator = np.asarray(tokens.size * max_completion_length)
    return np.where(tokens > 0, 1.0 / np.maximum(denominator, 1), 0.0).astype(np.float32)


class Advantages(NamedTuple):
    """The advantages of groups of completions, and metrics of their rewards."""

    values: Float[np.ndarray, "G n"]
    reward: float
    """The mean reward; NaN if all failed."""
    reward_std: float
    """The mean of the groups' standard deviations."""
    equal: Bool[np.ndarray, "G"]
    """Which groups have no advantages, because their rewards are all equal (or fewer than two)."""


def advantages(rewards: Float[np.ndarray, "G n"], scale: Literal["group", "batch", "none"]) -> Advantages:
    """How much better each completion is than the mean of its group, for G prompts with n completions each.

    `scale` divides it by the standard deviation (of the sample, n - 1, plus 1e-4, as TRL) of the `group` (DeepSeekMath,
    section 4.1.2) or of the whole `batch`, or by nothing (`none`, Dr. GRPO). Rewards that failed are NaN: they enter
    neither mean nor deviation, and get 0. A group of equal rewards gets exactly 0.
    """
    present = ~np.isnan(rewards)
    count = np.maximum(present.sum(-1, keepdims=True), 1)
    mean = np.where(present, rewards, 0.0).sum(-1, keepdims=True) / count
    deviation = np.where(present, rewards - mean, 0.0)
    std = sample_std(np.sum(deviation**2, -1, keepdims=True), count)
    # Compared, not std == 0: the mean of equal numbers may be off by a rounding, which 1e-4 would blow up.
    highest = np.where(present, rewards, -np.inf).max(-1, keepdims=True)
    lowest = np.where(present, rewards, np.inf).min(-1, keepdims=True)
    equal = highest <= lowest  # also in a group without any reward: -inf <= inf
    whole = rewards[present].mean() if present.any() else np.nan
    match scale:
        case "group":
            divisor = std + STD_EPSILON
        case "batch":
            divisor = sample_std(np.sum((rewards[present] - whole) ** 2), present.sum()) + STD_EPSILON
        case "none":
            divisor = np.ones(())
    return Advantages(
        values=np.where(equal, 0.0, deviation / divisor),
        reward=float(whole),
        reward_std=float(np.where(equal, 0.0, std).mean()),
        equal=equal[:, 0],
    )


def sample_std(squares: Float[Any, "*S"], count: Int[Any, "*S"]) -> Float[Any, "*S"]:
    """The standard deviation of `count` numbers whose squared distances to their mean add up to `squares`."""
    return np.sqrt(squares / np.maximum(count - 1, 1))


def policy_metrics(
    objective: GrpoObjective,
    logprob: Float[jax.Array, "B T"],
    entropy: Float[jax.Array, "B T"],
    mask: Bool[jax.Array, "B T"],
    segments: Int[jax.Array, "B T"],
    *operands: Float[jax.Array, "B T"],
) -> dict[str, Float[jax.Array, ""]]:
    """Means over the masked tokens of a whole batch, under TRL's names; 0 if there are none.

    `clip_ratio/low_mean` is the share of tokens (under GSPO, of sequences) that the lower clip keeps from becoming
    less likely still, `high_mean` the upper clip's share, `dual_mean` that of the dual clip. `masked_sequences` is the
    share of sequences whose importance weight is above the limit.
    """
    given = objective.unpack(logprob, operands)
    log_ratio, share, advantage = logprob - given["old_logprobs"], mask.astype(jnp.float32), given["advantages"]
    config, (mean, tokens) = objective.config, sequence_means(log_ratio, mask, segments)
    by_sequence = share / jnp.maximum(tokens, 1)  # a sequence's tokens together count as one
    if config.loss_type == "gspo":
        log_ratio, share = mean, by_sequence
    low, high = config.clip_range
    ratio, share = bounded_exp(log_ratio), share / jnp.maximum(share.sum(), 1)
    below = share.sum(where=(ratio < low) & (advantage < 0))
    above = share.sum(where=(ratio > high) & (advantage > 0))
    metrics = {
        "entropy": masked_mean(entropy, mask),
        "clip_ratio/low_mean": below,
        "clip_ratio/high_mean": above,
        "clip_ratio/region_mean": below + above,
    }
    if config.dual_clip is not None:
        metrics["clip_ratio/dual_mean"] = share.sum(where=(ratio > config.dual_clip) & (advantage < 0))
    if objective.masks_sequences:
        masked = by_sequence.sum(where=given["importance_weights"] == 0)
        metrics["sampling/masked_sequences"] = masked / jnp.maximum(by_sequence.sum(), 1)
    if config.beta > 0:
        metrics["kl"] = masked_mean(k3(logprob, given["reference_logprobs"]), mask)
    return metrics


def sampling_metrics(
    trainer: Float[jax.Array, "B T"], sampler: Float[jax.Array, "B T"], mask: Bool[jax.Array, "B T"]
) -> dict[str, Float[jax.Array, ""]]:
    """How far the trainer's log-probabilities of sampled tokens are from the sampler's; the ratio is not truncated."""
    difference = jnp.where(mask, jnp.abs(trainer - sampler), 0.0)
    return {
        "sampling/sampling_logp_difference/mean": masked_mean(difference, mask),
        "sampling/sampling_logp_difference/max": difference.max(),
        "sampling/importance_sampling_ratio/mean": masked_mean(bounded_exp(trainer - sampler), mask),
    }
