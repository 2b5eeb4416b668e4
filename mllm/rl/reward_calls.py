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
from mllm.rl.reward_functions import BUILT_IN
from mllm.rl.reward_url import post

SINGULAR = {"prompt", "completion", "example"}
PLURAL = {"prompts", "completions", "examples", "answers"}


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


@dataclass(frozen=True)
class Reward:
    """A reward function that is bound to the names of its arguments."""

    function: Callable[..., Any]
    batched: bool
    names: frozenset[str]
    """The arguments that each call gets."""
    constants: Mapping[str, Any]
    code: str
    """A checksum of the file that a user's function is in; empty for any other function."""

    def __call__(self, samples: Sequence[Sample]) -> Any:
        """What the function returns for the samples: for all of them if it is batched, else for the only one."""
        arguments: Mapping[str, Any] = {name: self.argument(name, samples) for name in self.names}
        result = self.function(**arguments, **self.constants)
        return asyncio.run(result) if inspect.iscoroutinefunction(self.function) else result

    def argument(self, name: str, samples: Sequence[Sample]) -> Any:
        """The argument of this name: a list with an item for each sample, or for a single function its only item."""
        values = [value(sample, name) for sample in samples]
        return values if self.batched else values[0]


def value(sample: Sample, name: str) -> Any:
    """What a function's argument `name` is for a sample; the fixed names precede the data's fields."""
    example = sample.example
    match name:
        case "prompt":
            return example.prompt[-1]["content"]
        case "prompts":
            return example.prompt if example.conversational else example.prompt[-1]["content"]
        case "completions" if example.conversational:
            return [{"role": "assistant", "content": sample.completion}]
        case "completion" | "completions":
            return sample.completion
        case "example" | "examples":
            return example
        case "answer" | "answers":
            return example.answer
        case "completion_ids":
            return sample.tokens.tolist()
        case "length":
            return len(sample.tokens)
        case "truncated":
            return sample.truncated
        case "solution":
            return example.fields.get(name, example.solution)
        case _:
            return example.fields.get(name)  # None where this record lacks a field that others have


def bind(name: str, args: Mapping[str, Any], scorer: Scorer | None, available: Available) -> Reward:
    """The reward function called `name`, its signature checked; UserError if it can't be had or called."""
    function = find(name, scorer)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise UserError(f"task.rewards: {name}: Python can't tell the arguments of this function") from None
    declared = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
    batched = bool(declared & PLURAL) or (takes_all and not declared & SINGULAR)
    fixed = [*sorted(PLURAL if batched else SINGULAR), "answer", "completion_ids", "length", "truncated"]
    if not available.answers:
        fixed = [given for given in fixed if given not in ("answer", "answers")]
    constants = {"max_completion_length": available.max_completion_length}
    names = {*fixed, *available.fields, *constants}
    for key in args:
        if key in fixed or key in constants:
            raise UserError(f"task.rewards: {name}: args.{key}: the trainer gives this argument itself: remove it")
        if key not in declared and not takes_all:
            takes = ", ".join(sorted(declared - names)) or "none"
            raise UserError(f"task.rewards: {name}: args.{key}: it has no such argument; args may set: {takes}")
    for parameter in parameters:
        if parameter.kind == parameter.POSITIONAL_ONLY:
            raise UserError(f"task.rewards: {name} takes {parameter.name} by position: remove the / from its arguments")
        required = parameter.default is parameter.empty and parameter.name in declared
        if required and parameter.name not in names | args.keys():
            raise UserError(f"task.rewards: {name} {missing(parameter.name, fixed, available)}")
    wanted = names if takes_all else names & declared
    given = {key: constant for key, constant in constants.items() if key in wanted} | dict(args)
    code = "" if name in BUILT_IN else checksum(function)
    reward = Reward(function, batched, frozenset(wanted - given.keys()), given, code)
    if name in BUILT_IN:
        try_out(name, reward)
    return reward


def checksum(function: Callable[..., Any]) -> str:
    """The CRC-32 of the file that a function is in; empty where Python knows none."""
    try:
        return f"{zlib.crc32(Path(inspect.getfile(inspect.unwrap(function))).read_bytes()):08x}"
    except (TypeError, OSError):
        return ""


def missing(argument: str, fixed: Sequence[str], available: Available) -> str:
    """What is wrong with a function that requires `argument`."""
    if argument in ("answer", "answers"):
        return f"requires {argument}, and the problems have none: name it in task.columns.answer, or set task.rewards"
    fields = ", ".join(sorted(available.fields)) or "none"
    return (
        f"requires {argument}, which there isn't; there are {', '.join(fixed)}, max_completion_length, "
        f"and the data's fields ({fields}); args gives further ones"
    )


def try_out(name: str, reward: Reward) -> None:
    """Call a built-in function once; UserError where `args` are none that it can work with."""
    example = Example([{"role": "user", "content": "1="}], "1", None)
    try:
        reward([Sample(example, "1", array("i", [0]), False)])
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"task.rewards: {name}: {error}") from None


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
        raise UserError(
            f"task.rewards: there is no reward {name}: {', '.join(BUILT_IN)}, task, package.module:function, or url:..."
        )
    try:
        found = getattr(importlib.import_module(module), function)
    except BaseException as error:  # a module may do anything when it's imported, exit too
        raise UserError(f"task.rewards: {name} can't be imported: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise UserError(f"task.rewards: {name} is not a function")
    return found
