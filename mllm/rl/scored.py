"""Completions with their rewards, as all processes know them, and what is logged of them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from mllm.errors import StepError
from mllm.rl.rewards import Failure, reward_metrics, weighted_sum
from mllm.rl.rollout import Completions

MOST_FAILED_GROUPS = 0.5
"""The share of a step's groups that a failed reward may leave out of the update; a larger one stops the run."""


class ScoredCompletions(NamedTuple):
    """The completions that one process sampled and scored, or those of all processes, in arrays that concatenate."""

    questions: Shaped[np.ndarray, "B"]
    texts: Shaped[np.ndarray, "B"]
    tokens: Int[np.ndarray, " tokens"]
    """One sequence after the other, each a prompt and its completion."""
    logprobs: Float[np.ndarray, " sampled"]
    """The sampler's, of the completions' tokens."""
    kept: Float[np.ndarray, " sampled"] | Float[np.ndarray, "0"]
    """The probability that top-k and top-p kept at each of these tokens; empty with neither of them."""
    prompt_lengths: Int[np.ndarray, "B"]
    lengths: Int[np.ndarray, "B"]
    """Numbers of tokens, without the prompt's."""
    finished: Bool[np.ndarray, "B"]
    rewards: Float[np.ndarray, "B R"]
    """What each function gave; NaN where it failed or does not apply."""
    reward_kinds: Shaped[np.ndarray, "B R"]
    failures: Shaped[np.ndarray, " failures"]

    def sequences(self) -> tuple[list[Int[np.ndarray, " tokens"]], list[Float[np.ndarray, " completion"]]]:
        """Each sequence's tokens, and each completion's log-probabilities under the sampler."""
        ends = np.cumsum(self.prompt_lengths + self.lengths)[:-1], np.cumsum(self.lengths)[:-1]
        return np.split(self.tokens, ends[0]), np.split(self.logprobs, ends[1])


def concatenate(parts: Iterable[ScoredCompletions]) -> ScoredCompletions:
    return ScoredCompletions(*map(np.concatenate, zip(*parts, strict=True)))


def flat(
    prompts: list[list[int]], completions: Completions
) -> tuple[Int[np.ndarray, " tokens"], Float[np.ndarray, " sampled"], Float[np.ndarray, " kept"]]:
    """The tokens of all sequences, one after the other; log-probabilities and kept probabilities of the sampled."""
    sampled = [row[:length] for row, length in zip(completions.tokens, completions.lengths, strict=True)]
    tokens = [part for both in zip(prompts, sampled, strict=True) for part in both]
    counts = np.arange(completions.logprobs.shape[1]) < completions.lengths[:, None]
    kept = np.zeros(0, np.float32) if completions.kept is None else completions.kept[counts]
    return np.concatenate(tokens, dtype=np.int32), completions.logprobs[counts], kept


def group_rewards(scored: ScoredCompletions, weights: dict[str, float], group: int) -> Float[np.ndarray, "G n"]:
    """The weighted sum of each completion's rewards, by groups; all NaN in a group in which a reward with a weight
    failed, for the completions that were scored have no known mean to be compared with.

    Raises StepError where more than the share `MOST_FAILED_GROUPS` of the groups failed.
    """
    rewards = weighted_sum(scored.rewards, scored.reward_kinds, np.array(list(weights.values()))).reshape(-1, group)
    failed = np.isnan(rewards).any(axis=1)
    if failed.mean() > MOST_FAILED_GROUPS:
        raise too_many_failures(scored.failures, weights, f"{failed.sum()} of {failed.size}")
    return np.where(failed[:, None], np.nan, rewards)


def too_many_failures(failures: Iterable[Failure], weights: dict[str, float], groups: str) -> StepError:
    """The error for failures in `groups`; it quotes the most frequent kind among rewards whose weight is not 0."""
    messages = [((f.name, f.kind), f.message) for f in failures if weights[f.name] != 0]
    (name, kind), count = Counter(key for key, _ in messages).most_common(1)[0]
    first = dict(reversed(messages))[name, kind]
    return StepError(
        f"task.rewards: a reward failed in {groups} groups, and in at most {MOST_FAILED_GROUPS:.0%} of them it may; "
        f"{name} {kind} {count} times, first: {first}; correct the function"
    )


def completion_metrics(scored: ScoredCompletions, names: Sequence[str]) -> dict[str, float]:
    """For each reward function the mean and deviation of its values, and how often it failed; lengths."""
    metrics = {
        **reward_metrics(names, scored.rewards, scored.reward_kinds),
        "completions/mean_length": float(scored.lengths.mean()),
        "completions/min_length": float(scored.lengths.min()),
        "completions/max_length": float(scored.lengths.max()),
        "completions/clipped_ratio": float(1 - scored.finished.mean()),
    }
    if scored.kept.size:
        metrics["sampling/kept_probability/mean"] = float(scored.kept.mean())
    return metrics


def sample_lines(
    scored: ScoredCompletions,
    names: Sequence[str],
    chosen: Int[np.ndarray, " chosen"],
    advantages: Float[np.ndarray, "B"],
) -> list[dict[str, Any]]:
    """The lines of samples.jsonl for the chosen completions; null for a reward that failed or does not apply,
    and for a NaN advantage."""
    return [
        {
            "prompt": scored.questions[i],
            "completion": scored.texts[i],
            "rewards": dict(zip(names, map(finite, scored.rewards[i]), strict=True)),
            "advantage": finite(advantages[i]),
        }
        for i in chosen
    ]


def finite(value: float | np.floating[Any]) -> float | None:
    """The value for JSON, which has no NaN."""
    return float(value) if np.isfinite(value) else None
