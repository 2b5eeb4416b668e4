"""What an update learns, by algorithm: the loss of a micro-batch from its hidden states, and the step's metrics.

The losses themselves are pure functions, in objectives.py.
"""

from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kernels.lm_head import TokenLogprobs
from mllm.algorithms.distill.settings import DistillConfig
from mllm.algorithms.dpo.losses import Dpo
from mllm.algorithms.grpo import losses as objectives
from mllm.algorithms.grpo.settings import GrpoConfig
from mllm.config.schema import Config
from mllm.data.batch import Batch
from mllm.train.head import Head, States

Metrics = dict[str, Float[Array, ""]]


@runtime_checkable
class Algorithm(Protocol):
    def loss(
        self, head: Head, states: States, batch: Batch, teacher: States | None = None
    ) -> tuple[Float[Array, ""], Any]:
        """The batch's share of the step's loss, and arrays [B, T] without gradient, from which `metrics` are made."""

    def metrics(self, batch: Batch, outputs: Any) -> Metrics:
        """The metrics of a whole batch, over the tokens with a weight, under TRL's names; NaN where there are none."""


class Sft:
    def loss(
        self, head: Head, states: States, batch: Batch, teacher: States | None = None
    ) -> tuple[Float[Array, ""], TokenLogprobs]:
        return head.loss(states, batch, objectives.sft)

    def metrics(self, batch: Batch, outputs: TokenLogprobs) -> Metrics:
        return {"entropy": objectives.masked_mean(outputs.entropy, batch.weights > 0)}


class Grpo:
    """GRPO and its kin."""

    def __init__(self, config: GrpoConfig) -> None:
        self.config = config

    def loss(
        self, head: Head, states: States, batch: Batch, teacher: States | None = None
    ) -> tuple[Float[Array, ""], TokenLogprobs]:
        config = self.config
        if config.takes_sequences:
            # A sequence's ratio or weight needs the log-probabilities of all its tokens before any loss is known.
            outputs, counts = head.logprobs(states, batch), batch.weights > 0
            inputs = objectives.token_inputs(config, batch, jax.lax.stop_gradient(outputs.logprob))
            loss_of = objectives.grpo
            if config.loss_type == "gspo":
                loss_of = partial(objectives.gspo, mask=counts, segments=batch.segments)
            losses = loss_of(config, outputs.logprob, outputs.entropy, inputs)
            return jnp.sum(jnp.where(counts, batch.weights * losses, 0.0)), jax.lax.stop_gradient(outputs)
        operands, structure = jax.tree.flatten(objectives.token_inputs(config, batch))

        def objective(logprob: Array, entropy: Array, *operands: Array) -> Array:
            return objectives.grpo(config, logprob, entropy, jax.tree.unflatten(structure, operands))

        return head.loss(states, batch, objective, *operands)

    def metrics(self, batch: Batch, outputs: TokenLogprobs) -> Metrics:
        metrics = objectives.policy_metrics(self.config, outputs.logprob, outputs.entropy, batch)
        return {name: jnp.where((batch.weights > 0).any(), value, jnp.nan) for name, value in metrics.items()}


class Comparison(NamedTuple):
    """Student and teacher at each token, float32 [B, T]; all but the divergence only where they are measured."""

    divergence: Float[Array, "B T"]
    entropy: Float[Array, "B T"]
    teacher_entropy: Float[Array, "B T"]
    agreement: Float[Array, "B T"]
    """1 where the student's likeliest token is the teacher's, else 0."""


class Distill:
    """The divergence from a teacher's distributions."""

    def __init__(self, config: DistillConfig) -> None:
        self.config = config

    def loss(
        self, head: Head, states: States, batch: Batch, teacher: States | None = None
    ) -> tuple[Float[Array, ""], Comparison]:
        assert teacher is not None
        loss, divergence = head.divergence(states, teacher, batch, self.config.kind, self.config.mixture)
        states, some = jax.lax.stop_gradient(states), self.measured(batch)
        measured = batch._replace(weights=jnp.float32(some), labels=head.top_k(states, 1, some)[1][..., 0])
        mine, yours = head.logprobs(states, measured), head.logprobs(teacher, measured)
        return loss, Comparison(divergence, mine.entropy, yours.entropy, 1.0 * yours.likeliest)

    def measured(self, batch: Batch) -> Bool[Array, "B T"]:
        """Where entropies and agreement are measured: at every eighth learned token of a row.

        They take 2 + E / D more products of what is measured; the divergence takes 3 + E / D at least.
        """
        counts = batch.weights > 0
        begin = batch.tokens.sum(axis=1, keepdims=True)  # else it would be the first token of all short rows
        return counts & ((jnp.cumsum(counts, axis=1) + begin) % 8 == 0)

    def metrics(self, batch: Batch, outputs: Comparison) -> Metrics:
        counts, some = batch.weights > 0, self.measured(batch)
        found = {
            "kl": (outputs.divergence, counts),
            "entropy": (outputs.entropy, some),
            "teacher_entropy": (outputs.teacher_entropy, some),
            "teacher_agreement": (outputs.agreement, some),
        }
        return {name: jnp.where(at.any(), objectives.masked_mean(x, at), jnp.nan) for name, (x, at) in found.items()}


def algorithm_of(config: Config) -> Algorithm:
    """The algorithm of a configuration."""
    if config.distill is not None and config.distill.estimator == "full":
        return Distill(config.distill)
    if config.dpo is not None:
        return Dpo(config.dpo)
    return Sft() if config.grpo is None else Grpo(config.grpo)
