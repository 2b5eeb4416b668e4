"""The built-in reward functions, and the lookup of a user's functions by name.

A function takes its arguments by name: see calls.py. This module must not import JAX.
"""

import importlib
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from mllm.data.tasks.answers import THINK, final_answer, last_element, without_thoughts
from mllm.data.tasks.task import Example
from mllm.errors import UserError, need

NUMBER = re.compile(
    r"(?:(?<![\w.)%])[-−])?[$€£¥]?(?:(?<=[$€£¥])[-−])?(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|\.[0-9]+)"
)
"""A number in a text. A minus after a letter, digit, `.`, `)` or `%` is a subtraction, not a sign. A comma separates
thousands if exactly three digits follow, even if more than three digits precede it."""
THINK_ANSWER = re.compile(
    r"\s*<think>(?:(?!</?(?:think|answer)>).)*</think>\s*<answer>(?:(?!</?(?:think|answer)>).)*</answer>\s*", re.DOTALL
)
MATH_SECONDS = 1


def exact_match(completion: str, answer: str | None, example: Example, thinks: bool = False) -> float:
    """1 if the final answer, extracted by `task.answer_form`, equals the reference answer as a string, else 0.

    `thinks` says whether the prompt has opened a thought. Text inside a thought is ignored.
    """
    return float(final_answer(THINK * thinks + completion, example.answer_form) == required(answer))


def flexible_match(completion: str, answer: str | None, example: Example, thinks: bool = False) -> float:
    """1 if the last number of the completion has the value of the answer, else 0.

    As in lm-evaluation-harness (tasks/gsm8k), but 1,234 is one number, and 7.0 equals 7. An answer that is not a
    number is matched exactly. Text inside a thought is ignored.
    """
    if not NUMBER.fullmatch(required(answer)):
        return exact_match(completion, answer, example, thinks)
    visible_text = without_thoughts(THINK * thinks + completion)
    return float(last_number(visible_text) == last_number(required(answer)))


def required(answer: str | None) -> str:
    """The answer; ValueError if this problem has no answer, though other problems of the task have answers."""
    if answer is None:
        raise ValueError("this problem has no answer")
    return answer


def last_number(text: str) -> Decimal | None:
    """The value of the last number in the text; None if the text has no number."""
    numbers = NUMBER.findall(text)
    if not numbers:
        return None
    magnitude = Decimal(re.sub(r"[^0-9.]", "", numbers[-1]))
    # Not -magnitude, which rounds to 28 digits.
    return magnitude.copy_negate() if re.search("[-−]", numbers[-1]) else magnitude


def math(completion: str, answer: str | None, thinks: bool = False) -> float:
    """1 if math-verify finds the completion's result equal to the answer, else 0.

    The result is the content of the last <answer> element, or else math-verify's choice: the last \\boxed{}, formula or
    number. Text inside a thought is ignored. A completion that math-verify can't parse within a second is wrong; an
    answer that it can't parse raises ValueError. The time limits are alarms, which only the main thread may set.
    """
    need("math_verify", "math", "task.rewards: math")
    from math_verify import parse, verify

    def read(text: str, is_formula: bool) -> Any:
        marked = is_formula and not re.search(r"\$|\\boxed", text)
        return parse(f"\\boxed{{{text}}}" if marked else text, parsing_timeout=MATH_SECONDS)

    expected = read(required(answer), True)
    if not expected:
        raise ValueError(f"math-verify can't read the answer {answer}")
    visible_text = without_thoughts(THINK * thinks + completion)
    result = last_element(visible_text)
    return float(verify(expected, read(result, result is not visible_text), timeout_seconds=MATH_SECONDS))


def think_answer_format(completion: str, thinks: bool = False) -> float:
    """1 if the completion is <think>...</think><answer>...</answer> (arXiv:2501.12948, section 2.2.2), else 0.

    If `thinks`, the prompt already has the first tag.
    """
    return float(THINK_ANSWER.fullmatch(THINK * thinks + completion) is not None)


def overlong(length: int, max_completion_length: int, cache: int) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13): 0, falling to -1 over the last `cache` tokens."""
    if not 0 < cache <= max_completion_length:
        raise ValueError(f"cache is {cache}, expected 1 to rollout.max_completion_length ({max_completion_length})")
    return max(-1.0, min(0.0, (max_completion_length - cache - length) / cache))


BUILT_IN: dict[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "flexible_match": flexible_match,
    "math": math,
    "format": think_answer_format,
    "overlong": overlong,
}


def find(name: str) -> Callable[..., Any]:
    """The built-in reward function `name`, or the imported `package.module:function`; UserError if there is none."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        known = f"{', '.join(BUILT_IN)}, or package.module:function"
        raise UserError(f"task.rewards: there is no reward {name}: {known}")
    return imported("task.rewards", name)


def imported(key: str, name: str) -> Callable[..., Any]:
    """Import the function or class `package.module:function` that a setting names; UserError if that fails."""
    module, _, function = name.partition(":")
    try:
        target = getattr(importlib.import_module(module), function)
    except BaseException as error:  # importing a module may raise anything, SystemExit included
        raise UserError(f"{key}: {name} can't be imported: {type(error).__name__}: {error}") from None
    if not callable(target):
        raise UserError(f"{key}: {name} is not a function")
    return target
