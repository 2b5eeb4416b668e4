"""Where a step's batch comes from: `SftSource` reads it, `GrpoSource` samples it. The loop sees no other difference.

A source's position is JSON and goes into the checkpoint; with the parameters it determines every later batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from mllm import objectives
from mllm.batch import Batch
from mllm.config import GrpoConfig, TaskConfig
from mllm.data import DataIterator, PromptBatch
from mllm.metrics import Stopwatch
from mllm.rewards import RewardRunner, Scores
from mllm.rollout import Completions
from mllm.sampler import Sampler

LogprobPass = Callable[[Any, Batch], Float[Array, "B T"]]


class Step(NamedTuple):
    batch: Batch
    metrics: dict[str, float]
    samples: list[dict[str, Any]]
    """For samples.jsonl: prompt, completion, rewards."""
    last: bool = False
    """The data ends here."""


class Source(Protocol):
    def next(self, params: Any, step: int, watch: Stopwatch) -> Step:
        """The batch of update `step`, from 0. Raises StopIteration where the data ends."""

    def position(self) -> dict[str, Any]:
        """Where `seek` continues: JSON."""

    def seek(self, position: Mapping[str, Any]) -> None: ...

    def resumable(self, step: int) -> bool:
        """Whether a run can go on from its position after `step` updates."""


class SftSource:
    """Batches as the data pipeline makes them, read one ahead to know which is the last."""

    def __init__(self, data: DataIterator[Batch]) -> None:
        self.data = data
        self.num_tokens = 0
        self.after = data.get_state()
        self.upcoming: Batch | None = None

    def next(self, params: Any, step: int, watch: Stopwatch) -> Step:
        with watch.phase("data"):
            batch = next(self.data) if self.upcoming is None else self.upcoming
            self.after = self.data.get_state()
            self.upcoming = next(self.data, None)
        self.num_tokens += int(np.count_nonzero(batch.segments))
        return Step(batch, {"num_tokens": self.num_tokens}, [], last=self.upcoming is None)

    def position(self) -> dict[str, Any]:
        return {"data": self.after, "num_tokens": self.num_tokens}

    def seek(self, position: Mapping[str, Any]) -> None:
        self.data.set_state(position["data"])
        self.num_tokens = position["num_tokens"]
        self.after, self.upcoming = position["data"], None

    def resumable(self, step: int) -> bool:
        return True


class GrpoSource:
    """Prompts from the task, completions from the policy, advantages from their rewards.

    One rollout serves `num_iterations` updates; a checkpoint must fall between rollouts.
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
    ) -> None:
        self.config = config
        self.reward_weights = {reward.name: reward.weight for reward in task.rewards}
        self.prompts = prompts
        self.sampler = sampler
        self.rewards = rewards
        self.logprob_pass = logprob_pass
        self.reference = reference
        self.logged_samples = logged_samples
        self.num_tokens = 0
        self.current: Step | None = None

    def next(self, params: Any, step: int, watch: Stopwatch) -> Step:
        if self.current is None or step % self.config.num_iterations == 0:
            self.current = self.roll_out(params, step, watch)
            return self.current
        return self.current._replace(samples=[])

    def roll_out(self, params: Any, step: int, watch: Stopwatch) -> Step:
        group = self.config.num_generations
        asked = next(self.prompts)
        prompts = [tokens for tokens in asked.tokens for _ in range(group)]
        examples = [example for example in asked.examples for _ in range(group)]
        with watch.phase("rollout"):
            completions, texts = self.sampler.complete(params, prompts, step=step)
        with watch.phase("reward"):
            questions = [example.prompt[-1]["content"] for example in examples]
            scores = self.rewards.score(questions, texts, examples)
        rewards = weighted_sum(scores.values, np.array(list(self.reward_weights.values())))
        judged = objectives.advantages(rewards.reshape(-1, group), self.config.scale_rewards)
        advantages = np.asarray(judged.values).reshape(-1)

        counts = np.isfinite(rewards)
        if self.config.mask_truncated_completions:
            counts &= completions.finished
        batch = self.assemble(prompts, completions, counts, advantages)
        with watch.phase("logprob"):
            batch = self.with_policies(params, batch)
        self.num_tokens += int(np.count_nonzero(batch.segments))
        metrics = {
            "reward": float(judged.reward),
            "reward_std": float(judged.reward_std),
            "frac_reward_zero_std": float(judged.frac_reward_zero_std),
            **self.reward_metrics(scores),
            **completion_metrics(completions),
            "num_tokens": self.num_tokens,
        }
        samples = [
            {
                "prompt": question,
                "completion": text,
                "rewards": {name: number(value) for name, value in zip(self.reward_weights, values, strict=True)},
                "advantage": number(advantage),
            }
            for question, text, values, advantage in zip(questions, texts, scores.values.T, advantages, strict=True)
        ]
        return Step(batch, metrics, samples[: self.logged_samples])

    def assemble(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Completions,
        counts: Bool[np.ndarray, "B"],
        advantages: Float[np.ndarray, "B"],
    ) -> Batch:
        """Lay prompt and completion out in one row; a row that doesn't count keeps its tokens and weighs nothing."""
        lengths = [len(prompt) + int(length) for prompt, length in zip(prompts, completions.lengths, strict=True)]
        shape = (len(prompts), bucket(max(lengths)))
        tokens, labels, segments = (np.zeros(shape, np.int32) for _ in range(3))
        mask = np.zeros(shape, bool)
        row_advantages, sampler_logprobs = (np.zeros(shape, np.float32) for _ in range(2))
        for row, (prompt, total) in enumerate(zip(prompts, lengths, strict=True)):
            start, count = len(prompt), total - len(prompt)
            tokens[row, :start] = prompt
            tokens[row, start:total] = completions.tokens[row, :count]
            segments[row, :total] = 1
            predicts = slice(start - 1, total - 1)
            labels[row, predicts] = completions.tokens[row, :count]
            mask[row, predicts] = counts[row]
            row_advantages[row, predicts] = advantages[row]
            sampler_logprobs[row, predicts] = completions.logprobs[row, :count]
        weights = objectives.token_weights(
            self.config.loss_type,
            mask,
            group_size=self.config.num_generations,
            max_completion_length=self.sampler.options.max_completion_length,
        )
        positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
        return Batch(tokens, positions, segments, labels * mask, np.asarray(weights), row_advantages, sampler_logprobs)

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


def bucket(length: int) -> int:
    """The length that rows of `length` tokens are padded to: few different ones, so that little is compiled.

    A power of two, or the one between two of them: at most a third is padding beyond 16.
    """
    power = 16
    while power < length:
        power *= 2
    return power * 3 // 4 if power > 16 and length <= power * 3 // 4 else power


def completion_metrics(completions: Completions) -> dict[str, float]:
    lengths = completions.lengths
    return {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(1 - completions.finished.mean()),
    }


def number(value: float | np.floating[Any]) -> float | None:
    """JSON has no NaN: a reward that failed is null."""
    return float(value) if np.isfinite(value) else None
