"""Where a GRPO step's batch comes from: `GrpoSource` samples it.

A source's position is JSON and goes into the checkpoint; with the parameters it determines every later batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mllm.config.schema import GrpoConfig, TaskConfig
from mllm.data.batch import Batch, padded_length
from mllm.data.pipeline import DataIterator, PromptBatch
from mllm.data.source import Step
from mllm.errors import StepError
from mllm.parallel.processes import ALL_ROWS, RowShare, raise_everywhere
from mllm.rl.rewards import RewardRunner, Scores
from mllm.rl.rollout import Completions
from mllm.rl.sampler import Sampler
from mllm.stopwatch import Stopwatch
from mllm.train import objectives

LogprobPass = Callable[[Any, Batch], Float[Array, "B T"]]


class Sampled(NamedTuple):
    """What a process tells the others of the rows that it sampled; joined, of all rows."""

    questions: list[str]
    texts: list[str]
    starts: Int[np.ndarray, "B"]
    """Tokens of the prompt."""
    lengths: Int[np.ndarray, "B"]
    """Tokens of the completion."""
    finished: Bool[np.ndarray, "B"]
    scores: Scores

    @classmethod
    def joined(cls, parts: Sequence["Sampled"]) -> "Sampled":
        questions, texts, starts, lengths, finished, scores = zip(*parts, strict=True)
        return cls(
            questions=[question for part in questions for question in part],
            texts=[text for part in texts for text in part],
            starts=np.concatenate(starts),
            lengths=np.concatenate(lengths),
            finished=np.concatenate(finished),
            scores=Scores.joined(scores),
        )


class GrpoSource:
    """Prompts from the task, completions from the policy, advantages from their rewards.

    Each process samples and scores its own rows and then learns the rewards of all: advantages, the loss's
    denominators, metrics and samples are those of the whole batch. A group in which a reward failed is left out of
    the loss. One rollout serves `num_iterations` updates; a checkpoint must fall between rollouts.
    """

    def __init__(
        self,
        config: GrpoConfig,
        task: TaskConfig,
        prompts: DataIterator[PromptBatch],
        sampler: Sampler,
        rewards: RewardRunner,
        logprob_pass: LogprobPass,
        reference: Any | None,
        logged_samples: int | None,
        rows: RowShare = ALL_ROWS,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        """`poll` is called again and again while rewards are waited for; what it raises passes through."""
        self.config = config
        self.reward_weights = {reward.name: reward.weight for reward in task.rewards}
        self.max_failed_groups = task.max_failed_groups
        self.prompts = prompts
        self.sampler = sampler
        self.rewards = rewards
        self.logprob_pass = logprob_pass
        self.reference = reference
        self.logged_samples = logged_samples
        self.rows = rows
        self.poll = poll
        self.num_tokens = 0
        self.current: Step | None = None

    def next(self, params: Any, step: int, watch: Stopwatch) -> Step:
        if self.current is None or step % self.config.num_iterations == 0:
            self.current = self.roll_out(params, step, watch)
            return self.current
        return replace(self.current, samples=[])

    def roll_out(self, params: Any, step: int, watch: Stopwatch) -> Step:
        """Raises StepError where too many groups failed."""
        group = self.config.num_generations
        asked = next(self.prompts)
        prompts = [tokens for tokens in asked.tokens for _ in range(group)]
        examples = [example for example in asked.examples for _ in range(group)]
        with watch.phase("rollout"):
            first = self.rows.index * len(prompts)
            completions, texts = self.sampler.complete(params, prompts, step=step, first=first)
        with watch.phase("reward"):
            questions = [example.prompt[-1]["content"] for example in examples]
            with raise_everywhere():
                scores = self.rewards.score(questions, texts, examples, self.poll)
            starts = np.array([len(prompt) for prompt in prompts])
            lengths, finished = np.asarray(completions.lengths), np.asarray(completions.finished)
            mine = Sampled(questions, texts, starts, lengths, finished, scores)
            sampled = Sampled.joined(self.rows.gather(mine))
        rewards = weighted_sum(sampled.scores.values, np.array(list(self.reward_weights.values()))).reshape(-1, group)
        failed = np.isnan(rewards).any(axis=1)
        if failed.mean() > self.max_failed_groups:
            raise self.failure(sampled.scores, f"{failed.sum()} of {failed.size}")
        rewards[failed] = np.nan  # what the others would be compared with is not known
        judged = objectives.advantages(rewards, self.config.scale_rewards)
        advantages = np.asarray(judged.values).reshape(-1)
        left_out = np.repeat(failed, group)

        counts = ~left_out
        if self.config.mask_truncated_completions:
            counts &= sampled.finished
        with watch.phase("logprob"):
            batch = self.with_policies(params, self.assemble(prompts, completions, sampled, counts, advantages))
        tokens = int(sampled.starts.sum() + sampled.lengths.sum())
        self.num_tokens += tokens
        metrics = {
            "reward": float(judged.reward),
            "reward_std": float(judged.reward_std),
            "frac_reward_zero_std": float(judged.frac_reward_zero_std),
            "frac_groups_failed": float(failed.mean()),
            **self.reward_metrics(sampled.scores),
            **completion_metrics(sampled),
            "num_tokens": self.num_tokens,
        }
        samples = [
            {
                "prompt": question,
                "completion": text,
                "rewards": {name: number(value) for name, value in zip(self.reward_weights, values, strict=True)},
                "advantage": number(advantage),
            }
            for question, text, values, advantage in zip(
                sampled.questions,
                sampled.texts,
                sampled.scores.values.T,
                np.where(left_out, np.nan, advantages),
                strict=True,
            )
        ]
        return Step(batch, metrics, samples[: self.logged_samples], tokens)

    def failure(self, scores: Scores, groups: str) -> StepError:
        """What the reward that counts and failed most often said first."""
        counts = {
            (name, kind): count
            for name, kinds in scores.failures.items()
            for kind, count in kinds.items()
            if self.reward_weights[name] != 0
        }
        name, kind = max(counts, key=lambda which: counts[which])
        return StepError(
            f"task.max_failed_groups: a reward failed in {groups} groups, and at most {self.max_failed_groups:g} of "
            f"them may; {name} {kind} {counts[name, kind]} times, first: {scores.messages[name][kind]}; "
            "mend the function, or raise the limit"
        )

    def assemble(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Completions,
        sampled: "Sampled",
        counts: Bool[np.ndarray, "B"],
        advantages: Float[np.ndarray, "B"],
    ) -> Batch:
        """Lay prompt and completion out in one row; a row that doesn't count keeps its tokens and weighs nothing.

        Args:
            prompts: of this process's rows, as `completions` are.
            sampled: of all rows, as `counts` and `advantages` are.
        """
        totals = sampled.starts + sampled.lengths
        options = self.sampler.options
        longest = options.max_prompt_length + options.max_completion_length
        shape = (len(prompts), padded_length(int(totals.max()), longest))
        place = np.arange(shape[1])
        mask = (place >= sampled.starts[:, None] - 1) & (place < totals[:, None] - 1) & counts[:, None]
        weights = objectives.token_weights(
            self.config.loss_type,
            mask,
            group_size=self.config.num_generations,
            max_completion_length=options.max_completion_length,
        )
        ours = slice(self.rows.index * len(prompts), (self.rows.index + 1) * len(prompts))
        tokens, labels, segments = (np.zeros(shape, np.int32) for _ in range(3))
        row_advantages, sampler_logprobs = (np.zeros(shape, np.float32) for _ in range(2))
        for row, (prompt, total, advantage) in enumerate(zip(prompts, totals[ours], advantages[ours], strict=True)):
            start, count = len(prompt), int(total) - len(prompt)
            tokens[row, :start] = prompt
            tokens[row, start:total] = completions.tokens[row, :count]
            segments[row, :total] = 1
            predicts = slice(start - 1, total - 1)
            labels[row, predicts] = completions.tokens[row, :count]
            row_advantages[row, predicts] = advantage
            sampler_logprobs[row, predicts] = completions.logprobs[row, :count]
        positions = np.broadcast_to(place.astype(np.int32), shape)
        return Batch(
            tokens,
            positions,
            segments,
            labels * mask[ours],
            np.asarray(weights)[ours],
            row_advantages,
            sampler_logprobs,
        )

    def with_policies(self, params: Any, batch: Batch) -> Batch:
        """Add the log-probabilities under other policies that the objective will ask for."""
        if self.config.num_iterations > 1:
            batch = batch._replace(old_logprobs=self.logprob_pass(params, batch))
        if self.reference is not None:
            batch = batch._replace(reference_logprobs=self.logprob_pass(self.reference, batch))
        return jax.block_until_ready(batch)

    def reward_metrics(self, scores: Scores) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, values in zip(self.reward_weights, scores.values, strict=True):
            sound = values[np.isfinite(values)]
            metrics[f"rewards/{name}/mean"] = float(sound.mean()) if sound.size else float("nan")
            metrics[f"rewards/{name}/std"] = float(sound.std()) if sound.size else float("nan")
            for kind, count in scores.failures[name].items():
                metrics[f"rewards/{name}/{kind}"] = count
        return metrics

    def position(self) -> dict[str, Any]:
        return {"prompts": self.prompts.get_state(), "num_tokens": self.num_tokens}

    def seek(self, position: Mapping[str, Any]) -> None:
        self.prompts.set_state(position["prompts"])
        self.num_tokens = position["num_tokens"]

    def resumable(self, step: int) -> bool:
        return step % self.config.num_iterations == 0


def weighted_sum(values: Float[np.ndarray, "R B"], weights: Float[np.ndarray, "R"]) -> Float[np.ndarray, "B"]:
    """Each completion's reward; NaN where a function failed that counts. One of weight 0 is only watched."""
    return np.where(weights[:, None] == 0, 0.0, weights[:, None] * values).sum(axis=0)


def completion_metrics(sampled: Sampled) -> dict[str, float]:
    lengths = sampled.lengths
    return {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(1 - sampled.finished.mean()),
    }


def number(value: float | np.floating[Any]) -> float | None:
    """JSON has no NaN: a reward that failed is null, and so is an advantage that there isn't for that."""
    return float(value) if np.isfinite(value) else None
