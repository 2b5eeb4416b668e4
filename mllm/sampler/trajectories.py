"""Trajectories: prompts are completed and scored, in all processes alike, and logged."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import numpy as np
from jaxtyping import Float

from mllm.config.task import ENVIRONMENT
from mllm.data.batch import Trajectory
from mllm.data.prompts import Prompt
from mllm.errors import StepError, printable
from mllm.model.layout import Params
from mllm.parallel.processes import RowShare, raise_everywhere
from mllm.rewards.calls import Sample
from mllm.rewards.runner import RewardRunner
from mllm.rewards.scores import FAILURES, number, reward_metrics, totals
from mllm.sampler.completion import Completion
from mllm.sampler.conversations import Conversation, Conversations
from mllm.sampler.sampler import Sampler
from mllm.stopwatch import Stopwatch

MAX_FAILED_SHARE = 0.5
"""The share of a step's completions with a failed reward that is allowed; more stop the run."""


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
    group: int = 1,
    fixed: bool = False,
) -> list[Trajectory]:
    """Complete and score each prompt once; each process scores its share, and receives all scores.

    Finished completions are scored while other completions decode; conversations as well, once they are over.

    No `group` of prompts is scored in parts: a batched function may compare its completions.

    Prompt i draws from the stream (seed, step, first_sequence + i). Environments begin as `Conversations` says, `fixed`
    or not.
    """
    local = range(len(prompts))[rows.part_of(len(prompts), group)]
    tokens = [[*prompt.tokens] for prompt in prompts]
    talk: Conversations | None = None

    def sample_of(i: int, reply: Completion) -> Sample:
        prompt = prompts[i]
        if talk:
            return talk.conversations[i].sample(prompt.example)
        return Sample(prompt.example, reply.text, reply.tokens, not reply.finished, prompt.thinks)

    with rewards.scoring(len(local)) as scoring, ExitStack() as stack:

        def ended(finished: Mapping[int, Completion]) -> None:
            known = [i for i in finished if i in local and not (talk and i in talk.ends)]
            scoring.add({i - local.start: sample_of(i, finished[i]) for i in known})

        with watch.phase("rollout"):
            where: dict[str, Any] = {"step": step, "first_sequence": first_sequence}
            options: dict[str, Any] = {**where, "greedy": greedy, "ended": ended}
            if rewards.environments:
                talk = Conversations(
                    rewards, sampler.renderer, sampler.options, sampler.seed, rows, group, **where, fixed=fixed
                )
                options["conversations"] = stack.enter_context(talk)
                tokens = talk.start(prompts)
            completions = sampler.complete(params, tokens, **options)
            conversations = talk.finish() if talk else []
        with watch.phase("reward"):
            with raise_everywhere():
                scored = scoring.finish([sample_of(i, completions[i]) for i in local])
            answers = chain(*rows.gather(scored))
    return [
        trajectory(prompt, reply, answer, conversations[number] if conversations else None)
        for number, (prompt, reply, answer) in enumerate(zip(prompts, completions, answers, strict=True))
    ]


def trajectory(
    prompt: Prompt, reply: Completion, answers: Sequence[Sequence[Any]], conversation: Conversation | None
) -> Trajectory:
    """A completion and its rewards; a conversation has all tokens and messages."""
    tokens, sampled = [*prompt.tokens, *reply.tokens], [False] * len(prompt.tokens) + [True] * len(reply.tokens)
    return Trajectory(
        np.array(conversation.tokens if conversation else tokens, np.int32),
        np.array(conversation.sampled if conversation else sampled),
        np.array(reply.logprobs, np.float32),
        None if reply.kept is None else np.array(reply.kept, np.float32),
        np.array(reply.norms, np.float32),
        conversation.finished if conversation else reply.finished,
        conversation.prompt[-1]["content"] if conversation else prompt.example.question,
        conversation.assistant[-1]["content"] if conversation else reply.text,
        conversation.thinks if conversation else prompt.thinks,
        [tuple(answer) for answer in answers],  # lists, where another process sent them
        conversation.messages if conversation else (),
    )


def group_rewards(
    trajectories: Sequence[Trajectory], functions: RewardRunner, group: int, most_failed: float = MAX_FAILED_SHARE
) -> Float[np.ndarray, "G n"]:
    """The reward of each completion, as in `totals`, by groups of `group` one after the other.

    Raises StepError if the rewards of more than the share `most_failed` of the completions failed. The error quotes the
    first failure of the most frequent function and kind.
    """
    rewards, failed = totals([trajectory.rewards for trajectory in trajectories], functions.weights)
    if failed.mean() > most_failed:
        failures = [
            (name, kind, message)
            for index, (name, weight) in enumerate(zip(functions.names, functions.weights, strict=True))
            for kind, message, *_ in (trajectory.rewards[index] for trajectory in trajectories)
            if weight and kind in FAILURES
        ]
        (most, count), *_ = Counter(failure[:2] for failure in failures).most_common(1)
        name, kind, message = next(failure for failure in failures if failure[:2] == most)
        share = f"{failed.sum()} of {failed.size} completions, and for at most {most_failed:.0%} of them it may"
        first = f"{name} {kind} {count} times, first: {message}"
        key = functions.environments[0].key if name == ENVIRONMENT else "task.rewards"
        raise StepError(f"{key}: a reward failed for {share}; {first}; correct it")
    return rewards.reshape(-1, group)


def completion_metrics(trajectories: Sequence[Trajectory], names: Sequence[str]) -> dict[str, float]:
    """For each reward function the mean and deviation of its values, and how often it failed; lengths; turns, tools."""
    lengths = np.array([len(trajectory.logprobs) for trajectory in trajectories])
    metrics = {
        **reward_metrics(names, [trajectory.rewards for trajectory in trajectories]),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(1 - np.mean([trajectory.finished for trajectory in trajectories])),
    }
    metrics |= turn_metrics(trajectories)
    kept = [trajectory.kept for trajectory in trajectories if trajectory.kept is not None]
    if kept:
        metrics["sampling/kept_probability/mean"] = float(np.concatenate(kept).mean())
    return metrics


def turn_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean number of turns, and the frequency and failures of tool calls; empty without conversations."""
    if not (talks := [trajectory.turns for trajectory in trajectories if trajectory.turns]):
        return {}
    messages = [*chain.from_iterable(talks)]
    roles, errors = Counter(turn["role"] for turn in messages), sum(turn.get("tool_errors", 0) for turn in messages)
    return {
        "environment/mean_turns": roles["assistant"] / len(talks),
        "tools/call_frequency": roles["tool"] / len(talks),
        "tools/failure_frequency": errors / max(roles["tool"], 1),
    }


def sample_line(trajectory: Trajectory, functions: RewardRunner, advantage: float) -> dict[str, Any]:
    """The line of samples.jsonl; null for a reward that failed or does not apply, and for a NaN advantage."""
    logged = chain.from_iterable(entries for _, _, *entries in trajectory.rewards)
    extra = {
        printable(column): printable(value, "\n\t") if isinstance(value, str) else value
        for kind, column, value in logged
        if kind == "extra"
    }
    return {
        "prompt": trajectory.prompt,
        "completion": trajectory.text,
        "rewards": dict(zip(functions.names, map(finite, map(number, trajectory.rewards)), strict=True)),
        "reward": finite(totals([trajectory.rewards], functions.weights)[0][0]),
        "advantage": finite(advantage),
        "length": len(trajectory.logprobs),
        "truncated": not trajectory.finished,
        **({"extra": extra} if extra else {}),
        **({"turns": [*trajectory.turns]} if trajectory.turns else {}),
    }


def finite(value: float) -> float | None:
    """The value for JSON, which has no NaN."""
    return float(value) if np.isfinite(value) else None
