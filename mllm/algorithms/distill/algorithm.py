"""Distillation: the divergence from a teacher's distributions, over given completions or the student's own.

The sampled estimator is GRPO's objective with the advantage log p_teacher - log p_sampler of each sampled token.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from lm_head import TokenLogprobs
from mllm.algorithms.distill.settings import DistillRun, DivergenceConfig, OwnDistillRun
from mllm.algorithms.grpo import algorithm as grpo
from mllm.algorithms.grpo.inputs import PolicyInputs
from mllm.algorithms.grpo.losses import MAX_LOG_RATIO
from mllm.algorithms.rollouts import Learning, Rollout, RolloutSource, ScoredRollout
from mllm.algorithms.sft.algorithm import document_source
from mllm.data.batch import Batch
from mllm.data.source import FrozenModels
from mllm.model.layout import Params
from mllm.parallel.mesh import shard_batch
from mllm.training.head import Head, HeadInputs
from mllm.training.means import masked_mean
from mllm.training.recipe import Demands, Parts, Pass, Recipe, Shape
from mllm.training.step import Forward, Metrics, make_logprob_pass

PROGRESS = {"kl": "kl", "agreement": "teacher_agreement", "entropy": "entropy"}


class Comparison(NamedTuple):
    """Statistics of student and teacher at each token, float32 [B, T]; all except the divergence only at `measured`."""

    divergence: Float[Array, "B T"]
    entropy: Float[Array, "B T"]
    teacher_entropy: Float[Array, "B T"]
    agreement: Float[Array, "B T"]
    """1 if student and teacher have the same likeliest token, else 0."""


def make(config: DistillRun) -> Recipe[Comparison]:
    """The recipe for the divergence over the whole vocabulary, on the examples of `data`."""
    loss = partial(divergence, config.distill, config.distill.label_coef)
    demands = Demands(teacher_in_update=True)
    return Recipe(loss, metrics, lambda parts: document_source(config, parts), demands, PROGRESS)


def make_own(config: OwnDistillRun) -> Recipe[Comparison] | Recipe[TokenLogprobs]:
    """The recipe for the divergence, or its sampled estimate, on the student's own completions."""
    return make_sampled(config) if config.distill.estimator == "sampled" else make_full(config)


def make_full(config: OwnDistillRun) -> Recipe[Comparison]:
    """The recipe for the divergence over the whole vocabulary, on the student's own completions."""

    def as_they_are(batch: Batch, params: Params, frozen: FrozenModels, first: bool) -> tuple[Batch, dict[str, float]]:
        return batch, {}

    def inputs(tokens: Shape, rows: Shape) -> PolicyInputs:
        return PolicyInputs(tokens, tokens)

    learning = Learning(learn_all, as_they_are, all_learned=True, compares_rewards=False)
    return Recipe(
        partial(divergence, config.distill, 0.0),
        metrics,
        lambda parts: RolloutSource(config, parts, learning),
        replace(grpo.rollout_demands(config, inputs), teacher_in_update=True),
        MappingProxyType({**PROGRESS, **grpo.LENGTHS}),
    )


def make_sampled(config: OwnDistillRun) -> Recipe[TokenLogprobs]:
    """The recipe for GRPO's objective with the advantage log p_teacher - log p_sampler of each sampled token."""

    def source(parts: Parts) -> RolloutSource:
        ask_policies = SampledDivergence(grpo.PolicyPasses(config.grpo, parts.forward), parts.forward)
        return RolloutSource(config, parts, Learning(learn_all, ask_policies, True, compares_rewards=False))

    demands = grpo.policy_demands(config)
    demands = replace(demands, passes=(*demands.passes, Pass("teacher")))
    progress = MappingProxyType({"kl": "kl", "entropy": "entropy", **grpo.LENGTHS})
    return Recipe(partial(grpo.loss, config.grpo), partial(grpo.metrics, config.grpo), source, demands, progress)


def divergence(
    config: DivergenceConfig,
    label_coef: float,
    head: Head,
    states: HeadInputs,
    batch: Batch,
    teacher: HeadInputs | None = None,
) -> tuple[Float[Array, ""], Comparison]:
    """The divergence from the teacher, plus `label_coef` times the cross-entropy of the labels."""
    assert teacher is not None

    def objective(logprob: jax.Array, entropy: jax.Array, *, divergence: jax.Array) -> jax.Array:
        return divergence - label_coef * logprob if label_coef else divergence

    options = {"kind": config.kind, "beta": config.mixture}
    # A sampled token that the teacher's vocabulary lacks would be a label out of range.
    labelled = batch if label_coef else batch._replace(labels=jnp.zeros_like(batch.labels))
    loss, tokens = head.loss(states, labelled, objective, teacher=teacher, **options)
    states, mask = jax.lax.stop_gradient(states), measured(batch)
    at_mask = batch._replace(weights=jnp.float32(mask), labels=head.likeliest(states, mask))
    student, target = head.logprobs(states, at_mask), head.logprobs(teacher, at_mask)
    return loss, Comparison(cast(Array, tokens.divergence), student.entropy, target.entropy, 1.0 * target.likeliest)


def measured(batch: Batch) -> Bool[Array, "B T"]:
    """The mask of the tokens where entropies and agreement are measured: every eighth learned token of a row.

    Measuring takes 2 + E / D products over the measured tokens; the divergence takes at least 3 + E / D over all
    learned tokens.
    """
    counts = batch.weights > 0
    # Without an offset, the first token of all short rows would be measured.
    offset = batch.tokens.sum(axis=1, keepdims=True)
    return counts & ((jnp.cumsum(counts, axis=1) + offset) % 8 == 0)


def metrics(batch: Batch, outputs: Comparison) -> Metrics:
    counts, mask = batch.weights > 0, measured(batch)
    measures = {
        "kl": (outputs.divergence, counts),
        "entropy": (outputs.entropy, mask),
        "teacher_entropy": (outputs.teacher_entropy, mask),
        "teacher_agreement": (outputs.agreement, mask),
    }
    return {name: jnp.where(at.any(), masked_mean(value, at), jnp.nan) for name, (value, at) in measures.items()}


def learn_all(rollout: Rollout) -> ScoredRollout:
    """Train on all completions; their rewards are only logged."""
    everywhere = np.ones(rollout.rewards.size, bool)
    return ScoredRollout(rollout.trajectories, [*np.zeros(rollout.rewards.size)], everywhere, everywhere, 1.0)


class SampledDivergence:
    """Sets each sampled token's advantage to log p_teacher - log p_sampler."""

    def __init__(self, passes: grpo.PolicyPasses, forward: Forward) -> None:
        self.passes, self.mesh, self.teacher_pass = passes, forward.mesh, make_teacher_pass(forward)

    def __call__(
        self, batch: Batch, params: Params, frozen: FrozenModels, first: bool
    ) -> tuple[Batch, dict[str, float]]:
        batch, metrics = self.passes(batch, params, frozen, first)
        advantages, divergence = self.teacher_pass(frozen.teacher, shard_batch(self.mesh, batch))
        return batch._replace(inputs=batch.inputs._replace(advantages=advantages)), metrics | {"kl": float(divergence)}


def make_teacher_pass(forward: Forward) -> Callable[[Any, Batch], tuple[Float[Array, "B T"], Float[Array, ""]]]:
    """A jitted function (teacher's parameters, batch) -> (advantages, divergence).

    The advantage is log p_teacher - log p_sampler of each learned token, at least -`MAX_LOG_RATIO`, and 0 elsewhere.
    The divergence is the negated mean over the learned tokens, an estimate of KL(sampler || teacher).
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
