"""GRPO and its kin: the loss of a micro-batch of completions, its metrics, and what a run holds for it."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lm_head import TokenLogprobs
from mllm.algorithms.grpo import losses
from mllm.algorithms.grpo.batch import PolicyInputs
from mllm.algorithms.grpo.settings import GrpoConfig
from mllm.algorithms.grpo.source import GrpoSource
from mllm.config.schema import Config
from mllm.data.batch import Batch
from mllm.data.source import Source
from mllm.training.algorithm import Algorithm, Metrics, Parts, Pass
from mllm.training.head import Head, States

LENGTHS = {"length": "completions/mean_length", "cut off": "completions/clipped_ratio"}
"""The metrics of completions' lengths: the mean in tokens, and the share that was cut off."""


class Grpo(Algorithm):
    progress: Mapping[str, str] = MappingProxyType({"reward": "reward", **LENGTHS, "entropy": "entropy"})

    def __init__(self, config: Config, source: type[GrpoSource] = GrpoSource) -> None:
        super().__init__(config)
        self.source = source
        assert config.rollout is not None
        self.settings = settings = config.section(GrpoConfig)
        self.temperature = config.rollout.temperature
        self.group = settings.num_generations
        self.completions = settings.updates_per_generation * config.batch_size
        self.reference = "held" if settings.beta > 0 else None
        self.passes = (Pass("policy"),) if settings.passes else ()

    def loss(
        self, head: Head, states: States, batch: Batch, teacher: States | None = None
    ) -> tuple[Float[Array, ""], TokenLogprobs]:
        config = self.settings
        if config.takes_sequences:
            # A sequence's ratio or weight needs the log-probabilities of all its tokens before any loss is known.
            outputs, counts = head.logprobs(states, batch), batch.weights > 0
            inputs = losses.token_inputs(config, batch, jax.lax.stop_gradient(outputs.logprob))
            loss_of = losses.policy_loss
            if config.limits.by_sequence:
                loss_of = partial(losses.sequence_policy_loss, mask=counts, segments=batch.segments)
            token_losses = loss_of(config, outputs.logprob, outputs.entropy, inputs)
            return jnp.sum(jnp.where(counts, batch.weights * token_losses, 0.0)), jax.lax.stop_gradient(outputs)
        operands, structure = jax.tree.flatten(losses.token_inputs(config, batch))

        def objective(logprob: Array, entropy: Array, *operands: Array) -> Array:
            return losses.policy_loss(config, logprob, entropy, jax.tree.unflatten(structure, operands))

        return head.loss(states, batch, objective, *operands)

    def metrics(self, batch: Batch, outputs: TokenLogprobs) -> Metrics:
        metrics = losses.policy_metrics(self.settings, outputs.logprob, outputs.entropy, batch)
        return {name: jnp.where((batch.weights > 0).any(), value, jnp.nan) for name, value in metrics.items()}

    def inputs(self, tokens: jax.ShapeDtypeStruct, rows: jax.ShapeDtypeStruct) -> PolicyInputs:
        config = self.settings
        old = tokens if config.needs_old_logprobs else None
        current = tokens if config.needs_old_logprobs and config.first_is_current else None
        return PolicyInputs(tokens, tokens, old, current, tokens if config.beta > 0 else None)

    def make_source(self, parts: Parts) -> Source:
        config = parts.config
        assert parts.task and parts.sampler and parts.rewards  # noqa: PT018
        return self.source(
            self.settings,
            parts.task,
            parts.sampler,
            parts.rewards,
            parts.forward,
            batch_size=config.batch_size,
            steps=config.steps or 0,
            seed=config.seed,
            logged_samples=config.log.samples,
        )
