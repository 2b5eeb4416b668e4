"""The data source of GRPO and distillation: completions of a task's prompts, sampled from the policy.

Each process samples and scores its own rows, then gathers the rewards of all processes. One rollout serves
`grpo.updates_per_generation` batches, each `grpo.num_iterations` times; a checkpoint must fall between rollouts.
Completions without a gradient (advantage 0, no KL penalty, no entropy bonus) are left out of the batch. The weights of
the remaining completions don't change.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float

from mllm.algorithms.grpo import groups
from mllm.algorithms.grpo.inputs import pack
from mllm.algorithms.grpo.losses import sequence_weights
from mllm.algorithms.grpo.settings import RolloutRun
from mllm.data.batch import Batch, Trajectory
from mllm.data.prompts import prompt_iterator
from mllm.data.source import Evaluate, FrozenModels, Step
from mllm.model.layout import Params
from mllm.parallel.processes import RowShare, is_writer, raise_everywhere
from mllm.sampler import trajectories
from mllm.sampler.schedule import round_size
from mllm.stopwatch import Stopwatch
from mllm.training.recipe import Parts

log = logging.getLogger(__name__)


class Rollout(NamedTuple):
    """The sampled completions of a rollout, group by group."""

    trajectories: list[Trajectory]
    rewards: Float[np.ndarray, "G n"]
    """Weighted sums; NaN for no reward."""
    rounds: int
    """The number of rounds of dynamic sampling."""


class ScoredRollout(NamedTuple):
    """The N completions to train on, group by group."""

    trajectories: list[Trajectory]
    advantages: Sequence[Float[Any, "..."]]
    """One number per completion, or one per sampled token."""
    counts: Bool[np.ndarray, "N"]
    """The completions with a weight in the loss."""
    failed: Bool[np.ndarray, "N"]
    """The completions without an advantage to log."""
    frac_kept: float
    """The share of the sampled groups that are trained on and have different rewards."""


Opinions = Callable[[Batch, Params, FrozenModels, bool], tuple[Batch, dict[str, float]]]
"""(batch, policy's parameters, frozen models, whether it is a rollout's first batch) -> the batch with the
log-probabilities of further policies, and metrics. All batches of a rollout have the same shapes."""


@dataclass(frozen=True)
class Learning:
    """How an algorithm learns from a rollout."""

    score: Callable[[Rollout], ScoredRollout]
    """Chooses the completions that are learned from, and gives their advantages."""
    ask_policies: Opinions
    all_learned: bool
    """Whether completions with an advantage of 0 have a gradient."""
    compares_rewards: bool = True
    """Whether rewards are learned from: then StepError is raised where they fail in too many groups."""


class RolloutSource:
    """A `mllm.data.source.Source` over batches of completions."""

    def __init__(self, config: RolloutRun, parts: Parts, learning: Learning) -> None:
        """UserError is raised as by `prompt_iterator`."""
        assert parts.sampling is not None
        self.config, self.learning, self.batch_size = config.grpo, learning, config.batch_size
        self.task, self.sampler, self.rewards = parts.sampling.task, parts.sampling.sampler, parts.sampling.rewards
        self.form = self.sampler.renderer.form
        self.steps = config.steps or 0
        self.logged_samples = config.log.samples
        self.shape = parts.forward.shape
        self.rows = RowShare.of_mesh(parts.mesh)
        limit, seed = config.rollout.max_prompt_length, config.seed
        self.prompts = prompt_iterator(self.task, self.sampler.renderer, max_prompt_length=limit, seed=seed)
        self.num_tokens = 0
        self.updates_without_gradient = 0
        self.rollouts_without_signal = 0
        """Counted since the process began, for warnings only."""
        self.parts: list[Step] = []
        """The data of the updates that share the current rollout."""

    @property
    def summary(self) -> str:
        tested = f", {len(self.task.test):,} in the test set" if self.task.test else ""
        return f"{len(self.task.train):,} problems to train on, {len(self.task.heldout):,} held out{tested}"

    def next(self, params: Params, step: int, watch: Stopwatch, frozen: FrozenModels) -> Step:
        """The data of update `step`. Raises StepError if rewards failed for too many completions."""
        update = step % self.config.updates_per_rollout
        first = update == 0 or not self.parts
        if first:
            self.parts = self.roll_out(params, frozen, step, watch)
        part = self.parts[update % len(self.parts)]
        self.updates_without_gradient += part.metrics["frac_without_gradient"] == 1
        metrics = part.metrics | {"updates_without_gradient": self.updates_without_gradient}
        return replace(part, metrics=metrics, samples=part.samples if first else [])

    def roll_out(self, params: Params, frozen: FrozenModels, step: int, watch: Stopwatch) -> list[Step]:
        """Sample completions, score them, and pack them into the batches of all updates that share the rollout."""
        rollout = self.sample(params, step, watch)
        if self.learning.compares_rewards and groups.equal_rewards(rollout.rewards).all():
            self.warn_without_signal(step)
        return self.pack_updates(rollout, self.learning.score(rollout), params, frozen, watch)

    def sample(self, params: Params, step: int, watch: Stopwatch) -> Rollout:
        """Sample and score the completions of all processes.

        With dynamic sampling (DAPO, Yu et al. 2025, section 3.2), prompts with equal rewards are replaced in further
        rounds, until enough groups have different rewards. DAPO draws a whole batch in each round; this function draws
        about as many prompts as are missing.
        """
        wanted = missing = self.config.groups_per_rollout(self.batch_size)
        sampled: list[Trajectory] = []
        for rounds in count(1):
            size = round_size(missing, wanted, self.shape.shards)
            with raise_everywhere():
                prompts = [next(self.prompts) for _ in range(size)]
            sampled += trajectories.sample_trajectories(
                self.sampler,
                self.rewards,
                [prompt for prompt in prompts for _ in range(self.config.num_generations)],
                params,
                step=step,
                first_sequence=len(sampled),
                rows=self.rows,
                watch=watch,
                group=self.config.num_generations,
            )
            limit = trajectories.MAX_FAILED_SHARE if self.learning.compares_rewards else 1.0
            rewards = trajectories.group_rewards(sampled, self.rewards, self.config.num_generations, limit)
            missing = wanted - int(np.count_nonzero(~groups.equal_rewards(rewards)))
            if missing <= 0 or rounds == self.config.dynamic_sampling:
                break
        self.num_tokens += sum(len(trajectory.tokens) for trajectory in sampled)
        return Rollout(sampled, rewards, rounds)

    def pack_updates(
        self, rollout: Rollout, scored: ScoredRollout, params: Params, frozen: FrozenModels, watch: Stopwatch
    ) -> list[Step]:
        """The data of each update: its completions in packed rows, with further policies' log-probabilities."""
        chosen, counts = scored.trajectories, scored.counts
        if self.config.mask_truncated_completions:
            counts = counts & [trajectory.finished for trajectory in chosen]
        metrics, samples = self.rollout_metrics(rollout, scored), self.sample_lines(scored)
        has_gradient = np.array([bool(np.any(part)) for part in scored.advantages]) | self.learning.all_learned
        lengths = np.array([len(trajectory.logprobs) for trajectory in chosen])
        longest = self.sampler.options.turns * self.sampler.options.max_completion_length
        local_rows = self.rows.part_of(self.shape.total)
        steps: list[Step] = []
        for part in np.split(np.arange(len(chosen)), self.config.updates_per_generation):
            # A completion's tokens count together or not at all.
            weights = sequence_weights(self.config, np.where(counts, lengths, 0)[part], longest)
            learned = (weights > 0) & has_gradient[part]
            with watch.phase("logprob"):
                sequences = [chosen[i] for i in part[learned]]
                advantages = [scored.advantages[i] for i in part[learned]]
                whole = pack(sequences, weights[learned], advantages, self.shape)
                batch = jax.tree.map(lambda array: array[local_rows], whole)
                batch, more = self.learning.ask_policies(batch, params, frozen, not steps)
                batch = jax.block_until_ready(batch)
            without = {"frac_without_gradient": float(1 - learned.mean())}
            steps.append(Step(batch, metrics | without | more, samples, sum(len(chosen[i].tokens) for i in part)))
        return steps

    def rollout_metrics(self, rollout: Rollout, scored: ScoredRollout) -> dict[str, Any]:
        """The metrics of rewards, lengths, groups and prompts."""
        metrics: dict[str, Any] = {
            **groups.group_metrics(rollout.rewards),
            "frac_groups_failed": float(np.isnan(rollout.rewards).all(axis=1).mean()),
            **trajectories.completion_metrics(rollout.trajectories, self.rewards.names),
            "num_tokens": self.num_tokens,
        }
        if self.config.dynamic_sampling > 1:
            names = ("dynamic_sampling/rounds", "dynamic_sampling/frac_groups_kept")
            metrics |= zip(names, (rollout.rounds, scored.frac_kept), strict=True)
        return metrics

    def sample_lines(self, scored: ScoredRollout) -> list[dict[str, Any]]:
        """The lines of samples.jsonl."""
        means = np.array([np.mean(part) for part in scored.advantages])
        advantages = np.where(scored.failed, np.nan, means)
        logged = telling_samples(means, self.config.num_generations, self.logged_samples)
        return [trajectories.sample_line(scored.trajectories[i], self.rewards, advantages[i]) for i in logged]

    def warn_without_signal(self, step: int) -> None:
        """Warn that no group has different rewards: the first time, the second, the fourth, the eighth, ..."""
        self.rollouts_without_signal += 1
        if self.rollouts_without_signal.bit_count() == 1 and is_writer():
            log.warning(
                "step %d: in no group do the rewards differ, so there is nothing to learn from (%d such rollouts so "
                "far); see samples.jsonl, and try problems that are neither too easy nor too hard, a reward with part "
                "marks, or a larger grpo.num_generations",
                step + 1,
                self.rollouts_without_signal,
            )

    def position(self) -> dict[str, Any]:
        counts = {"num_tokens": self.num_tokens, "updates_without_gradient": self.updates_without_gradient}
        return {"prompts": self.prompts.get_state(), **counts}

    def seek(self, position: Mapping[str, Any]) -> None:
        self.prompts.set_state(position["prompts"])
        self.num_tokens = position["num_tokens"]
        self.updates_without_gradient = position["updates_without_gradient"]

    def resumable(self, step: int) -> bool:
        return step % self.config.updates_per_rollout == 0

    def evaluations(self, poll: Callable[[], None]) -> Iterable[Evaluate]:
        return ()


def telling_samples(advantages: Float[np.ndarray, "N"], group: int, most: int | None) -> list[int]:
    """The indices of the completions to log, in order: at most `most`; None: all.

    The best and the worst completion of as many prompts as possible are chosen. A prompt has `group` completions.
    """
    size = len(advantages)
    if most is None or most >= size:
        return list(range(size))
    quota = min(group, most, max(2, most // (size // group)))
    chosen: list[int] = []
    for begin in range(0, size, group):
        order = begin + np.argsort(-advantages[begin : begin + group], kind="stable")
        chosen += sorted([*order[: -(-quota // 2)].tolist(), *order[len(order) - quota // 2 :].tolist()])
    return chosen[:most]
