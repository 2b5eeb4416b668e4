"""What a reward function's answer means: for its completion, for the sum of rewards, and for metrics.

An answer is a number, a failure, or says that the function does not apply. A failure leaves the completion without a
reward. JAX must not be imported here.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from mllm.errors import printable

FAILURES = ("raised", "timed_out", "not_a_number")
NOT_APPLICABLE = "not_applicable"
"""The kind of None: the function says nothing of this completion, which is neither failure nor 0."""
Logged = tuple[Any, ...]
"""What a function logged: `metric` or `extra`, a name and a value; and `turn` with what an environment said, see
mllm/rewards/environments.py."""
Answer = tuple[str, float | str, *tuple[Logged, ...]]
"""What a function gave for a completion: ("value", number), or one of FAILURES or NOT_APPLICABLE, and a message; what
it logged with it follows."""
NOTHING: Answer = (NOT_APPLICABLE, "")
LARGEST = 1e18
"""The largest reward: squares of larger ones overflow the float32 in which a group's rewards are compared."""


def judge(value: Any) -> tuple[str, float | str]:
    """The answer for what a function returned. Text is no number, though numpy's has a `__float__`."""
    if value is None:
        return NOT_APPLICABLE, ""
    try:
        number = float("nan") if isinstance(value, str | bytes) else float(value)
    except Exception:  # 10**400, and what has no `__float__`
        number = float("nan")
    return ("value", number) if abs(number) <= LARGEST else ("not_a_number", f"returned {value!r:.300}")


def failed(answer: Answer) -> bool:
    return answer[0] in FAILURES


def number(answer: Answer) -> float:
    """The number in a function's answer; NaN where it failed or does not apply."""
    kind, value, *_ = answer
    return float(value) if kind == "value" else float("nan")


def weighted_sum(answers: Sequence[Sequence[Answer]], weights: Float[np.ndarray, "R"]) -> Float[np.ndarray, "B"]:
    """Each completion's reward; NaN where a function failed whose weight is not 0. What does not apply adds nothing."""
    values = np.array([[number(answer) for answer in row] for row in answers])
    nothing = np.array([[kind == NOT_APPLICABLE for kind, *_ in row] for row in answers])
    return np.where((weights == 0) | nothing, 0.0, weights * values).sum(axis=1)


def reward_metrics(names: Sequence[str], answers: Sequence[Sequence[Answer]]) -> dict[str, float]:
    """For each reward function what it logs, the mean and deviation of its values, and how often it failed."""
    metrics: dict[str, float] = {}
    for name, column in zip(names, zip(*answers, strict=True), strict=True):
        logged = defaultdict[str, list[float]](list)
        for kind, metric, value in itertools.chain.from_iterable(entries for _, _, *entries in column):
            if kind == "metric":
                logged[printable(metric)].append(float(value))
        metrics |= {f"rewards/{name}/{metric}": float(np.mean(values)) for metric, values in logged.items()}
        numbers = np.array([number(answer) for answer in column if answer[0] == "value"])
        metrics[f"rewards/{name}/mean"] = float(numbers.mean()) if numbers.size else float("nan")
        metrics[f"rewards/{name}/std"] = float(numbers.std()) if numbers.size else float("nan")
        kinds = [kind for kind, *_ in column]
        metrics |= {f"rewards/{name}/{failure}": kinds.count(failure) for failure in FAILURES}
    return metrics
