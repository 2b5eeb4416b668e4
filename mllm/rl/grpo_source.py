"""GRPO's source of batches: prompts from the task, completions from the policy, advantages from their rewards."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Shaped

from mllm.config.grpo import GrpoConfig
from mllm.config.schema import Config, Rows
from mllm.config.task import TaskConfig
from mllm.data.batch import Batch
from mllm.data.iteration import DataIterator
from mllm.data.packing import Sequence, pack
from mllm.data.prompts import PromptBatch, prompt_batches
from mllm.data.source import Step
from mllm.data.tasks.task import Task
from mllm.errors import StepError
from mllm.model.layout import Params
from mllm.model.load import Policy
from mllm.parallel.mesh import shard_batch
from mllm.parallel.processes import ALL_ROWS, RowShare, raise_everywhere
from mllm.rl.reward_worker import FAILURES
from mllm.rl.rewards import Failure, RewardRunner
from mllm.rl.rollout import Completions
from mllm.rl.sampler import Sampler
from mllm.stopwatch import Stopwatch
from mllm.train import objectives
from mllm.train.step import make_logprob_pass


def make_grpo_source(
    config: Config,
    policy: Policy,
    mesh: Mesh,
    task: Task,
    sampler: Sampler,
    rewards: RewardRunner,
    poll: Callable[[], None],
) -> "GrpoSource":
    """The source of a run, without the parameters of a reference; UserError as for `prompt_batches`."""
    assert config.grpo is not None
    assert config.task is not None
    rows = RowShare.of_mesh(mesh)
    prompts = prompt_batches(
        task,
        policy.tokenizer,
        prompts_per_step=config.batch_size // config.grpo.num_generations,
        max_prompt_length=sampler.options.max_prompt_length,
        seed=config.seed,
        process_index=rows.index,
        process_count=rows.count,
    )
    logprob_pass = make_logprob_pass(policy.graphdef, config, mesh)
    return GrpoSource(
        config.grpo,
        config.task,
        prompts,
        sampler,
        rewards,
        lambda params, batch: logprob_pass(params, shard_batch(mesh, batch)),
        config.rows,
        logged_samples=config.log.samples,
        rows=rows,
        poll=poll,
    )


class ScoredCompletions(NamedTuple):
    """The completions that one process sampled and scored, or those of all processes, in arrays that concatenate."""

    questions: Shaped[np.ndarray, "B"]
    texts: Shaped[np.ndarray, "B"]
    tokens: Int[np.ndarray, " tokens"]
    """One sequence after the other, each a prompt and its completion."""
    logprobs: Float[np.ndarray, " sampled"]
    """The sampler's, of the completions' tokens."""
    prompt_lengths: Int[np.ndarray, "B"]
    lengths: Int[np.ndarray, "B"]
    """Numbers of tokens, without the prompt's."""
    finished: Bool[np.ndarray, "B"]
    rewards: Float[np.ndarray, "B R"]
    """What each function gave; NaN where it failed."""
    failures: Shaped[np.ndarray, " failures"]


@dataclass
class GrpoSource:
    """Samples completions, scores them, and gives the batch that the update learns from.

    Each process samples and scores its own rows and then learns the rewards of all. A group in which a reward
    failed is left out of the loss. One rollout serves `num_iterations` updates; a checkpoint must fall between
    rollouts. Completions that can't have a gradient, because their advantage is 0 and there is neither a KL penalty nor
    an entropy bonus, are left out of the batch; the weights of the others are those of the whole batch.
    """

    config: GrpoConfig
    task: TaskConfig
    prompts: DataIterator[PromptBatch]
    sampler: Sampler
    rewards: RewardRunner
    logprob_pass: Callable[[Params, Batch], Float[Array, "B T"]]
    update_rows: Rows
    reference: Params | None = None
    logged_samples: int | None = None
    rows: RowShare = ALL_ROWS
    poll: Callable[[], None] = lambda: None
    """Called again and again while rewards are computed; what it raises passes through."""
    num_tokens: int = 0
    updates_without_gradient: int = 0
    current: Step | None = None

    @property
    def reward_weights(self) -> dict[str, float]:
        return {reward.name: reward.weight for reward in self.task.rewards}

    def next(self, params: Params, step: int, watch: Stopwatch) -> Step:
        """The data of update `step`. Raises StepError where rewards failed in too many groups."""
        first = self.current is None or step % self.config.num_iterations == 0
        if first:
            self.current = self.roll_out(params, step, watch)
        assert self.current is not None
        self.updates_without_gradient += self.current.metrics["frac_without_gradient"] == 1
        metrics = self.current.metrics | {"updates_without_gradient": self.updates_without_gradient}
        return replace(self.current, metrics=metrics, samples=self.current.samples if first else [])

    def roll_out(self, params: Params, step: int, watch: Stopwatch) -> Step:
        """Sample and score a group of completions for each of the next prompts."""
        group = self.config.num_generations
        problems = next(self.prompts)
        prompts = [tokens for tokens in problems.tokens for _ in range(group)]
        examples = [example for example in problems.examples for _ in range(group)]
        with watch.phase("rollout"):
            first = self.rows.index * len(prompts)
            completions, texts = self.sampler.complete(params, prompts, step=step, first_sequence=first)
        with watch.phase("reward"):
            questions = [example.prompt[-1]["content"] for example in examples]
            with raise_everywhere():
                scores = self.rewards.score(questions, texts, examples, self.poll)
            mine = ScoredCompletions(
                np.array(questions, object),
                np.array(texts, object),
                *flat(prompts, completions),
                np.array([len(prompt) for prompt in prompts]),
                completions.lengths,
                completions.finished,
                scores.values.T,
                np.array(scores.failures, object),
            )
            scored = ScoredCompletions(*map(np.concatenate, zip(*self.rows.gather(mine), strict=True)))
        rewards = weighted_sum(scored.rewards, np.array(list(self.reward_weights.values()))).reshape(-1, group)
        failed = np.isnan(rewards).any(axis=1)
        if failed.mean() > self.task.max_failed_groups:
            raise self.too_many_failures(scored.failures, f"{failed.sum()} of {failed.size}")
        rewards[failed] = np.nan  # the completions that were scored have no known mean to be compared with
        compared = objectives.advantages(rewards, self.config.scale_rewards)
        advantages = np.asarray(compared.values).reshape(-1)

        excluded = np.repeat(failed, group)
        counts = ~excluded
        if self.config.mask_truncated_completions:
            counts &= scored.finished
        learned = self.sequences(scored, np.where(counts, scored.lengths, 0), advantages)
        with watch.phase("logprob"):
            batch = self.add_policy_logprobs(params, self.make_batch(learned))
        tokens = int(scored.prompt_lengths.sum() + scored.lengths.sum())
        self.num_tokens += tokens
        metrics = {
            "reward": float(compared.reward),
            "reward_std": float(compared.reward_std),
            "frac_reward_zero_std": float(compared.frac_reward_zero_std),
            "frac_groups_failed": float(failed.mean()),
            "frac_without_gradient": 1 - len(learned) / counts.size,
            **self.reward_metrics(scored),
            "completions/mean_length": float(scored.lengths.mean()),
            "completions/min_length": float(scored.lengths.min()),
            "completions/max_length": float(scored.lengths.max()),
            "completions/clipped_ratio": float(1 - scored.finished.mean()),
            "num_tokens": self.num_tokens,
        }
        logged_advantages = np.where(excluded, np.nan, advantages)
        samples = [
            {
                "prompt": prompt,
                "completion": text,
                "rewards": dict(zip(self.reward_weights, map(finite, row), strict=True)),
                "advantage": finite(advantage),
            }
            for prompt, text, row, advantage in zip(
                scored.questions, scored.texts, scored.rewards, logged_advantages, strict=True
            )
        ]
        return Step(batch, metrics, samples[: self.logged_samples], tokens)

    def too_many_failures(self, failures: Iterable[Failure], groups: str) -> StepError:
        """The error for failures in `groups`; it quotes the most frequent kind among rewards whose weight is not 0."""
        messages = [((f.name, f.kind), f.message) for f in failures if self.reward_weights[f.name] != 0]
        (name, kind), count = Counter(key for key, _ in messages).most_common(1)[0]
        first = dict(reversed(messages))[name, kind]
        return StepError(
            f"task.max_failed_groups: a reward failed in {groups} groups, and at most {self.task.max_failed_groups:g} "
            f"of them may; {name} {kind} {count} times, first: {first}; mend the function, or raise the limit"
        )

    def sequences(
        self, scored: ScoredCompletions, tokens: Int[np.ndarray, "B"], advantages: Float[np.ndarray, "B"]
    ) -> list[Sequence]:
        """The sequences that may have a gradient; `tokens` is how many of a completion's tokens count, all or none."""
        limit = self.sampler.options.max_completion_length
        weights = objectives.sequence_weights(self.config.loss_type, tokens, self.config.num_generations, limit)
        learned = tokens > 0
        if self.config.beta == 0 and self.config.entropy_coef == 0:
            learned &= advantages != 0
        whole = np.split(scored.tokens, np.cumsum(scored.prompt_lengths + scored.lengths)[:-1])
        logprobs = np.split(scored.logprobs, np.cumsum(scored.lengths)[:-1])
        return [Sequence(whole[i], logprobs[i], weights[i], advantages[i]) for i in np.flatnonzero(learned)]

    def make_batch(self, sequences: list[Sequence]) -> Batch:
        """This process's rows of the packed batch of all processes."""
        share = self.update_rows.total // self.rows.count
        mine = slice(self.rows.index * share, (self.rows.index + 1) * share)
        return jax.tree.map(lambda array: array[mine], pack(sequences, self.update_rows))

    def add_policy_logprobs(self, params: Params, batch: Batch) -> Batch:
        """The batch with the log-probabilities under other policies that the objective needs."""
        if self.config.num_iterations > 1:
            batch = batch._replace(old_logprobs=self.logprob_pass(params, batch))
        if self.reference is not None:
            batch = batch._replace(reference_logprobs=self.logprob_pass(self.reference, batch))
        return jax.block_until_ready(batch)

    def reward_metrics(self, scored: ScoredCompletions) -> dict[str, float]:
        """For each reward function the mean and deviation of its values, and how often it failed."""
        metrics: dict[str, float] = {}
        counts = Counter((failure.name, failure.kind) for failure in scored.failures)
        for name, values in zip(self.reward_weights, scored.rewards.T, strict=True):
            sound = values[np.isfinite(values)]
            metrics[f"rewards/{name}/mean"] = float(sound.mean()) if sound.size else float("nan")
            metrics[f"rewards/{name}/std"] = float(sound.std()) if sound.size else float("nan")
            metrics |= {f"rewards/{name}/{kind}": counts[name, kind] for kind in FAILURES}
        return metrics

    def position(self) -> dict[str, Any]:
        counts = {"num_tokens": self.num_tokens, "updates_without_gradient": self.updates_without_gradient}
        return {"prompts": self.prompts.get_state(), **counts}

    def seek(self, position: Mapping[str, Any]) -> None:
        self.prompts.set_state(position["prompts"])
        self.num_tokens = position["num_tokens"]
        self.updates_without_gradient = position.get("updates_without_gradient", 0)

    def resumable(self, step: int) -> bool:
        return step % self.config.num_iterations == 0


def flat(
    prompts: list[list[int]], completions: Completions
) -> tuple[Int[np.ndarray, " tokens"], Float[np.ndarray, " sampled"]]:
    """The tokens of all sequences, one after the other, and the log-probabilities of those that were sampled."""
    sampled = [row[:length] for row, length in zip(completions.tokens, completions.lengths, strict=True)]
    tokens = [part for both in zip(prompts, sampled, strict=True) for part in both]
    kept = np.arange(completions.logprobs.shape[1]) < completions.lengths[:, None]
    return np.concatenate(tokens, dtype=np.int32), completions.logprobs[kept]


def weighted_sum(values: Float[np.ndarray, "B R"], weights: Float[np.ndarray, "R"]) -> Float[np.ndarray, "B"]:
    """Each completion's reward; NaN where a function failed whose weight is not 0."""
    return np.where(weights == 0, 0.0, weights * values).sum(axis=1)


def finite(value: float | np.floating[Any]) -> float | None:
    """The value for JSON, which has no NaN: None for a failed reward and for the advantages of its group."""
    return float(value) if np.isfinite(value) else None
