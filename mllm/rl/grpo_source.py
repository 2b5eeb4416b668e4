"""GRPO's source of batches: prompts from the task, completions from the policy, advantages from their rewards."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from mllm.config.grpo import GrpoConfig
from mllm.config.schema import Rows
from mllm.config.task import TaskConfig
from mllm.data.batch import Batch
from mllm.data.iteration import DataIterator, process_rows
from mllm.data.packing import Sequence, pack
from mllm.data.prompts import TrainingPrompt, training_prompts
from mllm.data.source import Step
from mllm.data.tasks.task import Task
from mllm.model.layout import Params
from mllm.parallel.mesh import shard_batch
from mllm.parallel.processes import ALL_ROWS, RowShare, is_writer, raise_everywhere
from mllm.rl import scored
from mllm.rl.rewards import RewardRunner
from mllm.rl.sampler import Sampler
from mllm.rl.schedule import round_size
from mllm.rl.scored import ScoredCompletions
from mllm.stopwatch import Stopwatch
from mllm.train import objectives
from mllm.train.step import Forward, make_logprob_pass

log = logging.getLogger(__name__)


def make_grpo_source(
    config: GrpoConfig,
    task_config: TaskConfig,
    *,
    batch_size: int,
    steps: int,
    seed: int,
    task: Task,
    sampler: Sampler,
    rewards: RewardRunner,
    forward: Forward,
    logged_samples: int | None,
) -> "GrpoSource":
    """The source of a run; UserError as for `training_prompts`."""
    rows, groups = RowShare.of_mesh(forward.mesh), config.groups_per_rollout(batch_size)
    process_rows(groups, rows.index, rows.count, "grpo.steps_per_generation * batch_size / grpo.num_generations")
    prompts = training_prompts(
        task,
        sampler.tokenizer,
        max_prompt_length=sampler.options.max_prompt_length,
        long_prompts=task_config.long_prompts,
        seed=seed,
        prefetch=2 * groups,
    )
    logprob_pass = make_logprob_pass(forward)
    return GrpoSource(
        config,
        task_config,
        batch_size,
        prompts,
        sampler,
        rewards,
        lambda params, batch: logprob_pass(params, shard_batch(forward.mesh, batch)),
        forward.rows,
        steps,
        logged_samples,
        rows,
    )


@dataclass
class GrpoSource:
    """Samples completions, scores them, and gives the batches that the updates learn from.

    Each process samples and scores its own rows and then learns the rewards of all. A group in which a reward
    failed is left out of the loss. One rollout serves `steps_per_generation` batches, each `num_iterations` times; a
    checkpoint must fall between rollouts. Completions that can't have a gradient, because their advantage is 0 and
    there is neither a KL penalty nor an entropy bonus, are left out of the batch; the weights of the others are those
    of the whole batch.
    """

    config: GrpoConfig
    task: TaskConfig
    batch_size: int
    prompts: DataIterator[TrainingPrompt]
    sampler: Sampler
    rewards: RewardRunner
    logprob_pass: Callable[[Params, Batch], Float[Array, "B T"]]
    update_rows: Rows
    steps: int
    logged_samples: int | None = None
    rows: RowShare = ALL_ROWS
    num_tokens: int = 0
    prompts_skipped: int = 0
    """How many prompts were left out since training began."""
    updates_without_gradient: int = 0
    rollouts_without_signal: int = 0
    """Since the process began: for warnings only."""
    parts: list[Step] = field(default_factory=list)
    """The data of the updates that share the current rollout."""
    validation: None = None

    @property
    def needs_reference(self) -> bool:
        return self.config.beta > 0

    @property
    def reward_weights(self) -> dict[str, float]:
        return {reward.name: reward.weight for reward in self.task.rewards}

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
        group = self.config.num_generations
        drawn, rewards, rounds = self.draw(params, step, watch)
        equal = objectives.equal_rewards(rewards)
        if equal.all():
            self.warn_without_signal(step)
        # The first groups with a signal, filled up with the first without, in the order in which they were drawn.
        wanted = self.config.groups_per_rollout(self.batch_size)
        groups = np.sort(np.argsort(equal, kind="stable")[:wanted])
        chosen = (groups[:, None] * group + np.arange(group)).reshape(-1)
        advantages = np.full(drawn.lengths.shape, np.nan)
        advantages[chosen] = objectives.advantages(rewards[groups], self.config.reward_scale).reshape(-1)
        advantages[np.isnan(rewards).reshape(-1)] = np.nan
        counts = ~np.isnan(advantages)
        if self.config.mask_truncated_completions:
            counts &= drawn.finished

        lengths = drawn.prompt_lengths + drawn.lengths
        self.num_tokens += int(lengths.sum())
        metrics: dict[str, Any] = {
            **objectives.reward_metrics(rewards),
            "frac_groups_failed": float(np.isnan(rewards).all(axis=1).mean()),
            **scored.completion_metrics(drawn, list(self.reward_weights)),
            "num_tokens": self.num_tokens,
            "prompts_skipped": self.prompts_skipped,
        }
        if self.config.dynamic_sampling > 1:
            kept = np.count_nonzero(~equal[groups]) / equal.size
            metrics |= {"dynamic_sampling/rounds": rounds, "dynamic_sampling/frac_groups_kept": kept}
        samples = scored.sample_lines(drawn, list(self.reward_weights), chosen[: self.logged_samples], advantages)
        (tokens, logprobs), parts = drawn.sequences(), []
        for members in np.split(chosen, self.config.steps_per_generation):
            weights = self.weights(np.where(counts, drawn.lengths, 0)[members])
            learned = [
                Sequence(tokens[i], logprobs[i], weight, advantages[i])
                for i, weight in zip(members, weights, strict=True)
                if weight > 0 and (advantages[i] != 0 or self.config.beta > 0 or self.config.entropy_coef != 0)
            ]
            with watch.phase("logprob"):
                batch = self.add_policy_logprobs(self.make_batch(learned), params, reference)
            without = {"frac_without_gradient": 1 - len(learned) / members.size}
            parts.append(Step(batch, metrics | without, samples, int(lengths[members].sum())))
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
    ) -> tuple[ScoredCompletions, Float[np.ndarray, "G n"], int]:
        """Completions of all processes and their rewards by groups, and in how many rounds they were drawn.

        With dynamic sampling (DAPO, Yu et al. 2025, section 3.2), prompts whose completions have equal rewards are
        replaced by others in further rounds, until enough groups have a signal. DAPO draws whole batches again; here a
        round draws about as many prompts as are missing. NaN stands for the rewards of a group that failed.
        """
        wanted = missing = self.config.groups_per_rollout(self.batch_size)
        rounds: list[ScoredCompletions] = []
        while True:
            size = round_size(missing, wanted, self.update_rows.shards)
            first = sum(part.lengths.size for part in rounds)
            with raise_everywhere():
                problems = [next(self.prompts) for _ in range(size)]
            self.prompts_skipped = problems[-1].passed - self.prompts.consumed
            rounds.append(self.sample(params, problems, step, first, watch))
            drawn = scored.concatenate(rounds)
            rewards = scored.group_rewards(drawn, self.reward_weights, self.config.num_generations)
            missing = wanted - int(np.count_nonzero(~objectives.equal_rewards(rewards)))
            if missing <= 0 or len(rounds) == self.config.dynamic_sampling:
                return drawn, rewards, len(rounds)

    def sample(
        self, params: Params, problems: list[TrainingPrompt], step: int, first: int, watch: Stopwatch
    ) -> ScoredCompletions:
        """Sample and score a group of completions for each problem; each process does its share of the problems.

        `first` is the number of the first sequence among those of the step.
        """
        group, share = self.config.num_generations, len(problems) // self.rows.count
        mine = slice(self.rows.index * share, (self.rows.index + 1) * share)
        prompts = [problem.tokens for problem in problems[mine] for _ in range(group)]
        examples = [problem.example for problem in problems[mine] for _ in range(group)]
        with watch.phase("rollout"):
            first += mine.start * group
            completions, texts = self.sampler.complete(params, prompts, step=step, first_sequence=first)
        with watch.phase("reward"):
            with raise_everywhere():
                scores = self.rewards.score(examples, texts, completions)
            own = ScoredCompletions(
                np.array([example.prompt[-1]["content"] for example in examples], object),
                np.array(texts, object),
                *scored.flat(prompts, completions),
                np.array([len(prompt) for prompt in prompts]),
                completions.lengths,
                completions.finished,
                scores.values,
                scores.kinds,
                np.array(scores.failures, object),
            )
            return scored.concatenate(self.rows.gather(own))

    def weights(self, tokens: Int[np.ndarray, "B"]) -> Float[np.ndarray, "B"]:
        """Each token's weight, by its sequence; `tokens` is how many of a completion's tokens count, all or none."""
        limit = self.sampler.options.max_completion_length
        return objectives.sequence_weights(self.config.loss_type, tokens, self.config.num_generations, limit)

    def make_batch(self, sequences: list[Sequence]) -> Batch:
        """This process's rows of the packed batch of all processes."""
        share = self.update_rows.total // self.rows.count
        mine = slice(self.rows.index * share, (self.rows.index + 1) * share)
        return jax.tree.map(lambda array: array[mine], pack(sequences, self.update_rows))

    def add_policy_logprobs(self, batch: Batch, params: Params, reference: Params | None) -> Batch:
        """The batch with the log-probabilities under other policies that the objective needs."""
        if self.config.needs_old_logprobs:
            batch = batch._replace(old_logprobs=self.logprob_pass(params, batch))
        if self.needs_reference:
            batch = batch._replace(reference_logprobs=self.logprob_pass(reference, batch))
        return jax.block_until_ready(batch)

    def position(self) -> dict[str, Any]:
        counts = {"num_tokens": self.num_tokens, "updates_without_gradient": self.updates_without_gradient}
        return {"prompts": self.prompts.get_state(), **counts, "reward_codes": self.rewards.codes}

    def seek(self, position: Mapping[str, Any]) -> None:
        self.prompts.set_state(position["prompts"])
        self.num_tokens = position["num_tokens"]
        self.updates_without_gradient = position.get("updates_without_gradient", 0)
        for name, code in position.get("reward_codes", {}).items():
            if self.rewards.codes.get(name, code) != code and is_writer():
                log.warning("task.rewards: the file of %s has changed since the checkpoint; its new code is used", name)

    def resumable(self, step: int) -> bool:
        return step % self.config.updates_per_rollout == 0
