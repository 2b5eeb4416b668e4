"""The built-in reward functions, how others are found by name, and what is asked over HTTP.

A function takes its arguments by name: see reward_process. No JAX is imported here.
"""

import contextlib
import http.client
import importlib
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from types import SimpleNamespace
from typing import Any

from mllm.config.task import REWARD_TOKEN
from mllm.data.tasks.answers import final_answer, last_element
from mllm.data.tasks.task import Example, Scorer
from mllm.errors import UserError, need

NUMBER = re.compile(
    r"(?:(?<![\w.)%])[-−])?[$€£¥]?(?:(?<=[$€£¥])[-−])?(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|\.[0-9]+)"
)
"""A minus is a sign only if nothing precedes it that it could be subtracted from. A comma separates thousands if
exactly three digits follow, even if the digits before it lack one."""
THINK_ANSWER = re.compile(
    r"\s*<think>(?:(?!</?(?:think|answer)>).)*</think>\s*<answer>(?:(?!</?(?:think|answer)>).)*</answer>\s*", re.DOTALL
)
MATH_SECONDS = 1
PAUSES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each further request to a server that failed."""
LONGEST_ANSWER = 2**26
QUOTED = 200
NOT_SENT = ("examples", "answer", "environments", "log_extra", "log_metric")
"""Arguments that a server does not get: three of them it has by other names."""


def exact_match(completion: str, answer: str | None, example: Example) -> float:
    """1 if the completion states the answer, letter by letter, in the form that the task asks for, else 0."""
    return float(final_answer(completion, example.answer_form) == required(answer))


def flexible_match(completion: str, answer: str | None, example: Example) -> float:
    """1 if the last number of the completion equals the answer's, however the two are written, else 0.

    As in lm-evaluation-harness (tasks/gsm8k), but 1,234 is one number, and 7.0 equals 7. An answer that is not a
    number is matched exactly.
    """
    if not NUMBER.fullmatch(required(answer)):
        return exact_match(completion, answer, example)
    return float(last_number(completion) == last_number(required(answer)))


def required(answer: str | None) -> str:
    """The answer; ValueError where a problem has none, though others of its task do."""
    if answer is None:
        raise ValueError("this problem has no answer")
    return answer


def last_number(text: str) -> Decimal | None:
    """The last number of the text, its sign, thousands' commas and decimals read; None if it has none."""
    found = NUMBER.findall(text)
    if not found:
        return None
    magnitude = Decimal(re.sub(r"[^0-9.]", "", found[-1]))
    # Not -magnitude, which rounds to 28 digits.
    return magnitude.copy_negate() if re.search("[-−]", found[-1]) else magnitude


def math(completion: str, answer: str | None) -> float:
    """1 if the completion's result equals the answer mathematically, as math-verify reads the two, else 0.

    The result is the content of the last <answer> element, or else what math-verify finds: the last \\boxed{}, formula
    or number. A completion that it can't read, or not within a second, is wrong; an answer that it can't read raises
    ValueError. Its time limits are alarms, which only a process's main thread may set.
    """
    need("math_verify", "math", "task.rewards: math")
    from math_verify import parse, verify

    def read(text: str, is_formula: bool) -> Any:
        marked = is_formula and not re.search(r"\$|\\boxed", text)
        return parse(f"\\boxed{{{text}}}" if marked else text, parsing_timeout=MATH_SECONDS)

    expected = read(required(answer), True)
    if not expected:
        raise ValueError(f"math-verify can't read the answer {answer}")
    result = last_element(completion)
    return float(verify(expected, read(result, result is not completion), timeout_seconds=MATH_SECONDS))


def think_answer_format(completion: str) -> float:
    """1 if all of it is <think>...</think><answer>...</answer> (arXiv:2501.12948, section 2.2.2), else 0."""
    return float(THINK_ANSWER.fullmatch(completion) is not None)


def overlong(length: int, max_completion_length: int, cache: int) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13): 0, which falls to -1 over the last `cache` tokens."""
    if not 0 < cache <= max_completion_length:
        raise ValueError(f"cache is {cache}, expected 1 to rollout.max_completion_length ({max_completion_length})")
    return min(0.0, (max_completion_length - cache - length) / cache)


BUILT_IN: dict[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "flexible_match": flexible_match,
    "math": math,
    "format": think_answer_format,
    "overlong": overlong,
}


def find(name: str, scorer: Scorer | None) -> Callable[..., Any]:
    """The reward function called `name` (`package.module:function` is imported); UserError where it can't be had."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name == "task":
        if scorer is None:
            raise UserError("task.rewards: this task has no scorer of its own: use exact_match or flexible_match")
        return scorer
    if name.startswith("url:"):
        return partial(post, *server(name))
    if ":" not in name:
        known = f"{', '.join(BUILT_IN)}, task, package.module:function, or url:..."
        raise UserError(f"task.rewards: there is no reward {name}: {known}")
    return imported("task.rewards", name)


def server(name: str) -> tuple[str, str]:
    """The address in `url:...`, and the secret for it; UserError where no header can hold that."""
    token = os.environ.get(REWARD_TOKEN, "")
    if not token.isascii() or not token.isprintable():
        raise UserError(f"{REWARD_TOKEN}: no header can hold its line ends or special characters: remove them")
    return name.removeprefix("url:"), token


def imported(key: str, name: str) -> Callable[..., Any]:
    """The function or class `package.module:function` that a setting names; UserError where there is none."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except BaseException as error:  # a module may do anything when it's imported, exit too
        raise UserError(f"{key}: {name} can't be imported: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise UserError(f"{key}: {name} is not a function")
    return found


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would send completions and the token to a place that the configuration does not name."""

    def redirect_request(self, *_: Any) -> None:
        return None


def post(url: str, token: str, /, **arguments: Any) -> list[Any]:
    """The rewards that the server gives for a batch, where null says that it does not apply to a completion.

    The request's body is a JSON object with a batched function's arguments, except for `examples`; the answer is
    a list, or an object with the list `rewards`.
    """
    return listed_rewards(ask(url, token, {name: arguments[name] for name in arguments if name not in NOT_SENT}))


def ask(url: str, token: str, body: Mapping[str, Any], seconds: float | None = None) -> bytes:
    """What the server answers to a JSON object.

    Connections that fail, and the statuses 429 and 5xx, are tried again; any other status raises. `seconds` limit the
    wait for each byte; the limit for all of it is the caller's, who ends the process.
    """

    def plain(value: Any) -> Any:
        return vars(value) if isinstance(value, SimpleNamespace) else str(value)

    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(url, json.dumps(body, default=plain).encode(), headers)
    for pause in (*PAUSES, None):
        try:
            with urllib.request.build_opener(NoRedirects).open(request, timeout=seconds) as response:
                answer: bytes = response.read(LONGEST_ANSWER)
                return answer
        except urllib.error.HTTPError as error:
            said = error.read(QUOTED).decode(errors="replace")
            followed = ", and no redirect is followed" * (error.code in range(300, 400))
            problem = f"HTTP {error.code} {error.reason}{followed}: {said}"
            if error.code != 429 and error.code < 500:
                raise ValueError(problem) from None
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError) as error:
            problem = f"{type(error).__name__}: {error}"
        if pause is not None:
            time.sleep(pause)
    raise ConnectionError(f"{len(PAUSES) + 1} tries: {problem}")


def listed_rewards(answer: bytes) -> list[Any]:
    """The list in a server's answer; ValueError where there is none."""
    found = None
    with contextlib.suppress(ValueError):
        found = json.loads(answer)
    found = found.get("rewards") if isinstance(found, dict) else found
    if not isinstance(found, list):
        text = answer[:QUOTED].decode(errors="replace")
        raise ValueError(f"expected a JSON list, or an object with the list rewards; the answer was {text!r}")
    return found
