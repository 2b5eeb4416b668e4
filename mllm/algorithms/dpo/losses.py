"""The losses of DPO and its kin on sums of log-probabilities, and their metrics: pure functions.

With r the log-ratio of policy and reference of a completion, m its mean over the tokens, p the mean log-probability, w
and l the chosen and the rejected completion, s the sigmoid, e `label_smoothing` and g `gamma`, the losses are:

    sigmoid  -(1 - e) log s(beta (r_w - r_l)) - e log s(-beta (r_w - r_l))
             Rafailov et al. 2023, Direct preference optimization, eq. 7; e: Mitchell 2023, cDPO, eq. 3
    ipo      (m_w - m_l - 1 / (2 beta))^2
             Azar et al. 2023, A general theoretical paradigm, eq. 17; over tokens as in TRL, by word of its authors
    simpo    -log s(beta (p_w - p_l) - g)
             Meng et al. 2024, SimPO, eq. 6
    orpo     -p_w - beta log s(odds(p_w) - odds(p_l)), odds(p) = p - log(1 - exp(p))
             Hong et al. 2024, ORPO, eq. 6 and 7

The loss of an update is the mean over its pairs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mllm.algorithms.dpo.settings import DpoConfig
from mllm.data.batch import Batch

LARGEST_LOGPROB = -(2.0**-24)  # float32's next number below 1 has this logarithm; the odds of 1 are infinite
ROUNDING = 2.0**-20  # eight roundings of float32: how far a sum of log-probabilities may be off, over its size


class Completions(NamedTuple):
    """Log-probabilities of completions under the policy and the reference, sums or means over tokens, in nats."""

    logprob: Float[Array, "B S"]
    reference: Float[Array, "B S"]

    @property
    def log_ratio(self) -> Float[Array, "B S"]:
        return self.logprob - self.reference


def pairs_of(
    logprob: Float[Array, "B T"], batch: Batch, per_token: bool
) -> tuple[Completions, Completions, Bool[Array, "B P"]]:
    """The chosen and the rejected completions of each row's pairs, and which of the pairs exist."""
    counts, reference = batch.weights > 0, batch.inputs.reference_logprobs
    # A sequence has two tokens or more, and the first is not learned; the number of sequences is even.
    most_sequences = 2 * -(-logprob.shape[1] // 4)

    def sums(values: Float[Array, "T"], segments: Array) -> Float[Array, "S"]:
        return jax.ops.segment_sum(values, segments, most_sequences + 1)[1:]

    total, reference_total, tokens = (
        jax.vmap(sums)(values, batch.segments)
        for values in (
            jnp.where(counts, logprob, 0.0),
            jnp.zeros_like(logprob) if reference is None else reference,
            counts.astype(jnp.float32),
        )
    )
    length = jnp.maximum(tokens, 1) if per_token else 1.0
    completions = Completions(total / length, reference_total / length)
    chosen, rejected = (Completions(*(array[:, start::2] for array in completions)) for start in (0, 1))
    return chosen, rejected, tokens[:, ::2] > 0


def pair_loss(config: DpoConfig, chosen: Completions, rejected: Completions) -> Float[Array, "B P"]:
    """The loss of each pair."""
    margin = chosen.log_ratio - rejected.log_ratio
    scaled, smoothing = config.beta * margin, config.label_smoothing
    match config.loss_type:
        case "ipo":
            return (margin - 1 / (2 * config.beta)) ** 2
        case "simpo":
            return -jax.nn.log_sigmoid(scaled - config.gamma)
        case "orpo":
            return -chosen.logprob - config.beta * jax.nn.log_sigmoid(log_odds_ratio(chosen, rejected))
        case _:
            return -(1 - smoothing) * jax.nn.log_sigmoid(scaled) - smoothing * jax.nn.log_sigmoid(-scaled)


def log_odds_ratio(chosen: Completions, rejected: Completions) -> Float[Array, "B P"]:
    """The difference of the log-odds of two completions' mean probabilities of a token."""

    def log_odds(logprob: Float[Array, "B P"]) -> Float[Array, "B P"]:
        logprob = jnp.minimum(logprob, LARGEST_LOGPROB)
        return logprob - jnp.log(-jnp.expm1(logprob))

    return log_odds(chosen.logprob) - log_odds(rejected.logprob)


def preference_loss(config: DpoConfig, logprob: Float[Array, "B T"], batch: Batch) -> Float[Array, ""]:
    """The batch's share of the mean over all examples of the update."""
    chosen, rejected, present = pairs_of(logprob, batch, config.per_token)
    return batch.inputs.share[0] * jnp.sum(jnp.where(present, pair_loss(config, chosen, rejected), 0.0))


def preference_metrics(config: DpoConfig, logprob: Float[Array, "B T"], batch: Batch) -> dict[str, Float[Array, ""]]:
    """The means of metrics over a whole batch's pairs, under TRL's names.

    `rewards` are beta times the log-ratio, and without a reference beta times the mean log-probability; as in TRL,
    ipo's rewards are sums over the tokens. In `rewards/accuracies` a pair counts half if its two rewards differ by
    rounding alone, as all pairs' do while the policy is the reference.
    """
    chosen, rejected, present = pairs_of(logprob, batch, not config.needs_reference)

    def mean(values: Float[Array, "B P"]) -> Float[Array, ""]:
        return batch.inputs.share[0] * jnp.sum(jnp.where(present, values, 0.0))

    margin = chosen.log_ratio - rejected.log_ratio
    rounding = ROUNDING * sum(abs(part) for completion in (chosen, rejected) for part in completion)
    metrics = {
        "rewards/margins": mean(config.beta * margin),
        "rewards/accuracies": mean(jnp.where(abs(margin) <= rounding, 0.5, (margin > 0).astype(jnp.float32))),
    }
    for name, part in {"chosen": chosen, "rejected": rejected}.items():
        metrics |= {f"rewards/{name}": mean(config.beta * part.log_ratio), f"logps/{name}": mean(part.logprob)}
    if config.loss_type == "orpo":
        odds = log_odds_ratio(chosen, rejected)
        metrics |= {"nll_loss": mean(-chosen.logprob), "log_odds_chosen": mean(odds)}
        metrics["log_odds_ratio"] = mean(jax.nn.log_sigmoid(odds))
    return metrics
