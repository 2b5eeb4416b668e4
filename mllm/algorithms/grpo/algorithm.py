"""GRPO and its kin: the loss of a micro-batch of completions, its metrics, and the advantages of completions."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lm_head import TokenLogprobs
from mllm.algorithms.grpo import groups, losses
from mllm.algorithms.grpo.inputs import PolicyInputs
from mllm.algorithms.grpo.settings import GrpoConfig, GrpoRun, RolloutRun
from mllm.algorithms.rollouts import Learning, Rollout, RolloutSource, ScoredRollout
from mllm.data.batch import Batch
from mllm.data.source import FrozenModels
from mllm.model.layout import Params
from mllm.training.head import Head, HeadInputs
from mllm.training.recipe import Demands, Parts, Pass, Recipe, Shape
from mllm.training.step import Forward, Metrics, logprobs_of

LENGTHS = {"length": "completions/mean_length", "cut off": "completions/clipped_ratio"}
"""The metrics of completions' lengths: the mean in tokens, and the share that was cut off."""
PROGRESS = MappingProxyType({"reward": "reward", **LENGTHS, "entropy": "entropy"})


def make(config: GrpoRun) -> Recipe[TokenLogprobs]:
    grpo = config.grpo

    def source(parts: Parts) -> RolloutSource:
        score = partial(compare, grpo, grpo.groups_per_rollout(config.batch_size))
        has_gradient = bool(grpo.beta > 0 or grpo.entropy_coef)
        return RolloutSource(config, parts, Learning(score, PolicyPasses(grpo, parts.forward), has_gradient))

    return Recipe(partial(loss, grpo), partial(metrics, grpo), source, policy_demands(config), PROGRESS)


def policy_demands(config: RolloutRun) -> Demands:
    """The demands of GRPO's loss."""
    grpo = config.grpo
    return replace(
        rollout_demands(config, partial(input_shapes, grpo)),
        reference="held" if grpo.beta > 0 else None,
        passes=(Pass("policy"),) if grpo.passes else (),
        group=grpo.num_generations,
    )


def rollout_demands(config: RolloutRun, inputs: Callable[[Shape, Shape], PolicyInputs]) -> Demands:
    """The demands of an algorithm that trains on its own sampled completions, without groups."""
    completions = config.grpo.updates_per_generation * config.batch_size
    return Demands(temperature=config.rollout.temperature, completions=completions, inputs=inputs)


def loss(
    config: GrpoConfig, head: Head, states: HeadInputs, batch: Batch, teacher: HeadInputs | None = None
) -> tuple[Float[Array, ""], TokenLogprobs]:
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


def metrics(config: GrpoConfig, batch: Batch, outputs: TokenLogprobs) -> Metrics:
    values = losses.policy_metrics(config, outputs.logprob, outputs.entropy, batch)
    return {name: jnp.where((batch.weights > 0).any(), value, jnp.nan) for name, value in values.items()}


def input_shapes(config: GrpoConfig, tokens: Shape, rows: Shape) -> PolicyInputs:
    """`Batch.inputs` as shapes."""
    old = tokens if config.needs_old_logprobs else None
    current = tokens if config.needs_old_logprobs and config.first_is_current else None
    return PolicyInputs(tokens, tokens, old, current, tokens if config.beta > 0 else None)


def compare(config: GrpoConfig, wanted: int, rollout: Rollout) -> ScoredRollout:
    """Choose `wanted` groups to train on, and compute each completion's advantage over its group."""
    equal = groups.equal_rewards(rollout.rewards)
    # Groups with different rewards are chosen first; the chosen groups keep the order of sampling.
    chosen = np.sort(np.argsort(equal, kind="stable")[:wanted])
    members = np.arange(rollout.rewards.size).reshape(rollout.rewards.shape)[chosen].reshape(-1)
    failed = np.isnan(rollout.rewards).reshape(-1)[members]
    learned, scale = [rollout.trajectories[member] for member in members], config.reward_scale
    if config.baseline == "token":
        norms = [trajectory.norms for trajectory in learned]
        advantages = groups.token_advantages(rollout.rewards[chosen], scale, norms)
    else:
        advantages = [*groups.advantages(rollout.rewards[chosen], scale).reshape(-1)]
    kept = np.count_nonzero(~equal[chosen]) / equal.size
    return ScoredRollout(learned, advantages, ~failed, failed, kept)


class PolicyPasses:
    """Adds the old and the reference policy's log-probabilities to a batch, if the loss needs them."""

    def __init__(self, config: GrpoConfig, forward: Forward) -> None:
        self.config, self.logprobs = config, logprobs_of(forward)

    def __call__(
        self, batch: Batch, params: Params, frozen: FrozenModels, first: bool
    ) -> tuple[Batch, dict[str, float]]:
        """The batch with log-probabilities. A rollout's batches have equal shapes, so one program is compiled."""
        config, inputs = self.config, batch.inputs
        if config.needs_old_logprobs:
            current = first and config.first_is_current
            zeros = np.zeros(batch.tokens.shape, np.float32)
            inputs = inputs._replace(old_logprobs=zeros if current else self.logprobs(params, batch))
            if config.first_is_current:
                inputs = inputs._replace(is_current=zeros + current)
        if config.beta > 0:
            inputs = inputs._replace(reference_logprobs=self.logprobs(frozen.reference, batch))
        return batch._replace(inputs=inputs), {}
