"""Accuracy on problems that training never sees, with its confidence interval."""

from collections.abc import Sequence
from typing import Any

from scipy.stats import binomtest

from mllm.rewards import exact_match, flexible_match
from mllm.sampler import EVALUATION, Sampler
from mllm.tasks import Example
from mllm.tokenizer import encode_prompt


def evaluate(
    sampler: Sampler, params: Any, examples: Sequence[Example], *, step: int, sampled: bool
) -> dict[str, float]:
    """Complete each problem greedily and, if `sampled`, once at the rollout's temperature.

    Returns:
        `eval/greedy_accuracy` (the task's exact form) with the ends `_low` and `_high` of its 95 % interval,
        `eval/greedy_flexible_accuracy` (its last number), the mean length in tokens; likewise `eval/sampled_...`.
    """
    prompts = [encode_prompt(sampler.tokenizer, example.prompt) for example in examples]
    metrics: dict[str, float] = {}
    for mode in ("greedy", "sampled") if sampled else ("greedy",):
        completions, texts = sampler.complete(params, prompts, step=step, first=EVALUATION, greedy=mode == "greedy")
        answered = [(e.prompt[-1]["content"], text, e) for e, text in zip(examples, texts, strict=True)]
        correct = sum(exact_match(*answer) == 1 for answer in answered)
        flexible = sum(flexible_match(*answer) == 1 for answer in answered)
        low, high = wilson(correct, len(examples))
        metrics |= {
            f"eval/{mode}_accuracy": correct / len(examples),
            f"eval/{mode}_accuracy_low": low,
            f"eval/{mode}_accuracy_high": high,
            f"eval/{mode}_flexible_accuracy": flexible / len(examples),
            f"eval/{mode}_mean_length": float(completions.lengths.mean()),
        }
    return metrics


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of a proportion (Wilson 1927): sound at 0 and 1, where the normal one is empty."""
    interval = binomtest(successes, trials).proportion_ci(confidence_level=0.95, method="wilson")
    return float(interval.low), float(interval.high)
