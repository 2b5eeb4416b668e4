"""GRPO's source of batches: prompts from the task, completions from the policy, advantages from their rewards."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float

from mllm.algorithms.grpo import groups
from mllm.algorithms.grpo.batch import pack
from mllm.algorithms.grpo.losses import sequence_weights
from mllm.algorithms.grpo.settings import GrpoConfig
from mllm.data.batch import Batch, Trajectory
from mllm.data.prompts import PromptIterator
from mllm.data.source import Fixed, Step
from mllm.data.tasks.task import Task
from mllm.model.layout import Params
from mllm.parallel.processes import RowShare, is_writer, raise_everywhere
from mllm.rewards.runner import RewardRunner
from mllm.sampler import trajectories
from mllm.sampler.sampler import Sampler
from mllm.sampler.schedule import round_size
from mllm.stopwatch import Stopwatch
from mllm.training.step import Forward, logprobs_of

log = logging.getLogger(__name__)


class Drawn(NamedTuple):
    """The completions that a rollout has sampled, group by group."""

    trajectories: list[Trajectory]
    rewards: Float[np.ndarray, "G n"]
    """Weighted sums; NaN in a group that failed."""
    rounds: int
    """The number of rounds in which dynamic sampling has drawn them."""


class Judged(NamedTuple):
    """The N completions that are learned from, group by group."""

    trajectories: list[Trajectory]
    advantages: Sequence[Float[Any, "..."]]
    """Each completion's, or each of its sampled tokens'."""
    counts: Bool[np.ndarray, "N"]
    """Which have a weight in the loss."""
    failed: Bool[np.ndarray, "N"]
    """Which have no advantage to log."""
    frac_kept: float
    """The share of the groups that were drawn which are learned from and have a signal."""


class GrpoSource:
    """Samples completions, scores them, and gives the batches that the updates learn from.

    Each process samples and scores its own rows and then learns the rewards of all. A group in which a reward
    failed is left out of the loss. One rollout serves `updates_per_generation` batches, each `num_iterations` times; a
    checkpoint must fall between rollouts. Completions that can't have a gradient, because their advantage is 0 and
    there is neither a KL penalty nor an entropy bonus, are left out of the batch; the others keep the weights that they
    have in the whole batch.
    """

    most_failed = trajectories.MOST_FAILED_GROUPS

    def __init__(
        self,
        config: GrpoConfig,
        task: Task,
        sampler: Sampler,
        rewards: RewardRunner,
        forward: Forward,
        *,
        batch_size: int,
        steps: int,
        seed: int,
        logged_samples: int | None = None,
    ) -> None:
        """`logged_samples` None: all. UserError is raised as by `PromptIterator`."""
        self.config, self.task = config, task
        self.needs_old_logprobs = config.needs_old_logprobs
        self.all_learned = bool(config.beta > 0 or config.entropy_coef)
        """Whether completions with an advantage of 0 have a gradient."""
        self.sampler = sampler
        self.learned = sampler.renderer.form
        self.rewards = rewards
        self.batch_size = batch_size
        self.steps = steps
        self.logged_samples = logged_samples
        self.forward, self.update_rows = forward, forward.rows
        self.rows, drawn = RowShare.of_mesh(forward.mesh), config.groups_per_rollout(batch_size)
        limit, ahead = sampler.options.max_prompt_length, 2 * drawn
        self.prompts = PromptIterator(task, sampler.renderer, max_prompt_length=limit, seed=seed, ahead=ahead)
        self.logprob_pass = logprobs_of(forward)
        self.num_tokens = 0
        self.updates_without_gradient = 0
        self.rollouts_without_signal = 0
        """Since the process began: for warnings only."""
        self.parts: list[Step] = []
        """The data of the updates that share the current rollout."""

    @property
    def counts(self) -> str:
        tested = f", {len(self.task.test):,} in the test set" if self.task.test else ""
        return f"{len(self.task.train):,} problems to train on, {len(self.task.heldout):,} held out{tested}"

    def next(self, params: Params, step: int, watch: Stopwatch, fixed: Fixed) -> Step:
        """The data of update `step`. Raises StepError where rewards failed in too many groups."""
        update = step % self.config.updates_per_rollout
        first = update == 0 or not self.parts
        if first:
            self.parts = self.roll_out(params, fixed, step, watch)
        part = self.parts[update % len(self.parts)]
        self.updates_without_gradient += part.metrics["frac_without_gradient"] == 1
        metrics = part.metrics | {"updates_without_gradient": self.updates_without_gradient}
        return replace(part, metrics=metrics, samples=part.samples if first else [])

    def roll_out(self, params: Params, fixed: Fixed, step: int, watch: Stopwatch) -> list[Step]:
        """The data of all updates that share a rollout: completions are drawn, judged, and packed into batches."""
        drawn = self.draw(params, step, watch)
        judged = self.judge(drawn, step)
        return self.pack_updates(drawn, judged, params, fixed, watch)

    def draw(self, params: Params, step: int, watch: Stopwatch) -> Drawn:
        """Sample and score completions of all processes.

        With dynamic sampling (DAPO, Yu et al. 2025, section 3.2), prompts whose completions have equal rewards are
        replaced by others in further rounds, until enough groups have a signal. DAPO draws whole batches again; here a
        round draws about as many prompts as are missing.
        """
        wanted = missing = self.config.groups_per_rollout(self.batch_size)
        drawn: list[Trajectory] = []
        for rounds in count(1):
            size = round_size(missing, wanted, self.update_rows.shards)
            with raise_everywhere():
                prompts = [next(self.prompts) for _ in range(size)]
            drawn += trajectories.sample_trajectories(
                self.sampler,
                self.rewards,
                [prompt for prompt in prompts for _ in range(self.config.num_generations)],
                params,
                step=step,
                first_sequence=len(drawn),
                rows=self.rows,
                watch=watch,
                group=self.config.num_generations,
            )
            rewards = trajectories.group_rewards(drawn, self.rewards, self.config.num_generations, self.most_failed)
            missing = wanted - int(np.count_nonzero(~groups.equal_rewards(rewards)))
            if missing <= 0 or rounds == self.config.dynamic_sampling:
                break
        self.num_tokens += sum(len(trajectory.tokens) for trajectory in drawn)
        return Drawn(drawn, rewards, rounds)

    def judge(self, drawn: Drawn, step: int) -> Judged:
        """Choose the groups that are learned from, and compare each completion with its group."""
        equal = groups.equal_rewards(drawn.rewards)
        if equal.all():
            self.warn_without_signal(step)
        # The first groups with a signal, filled up with the first without, in the order in which they were drawn.
        wanted = self.config.groups_per_rollout(self.batch_size)
        chosen = np.sort(np.argsort(equal, kind="stable")[:wanted])
        members = np.arange(drawn.rewards.size).reshape(drawn.rewards.shape)[chosen].reshape(-1)
        failed = np.isnan(drawn.rewards).reshape(-1)[members]
        learned, scale = [drawn.trajectories[member] for member in members], self.config.reward_scale
        if self.config.baseline == "token":
            norms = [trajectory.norms for trajectory in learned]
            advantages = groups.token_advantages(drawn.rewards[chosen], scale, norms)
        else:
            advantages = [*groups.advantages(drawn.rewards[chosen], scale).reshape(-1)]
        kept = np.count_nonzero(~equal[chosen]) / equal.size
        return Judged(learned, advantages, ~failed, failed, kept)

    def pack_updates(self, drawn: Drawn, judged: Judged, params: Params, fixed: Fixed, watch: Stopwatch) -> list[Step]:
        """The data of each update: its part of the completions in packed rows, with further policies' opinions."""
        chosen, counts = judged.trajectories, judged.counts
        if self.config.mask_truncated_completions:
            counts = counts & [trajectory.finished for trajectory in chosen]
        metrics, samples = self.rollout_metrics(drawn, judged), self.sample_lines(judged)
        has_gradient = np.array([bool(np.any(part)) for part in judged.advantages]) | self.all_learned
        lengths = np.array([len(trajectory.logprobs) for trajectory in chosen])
        longest = self.sampler.options.turns * self.sampler.options.max_completion_length
        local_rows = self.rows.part_of(self.update_rows.total)
        steps: list[Step] = []
        for part in np.split(np.arange(len(chosen)), self.config.updates_per_generation):
            # All of a completion's tokens are learnable, or none.
            weights = sequence_weights(self.config, np.where(counts, lengths, 0)[part], longest)
            learned = (weights > 0) & has_gradient[part]
            with watch.phase("logprob"):
                sequences = [chosen[i] for i in part[learned]]
                advantages = [judged.advantages[i] for i in part[learned]]
                whole = pack(sequences, weights[learned], advantages, self.update_rows)
                batch = jax.tree.map(lambda array: array[local_rows], whole)
                batch, more = self.ask_policies(batch, params, fixed, first=not steps)
                batch = jax.block_until_ready(batch)
            without = {"frac_without_gradient": float(1 - learned.mean())}
            steps.append(Step(batch, metrics | without | more, samples, sum(len(chosen[i].tokens) for i in part)))
        return steps

    def ask_policies(self, batch: Batch, params: Params, fixed: Fixed, first: bool) -> tuple[Batch, dict[str, float]]:
        """The batch with log-probabilities under the old and the reference policy, as far as the loss needs them.

        The second value holds metrics. A rollout's `first` batch has the same shapes as the others: one program serves
        all.
        """
        inputs = batch.inputs
        if self.needs_old_logprobs:
            current = first and self.config.first_is_current
            zeros = np.zeros(batch.tokens.shape, np.float32)
            inputs = inputs._replace(old_logprobs=zeros if current else self.logprob_pass(params, batch))
            if self.config.first_is_current:
                inputs = inputs._replace(is_current=zeros + current)
        if self.config.beta > 0:
            inputs = inputs._replace(reference_logprobs=self.logprob_pass(fixed.reference, batch))
        return batch._replace(inputs=inputs), {}

    def rollout_metrics(self, drawn: Drawn, judged: Judged) -> dict[str, Any]:
        """The metrics of rewards, lengths, groups and prompts."""
        metrics: dict[str, Any] = {
            **groups.group_metrics(drawn.rewards),
            "frac_groups_failed": float(np.isnan(drawn.rewards).all(axis=1).mean()),
            **trajectories.completion_metrics(drawn.trajectories, self.rewards.names),
            "num_tokens": self.num_tokens,
            "prompts_skipped": self.prompts.position - self.prompts.given,
        }
        if self.config.dynamic_sampling > 1:
            names = ("dynamic_sampling/rounds", "dynamic_sampling/frac_groups_kept")
            metrics |= zip(names, (drawn.rounds, judged.frac_kept), strict=True)
        return metrics

    def sample_lines(self, judged: Judged) -> list[dict[str, Any]]:
        """The lines of samples.jsonl."""
        means = np.array([np.mean(part) for part in judged.advantages])
        advantages = np.where(judged.failed, np.nan, means)
        logged = telling_samples(means, self.config.num_generations, self.logged_samples)
        return [trajectories.sample_line(judged.trajectories[i], self.rewards, advantages[i]) for i in logged]

    def warn_without_signal(self, step: int) -> None:
        """Log that no group has rewards that differ: the first time, the second, the fourth, the eighth, ..."""
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
        return {"prompts": self.prompts.get_state(), **counts, "reward_codes": self.rewards.codes}

    def seek(self, position: Mapping[str, Any]) -> None:
        self.prompts.set_state(position["prompts"])
        self.num_tokens = position["num_tokens"]
        self.updates_without_gradient = position["updates_without_gradient"]
        for name, code in position["reward_codes"].items():
            if self.rewards.codes.get(name, code) != code and is_writer():
                log.warning("task.rewards: the file of %s has changed since the checkpoint; its new code is used", name)

    def resumable(self, step: int) -> bool:
        return step % self.config.updates_per_rollout == 0


def telling_samples(advantages: Float[np.ndarray, "N"], group: int, most: int | None) -> list[int]:
    """Which of the completions, `group` of each prompt, are logged, in their order: at most `most`; None: all.

    They are of as many prompts as can have two, the best and the worst.
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
