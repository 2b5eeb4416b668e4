"""The objectives of GRPO and its kin: pure functions of log-probabilities, advantages and masks.

The loss of a step is the sum of `weights * objective` over all tokens. The weights contain the whole batch's
denominator, so loss and gradient do not depend on the split into micro-batches. A sequence is one prompt and its
completion; a packed row holds several sequences, each a segment.

PPO: Schulman et al. 2017, eq. 7. Dual clip: Ye et al. 2020, Mastering complex control in MOBA games. GRPO: Shao et al.
2024, DeepSeekMath, eq. 3 (loss), eq. 4 (KL: k3). Dr. GRPO: Liu et al. 2025, Understanding R1-Zero-like training,
section 3.2. DAPO: Yu et al. 2025. GSPO: Zheng et al. 2025, eq. 5 and 7. Truncated importance weights (TIS): Yao et al.
2025, Your efficient RL framework secretly brings you off-policy RL training, and Espeholt et al. 2018, IMPALA, section
4.1. Masked importance weights (MIS): Liu et al. 2025, When speed kills stability. CISPO: MiniMax 2025, MiniMax-M1,
eq. 4 and 5. SAPO: Gao et al. 2025, Soft adaptive policy optimization, eq. 5 and 6.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from mllm.algorithms.grpo.inputs import PolicyInputs
from mllm.algorithms.grpo.settings import GrpoConfig, LossType
from mllm.data.batch import Batch
from mllm.training.means import masked_mean, sequence_means

MAX_LOG_RATIO = 20.0  # verl's; exp(20) = 5e8, and exp(89) is infinite in float32
SAPO_TEMPERATURES = 1.0, 1.05  # of the gate for advantages above 0, and at most 0: the paper's
Array: TypeAlias = Float[Any, "*S"]


def clipped(config: GrpoConfig, ratio: Array, logprob: Array, advantage: Array) -> Array:
    """PPO's clipped ratio times the advantage; `dual_clip` limits the ratio for negative advantages."""
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, *config.clip_range) * advantage)
    if config.dual_clip is None:
        return gain
    return jnp.where(advantage < 0, jnp.maximum(gain, config.dual_clip * advantage), gain)


def capped(config: GrpoConfig, ratio: Array, logprob: Array, advantage: Array) -> Array:
    """CISPO: the log-probability times the capped ratio as a constant, so that every token keeps its gradient."""
    return jax.lax.stop_gradient(jnp.minimum(ratio, config.clip_range[1])) * advantage * logprob


def gated(config: GrpoConfig, ratio: Array, logprob: Array, advantage: Array) -> Array:
    """SAPO: a sigmoid of the ratio, centred at 1 with slope 1."""
    temperature = jnp.where(advantage > 0, *SAPO_TEMPERATURES)
    return 4 / temperature * jax.nn.sigmoid(temperature * (ratio - 1)) * advantage


def completion_lengths(tokens: Int[np.ndarray, "B"], longest: int) -> Int[np.ndarray, "B"]:
    """Denominators for the mean over each completion's tokens, then over completions (DeepSeekMath, eq. 3; TRL)."""
    return tokens.size * tokens


def of_tokens(tokens: Int[np.ndarray, "B"], longest: int) -> Int[Any, ""]:
    """The denominator for the mean over all tokens of the batch, as in TRL and verl."""
    return tokens.sum()


def of_constant(tokens: Int[np.ndarray, "B"], longest: int) -> Int[Any, ""]:
    """The denominator for the token sum over a constant, then the mean over completions (Dr. GRPO), as in TRL."""
    return np.asarray(tokens.size * longest)


def clip_ratios(below: Array, above: Array) -> dict[str, Array]:
    """The shares of tokens (or sequences) that the lower and the upper clip stop, and their sum."""
    return {"clip_ratio/low_mean": below, "clip_ratio/high_mean": above, "clip_ratio/region_mean": below + above}


class PolicyLoss(NamedTuple):
    """A loss type: the surrogate that is maximised, the denominator of its mean, and the clip's metrics."""

    surrogate: Callable[[GrpoConfig, Array, Array, Array], Array]
    """(settings, ratio, log-probability, advantage) -> the gain of each token."""
    denominator: Callable[[Int[np.ndarray, "B"], int], Any]
    """(counted tokens of each sequence, the largest possible number) -> the divisor of a token's loss."""
    clip_metrics: Callable[[Array, Array], dict[str, Array]] = clip_ratios
    """(share below the clip range, share above it) -> metrics."""


LOSSES: dict[LossType, PolicyLoss] = {
    "grpo": PolicyLoss(clipped, completion_lengths),
    "dapo": PolicyLoss(clipped, of_tokens),
    "dr_grpo": PolicyLoss(clipped, of_constant),
    "gspo": PolicyLoss(clipped, completion_lengths),
    "cispo": PolicyLoss(capped, of_tokens, lambda below, above: {"cispo_clip_ratio": above}),
    "sapo": PolicyLoss(gated, completion_lengths, lambda below, above: {}),
}


def kind_of(config: GrpoConfig) -> PolicyLoss:
    """The `PolicyLoss` of `config.loss_type`."""
    return LOSSES[config.loss_type]


def token_inputs(config: GrpoConfig, batch: Batch, logprob: Float[jax.Array, "B T"] | None = None) -> PolicyInputs:
    """The arrays of a batch that the settings need; the other arrays are None.

    With one update per rollout the old policy is the current policy. If `config.weighs_sequences`, its
    log-probabilities `logprob` are then needed, as constants.
    """
    inputs, by_sequence = batch.inputs, config.weighs_sequences
    return inputs._replace(
        old_logprobs=inputs.old_logprobs if config.updates_per_rollout > 1 else None,
        reference_logprobs=inputs.reference_logprobs if config.beta > 0 else None,
        sampler_logprobs=None if config.importance_cap is None or by_sequence else inputs.sampler_logprobs,
        sequence_weights=sequence_importance_weights(config, batch, logprob) if by_sequence else None,
    )


def policy_loss(config: GrpoConfig, logprob: Array, entropy: Array, inputs: PolicyInputs) -> Array:
    """Each token's loss with the ratio of its own probabilities."""
    return loss_of_ratio(config, logprob - old_logprobs(inputs, logprob), logprob, entropy, inputs)


def sequence_policy_loss(
    config: GrpoConfig,
    logprob: Float[jax.Array, "B T"],
    entropy: Float[jax.Array, "B T"],
    inputs: PolicyInputs,
    mask: Bool[jax.Array, "B T"],
    segments: Int[jax.Array, "B T"],
) -> Float[jax.Array, "B T"]:
    """Each token's loss with the ratio of its sequence: exp(mean_t(logprob - old)) over the tokens in `mask`: GSPO.

    The gradient flows through the ratio to all tokens of the sequence. Importance weight, KL and entropy stay per
    token, as with TRL's `importance_sampling_level="sequence"`.
    """
    log_ratio, _ = sequence_means(logprob - old_logprobs(inputs, logprob), mask, segments)
    return loss_of_ratio(config, log_ratio, logprob, entropy, inputs)


def loss_of_ratio(
    config: GrpoConfig, log_ratio: Float[Any, "*R"], logprob: Array, entropy: Array, inputs: PolicyInputs
) -> Array:
    """The loss of each token: minus the surrogate, with importance weight, KL penalty and entropy bonus.

    `log_ratio` is the logarithm of the token's or the sequence's ratio. As in TRL, the importance weight multiplies the
    surrogate only, and is a constant: it does not depend on the current policy.
    """
    gain = kind_of(config).surrogate(config, bounded_exp(log_ratio), logprob, inputs.advantages)
    if inputs.sequence_weights is not None:
        gain *= inputs.sequence_weights
    elif inputs.sampler_logprobs is not None:
        gain *= importance_weight(config, old_logprobs(inputs, logprob) - inputs.sampler_logprobs)
    loss = -gain
    if inputs.reference_logprobs is not None:
        loss += config.beta * k3(logprob, inputs.reference_logprobs)
    if config.entropy_coef:
        loss -= config.entropy_coef * entropy
    return loss


def importance_weight(config: GrpoConfig, log_ratio: Array) -> Array:
    """The importance weight of a token or sequence; `log_ratio` is log p_trainer - log p_sampler."""
    ratio, cap = bounded_exp(log_ratio), math.inf if config.importance_cap is None else config.importance_cap
    return jnp.where(ratio <= cap, ratio, 0.0 if config.importance_sampling.endswith("mask") else cap)


def old_logprobs(inputs: PolicyInputs, logprob: Array) -> Array:
    """Log-probabilities under the old policy; if it is the current policy, `logprob` as a constant."""
    current = jax.lax.stop_gradient(logprob)
    if inputs.old_logprobs is None:
        return current
    return (
        inputs.old_logprobs if inputs.is_current is None else jnp.where(inputs.is_current, current, inputs.old_logprobs)
    )


def k3(logprob: Float[jax.Array, "*S"], reference: Float[jax.Array, "*S"]) -> Float[jax.Array, "*S"]:
    """The k3 estimator (DeepSeekMath, eq. 4) of each token's KL divergence; never negative.

    Over samples of the policy its mean is KL(policy || reference). The mean of its derivative is the derivative of
    KL(reference || policy), so a k3 penalty minimises the forward divergence.
    """
    difference = jnp.minimum(reference - logprob, MAX_LOG_RATIO)
    return jnp.exp(difference) - difference - 1


def bounded_exp(log_ratio: Float[jax.Array, "*S"]) -> Float[jax.Array, "*S"]:
    """exp with a finite upper bound: infinity times an advantage or a clip gradient of 0 would be NaN."""
    return jnp.exp(jnp.minimum(log_ratio, MAX_LOG_RATIO))


def sequence_importance_weights(
    config: GrpoConfig, batch: Batch, logprob: Float[jax.Array, "B T"] | None
) -> Float[jax.Array, "B T"]:
    """At each token the importance weight of its completion; `logprob` is used if the old policy is the current policy.

    As in TRL, the completion's ratio is the product over its counted tokens, not their geometric mean.
    """
    old = logprob if batch.inputs.old_logprobs is None else batch.inputs.old_logprobs
    mean, tokens = sequence_means(old - batch.inputs.sampler_logprobs, batch.weights > 0, batch.segments)
    return importance_weight(config, mean * tokens)


def sequence_weights(config: GrpoConfig, tokens: Int[np.ndarray, "B"], longest: int) -> Float[np.ndarray, "B"]:
    """The weight of each sequence's tokens in the loss, float32: one over the whole batch's denominator.

    `tokens` has the number of counted completion tokens of each sequence in one update, `longest` the largest possible
    number. A completion without counted tokens (masked, or with a failed reward) adds nothing to the loss. As in TRL,
    means over completions still count it; means over tokens (`dapo`, `cispo`) don't.
    """
    denominator = kind_of(config).denominator(tokens, longest)
    return np.where(tokens > 0, 1.0 / np.maximum(denominator, 1), 0.0).astype(np.float32)


def policy_metrics(
    config: GrpoConfig, logprob: Float[jax.Array, "B T"], entropy: Float[jax.Array, "B T"], batch: Batch
) -> dict[str, Float[jax.Array, ""]]:
    """Means over a batch's tokens with a weight, under TRL's names; 0 if no token has a weight.

    Clip shares count tokens, and sequences under GSPO. `dual_mean` is the share of tokens at the dual clip,
    `cispo_clip_ratio` the share with a capped ratio. `masked_sequences` is the share of sequences with importance
    weight 0. The other `sampling` metrics compare the old policy with the sampler, without the cap.
    """
    inputs, mask = token_inputs(config, batch, logprob), batch.weights > 0
    log_ratio, share = logprob - old_logprobs(inputs, logprob), mask.astype(jnp.float32)
    advantage = inputs.advantages
    mean, tokens = sequence_means(log_ratio, mask, batch.segments)
    by_sequence = share / jnp.maximum(tokens, 1)  # sums to 1 over a sequence's tokens
    if config.limits.by_sequence:
        log_ratio, share = mean, by_sequence
    low, high = config.clip_range
    ratio, share = bounded_exp(log_ratio), share / jnp.maximum(share.sum(), 1)
    below = share.sum(where=(ratio < low) & (advantage < 0))
    above = share.sum(where=(ratio > high) & (advantage > 0))
    metrics = {"entropy": masked_mean(entropy, mask)}
    metrics |= kind_of(config).clip_metrics(below, above)
    if config.dual_clip is not None:
        metrics["clip_ratio/dual_mean"] = share.sum(where=(ratio > config.dual_clip) & (advantage < 0))
    if config.weighs_sequences and config.importance_sampling == "sequence_mask":
        masked = by_sequence.sum(where=inputs.sequence_weights == 0)
        metrics["sampling/masked_sequences"] = masked / jnp.maximum(by_sequence.sum(), 1)
    if inputs.reference_logprobs is not None:
        metrics["kl"] = masked_mean(k3(logprob, inputs.reference_logprobs), mask)
    sampler = batch.inputs.sampler_logprobs
    trainer = old_logprobs(inputs, logprob)
    difference = jnp.where(mask, jnp.abs(trainer - sampler), 0.0)
    return metrics | {
        "sampling/sampling_logp_difference/mean": masked_mean(difference, mask),
        "sampling/sampling_logp_difference/max": difference.max(),
        "sampling/importance_sampling_ratio/mean": masked_mean(bounded_exp(trainer - sampler), mask),
    }
