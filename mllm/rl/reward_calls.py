"""How a reward function is found by its name and called: with the arguments that it declares, by their names.

A function that names `completions` or another plural is batched: each argument is a list, and so is what it returns
(TRL's contract). What a signature needs and there isn't is a UserError. No JAX is imported here.
"""

import asyncio
import importlib
import inspect
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mllm.data.tasks.task import Example, Scorer, Task
from mllm.errors import UserError
from mllm.rl.reward_functions import BUILT_IN, post


class Sample(NamedTuple):
    """A completion, and what a reward function may know about it."""

    example: Example
    completion: str
    tokens: "array[int]"
    """The completion's, the stop token included: an array, since it is sent to another process."""
    truncated: bool
    """Whether it was cut off by `rollout.max_completion_length`."""


class Available(NamedTuple):
    """What a run has for its reward functions, besides the samples."""

    fields: tuple[str, ...]
    """The names of the data's further fields."""
    answers: bool
    """Whether the task's problems have answers."""
    max_completion_length: int

    @classmethod
    def of_task(cls, task: Task, max_completion_length: int) -> "Available":
        """What the task's examples have; of problems that are made on demand, one is looked at."""
        parts = [part if isinstance(part, list) else part[:1] for part in (task.train, task.heldout)]
        examples = [example for part in parts for example in part]
        fields = dict.fromkeys(name for example in examples for name in example.fields)
        if any(example.solution is not None for example in examples):
            fields["solution"] = None
        answers = any(example.answer is not None for example in examples)
        return cls(tuple(fields), answers, max_completion_length)


def batched_prompt(sample: Sample) -> Any:
    """The messages of a conversational example, else the text."""
    return sample.example.prompt if sample.example.conversational else sample.example.prompt[-1]["content"]


def batched_completion(sample: Sample) -> Any:
    return [{"role": "assistant", "content": sample.completion}] if sample.example.conversational else sample.completion


def data_field(sample: Sample, name: str) -> Any:
    """A further field of the data: None where this record lacks one that others have."""
    return sample.example.fields.get(name, sample.example.solution if name == "solution" else None)


Reader = Callable[[Sample], Any]
"""What an argument is for a sample."""
EITHER: dict[str, Reader] = {
    "answer": lambda sample: sample.example.answer,
    "completion_ids": lambda sample: sample.tokens.tolist(),
    "length": lambda sample: len(sample.tokens),
    "truncated": lambda sample: sample.truncated,
}
SINGLE: dict[str, Reader] = {
    "prompt": lambda sample: sample.example.prompt[-1]["content"],
    "completion": lambda sample: sample.completion,
    "example": lambda sample: sample.example,
}
BATCHED: dict[str, Reader] = {
    "prompts": batched_prompt,
    "completions": batched_completion,
    "examples": lambda sample: sample.example,
    "answers": lambda sample: sample.example.answer,
}
"""The arguments of any function, of one that is called for each completion, and of a batched one, by their names."""


@dataclass(frozen=True)
class Reward:
    """A reward function that is bound to its arguments."""

    function: Callable[..., Any]
    batched: bool
    readers: Mapping[str, Reader]
    constants: Mapping[str, Any]
    code: str
    """A checksum of the file that a user's function is in; empty for any other function."""

    def __call__(self, samples: Sequence[Sample]) -> Any:
        """What the function returns for the samples: for all of them if it is batched, else for the only one."""
        values: dict[str, Any] = {name: [read(one) for one in samples] for name, read in self.readers.items()}
        if not self.batched:
            values = {name: value for name, (value,) in values.items()}
        result = self.function(**values, **self.constants)
        return asyncio.run(result) if inspect.iscoroutinefunction(self.function) else result


def bind(name: str, args: Mapping[str, Any], scorer: Scorer | None, available: Available) -> Reward:
    """The reward function called `name`, its signature checked; UserError if it can't be had or called."""
    start = f"task.rewards: {name}"
    function = find(name, scorer)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise UserError(f"{start}: Python can't tell the arguments of this function") from None
    declared = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
    batched = bool(declared & BATCHED.keys()) or (takes_all and not declared & SINGLE.keys())
    fixed = (BATCHED if batched else SINGLE) | EITHER
    if not available.answers:
        fixed = {given: read for given, read in fixed.items() if given not in ("answer", "answers")}
    constants = {"max_completion_length": available.max_completion_length}
    readers = {field: partial(data_field, name=field) for field in available.fields} | fixed
    names = {*readers, *constants}
    for key in args:
        if key in fixed or key in constants:
            raise UserError(f"{start}: args.{key}: the trainer gives this argument itself: remove it")
        if key not in declared and not takes_all:
            takes = ", ".join(sorted(declared - names)) or "none"
            raise UserError(f"{start}: args.{key}: it has no such argument; args may set: {takes}")
    for parameter in parameters:
        if parameter.kind == parameter.POSITIONAL_ONLY:
            raise UserError(f"{start} takes {parameter.name} by position: remove the / from its arguments")
        if parameter.default is not parameter.empty or parameter.name not in declared - names - args.keys():
            continue
        if parameter.name in ("answer", "answers"):
            why = "and the problems have none: name it in task.columns.answer, or set task.rewards"
        else:
            fields = ", ".join(sorted(available.fields)) or "none"
            there = f"{', '.join(fixed)}, max_completion_length, and the data's fields ({fields})"
            why = f"which there isn't; there are {there}; args gives further ones"
        raise UserError(f"{start} requires {parameter.name}, {why}")
    wanted = names if takes_all else declared
    given = {key: value for key, value in constants.items() if key in wanted} | dict(args)
    readers = {key: read for key, read in readers.items() if key in wanted - given.keys()}
    reward = Reward(function, batched, readers, given, "" if name in BUILT_IN else checksum(function))
    if name in BUILT_IN:
        try_out(start, reward)
    return reward


def checksum(function: Callable[..., Any]) -> str:
    """The CRC-32 of the file that a function is in; empty where Python knows none."""
    try:
        return f"{zlib.crc32(Path(inspect.getfile(inspect.unwrap(function))).read_bytes()):08x}"
    except (TypeError, OSError):
        return ""


def try_out(start: str, reward: Reward) -> None:
    """Call a built-in function once; UserError where `args` are none that it can work with."""
    example = Example([{"role": "user", "content": "1="}], "1", None)
    try:
        reward([Sample(example, "1", array("i", [0]), False)])
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{start}: {error}") from None


def find(name: str, scorer: Scorer | None) -> Callable[..., Any]:
    """The reward function called `name` (`package.module:function` is imported); UserError where it can't be had."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name == "task":
        if scorer is None:
            raise UserError("task.rewards: this task has no scorer of its own: use exact_match or flexible_match")
        return scorer
    if name.startswith("url:"):
        url = name.removeprefix("url:")
        if not url.startswith(("http://", "https://")):
            raise UserError(f"task.rewards: {name}: expected url:http://... or url:https://...")
        return partial(post, url)
    module, colon, function = name.partition(":")
    if not colon:
        known = f"{', '.join(BUILT_IN)}, task, package.module:function, or url:..."
        raise UserError(f"task.rewards: there is no reward {name}: {known}")
    try:
        found = getattr(importlib.import_module(module), function)
    except BaseException as error:  # a module may do anything when it's imported, exit too
        raise UserError(f"task.rewards: {name} can't be imported: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise UserError(f"task.rewards: {name} is not a function")
    return found
