"""Turns the answers of reward functions into rewards and metrics.

An answer is a number, a failure, or `NOT_APPLICABLE`. A failure leaves the completion without a reward. This module
must not import JAX.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from mllm.errors import printable

FAILURES = ("raised", "timed_out", "not_a_number")
NOT_APPLICABLE = "not_applicable"
"""The kind of answer if a function returns None: it does not apply to this completion. Neither a failure nor 0."""
Logged = tuple[Any, ...]
"""An entry logged by a function: `metric` or `extra`, a name and a value; or `turn` with an environment's reply, see
mllm/rewards/environments.py."""
Answer = tuple[str, float | str, *tuple[Logged, ...]]
"""A function's result for a completion: ("value", number), or one of FAILURES or NOT_APPLICABLE with a message;
logged entries follow."""
NOTHING: Answer = (NOT_APPLICABLE, "")
DIGITS = 14
"""Significant digits of rewards: sums of the same parts in two orders differ in later digits."""
LARGEST = 1e18
"""The largest reward: a group's rewards are compared in float32, which squares of larger numbers overflow."""


def judge(value: Any) -> tuple[str, float | str]:
    """The answer for a function's result. Text is no number, though numpy's strings have a `__float__`."""
    if value is None:
        return NOT_APPLICABLE, ""
    try:
        number = float("nan") if isinstance(value, str | bytes) else float(value)
    except Exception:  # 10**400, and objects without `__float__`
        number = float("nan")
    return ("value", number) if abs(number) <= LARGEST else ("not_a_number", f"returned {value!r:.300}")


def failed(answer: Answer) -> bool:
    return answer[0] in FAILURES


def number(answer: Answer) -> float:
    """The number in a function's answer; NaN where it failed or does not apply."""
    kind, value, *_ = answer
    return float(value) if kind == "value" else float("nan")


def totals(
    answers: Sequence[Sequence[Answer]], weights: Float[np.ndarray, "R"]
) -> tuple[Float[np.ndarray, "B"], Bool[np.ndarray, "B"]]:
    """The reward of each completion, from each function's answer, and whether a function failed.

    A reward is a weighted sum; NaN for no reward: a function failed, or no function applies to the completion. A
    completion without a reward is in no mean, and has no advantage. Functions of weight 0 are only logged. Sums are
    rounded, so that sums of the same parts in two orders are bit-identical, also a sum and 0.
    """
    kinds = np.array([[kind for kind, *_ in row] for row in answers])
    values = np.array([[number(answer) for answer in row] for row in answers])
    counts = weights != 0
    parts = np.where(counts & (kinds == "value"), weights * values, 0.0)
    largest = np.abs(parts).sum(axis=1).max(initial=1.0)
    sums = parts.sum(axis=1).round(DIGITS - math.ceil(math.log10(largest)))
    failed = (counts & np.isin(kinds, FAILURES)).any(axis=1)
    unscored = counts.any() & (~counts | (kinds == NOT_APPLICABLE)).all(axis=1)
    return np.where(failed | unscored, np.nan, sums), failed


def with_failures(values: Float[np.ndarray, "B"], failures: int) -> Float[np.ndarray, " K"]:
    """The values that aren't NaN, and for each failure 0 or their minimum, whichever is less: for evaluations."""
    known = values[~np.isnan(values)]
    return np.append(known, [min(known.min(), 0.0)] * failures) if known.size else known


def reward_metrics(
    names: Sequence[str], answers: Sequence[Sequence[Answer]], evaluates: bool = False
) -> dict[str, float]:
    """The metrics of each reward function: its own logged metrics, the mean and standard deviation of its values, and
    its number of failures.

    If `evaluates`, a failure counts as in `with_failures`.
    """
    metrics: dict[str, float] = {}
    for name, column in zip(names, zip(*answers, strict=True), strict=True):
        logged = defaultdict[str, list[float]](list)
        for kind, metric, value in itertools.chain.from_iterable(entries for _, _, *entries in column):
            if kind == "metric":
                logged[printable(metric)].append(float(value))
        metrics |= {f"rewards/{name}/{metric}": float(np.mean(values)) for metric, values in logged.items()}
        failures = sum(map(failed, column)) if evaluates else 0
        numbers = with_failures(np.array([number(answer) for answer in column]), failures)
        metrics[f"rewards/{name}/mean"] = float(numbers.mean()) if numbers.size else float("nan")
        metrics[f"rewards/{name}/std"] = float(numbers.std()) if numbers.size else float("nan")
        kinds = [kind for kind, *_ in column]
        metrics |= {f"rewards/{name}/{failure}": kinds.count(failure) for failure in FAILURES}
    return metrics
