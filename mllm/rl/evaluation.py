"""Accuracy on problems that training never sees, with its confidence interval."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import binomtest

from mllm.data.tasks import Example
from mllm.model.tokenizer import encode_prompt
from mllm.parallel.processes import ALL_ROWS, RowShare
from mllm.rl.reward_functions import exact_match, flexible_match
from mllm.rl.sampler import EVALUATION, Sampler


def evaluate(
    sampler: Sampler, params: Any, examples: Sequence[Example], *, step: int, sampled: bool, rows: RowShare = ALL_ROWS
) -> dict[str, float]:
    """Complete each problem greedily and, if `sampled`, once at the rollout's temperature; each process its share.

    Returns:
        `eval/greedy_accuracy` (the task's exact form) with the ends `_low` and `_high` of its 95 % interval,
        `eval/greedy_flexible_accuracy` (its last number), the mean length in tokens; likewise `eval/sampled_...`.
    """
    share = -(-len(examples) // rows.count)
    mine = examples[rows.index * share :][:share]
    # Every process completes as many; what stands in for a missing one is dropped below.
    mine = [*mine, *[examples[0]] * (share - len(mine))]
    prompts = [encode_prompt(sampler.tokenizer, example.prompt) for example in mine]
    first = EVALUATION + rows.index * share
    metrics: dict[str, float] = {}
    for mode in ("greedy", "sampled") if sampled else ("greedy",):
        completions, texts = sampler.complete(params, prompts, step=step, first=first, greedy=mode == "greedy")
        answered = [(e.prompt[-1]["content"], text, e) for e, text in zip(mine, texts, strict=True)]
        matches = [(exact_match(*answer) == 1, flexible_match(*answer) == 1) for answer in answered]
        said = rows.gather((np.array(matches), completions.lengths))
        (exact, flexible), lengths = (np.concatenate(part)[: len(examples)].T for part in zip(*said, strict=True))
        correct = int(exact.sum())
        low, high = wilson(correct, len(examples))
        metrics |= {
            f"eval/{mode}_accuracy": correct / len(examples),
            f"eval/{mode}_accuracy_low": low,
            f"eval/{mode}_accuracy_high": high,
            f"eval/{mode}_flexible_accuracy": int(flexible.sum()) / len(examples),
            f"eval/{mode}_mean_length": float(lengths.mean()),
        }
    return metrics


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of a proportion (Wilson 1927): sound at 0 and 1, where the normal one is empty."""
    interval = binomtest(successes, trials).proportion_ci(confidence_level=0.95, method="wilson")
    return float(interval.low), float(interval.high)
