"""What an update learns, by algorithm: the loss of a micro-batch from its hidden states, and the step's metrics.

The losses themselves are pure functions, in objectives.py.
"""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.lm_head import TokenLogprobs
from mllm.config.grpo import GrpoConfig
from mllm.config.schema import Config
from mllm.data.batch import Batch
from mllm.train import objectives
from mllm.train.head import Head, States
from mllm.train.preferences import Dpo

Metrics = dict[str, Float[Array, ""]]


@runtime_checkable
class Algorithm(Protocol):
    def loss(self, head: Head, states: States, batch: Batch) -> tuple[Float[Array, ""], Any]:
        """The batch's share of the step's loss, and arrays [B, T] without gradient, from which `metrics` are made."""

    def metrics(self, batch: Batch, outputs: Any) -> Metrics:
        """The metrics of a whole batch, over the tokens with a weight, under TRL's names; NaN where there are none."""


class Sft:
    def loss(self, head: Head, states: States, batch: Batch) -> tuple[Float[Array, ""], TokenLogprobs]:
        return head.loss(states, batch, objectives.sft)

    def metrics(self, batch: Batch, outputs: TokenLogprobs) -> Metrics:
        return {"entropy": objectives.masked_mean(outputs.entropy, batch.weights > 0)}


class Grpo:
    """GRPO and its kin."""

    def __init__(self, config: GrpoConfig) -> None:
        self.config = config

    def loss(self, head: Head, states: States, batch: Batch) -> tuple[Float[Array, ""], TokenLogprobs]:
        config, inputs = self.config, objectives.token_inputs(self.config, batch)
        if config.loss_type == "gspo":
            # The ratio of a sequence needs the log-probabilities of all its tokens before any loss is known.
            outputs, counts = head.logprobs(states, batch), batch.weights > 0
            losses = objectives.gspo(config, outputs.logprob, outputs.entropy, inputs, counts, batch.segments)
            return jnp.sum(jnp.where(counts, batch.weights * losses, 0.0)), jax.lax.stop_gradient(outputs)
        operands, structure = jax.tree.flatten(inputs)

        def objective(logprob: Array, entropy: Array, *operands: Array) -> Array:
            return objectives.grpo(config, logprob, entropy, jax.tree.unflatten(structure, operands))

        return head.loss(states, batch, objective, *operands)

    def metrics(self, batch: Batch, outputs: TokenLogprobs) -> Metrics:
        metrics = objectives.policy_metrics(self.config, outputs.logprob, outputs.entropy, batch)
        return {name: jnp.where((batch.weights > 0).any(), value, jnp.nan) for name, value in metrics.items()}


def algorithm_of(config: Config) -> Algorithm:
    """The algorithm of a configuration."""
    if config.dpo is not None:
        return Dpo(config.dpo)
    return Sft() if config.grpo is None else Grpo(config.grpo)
