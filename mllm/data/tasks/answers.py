"""How a completion states its answer."""

import re

from mllm.config.answer_form import AnswerForm

HASHES = re.compile(r"#### (-?[.,]*[0-9][0-9.,]*+)(?![ \t]*(?:[/^×÷]|[-+−*:=eE_]{0,2}[ \t]*[0-9]))")
"""GSM8K's own answer pattern (grade_school_math/dataset.py), except that the 3 of 3/4, 3e5 or 3 000 doesn't match."""
ELEMENT = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
THINK, THOUGHT = "<think>", "</think>"
WHOLE_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
BOXED = "\\boxed{"
STATED = {"whole": "{}", "hashes": "#### {}", "tags": "<answer>{}</answer>", "boxed": "\\boxed{{{}}}"}
"""The text that states an answer in each form."""


def final_answer(completion: str, form: AnswerForm) -> str | None:
    r"""The final answer in a completion, by the form; None if the completion states no answer.

    `whole`: the stripped completion. `hashes`: the number of the last `#### N` as in GSM8K, without commas. `tags`: the
    content of the last <answer> element, or the whole completion without such an element. `boxed`: the content of the
    last \boxed{...} with paired braces. Text inside a thought is ignored.
    """
    completion = without_thoughts(completion)
    match form:
        case "hashes":
            matches = HASHES.findall(completion)
            return matches[-1].replace(",", "").rstrip(".") if matches else None
        case "tags":
            return last_element(completion).strip()
        case "boxed":
            return last_box(completion)
        case _:
            return completion.strip()


def without_thoughts(text: str) -> str:
    """The text without its thoughts; the first thought may lack its opening tag, the last its closing tag."""
    return WHOLE_THOUGHT.sub("", text).rpartition(THOUGHT)[2]


def last_element(completion: str) -> str:
    """The content of the last <answer> element, or the whole text without such an element."""
    return (ELEMENT.findall(completion) or [completion])[-1]


def last_box(completion: str) -> str | None:
    r"""The content of the last \boxed{...}; None if there is none or its braces aren't closed."""
    start = completion.rfind(BOXED)
    if start < 0:
        return None
    depth = 1
    for position in range(start + len(BOXED), len(completion)):
        depth += {"{": 1, "}": -1}.get(completion[position], 0)
        if depth == 0:
            return completion[start + len(BOXED) : position].strip()
    return None
