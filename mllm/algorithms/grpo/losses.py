"""The objectives of SFT and of GRPO and its kin: pure functions of log-probabilities, advantages and masks.

The loss of a step is the plain sum of `weights * objective` over all tokens. The weights carry the whole batch's
denominator, so neither loss nor gradient depends on how it is split. A sequence is one prompt and its completion; a row
holds several, each a segment.

PPO: Schulman et al. 2017, eq. 7. Dual clip: Ye et al. 2020, Mastering complex control in MOBA games. GRPO: Shao et al.
2024, DeepSeekMath, eq. 3 (loss), eq. 4 (KL: k3), section 4.1.2 (advantages). Dr. GRPO: Liu et al. 2025, Understanding
R1-Zero-like training, section 3.2. DAPO: Yu et al. 2025, eq. 8. GSPO: Zheng et al. 2025, eq. 5 and 7. Truncated
importance weights (TIS): Yao et al. 2025, Your efficient RL framework secretly brings you off-policy RL training, and
Espeholt et al. 2018, IMPALA, section 4.1. Masked ones (MIS): Liu et al. 2025, When speed kills stability. CISPO:
MiniMax 2025, MiniMax-M1, eq. 4 and 5. SAPO: Gao et al. 2025, Soft adaptive policy optimization, eq. 5 and 6.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from kernels.lm_head.two_softmaxes import Kind
from mllm.algorithms.grpo.settings import GrpoConfig, LossType
from mllm.data.batch import Batch

STD_EPSILON = 1e-4  # TRL's: beside the standard deviation that rewards are divided by
CURRENT = 1.0  # in place of the old policy's log-probabilities, which are not positive: the policy is the current one
MAX_LOG_RATIO = 20.0  # as verl's: exp(20) = 5e8, nothing is learnt beyond, and exp(89) is infinite in float32


SAPO_TEMPERATURES = 1.0, 1.05  # of the gate for advantages above 0, and for others: the paper's


def sft(logprob: Float[jax.Array, "*S"], entropy: Float[jax.Array, "*S"]) -> Float[jax.Array, "*S"]:
    """Cross-entropy in nats."""
    return -logprob


class TokenInputs(NamedTuple):
    """What an objective is given for each token beside its log-probability and entropy: float32 [*S], in nats.

    An array that the settings don't need is None.
    """

    advantages: Float[Any, "*S"]
    old_logprobs: Float[Any, "*S"] | None = None
    """Under the policy before the rollout's first update; None: that is the current policy."""
    sampler_logprobs: Float[Any, "*S"] | None = None
    """For the importance weight of each token; None: there is no such weight."""
    importance_weights: Float[Any, "*S"] | None = None
    """The importance weight of the token's whole sequence; None: there is no such weight."""
    reference_logprobs: Float[Any, "*S"] | None = None
    """Under the reference policy; None: there is no KL penalty."""


def token_inputs(config: GrpoConfig, batch: Batch, logprob: Float[jax.Array, "B T"] | None = None) -> TokenInputs:
    """The arrays of a batch that the settings need.

    With one update to a rollout, the old policy is the current one, whose log-probabilities `logprob` is then needed,
    as a constant, where `config.weighs_sequences`.
    """
    by_sequence = config.weighs_sequences
    return TokenInputs(
        batch.advantages,
        batch.old_logprobs if config.updates_per_rollout > 1 else None,
        None if config.importance_cap is None or by_sequence else batch.sampler_logprobs,
        sequence_importance_weights(config, batch, logprob) if by_sequence else None,
        batch.reference_logprobs if config.beta > 0 else None,
    )


def grpo(
    config: GrpoConfig, logprob: Float[jax.Array, "*S"], entropy: Float[jax.Array, "*S"], inputs: TokenInputs
) -> Float[jax.Array, "*S"]:
    """Each token's loss with the ratio of its own probabilities: all loss types but `gspo`.

    `grpo`, `dapo`, `prompt_mean` and `dr_grpo` differ in their means, which `sequence_weights` has.
    """
    return policy_loss(config, logprob - old_logprobs(inputs, logprob), logprob, entropy, inputs)


def gspo(
    config: GrpoConfig,
    logprob: Float[jax.Array, "B T"],
    entropy: Float[jax.Array, "B T"],
    inputs: TokenInputs,
    mask: Bool[jax.Array, "B T"],
    segments: Int[jax.Array, "B T"],
) -> Float[jax.Array, "B T"]:
    """Each token's loss with the ratio of its sequence: exp(mean_t(logprob - old)) over the tokens in `mask`.

    The gradient flows through the ratio to all tokens of the sequence. Importance weight, KL and entropy stay per
    token, as with TRL's `importance_sampling_level="sequence"`.
    """
    log_ratio, _ = sequence_means(logprob - old_logprobs(inputs, logprob), mask, segments)
    return policy_loss(config, log_ratio, logprob, entropy, inputs)


def policy_loss(
    config: GrpoConfig,
    log_ratio: Float[jax.Array, "*R"],
    logprob: Float[jax.Array, "*S"],
    entropy: Float[jax.Array, "*S"],
    inputs: TokenInputs,
) -> Float[jax.Array, "*S"]:
    """The surrogate with an importance weight, KL penalty and entropy bonus; `log_ratio` says which ratio.

    As in TRL, the importance weight multiplies the surrogate, not the penalty and the bonus. It is constant: neither
    of its policies is the current one.
    """
    gain = surrogate(config, bounded_exp(log_ratio), logprob, inputs.advantages)
    if inputs.importance_weights is not None:
        gain *= inputs.importance_weights
    elif inputs.sampler_logprobs is not None:
        gain *= importance_weight(config, old_logprobs(inputs, logprob) - inputs.sampler_logprobs)
    loss = -gain
    if inputs.reference_logprobs is not None:
        loss += config.beta * k3(logprob, inputs.reference_logprobs)
    if config.entropy_coef:
        loss -= config.entropy_coef * entropy
    return loss


def surrogate(
    config: GrpoConfig, ratio: Float[jax.Array, "*R"], logprob: Float[jax.Array, "*S"], advantage: Float[Any, "*S"]
) -> Float[jax.Array, "*S"]:
    """What is maximised: PPO's clipped ratio times the advantage, or what CISPO and SAPO have in its place.

    CISPO: the log-probability times the capped ratio, a constant, so that no token loses its gradient. SAPO: a sigmoid
    of the ratio around 1, with the slope of the ratio itself there.
    """
    if config.loss_type == "cispo":
        return jax.lax.stop_gradient(jnp.minimum(ratio, config.clip_range[1])) * advantage * logprob
    if config.loss_type == "sapo":
        temperature = jnp.where(advantage > 0, *SAPO_TEMPERATURES)
        return 4 / temperature * jax.nn.sigmoid(temperature * (ratio - 1)) * advantage
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, *config.clip_range) * advantage)
    if config.dual_clip is None:
        return gain
    return jnp.where(advantage < 0, jnp.maximum(gain, config.dual_clip * advantage), gain)


def importance_weight(config: GrpoConfig, log_ratio: Float[jax.Array, "*S"]) -> Float[jax.Array, "*S"]:
    """The weight that the trainer's probability over the sampler's gives a token, or a sequence."""
    assert config.importance_cap is not None
    ratio = bounded_exp(log_ratio)
    above = 0.0 if config.importance_sampling.endswith("mask") else config.importance_cap
    return jnp.where(ratio <= config.importance_cap, ratio, above)


def summed_divergence(
    p: Float[jax.Array, "*S K"], q: Float[jax.Array, "*S K"], kind: Kind, beta: float
) -> Float[jax.Array, "*S"]:
    """The divergence from the student's and the teacher's log-probabilities of all there is."""

    def terms(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.exp(a) * (a - b) - jnp.exp(a) + jnp.exp(b)

    if kind == "jsd":
        m = jnp.logaddexp(jnp.log(beta) + q, jnp.log1p(-beta) + p)
        return (beta * terms(q, m) + (1 - beta) * terms(p, m)).sum(-1)
    return (terms(q, p) if kind == "forward_kl" else terms(p, q)).sum(-1)


def old_logprobs(inputs: TokenInputs, logprob: Float[jax.Array, "*S"]) -> Float[jax.Array, "*S"]:
    """Log-probabilities under the old policy; the current policy's, as constants, where there are none."""
    current = jax.lax.stop_gradient(logprob)
    return current if (old := inputs.old_logprobs) is None else jnp.where(old == CURRENT, current, old)


def k3(logprob: Float[jax.Array, "*S"], reference: Float[jax.Array, "*S"]) -> Float[jax.Array, "*S"]:
    """k3 (DeepSeekMath, eq. 4) of each token, which is never negative.

    Over samples of the policy its mean is KL(policy || reference), but its derivative's mean is the derivative of
    KL(reference || policy), the forward divergence: a penalty of k3 minimises that one.
    """
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
    config: GrpoConfig, batch: Batch, logprob: Float[jax.Array, "B T"] | None
) -> Float[jax.Array, "B T"]:
    """At each token the importance weight of its completion, by the old policy, or `logprob` where that is current.

    As in TRL's modes: of the product over the tokens that count, not their geometric mean.
    """
    old = logprob if batch.old_logprobs is None else batch.old_logprobs
    assert old is not None
    assert batch.sampler_logprobs is not None
    mean, tokens = sequence_means(old - batch.sampler_logprobs, batch.weights > 0, batch.segments)
    return importance_weight(config, mean * tokens)


def sequence_weights(
    loss_type: LossType, tokens: Int[np.ndarray, "B"], group_size: int, max_completion_length: int
) -> Float[np.ndarray, "B"]:
    """Each token's share of the loss, by its sequence, float32: one over the whole batch's denominator.

    `tokens` are the numbers of completion tokens that count, in all sequences of one update, 0 for a sequence that
    doesn't count; each `group_size` sequences in turn are a group.

    - `grpo`, `gspo`, `sapo`: the mean over each completion's tokens, then over completions (DeepSeekMath, eq. 3), as in
      TRL.
    - `dapo`, `cispo`: the mean over all tokens of the batch, as in TRL and verl.
    - `prompt_mean`: the mean over all tokens of a group, then over groups: DAPO's eq. 8 as it is written.
    - `dr_grpo`: the sum over tokens divided by the constant `max_completion_length`, then the mean over
      completions (Dr. GRPO), as in TRL.

    A completion or group without any token that counts (cut off and masked, failed reward) adds nothing, but the
    outer mean is still over it, as in TRL: what is left weighs the same without it, except under `dapo` and `cispo`.

    Raises ValueError where the sequences are not divisible into groups.
    """
    if tokens.size % group_size:
        raise ValueError(f"tokens: {tokens.size} sequences are not divisible into groups of {group_size}")
    match loss_type:
        case "grpo" | "gspo" | "sapo":
            denominator = tokens.size * tokens
        case "dapo" | "cispo":
            denominator = tokens.sum()
        case "prompt_mean":
            groups = tokens.size // group_size
            denominator = groups * np.repeat(tokens.reshape(groups, group_size).sum(-1), group_size)
        case "dr_grpo":
            denominator = np.asarray(tokens.size * max_completion_length)
    return np.where(tokens > 0, 1.0 / np.maximum(denominator, 1), 0.0).astype(np.float32)


def equal_rewards(rewards: Float[np.ndarray, "G n"]) -> Bool[np.ndarray, "G"]:
    """Which groups have no two different rewards, NaN aside, so that no advantage can be learned from."""
    highest = np.where(np.isnan(rewards), -np.inf, rewards).max(-1)
    lowest = np.where(np.isnan(rewards), np.inf, rewards).min(-1)
    return highest <= lowest  # also in a group without any reward: -inf <= inf


def group_deviations(rewards: Float[np.ndarray, "G n"]) -> tuple[Float[np.ndarray, "G n"], Float[np.ndarray, "G 1"]]:
    """Each reward's distance to the mean of its group, and the group's standard deviation (of the sample, n - 1).

    Rewards that failed are NaN: they enter neither, and have distance 0. Both are exactly 0 in a group of equal
    rewards, whose mean may be off by a rounding.
    """
    present, equal = ~np.isnan(rewards), equal_rewards(rewards)[:, None]
    count = np.maximum(present.sum(-1, keepdims=True), 1)
    mean = np.where(present, rewards, 0.0).sum(-1, keepdims=True) / count
    deviation = np.where(present & ~equal, rewards - mean, 0.0)
    return deviation, sample_std(np.sum(deviation**2, -1, keepdims=True), count)


def advantages(rewards: Float[np.ndarray, "G n"], scale: Literal["group", "batch", "none"]) -> Float[np.ndarray, "G n"]:
    """How much better each completion is than the mean of its group, for G prompts with n completions each.

    `scale` divides it by the standard deviation (of the sample, n - 1, plus 1e-4, as TRL) of the `group` (DeepSeekMath,
    section 4.1.2) or of the whole `batch`, or by nothing (`none`, Dr. GRPO). A reward that failed is NaN and gets 0; so
    does, exactly, a group of equal rewards.
    """
    deviation, std = group_deviations(rewards)
    match scale:
        case "group":
            return deviation / (std + STD_EPSILON)
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


def policy_metrics(
    config: GrpoConfig, logprob: Float[jax.Array, "B T"], entropy: Float[jax.Array, "B T"], batch: Batch
) -> dict[str, Float[jax.Array, ""]]:
    """Means over the tokens of a whole batch that have a weight, under TRL's names; 0 if there are none.

    `clip_ratio/low_mean` is the share of tokens (under GSPO, of sequences) that the lower clip keeps from becoming
    less likely still, `high_mean` the upper clip's share, `dual_mean` that of the dual clip; under CISPO
    `cispo_clip_ratio` the share of tokens whose ratio is capped. `masked_sequences` is the share of sequences whose
    importance weight is 0. The other `sampling` metrics compare the policy
    before the rollout's first update with the sampler, and don't truncate the ratio.
    """
    inputs, mask = token_inputs(config, batch, logprob), batch.weights > 0
    log_ratio, share = logprob - old_logprobs(inputs, logprob), mask.astype(jnp.float32)
    advantage = inputs.advantages
    mean, tokens = sequence_means(log_ratio, mask, batch.segments)
    by_sequence = share / jnp.maximum(tokens, 1)  # a sequence's tokens together count as one
    if config.loss_type == "gspo":
        log_ratio, share = mean, by_sequence
    low, high = config.clip_range
    ratio, share = bounded_exp(log_ratio), share / jnp.maximum(share.sum(), 1)
    below = share.sum(where=(ratio < low) & (advantage < 0))
    above = share.sum(where=(ratio > high) & (advantage > 0))
    metrics = {"entropy": masked_mean(entropy, mask)}
    if config.loss_type == "cispo":
        metrics["cispo_clip_ratio"] = above
    elif config.loss_type != "sapo":
        names = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
        metrics |= zip(names, (below, above, below + above), strict=True)
    if config.dual_clip is not None:
        metrics["clip_ratio/dual_mean"] = share.sum(where=(ratio > config.dual_clip) & (advantage < 0))
    if config.weighs_sequences and config.importance_sampling == "sequence_mask":
        masked = by_sequence.sum(where=inputs.importance_weights == 0)
        metrics["sampling/masked_sequences"] = masked / jnp.maximum(by_sequence.sum(), 1)
    if inputs.reference_logprobs is not None:
        metrics["kl"] = masked_mean(k3(logprob, inputs.reference_logprobs), mask)
    assert batch.sampler_logprobs is not None
    trainer = old_logprobs(inputs, logprob)
    difference = jnp.where(mask, jnp.abs(trainer - batch.sampler_logprobs), 0.0)
    return metrics | {
        "sampling/sampling_logp_difference/mean": masked_mean(difference, mask),
        "sampling/sampling_logp_difference/max": difference.max(),
        "sampling/importance_sampling_ratio/mean": masked_mean(bounded_exp(trainer - batch.sampler_logprobs), mask),
    }
