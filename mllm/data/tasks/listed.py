"""Tasks whose problems a user lists: in files, in a data set of the hub, or as what a function returns.

A record has `prompt` (a text, or messages) or `messages`, perhaps an `answer`, and any further fields. An answer may be
a whole solution that states the answer in the task's form, as in GSM8K and MATH.
"""

import importlib
import pickle
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from mllm.config import places
from mllm.config.task import AnswerForm, ColumnsConfig, TaskConfig
from mllm.data.records import Record, Records, file_records, hub_rows, sound_records, text, turns
from mllm.data.tasks.answers import final_answer
from mllm.data.tasks.split import hold_out
from mllm.data.tasks.task import Example, Task, messages
from mllm.errors import UserError, brief


def from_files(config: TaskConfig) -> Task:
    """The task in the files `task.train` and perhaps `task.test`."""
    assert config.train is not None
    test = file_records(config.test, "task.test") if config.test else None
    return from_records(config, file_records(config.train, "task.train"), test)


def from_hub(config: TaskConfig) -> Task:
    """The task in the splits `task.train` (by default `train`) and perhaps `task.test` of a data set of the hub."""
    assert config.id is not None
    rows = partial(hub_rows, config.id, config.subset)
    test = rows(config.test, key="task.test") if config.test else None
    return from_records(config, rows(config.train or "train", key="task.id"), test)


def from_function(config: TaskConfig) -> Task:
    """The task whose problems the function `package.module:function` returns.

    It returns records, or a mapping with `train` and perhaps `test`. UserError is raised if it can't be imported, fails
    or returns something else.
    """
    module, _, function = config.name.partition(":")
    try:
        with places.importable():
            returned = getattr(importlib.import_module(module), function)()
            parts = {**returned} if isinstance(returned, Mapping) else {"train": returned}
            lists = {name: list(rows) for name, rows in parts.items()}
    except (Exception, SystemExit) as error:  # the user's code may do anything
        hint = (
            "; modules are looked for beside the configuration, too" if isinstance(error, ModuleNotFoundError) else ""
        )
        raise UserError(
            f"task.name: {config.name} can't be used: {type(error).__name__}: {brief(error)}{hint}"
        ) from None
    if not {"train"} <= {*lists} <= {"train", "test"}:
        raise UserError(f"task.name: {config.name} returned {', '.join(map(repr, lists))}: expected train, and test")
    test = returned_records(config.name, lists["test"]) if "test" in lists else None
    return from_records(config, returned_records(config.name, lists["train"]), test)


def returned_records(name: str, rows: Iterable[Any]) -> Records:
    """The records that a function returned; they must pickle, because rewards run in another process."""
    for number, row in enumerate(rows):
        place = f"{name}[{number}]"
        if not isinstance(row, Mapping):
            yield place, UserError(f"{place}: expected a mapping, got {type(row).__name__}")
            continue
        try:
            pickle.dumps(row)
        except Exception as error:  # pickling calls the objects' own code
            yield place, UserError(f"{place}: can't be sent to the rewards' process: {brief(error)}")
        else:
            yield place, dict(row)


def from_records(config: TaskConfig, train: Records, test: Records | None) -> Task:
    """The task with these problems. UserError lists all bad records of a split."""
    read: Callable[[str, Record], Example] = partial(make_example, config)
    problems = list(sound_records(train, "task.train", read))
    tests = None if test is None else list(sound_records(test, "task.test", read))
    for key, listed in (("task.train", problems), ("task.test", tests)):
        if listed is not None and not listed:
            raise UserError(f"{key}: there is no problem in it")
    return hold_out(config.name, problems, config.heldout_of(len(problems)), tests)


def make_example(config: TaskConfig, place: str, record: Record) -> Example:
    """The problem in a record; UserError where it is not as expected."""
    named = dict(record)
    for ours, theirs in config.columns or ColumnsConfig():
        if theirs != ours:
            if theirs not in record:
                raise UserError(f"{place}: {theirs} is missing, which task.columns.{ours} names")
            named[ours] = record[theirs]
    key = "prompt" if "prompt" in named else "messages"
    if key not in named:
        raise UserError(f"{place}: neither prompt nor messages are there")
    solution, conversational = None, not isinstance(named[key], str)
    if conversational:
        prompt = turns(place, named, key)
        if key == "messages" and prompt and prompt[-1]["role"] == "assistant":
            solution = prompt.pop()["content"]
        if not prompt or prompt[-1]["role"] != "user":
            raise UserError(f"{place}: the last message of a prompt must be the user's")
        if config.system_prompt is not None:
            if prompt[0]["role"] == "system":
                raise UserError(f"{place}: has a system message, and so has task.system_prompt: remove one of them")
            prompt.insert(0, {"role": "system", "content": config.system_prompt})
    else:
        prompt = messages(config, text(place, named, key))
    answer = None
    if named.get("answer") is not None:
        given = named["answer"]
        given = text(place, {"answer": str(given) if type(given) in (int, float) else given}, "answer")
        answer, worked = reference_answer(given, config.answer_form)
        solution = solution or worked
    fields = {name: value for name, value in named.items() if name not in (key, "answer")}
    return Example(prompt, answer, solution, config.answer_form, fields, conversational, place)


def reference_answer(given: str, form: AnswerForm) -> tuple[str, str | None]:
    """The answer in the text that the data gives, and that text if it states the answer as a completion must."""
    if (stated := final_answer(given, form)) is not None:
        return stated, given
    if form == "hashes" and (number := final_answer(f"#### {given.strip()}", form)) is not None:
        return number, None  # without thousands' commas, as it is read from completions
    return given.strip(), None
