"""GRPO's source of batches: prompts from the task, completions from the policy, advantages from their rewards."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from mllm.algorithms.distill.settings import DistillConfig
from mllm.algorithms.grpo import losses as objectives
from mllm.algorithms.grpo.settings import GrpoConfig
from mllm.data.batch import Batch, Trajectory
from mllm.data.packing import pack
from mllm.data.prompts import PromptIterator
from mllm.data.source import Step
from mllm.data.tasks.task import Task
from mllm.model.layout import Params
from mllm.parallel.mesh import shard_batch
from mllm.parallel.processes import RowShare, is_writer, raise_everywhere
from mllm.rewards.runner import RewardRunner, number
from mllm.sampler import trajectories
from mllm.sampler.sampler import Sampler
from mllm.sampler.schedule import round_size
from mllm.stopwatch import Stopwatch
from mllm.train.step import Forward, make_logprob_pass

log = logging.getLogger(__name__)


TeacherPass = Callable[[Batch], tuple[Float[Array, "B T"], Float[Array, ""]]]
"""What `make_teacher_pass` makes, with the teacher's parameters."""


class GrpoSource:
    """Samples completions, scores them, and gives the batches that the updates learn from.

    Each process samples and scores its own rows and then learns the rewards of all. A group in which a reward
    failed is left out of the loss. One rollout serves `updates_per_generation` batches, each `num_iterations` times; a
    checkpoint must fall between rollouts. Completions that can't have a gradient, because their advantage is 0 and
    there is neither a KL penalty nor an entropy bonus, are left out of the batch; the weights of the others are those
    of the whole batch. Where a teacher is learned from all have a gradient; rewards are no part of it in distillation.
    """

    validation = None

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
        distill: DistillConfig | None = None,
        teacher_pass: TeacherPass | None = None,
    ) -> None:
        """`logged_samples` None: all. UserError is raised as by `PromptIterator`."""
        self.config = config
        self.distill, self.teacher_pass = distill, teacher_pass
        full = distill is not None and distill.estimator == "full"
        self.needs_old_logprobs = config.needs_old_logprobs and not full
        self.all_learned = bool(distill or teacher_pass or config.beta > 0 or config.entropy_coef)
        self.sampler = sampler
        self.rewards = rewards
        self.batch_size = batch_size
        self.steps = steps
        self.logged_samples = logged_samples
        self.update_rows = forward.rows
        self.rows, groups = RowShare.of_mesh(forward.mesh), config.groups_per_rollout(batch_size)
        limit, ahead = sampler.options.max_prompt_length, 2 * groups
        self.prompts = PromptIterator(task, sampler.renderer, max_prompt_length=limit, seed=seed, ahead=ahead)
        logprob_pass = make_logprob_pass(forward)
        self.logprob_pass: Callable[[Params, Batch], Float[Array, "B T"]] = lambda params, batch: logprob_pass(
            params, shard_batch(forward.mesh, batch)
        )
        self.num_tokens = 0
        self.updates_without_gradient = 0
        self.rollouts_without_signal = 0
        """Since the process began: for warnings only."""
        self.parts: list[Step] = []
        """The data of the updates that share the current rollout."""

    @property
    def needs_reference(self) -> bool:
        return self.config.beta > 0

    def next(self, params: Params, step: int, watch: Stopwatch, reference: Params | None = None) -> Step:
        """The data of update `step`. Raises StepError where rewards failed in too many groups."""
        update = step % self.config.updates_per_rollout
        first = update == 0 or not self.parts
        if first:
            self.parts = self.roll_out(params, reference, step, watch)
        part = self.parts[update % len(self.parts)]
        self.updates_without_gradient += part.metrics["frac_without_gradient"] == 1
        metrics = part.metrics | {"updates_without_gradient": self.updates_without_gradient}
        return replace(part, metrics=metrics, samples=part.samples if first else [])

    def roll_out(self, params: Params, reference: Params | None, step: int, watch: Stopwatch) -> list[Step]:
        """Sample and score completions, and make the batches of all updates that share them."""
        drawn, rewards, rounds = self.draw(params, step, watch)
        equal, names = self.without_signal(drawn, rewards), self.rewards.names
        if equal.all() and not (self.distill or self.teacher_pass):
            self.warn_without_signal(step)
        # The first groups with a signal, filled up with the first without, in the order in which they were drawn.
        groups = np.sort(np.argsort(equal, kind="stable")[: self.config.groups_per_rollout(self.batch_size)])
        members = np.arange(rewards.size).reshape(rewards.shape)[groups].reshape(-1)
        chosen, failed = [drawn[member] for member in members], np.isnan(rewards).reshape(-1)[members]
        advantages = objectives.advantages(rewards[groups], self.config.reward_scale)
        advantages[equal[groups]] = 0  # also where `filter_by` alone finds a group's completions equal
        advantages = advantages.reshape(-1)
        counts = ~failed
        if self.distill:  # rewards are only logged
            advantages, counts, failed = np.zeros_like(advantages), np.ones_like(failed), np.ones_like(failed)
        if self.config.mask_truncated_completions:
            counts &= [trajectory.finished for trajectory in chosen]

        self.num_tokens += sum(len(trajectory.tokens) for trajectory in drawn)
        metrics: dict[str, Any] = {
            **objectives.group_metrics(rewards),
            "frac_groups_failed": float(np.isnan(rewards).all(axis=1).mean()),
            **trajectories.completion_metrics(drawn, names),
            "num_tokens": self.num_tokens,
            "prompts_skipped": self.prompts.position - self.prompts.given,
        }
        if self.config.dynamic_sampling > 1:
            kept = np.count_nonzero(~equal[groups]) / equal.size
            metrics |= {"dynamic_sampling/rounds": rounds, "dynamic_sampling/frac_groups_kept": kept}
        logged = zip(chosen[: self.logged_samples], np.where(failed, np.nan, advantages), strict=False)
        samples = [trajectories.sample_line(trajectory, self.rewards, advantage) for trajectory, advantage in logged]
        has_gradient = (advantages != 0) | self.all_learned
        lengths = np.array([len(trajectory.logprobs) for trajectory in chosen])
        parts: list[Step] = []
        mine = self.rows.part_of(self.update_rows.total)
        for part in np.split(np.arange(len(chosen)), self.config.updates_per_generation):
            learnable = np.where(counts, lengths, 0)[part]  # all of a completion's tokens, or none
            longest = self.sampler.options.turns * self.sampler.options.max_completion_length
            weights = objectives.sequence_weights(
                self.config.loss_type, learnable, self.config.num_generations, longest
            )
            learned = (weights > 0) & has_gradient[part]
            with watch.phase("logprob"):
                sequences = [chosen[i] for i in part[learned]]
                whole = pack(sequences, weights[learned], advantages[part[learned]], self.update_rows)
                batch = jax.tree.map(lambda array: array[mine], whole)
                if self.needs_old_logprobs:
                    first = not parts and self.config.first_is_current  # of the same form: one program for all updates
                    old = np.full(batch.tokens.shape, objectives.CURRENT, np.float32) if first else None
                    batch = batch._replace(old_logprobs=self.logprob_pass(params, batch) if old is None else old)
                if self.needs_reference:
                    batch = batch._replace(reference_logprobs=self.logprob_pass(reference, batch))
                without = {"frac_without_gradient": float(1 - learned.mean())}
                if self.teacher_pass:
                    added, divergence = self.teacher_pass(batch)
                    batch = batch._replace(advantages=added)
                    without["kl" if self.distill else "teacher_kl"] = float(divergence)
                batch = jax.block_until_ready(batch)
            tokens = sum(len(chosen[i].tokens) for i in part)
            parts.append(Step(batch, metrics | without, samples, tokens))
        return parts

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

    def draw(
        self, params: Params, step: int, watch: Stopwatch
    ) -> tuple[list[Trajectory], Float[np.ndarray, "G n"], int]:
        """Trajectories of all processes, group by group, their rewards, and in how many rounds they were drawn.

        With dynamic sampling (DAPO, Yu et al. 2025, section 3.2), prompts whose completions have equal rewards are
        replaced by others in further rounds, until enough groups have a signal. DAPO draws whole batches again; here a
        round draws about as many prompts as are missing. NaN stands for the rewards of a group that failed.
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
            limit = 1.0 if self.distill else trajectories.MOST_FAILED_GROUPS  # distillation only logs them
            rewards = trajectories.group_rewards(drawn, self.rewards, self.config.num_generations, limit)
            missing = wanted - int(np.count_nonzero(~self.without_signal(drawn, rewards)))
            if missing <= 0 or rounds == self.config.dynamic_sampling:
                break
        return drawn, rewards, rounds

    def without_signal(self, drawn: list[Trajectory], rewards: Float[np.ndarray, "G n"]) -> Bool[np.ndarray, "G"]:
        """Which groups nothing is learned from: their rewards are equal, or those that `filter_by` names."""
        equal, name = objectives.equal_rewards(rewards), self.config.filter_by
        if name is None:
            return equal
        function = self.rewards.names.index(name)
        judged = np.array([number(one.rewards[function]) for one in drawn]).reshape(rewards.shape)
        return equal | objectives.equal_rewards(judged)

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
