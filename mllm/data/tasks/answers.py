"""How a completion states its answer."""

import re

from mllm.config.answer_form import AnswerForm

HASHES = re.compile(r"#### (-?[.,]*[0-9][0-9.,]*+)(?![ \t]*(?:[/^×÷]|[-+−*:=eE_]{0,2}[ \t]*[0-9]))")
"""GSM8K's own answer pattern (grade_school_math/dataset.py), except that the 3 of 3/4, 3e5 or 3 000 doesn't match."""
OPEN, CLOSE = "<answer>", "</answer>"
THINK, THOUGHT = "<think>", "</think>"
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
    parts, end = list[str](), 0
    while (start := text.find(THINK, end)) >= 0:
        parts.append(text[end:start])
        close = text.find(THOUGHT, start)
        end = close + len(THOUGHT) if close >= 0 else len(text)
    return "".join([*parts, text[end:]]).rpartition(THOUGHT)[2]


def last_element(completion: str) -> str:
    """The content of the last <answer> element, or the whole text without such an element.

    A regular expression would search the rest of the text once for every <answer> that is not closed.
    """
    end, content = 0, completion
    while (start := completion.find(OPEN, end)) >= 0 and (end := completion.find(CLOSE, start)) >= 0:
        content = completion[start + len(OPEN) : end].rpartition(OPEN)[2]
    return content


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
