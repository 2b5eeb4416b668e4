"""Distillation: the divergence from a teacher's distributions, over given completions or the student's own.

The sampled estimator is GRPO's objective with the teacher's opinion of the sampled token as the advantage.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from mllm.algorithms.distill.settings import DistillConfig, samples_completions
from mllm.algorithms.grpo.algorithm import LENGTHS, Grpo
from mllm.algorithms.grpo.losses import MAX_LOG_RATIO
from mllm.algorithms.grpo.source import Drawn, GrpoSource, Judged
from mllm.algorithms.sft.algorithm import example_evaluations
from mllm.algorithms.sft.source import SftSource
from mllm.config.schema import Config
from mllm.data.batch import Batch
from mllm.data.source import Fixed, Source
from mllm.model.layout import Params
from mllm.parallel.mesh import shard_batch
from mllm.training.algorithm import Algorithm, Evaluate, Metrics, Parts, Pass
from mllm.training.head import Head, States
from mllm.training.means import masked_mean
from mllm.training.step import Forward, make_logprob_pass


def make_distillation(config: Config) -> Algorithm:
    """The algorithm that the settings ask for."""
    if config.section(DistillConfig).estimator == "sampled":
        return SampledDistillation(config)
    return OwnDistillation(config) if samples_completions(config) else Distillation(config)


class Comparison(NamedTuple):
    """Student and teacher at each token, float32 [B, T]; all but the divergence only where they are measured."""

    divergence: Float[Array, "B T"]
    entropy: Float[Array, "B T"]
    teacher_entropy: Float[Array, "B T"]
    agreement: Float[Array, "B T"]
    """1 where the student's likeliest token is the teacher's, else 0."""


class Distillation(Algorithm):
    """The divergence over the whole vocabulary, over given completions."""

    teacher_in_update = True
    progress: Mapping[str, str] = MappingProxyType({"kl": "kl", "agreement": "teacher_agreement", "entropy": "entropy"})

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.distill = config.section(DistillConfig)

    def loss(
        self, head: Head, states: States, batch: Batch, teacher: States | None = None
    ) -> tuple[Float[Array, ""], Comparison]:
        assert teacher is not None
        coef = self.distill.label_coef

        def objective(logprob: jax.Array, entropy: jax.Array, *, divergence: jax.Array) -> jax.Array:
            return divergence - coef * logprob if coef else divergence

        options = {"kind": self.distill.kind, "beta": self.distill.mixture}
        # Otherwise a sampled token that the teacher's vocabulary lacks would be a label out of range.
        labelled = batch if coef else batch._replace(labels=jnp.zeros_like(batch.labels))
        loss, tokens = head.loss(states, labelled, objective, teacher=teacher, **options)
        assert tokens.divergence is not None
        states, mask = jax.lax.stop_gradient(states), self.measured(batch)
        measured = batch._replace(weights=jnp.float32(mask), labels=head.likeliest(states, mask))
        student, target = head.logprobs(states, measured), head.logprobs(teacher, measured)
        return loss, Comparison(tokens.divergence, student.entropy, target.entropy, 1.0 * target.likeliest)

    def measured(self, batch: Batch) -> Bool[Array, "B T"]:
        """The mask of the tokens at which entropies and agreement are measured: every eighth learned one of a row.

        Measuring takes 2 + E / D more products of the measured tokens; the divergence takes 3 + E / D at least.
        """
        counts = batch.weights > 0
        # Without an offset, the first token of all short rows would be measured.
        offset = batch.tokens.sum(axis=1, keepdims=True)
        return counts & ((jnp.cumsum(counts, axis=1) + offset) % 8 == 0)

    def metrics(self, batch: Batch, outputs: Comparison) -> Metrics:
        counts, mask = batch.weights > 0, self.measured(batch)
        measures = {
            "kl": (outputs.divergence, counts),
            "entropy": (outputs.entropy, mask),
            "teacher_entropy": (outputs.teacher_entropy, mask),
            "teacher_agreement": (outputs.agreement, mask),
        }
        return {name: jnp.where(at.any(), masked_mean(value, at), jnp.nan) for name, (value, at) in measures.items()}

    def make_source(self, parts: Parts) -> Source:
        return SftSource(parts)

    def evaluations(self, forward: Forward, source: Source, poll: Callable[[], None]) -> Iterable[Evaluate]:
        return example_evaluations(forward, source, poll)


class OwnSource(GrpoSource):
    """The student's own completions, all of which are learned from; their rewards are only logged."""

    most_failed = 1.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.needs_old_logprobs, self.all_learned = False, True

    def judge(self, drawn: Drawn, step: int) -> Judged:
        everywhere = np.ones(drawn.rewards.size, bool)
        return Judged(drawn.trajectories, [*np.zeros(drawn.rewards.size)], everywhere, everywhere, 1.0)


class OwnDistillation(Distillation):
    """The divergence over the whole vocabulary, over the student's own completions."""

    progress = MappingProxyType({**Distillation.progress, **LENGTHS})

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.sampling = Grpo(config, OwnSource)
        self.temperature, self.completions = self.sampling.temperature, self.sampling.completions

    def inputs(self, tokens: jax.ShapeDtypeStruct, rows: jax.ShapeDtypeStruct) -> Any:
        return self.sampling.inputs(tokens, rows)._replace(old_logprobs=None, is_current=None)

    def make_source(self, parts: Parts) -> Source:
        return self.sampling.make_source(parts)


class SampledSource(OwnSource):
    """The student's own completions, with the teacher's opinion of each sampled token as its advantage."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.needs_old_logprobs = self.config.needs_old_logprobs
        self.teacher_pass = make_teacher_pass(self.forward)

    def ask_policies(self, batch: Batch, params: Params, fixed: Fixed, first: bool) -> tuple[Batch, dict[str, float]]:
        batch, metrics = super().ask_policies(batch, params, fixed, first)
        advantages, divergence = self.teacher_pass(fixed.teacher, shard_batch(self.forward.mesh, batch))
        return batch._replace(inputs=batch.inputs._replace(advantages=advantages)), metrics | {"kl": float(divergence)}


class SampledDistillation(Grpo):
    """GRPO's objective, whose advantages are log teacher - log student of the sampled token."""

    progress = MappingProxyType({"kl": "kl", "entropy": "entropy", **LENGTHS})

    def __init__(self, config: Config) -> None:
        super().__init__(config, SampledSource)
        self.passes = (*self.passes, Pass("teacher"))


def make_teacher_pass(forward: Forward) -> Callable[[Any, Batch], tuple[Float[Array, "B T"], Float[Array, ""]]]:
    """The jitted pass that gives log teacher - log sampler of each learned token of a batch, 0 elsewhere.

    The first argument is the teacher's parameters. The difference is at least -`MAX_LOG_RATIO`. Its mean over the
    learned tokens, negated, is returned, too: an estimate of KL(sampler || teacher).
    """
    assert forward.teacher is not None
    logprob_pass = make_logprob_pass(forward.teacher)

    @jax.jit
    def teacher_pass(params: Params, batch: Batch) -> tuple[Float[Array, "B T"], Float[Array, ""]]:
        counts, teacher = batch.weights > 0, logprob_pass(params, batch._replace(inputs=None))
        difference = jnp.maximum(teacher - batch.inputs.sampler_logprobs, -MAX_LOG_RATIO)
        mean = jnp.where(counts.any(), -masked_mean(difference, counts), jnp.nan)
        return jnp.where(counts, difference, 0.0), mean

    return teacher_pass
