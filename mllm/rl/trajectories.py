"""Prompts are completed and scored: trajectories, which all processes know, and what is logged of them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from mllm.data.batch import Trajectory
from mllm.data.prompts import Prompt
from mllm.errors import StepError
from mllm.model.layout import Params
from mllm.parallel.processes import RowShare, raise_everywhere
from mllm.rl.rewards import Failure, RewardRunner, reward_metrics, weighted_sum
from mllm.rl.rollout import Sampler
from mllm.stopwatch import Stopwatch

MOST_FAILED_GROUPS = 0.5
"""The share of a step's groups that a failed reward may leave out of the update; a larger one stops the run."""


def sample_trajectories(
    sampler: Sampler,
    rewards: RewardRunner,
    prompts: Sequence[Prompt],
    params: Params,
    *,
    step: int,
    first_sequence: int,
    rows: RowShare,
    watch: Stopwatch,
    greedy: bool = False,
) -> tuple[list[Trajectory], list[Failure]]:
    """Complete and score each prompt once; each process scores its share, and learns the scores of all.

    Prompt i draws from the stream (seed, step, first_sequence + i). The failures are the calls of reward functions
    that gave no number.
    """
    tokens = [prompt.tokens for prompt in prompts]
    with watch.phase("rollout"):
        completions = sampler.complete(params, tokens, step=step, first_sequence=first_sequence, greedy=greedy)
    mine = rows.part_of(len(prompts))
    with watch.phase("reward"):
        with raise_everywhere():
            scores = rewards.score([prompt.example for prompt in prompts[mine]], completions.part(mine))
        shares = rows.gather(scores)
    values, kinds = (np.concatenate(parts) for parts in zip(*((one.values, one.kinds) for one in shares), strict=True))
    made = []
    for i, (prompt, length) in enumerate(zip(prompts, completions.lengths, strict=True)):
        made.append(
            Trajectory(
                np.concatenate([prompt.tokens, completions.tokens[i, :length]], dtype=np.int32),
                np.arange(len(prompt.tokens) + length) >= len(prompt.tokens),
                completions.logprobs[i, :length],
                None if completions.kept is None else completions.kept[i, :length],
                bool(completions.finished[i]),
                prompt.example.prompt[-1]["content"],
                completions.texts[i],
                values[i],
                tuple(kinds[i]),
            )
        )
    return made, [failure for scores in shares for failure in scores.failures]


def group_rewards(
    trajectories: Sequence[Trajectory],
    failures: Sequence[Failure],
    names: Sequence[str],
    weights: Float[np.ndarray, "R"],
    group: int,
) -> Float[np.ndarray, "G n"]:
    """The weighted sum of each completion's rewards, by groups of `group` one after the other.

    All are NaN in a group in which a reward with a weight failed, for the completions that were scored have no known
    mean to be compared with. Raises StepError where more than the share `MOST_FAILED_GROUPS` of the groups failed.
    """
    rewards = weighted_sum(*reward_arrays(trajectories), weights).reshape(-1, group)
    failed = np.isnan(rewards).any(axis=1)
    if failed.mean() > MOST_FAILED_GROUPS:
        weighted = {name for name, weight in zip(names, weights, strict=True) if weight}
        raise too_many_failures([f for f in failures if f.name in weighted], f"{failed.sum()} of {failed.size}")
    return np.where(failed[:, None], np.nan, rewards)


def reward_arrays(trajectories: Sequence[Trajectory]) -> tuple[Float[np.ndarray, "B R"], np.ndarray]:
    """What each function gave for each trajectory, and of which kind that is."""
    kinds = np.array([trajectory.reward_kinds for trajectory in trajectories], object)
    return np.stack([trajectory.rewards for trajectory in trajectories]), kinds


def too_many_failures(failures: Sequence[Failure], groups: str) -> StepError:
    """The error for failures in `groups`; it quotes the first failure of the most frequent function and kind."""
    (name, kind), count = Counter((f.name, f.kind) for f in failures).most_common(1)[0]
    first = next(f.message for f in failures if (f.name, f.kind) == (name, kind))
    return StepError(
        f"task.rewards: a reward failed in {groups} groups, and in at most {MOST_FAILED_GROUPS:.0%} of them it may; "
        f"{name} {kind} {count} times, first: {first}; correct the function"
    )


def completion_metrics(trajectories: Sequence[Trajectory], names: Sequence[str]) -> dict[str, float]:
    """For each reward function the mean and deviation of its values, and how often it failed; lengths."""
    lengths = np.array([len(trajectory.logprobs) for trajectory in trajectories])
    metrics = {
        **reward_metrics(names, *reward_arrays(trajectories)),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(1 - np.mean([trajectory.finished for trajectory in trajectories])),
    }
    kept = [trajectory.kept for trajectory in trajectories if trajectory.kept is not None]
    if kept:
        metrics["sampling/kept_probability/mean"] = float(np.concatenate(kept).mean())
    return metrics


def sample_line(trajectory: Trajectory, names: Sequence[str], advantage: float) -> dict[str, Any]:
    """The line of samples.jsonl; null for a reward that failed or does not apply, and for a NaN advantage."""
    return {
        "prompt": trajectory.prompt,
        "completion": trajectory.text,
        "rewards": dict(zip(names, map(finite, trajectory.rewards), strict=True)),
        "advantage": finite(advantage),
    }


def finite(value: float | np.floating[Any]) -> float | None:
    """The value for JSON, which has no NaN."""
    return float(value) if np.isfinite(value) else None
