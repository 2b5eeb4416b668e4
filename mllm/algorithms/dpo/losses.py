"""The losses of DPO and its kin on sums of log-probabilities, and their metrics: pure functions.

With r the log-ratio of policy and reference of a completion, m its mean over the tokens, p the mean log-probability, w
and l the chosen and the rejected completion, s the sigmoid, e `label_smoothing` and g `gamma`, the losses are:

    sigmoid  -(1 - e) log s(beta (r_w - r_l)) - e log s(-beta (r_w - r_l))
             Rafailov et al. 2023, Direct preference optimization, eq. 7; e: Mitchell 2023, cDPO, eq. 3
    ipo      (m_w - m_l - 1 / (2 beta))^2
             Azar et al. 2023, A general theoretical paradigm, eq. 17; over tokens as in TRL, by word of its authors
    hinge    max(0, 1 - beta (r_w - r_l))
             Zhao et al. 2023, SLiC-HF, as in Liu et al. 2023, Statistical rejection sampling, table 1
    simpo    -log s(beta (p_w - p_l) - g)
             Meng et al. 2024, SimPO, eq. 6
    orpo     -p_w - beta log s(odds(p_w) - odds(p_l)), odds(p) = p - log(1 - exp(p))
             Hong et al. 2024, ORPO, eq. 6 and 7
    kto      weight_w s(beta (z0 - r_w)) or weight_l s(beta (r_l - z0))
             Ethayarajh et al. 2024, KTO, eq. 8; z0 is a constant, `PreferenceSource.estimate_kl`

The loss of an update is the mean over its pairs, or over its labelled completions.
"""

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mllm.algorithms.dpo.settings import DpoConfig
from mllm.data.batch import Batch

LARGEST_LOGPROB = -(2.0**-24)  # float32's next number below 1 has this logarithm; the odds of 1 are infinite
Sums: TypeAlias = dict[str, tuple[Float[Any, ""], Float[Any, ""]]]
"""The sum of a metric over the examples that have it, and their number."""


class Completions(NamedTuple):
    """Log-probabilities of completions under the policy and the reference, sums or means over tokens, in nats."""

    logprob: Float[Array, "B S"]
    reference: Float[Array, "B S"]

    @property
    def log_ratio(self) -> Float[Array, "B S"]:
        return self.logprob - self.reference


def completions_of(
    logprob: Float[Array, "B T"], batch: Batch, per_token: bool
) -> tuple[Completions, Float[Array, "B S"], Bool[Array, "B S"]]:
    """The segments 1 to S of each row, with their labels (1, -1, or 0 without any), and which of them exist."""
    counts = batch.weights > 0
    nothing = jnp.zeros_like(logprob)
    reference, labels = (nothing if x is None else x for x in (batch.inputs.reference_logprobs, batch.inputs.labels))
    # A sequence has two tokens or more, and the first is not learned; of pairs the number is even.
    most_sequences = 2 * -(-logprob.shape[1] // 4)

    def sums(values: Float[Array, "T"], segments: Array) -> Float[Array, "S"]:
        return jax.ops.segment_sum(values, segments, most_sequences + 1)[1:]

    total, reference_total, label, tokens = (
        jax.vmap(sums)(values, batch.segments)
        for values in (jnp.where(counts, logprob, 0.0), reference, labels, counts.astype(jnp.float32))
    )
    length = jnp.maximum(tokens, 1) if per_token else 1.0
    return Completions(total / length, reference_total / length), label, tokens > 0


def pairs_of(completions: Completions) -> tuple[Completions, Completions]:
    """The chosen and the rejected completions of rows of pairs."""
    chosen, rejected = (Completions(*(array[:, start::2] for array in completions)) for start in (0, 1))
    return chosen, rejected


def pair_loss(config: DpoConfig, chosen: Completions, rejected: Completions) -> Float[Array, "B P"]:
    """The loss of each pair."""
    margin = chosen.log_ratio - rejected.log_ratio
    scaled, smoothing = config.beta * margin, config.label_smoothing
    match config.loss_type:
        case "ipo":
            return (margin - 1 / (2 * config.beta)) ** 2
        case "hinge":
            return jax.nn.relu(1 - scaled)
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


def labelled_loss(
    config: DpoConfig, log_ratio: Float[Array, "B S"], kl: Float[Array, ""], labels: Float[Array, "B S"]
) -> Float[Array, "B S"]:
    """KTO's loss of each completion, whose label is 1 or -1; `kl` is z0."""
    weights = jnp.where(labels > 0, config.desirable_weight, config.undesirable_weight)
    return weights * jax.nn.sigmoid(labels * config.beta * (kl - log_ratio))


def preference_loss(config: DpoConfig, logprob: Float[Array, "B T"], batch: Batch) -> Float[Array, ""]:
    """The batch's share of the mean over all examples of the update."""
    completions, labels, present = completions_of(logprob, batch, config.per_token)
    if config.form == "labelled":
        losses = labelled_loss(config, completions.log_ratio, batch.inputs.kl[0], labels)
    else:
        losses, present = pair_loss(config, *pairs_of(completions)), present[:, ::2]
    return batch.inputs.share[0] * jnp.sum(jnp.where(present, losses, 0.0))


def preference_sums(config: DpoConfig, logprob: Float[Array, "B T"], batch: Batch) -> Sums:
    """The metrics of a batch under TRL's names, to be added up over batches and divided by `means`.

    `rewards` are beta times the log-ratio, and without a reference beta times the mean log-probability; as in TRL,
    ipo's rewards are sums over the tokens.
    """
    completions, labels, present = completions_of(logprob, batch, not config.needs_reference)

    def total(values: Float[Array, "B P"], where: Bool[Array, "B P"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        return jnp.sum(jnp.where(where, values, 0.0)), where.sum(dtype=jnp.float32)

    if config.form == "labelled":
        parts = {"chosen": (completions, present & (labels > 0)), "rejected": (completions, present & (labels < 0))}
    else:
        chosen, rejected = pairs_of(completions)
        parts = {"chosen": (chosen, present[:, ::2]), "rejected": (rejected, present[:, ::2])}
    sums = {f"rewards/{name}": total(config.beta * part.log_ratio, where) for name, (part, where) in parts.items()}
    sums |= {f"logps/{name}": total(part.logprob, where) for name, (part, where) in parts.items()}
    if config.form == "pairs":
        margin = config.beta * (chosen.log_ratio - rejected.log_ratio)
        sums["rewards/accuracies"] = total((margin > 0).astype(jnp.float32), present[:, ::2])
    if config.loss_type == "orpo":
        odds = log_odds_ratio(chosen, rejected)
        sums["nll_loss"] = total(-chosen.logprob, present[:, ::2])
        sums["log_odds_chosen"] = total(odds, present[:, ::2])
        sums["log_odds_ratio"] = total(jax.nn.log_sigmoid(odds), present[:, ::2])
    return sums


def means(sums: Sums) -> dict[str, Float[Array, ""]]:
    """The means of sums; NaN where no example has the metric."""
    averages = {
        name: jnp.where(count > 0, value / jnp.maximum(count, 1), jnp.nan) for name, (value, count) in sums.items()
    }
    return {**averages, "rewards/margins": averages["rewards/chosen"] - averages["rewards/rejected"]}
