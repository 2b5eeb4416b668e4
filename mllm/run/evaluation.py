"""Evaluation on held-out problems: rewards, and accuracy with its confidence interval if problems have answers."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from jaxtyping import Bool, Float

from mllm.config.task import EvalConfig, TaskConfig
from mllm.data.prompts import usable_prompts
from mllm.data.tasks.task import Example
from mllm.model.layout import Params
from mllm.parallel.processes import RowShare
from mllm.rewards.runner import RewardRunner
from mllm.rewards.scores import number, reward_metrics, totals, with_failures
from mllm.sampler.sampler import Sampler
from mllm.sampler.trajectories import sample_trajectories, turn_metrics
from mllm.stopwatch import Stopwatch

FIRST_SEQUENCE = 2**30
Z = 1.959963984540054
"""The normal distribution's 97.5 % quantile."""


def make_evaluation(
    options: EvalConfig,
    task: TaskConfig,
    problems: Sequence[Example],
    sampler: Sampler,
    rewards: RewardRunner,
    rows: RowShare,
    prefix: str = "eval/",
) -> Callable[[Params, int], dict[str, float]]:
    """A function (parameters, step) -> metrics that evaluates on the problems.

    Each problem is completed greedily, and k = `options.samples` times at the rollout's temperature. Metrics begin with
    `prefix`; for sampled completions `sampled_` follows:

        reward                  the mean reward; a failed reward counts as 0, or as the lowest reward if it is less
        rewards/NAME/...        each reward function's metrics
        environment/mean_turns, tools/...    of conversations
        greedy_mean_length      tokens of a completion
        greedy_accuracy         if all problems have answers and the task has a judge (`TaskConfig.judge`)
        avg@k, pass@j           likewise, of sampled completions; j = k and the powers of two below it

    Accuracies have the ends of their 95 % interval, `_low` and `_high`. Prompts longer than `rollout.max_prompt_length`
    are left out; UserError as in `usable_prompts`.
    """
    title = f"{prefix.strip('/')} prompts of task {task.name}"
    prompts = usable_prompts(problems, sampler.renderer, sampler.options.max_prompt_length, title)
    sample = partial(sample_trajectories, sampler, rewards, first_sequence=FIRST_SEQUENCE, rows=rows, fixed=True)
    judge = task.judge if all(prompt.example.answer is not None for prompt in prompts) else None

    def evaluate(params: Params, step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for mode, k in (("greedy", 1), ("sampled", options.samples))[: 1 + bool(options.samples)]:
            repeated = [prompt for prompt in prompts for _ in range(k)]
            trajectories = sample(repeated, params, step=step, watch=Stopwatch(), greedy=mode == "greedy", group=k)
            answers = [reply.rewards for reply in trajectories]
            reward, failed = totals(answers, rewards.weights)
            total = with_failures(reward, int(failed.sum()))
            start = prefix if mode == "greedy" else f"{prefix}sampled_"
            metrics[f"{start}reward"] = float(total.mean()) if total.size else float("nan")
            logged = reward_metrics(rewards.names, answers, evaluates=True) | turn_metrics(trajectories)
            metrics |= {f"{start}{name}": value for name, value in logged.items()}
            metrics[f"{prefix}{mode}_mean_length"] = float(np.mean([len(reply.logprobs) for reply in trajectories]))
            if judge is not None:
                correct = np.array([number(row[judge]) == 1 for row in answers]).reshape(-1, k)
                shares = {"greedy_accuracy" if mode == "greedy" else f"avg@{k}": correct.mean(axis=1)}
                js = [j for j in range(2, k + 1) if j == k or j.bit_count() == 1]
                shares |= {f"pass@{j}": pass_at(j, correct) for j in js}
                for name, values in shares.items():
                    low, high = interval(values, k)
                    ends = {f"{prefix}{name}_low": low, f"{prefix}{name}_high": high}
                    metrics |= {f"{prefix}{name}": float(values.mean()), **ends}
        return metrics

    return evaluate


def pass_at(j: int, correct: Bool[np.ndarray, "P k"]) -> Float[np.ndarray, " P"]:
    """Per problem, the unbiased estimate that one of j completions is right (Chen et al. 2021, eq. 1)."""
    k = correct.shape[1]
    return np.array([1 - math.comb(k - int(row.sum()), j) / math.comb(k, j) for row in correct])


def interval(values: Float[np.ndarray, " P"], k: int) -> tuple[float, float]:
    """The 95 % interval of the mean over problems, each measured by k completions.

    It is Wilson's interval for the number of independent trials that has the mean's variance (Kish 1965), 1 to k per
    problem.
    """
    share, count = float(values.mean()), len(values)
    trials = float(np.clip(share * (1 - share) * count / max(values.var(), 1e-12), count, count * k))
    return wilson(share * trials, trials)


def wilson(successes: float | int, trials: float | int) -> tuple[float, float]:
    """The 95 % interval of a proportion (Wilson 1927; Newcombe 1998, method 3), also valid at 0 and 1."""
    share, denominator = successes / trials, 2 * (trials + Z**2)
    center = (2 * trials * share + Z**2) / denominator
    half_width = Z / denominator * math.sqrt(4 * trials * share * (1 - share) + Z**2)
    return 0.0 if successes == 0 else center - half_width, 1.0 if successes == trials else center + half_width
