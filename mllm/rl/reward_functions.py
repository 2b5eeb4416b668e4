"""Reward functions: (prompt, completion, example) -> float. Their process imports this file without JAX."""

import importlib
import re
from collections.abc import Callable
from decimal import Decimal

from mllm.data.tasks.answers import final_answer
from mllm.data.tasks.task import Example, Scorer
from mllm.errors import UserError

Reward = Callable[[str, str, Example], float]

NUMBER = re.compile(
    r"(?:(?<![\w.)%])[-−])?[$€£¥]?(?:(?<=[$€£¥])[-−])?(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|\.[0-9]+)"
)
"""A minus is a sign only if nothing precedes it that it could be subtracted from. A comma separates thousands if
exactly three digits follow, even if the digits before it lack one."""
THINK_ANSWER = re.compile(
    r"\s*<think>(?:(?!</?(?:think|answer)>).)*</think>\s*<answer>(?:(?!</?(?:think|answer)>).)*</answer>\s*", re.DOTALL
)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def exact_match(prompt: str, completion: str, example: Example) -> float:
    """1 if the completion states the answer, letter by letter, in the form that the task asks for, else 0."""
    return float(example.answer is not None and final_answer(completion, example.answer_form) == example.answer)


def flexible_match(prompt: str, completion: str, example: Example) -> float:
    """1 if the last number of the completion equals the answer's, however the two are written, else 0.

    As in lm-evaluation-harness (tasks/gsm8k), but 1,234 is one number, and 7.0 equals 7. An answer that is not a
    number is matched exactly.
    """
    if example.answer is None or not NUMBER.fullmatch(example.answer):
        return exact_match(prompt, completion, example)
    return float(last_number(completion) == last_number(example.answer))


def last_number(text: str) -> Decimal | None:
    """The last number of the text, its sign, thousands' commas and decimals read; None if it has none."""
    found = NUMBER.findall(text)
    if not found:
        return None
    magnitude = Decimal(re.sub(r"[^0-9.]", "", found[-1]))
    # Not -magnitude, which rounds to 28 digits.
    return magnitude.copy_negate() if re.search("[-−]", found[-1]) else magnitude


def think_answer_format(prompt: str, completion: str, example: Example) -> float:
    """1 if all of it is <think>...</think><answer>...</answer> (arXiv:2501.12948, section 2.2.2), else 0."""
    return float(THINK_ANSWER.fullmatch(completion) is not None)


def tag_count(prompt: str, completion: str, example: Example) -> float:
    """The share of the four tags that occur exactly once: Open-R1's `tag_count_reward`, but line breaks are ignored."""
    return sum(completion.count(tag) == 1 for tag in TAGS) / len(TAGS)


BUILT_IN: dict[str, Reward] = {
    "exact_match": exact_match,
    "flexible_match": flexible_match,
    "format": think_answer_format,
    "tag_count": tag_count,
}


def find(name: str, scorer: Scorer | None) -> Reward:
    """The reward function called `name` (`package.module:function` is imported); UserError where it can't be had."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name == "task":
        if scorer is None:
            raise UserError("task.rewards: this task has no scorer of its own: use exact_match or flexible_match")
        return scorer
    module, colon, function = name.partition(":")
    if not colon:
        raise UserError(
            f"task.rewards: there is no reward {name}: {', '.join(BUILT_IN)}, task, or package.module:function"
        )
    try:
        found = getattr(importlib.import_module(module), function)
    except BaseException as error:  # a module may do anything when it's imported, exit too
        raise UserError(f"task.rewards: {name} can't be imported: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise UserError(f"task.rewards: {name} is not a function")
    return found
