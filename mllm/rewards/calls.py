"""Binds reward functions to their arguments, calls them, and turns their results into answers.

A function gets the arguments that it declares, by name. A function that declares `completions` or another plural is
batched: each argument is a list, and so is the result (TRL's contract). Coroutine functions run concurrently. A
required argument that doesn't exist is a UserError. This module must not import JAX.
"""

import asyncio
import inspect
import signal
import traceback
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

from mllm.data.tasks.task import Example, Task
from mllm.errors import UserError
from mllm.rewards.functions import BUILT_IN, find, math
from mllm.rewards.scores import Answer, Logged, failed, judge
from mllm.strict_json import whole_characters

LONGEST_MESSAGE, LONGEST_TEXT = 300, 1000
"""The most characters of an error, and of a text that a function logs."""


class ConversationResult(NamedTuple):
    """The outcome of a conversation with an environment or tools."""

    messages: list[dict[str, Any]]
    """The messages after the prompt."""
    values: Mapping[str, Any]
    """The environment's public attributes at the end."""
    tool_errors: int
    reward: Answer


class Sample(NamedTuple):
    """A completion with everything that a reward function may ask for."""

    example: Example
    completion: str
    tokens: "array[int]"
    """The completion's tokens, the stop token included: an array, since it is sent to another process."""
    truncated: bool
    """Whether it was cut off by `rollout.max_completion_length`."""
    thinks: bool = False
    """Whether the prompt has opened a thought (`<think>`)."""
    result: ConversationResult | None = None

    @property
    def failed(self) -> bool:
        """Whether the completion is a conversation with a failed environment."""
        return self.result is not None and failed(self.result.reward)


class Lost:
    """Replaces the environment of a failed conversation; every attribute is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def environment_of(sample: Sample) -> Any:
    """The public attributes of a conversation's environment at its end."""
    return Lost() if sample.failed else SimpleNamespace(**sample.result.values) if sample.result else None


def fields_of(task: Task) -> tuple[str, ...]:
    """The names of the fields that examples have besides prompts: `answer`, `solution` and the data's own."""
    examples = [*task.train, *task.heldout]
    basic = (name for name in ("answer", "solution") if any(getattr(example, name) is not None for example in examples))
    return tuple(dict.fromkeys([*basic, *(name for example in examples for name in example.fields)]))


def batched_completion(sample: Sample) -> Any:
    if sample.result and sample.example.conversational:
        return sample.result.messages
    return [{"role": "assistant", "content": sample.completion}] if sample.example.conversational else sample.completion


def data_field(sample: Sample, name: str) -> Any:
    """A field of the data; None where this record lacks it."""
    return sample.example.fields.get(name, sample.example.solution if name == "solution" else None)


Reader = Callable[[Sample], Any]
"""Reads an argument's value from a sample."""
EITHER: dict[str, Reader] = {
    "answer": lambda sample: sample.example.answer,
    "completion_ids": lambda sample: sample.tokens.tolist(),
    "length": lambda sample: len(sample.tokens),
    "thinks": lambda sample: sample.thinks,
    "truncated": lambda sample: sample.truncated,
}
SINGLE: dict[str, Reader] = {
    "prompt": lambda sample: sample.example.question,
    "completion": lambda sample: sample.completion,
    "example": lambda sample: sample.example,
}
BATCHED: dict[str, Reader] = {
    "prompts": lambda sample: sample.example.prompt if sample.example.conversational else sample.example.question,
    "completions": batched_completion,
    "examples": lambda sample: sample.example,
    "answers": lambda sample: sample.example.answer,
}
"""Arguments by name: `EITHER` for every function, `SINGLE` for unbatched and `BATCHED` for batched functions."""
OF_CONVERSATIONS: dict[str, Reader] = {
    "messages": lambda sample: sample.result.messages if sample.result else [],
    "tool_errors": lambda sample: sample.result.tool_errors if sample.result else 0,
    "environment": environment_of,
}
OF_CONVERSATIONS["environments"] = OF_CONVERSATIONS["environment"]  # TRL's name, in a batched function
"""Further fields of a conversation's sample."""
LOGS = ("log_extra", "log_metric")
"""Arguments that are functions, for every reward function."""


class Notes:
    """A call's logged values for each completion, by TRL's `log_extra` and `log_metric`."""

    def __init__(self, completions: int, batched: bool) -> None:
        self.batched = batched
        self.rows: list[list[Logged]] = [[] for _ in range(completions)]

    def log_extra(self, column: str, values: Any) -> None:
        """Add a column: a value for each completion, or one value if the function is not batched."""
        for row, value in zip(self.rows, values if self.batched else [values], strict=True):
            kind, judged = judge(value)
            text = whole_characters(str(value)[:LONGEST_TEXT])
            row.append(("extra", whole_characters(str(column)), judged if kind == "value" else text))

    def log_metric(self, name: str, value: Any) -> None:
        kind, judged = judge(value)
        if kind != "value":
            raise ValueError(f"log_metric: {name} is no number: {judged}")
        self.rows[0].append(("metric", whole_characters(str(name)), judged))


@dataclass(frozen=True)
class Reward:
    """A reward function that is bound to its arguments."""

    function: Callable[..., Any]
    batched: bool
    readers: Mapping[str, Reader]
    constants: Mapping[str, Any]
    file: str
    """The source file of a user's function; empty for a built-in function."""
    tools: ClassVar[Sequence[Any]] = ()
    run: ClassVar[Callable[..., Any]] = staticmethod(asyncio.run)

    @property
    def kind(self) -> str:
        """How the function is called: with one completion (`single`), with several (`quick`), or with all of them
        (`batched`, `async`).

        A function that may hang is `single`; a built-in function other than `math` is `quick`.
        """
        if inspect.iscoroutinefunction(self.function):
            return "async"
        quick = self.function in BUILT_IN.values() and self.function is not math
        return "batched" if self.batched else "quick" if quick else "single"

    def __call__(self, samples: Sequence[Sample], notes: Notes | None = None) -> Any:
        """The function's result for the samples; an unbatched function gets one sample."""
        if self.function not in BUILT_IN.values():  # it may change its arguments, and samples share their problem
            samples = [deepcopy(sample) for sample in samples]
        values: dict[str, Any] = {name: [read(sample) for sample in samples] for name, read in self.readers.items()}
        if not self.batched:
            values = {name: value for name, (value,) in values.items()}
        logs = {name: getattr(notes, name) for name in LOGS if notes and name in self.constants}
        return self.function(**values, **{**deepcopy(self.constants), **logs})


def bind(name: str, args: Mapping[str, Any], fields: Sequence[str], limit: int) -> Reward:
    """The reward function called `name`, with checked arguments; UserError if it can't be imported or called.

    `fields` are the names of the data's fields (see `fields_of`), `limit` is `rollout.max_completion_length`.
    """
    start = f"task.rewards: {name}"
    function = find(name)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise UserError(f"{start}: Python can't tell the arguments of this function") from None
    parameters = signature.parameters.values()
    declared = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
    batched = bool(declared & {*BATCHED, "environments"}) or (takes_all and not declared & SINGLE.keys())
    readers = {field: OF_CONVERSATIONS.get(field, partial(data_field, name=field)) for field in fields}
    own = (BATCHED if batched else SINGLE) | EITHER
    readers |= {key: read for key, read in own.items() if "answer" in fields or key not in ("answer", "answers")}
    constants = {"max_completion_length": limit} | dict.fromkeys(LOGS)
    known = [*readers, *constants]
    if given := [key for key in args if key in own or key in constants]:
        raise UserError(f"{start}: args.{given[0]}: the trainer gives this argument itself: remove it")
    wanted = {*known} if takes_all else declared
    values = {key: value for key, value in constants.items() if key in wanted} | dict(args)
    readers = {key: read for key, read in readers.items() if key in wanted - values.keys()}
    try:
        signature.bind(**readers, **values)
    except TypeError as error:
        way_out = f"there are {', '.join(known)}; args gives further ones, and task.columns.answer names the answer"
        raise UserError(f"{start}: {error}; {way_out}") from None
    reward = Reward(function, batched, readers, values, "" if name in BUILT_IN else file_of(function))
    if name in BUILT_IN:
        try_out(start, reward)
    return reward


def bind_all(named: Sequence[tuple[str, Mapping[str, Any]]], *arguments: Any) -> list[Reward]:
    """`bind` for each name and its `args`; the other arguments are as for `bind`."""
    return [bind(name, args, *arguments) for name, args in named]


def file_of(function: Callable[..., Any]) -> str:
    """The source file of a function or class; empty if Python knows no file."""
    try:
        return inspect.getfile(inspect.unwrap(function))
    except TypeError:
        return ""


def try_out(start: str, reward: Reward) -> None:
    """Call a built-in function once; UserError if its `args` don't work."""
    example = Example([{"role": "user", "content": "1="}], "1", None)
    try:
        reward([Sample(example, "1", array("i", [0]), False)])
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{start}: {error}") from None


def answers(rewards: Sequence[Any], samples: Sequence[Any], seconds: float = 0.0) -> Iterator[Answer]:
    """Each function's answer for each sample, function by function. Several functions must all be coroutine functions.

    A `Player` of environments is also a function; its samples are moves.

    Coroutine calls time out when no call has ended for `seconds` (times the samples of a batched call). The trainer
    limits the time of every other call.
    """
    calls = [
        (reward, part, Notes(len(part), reward.batched))
        for reward in rewards
        for part in ([samples] if reward.batched else [[sample] for sample in samples])
    ]
    results: Iterable[Any] = (call(*arguments) for arguments in calls)
    if rewards[0].kind == "async":
        limit = seconds * max(len(part) for _, part, _ in calls)
        results = rewards[0].run(run_together([reward(part, notes) for reward, part, notes in calls], limit))
    for (reward, part, notes), returned in zip(calls, results, strict=True):
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm left by one function must not go off in the next
        for (kind, value), logged in zip(judge_all(reward, returned, len(part)), notes.rows, strict=True):
            yield kind, value, *logged


def call(reward: Any, samples: Sequence[Any], notes: Notes) -> Any:
    """The function's result, or the exception that it raises."""
    try:
        return reward(samples, notes)
    except BaseException as error:  # SystemExit too: only this call has failed
        return error


async def run_together(coroutines: Sequence[Awaitable[Any]], limit: float) -> list[Any]:
    """The coroutines' results, or the exceptions that they raise."""

    async def finish(coroutine: Awaitable[Any]) -> Any:
        try:
            return await coroutine
        except BaseException as error:
            return error

    tasks = [asyncio.create_task(finish(coroutine)) for coroutine in coroutines]
    left = {*tasks}
    while left:
        ended, left = await asyncio.wait(left, timeout=limit or None, return_when=asyncio.FIRST_COMPLETED)
        for task in () if ended else left:
            task.cancel(f"took longer than {limit:g} s")
    return await asyncio.gather(*tasks)


def judge_all(reward: Any, returned: Any, samples: int) -> Iterable[tuple[str, float | str]]:
    """The answers for `samples` samples; if the call failed, every answer is the same failure."""
    try:
        if isinstance(returned, asyncio.CancelledError):
            failure = "timed_out", str(returned)
        elif isinstance(returned, BaseException):
            failure = "raised", describe(returned, reward.file)
        elif reward.batched and isinstance(returned, Mapping | Set | bytes):
            failure = "not_a_number", f"returned no list of numbers: a {type(returned).__name__}"
        elif len(values := list(returned) if reward.batched else [returned]) == samples:
            return map(judge, values)
        else:
            failure = "not_a_number", f"returned no list of numbers: {len(values)} values for {samples} completions"
    except BaseException as error:
        failure = "not_a_number", f"returned no list of numbers: {describe(error)}"
    return [failure] * samples


def describe(error: BaseException, file: str = "") -> str:
    """The error's kind and message, and the last line of the file that led to it."""
    try:
        lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
        location = f" ({Path(file).name}:{lines[-1]})" if lines else ""
        return f"{type(error).__name__}: {error!s:.{LONGEST_MESSAGE}}{location}"
    except BaseException:
        return "an exception that can't be printed"
