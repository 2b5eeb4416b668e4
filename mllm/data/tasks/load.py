"""Loads the task that a configuration names: made on demand, or listed in files, on the hub, or by a function.

A record has `prompt` (a text, or messages) or `messages`, perhaps an `answer`, and any further fields. An answer may be
a whole solution that states the answer in the task's form, as in GSM8K and MATH.
"""

import importlib
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from mllm.config import places
from mllm.config.task import AnswerForm, ColumnsConfig, TaskConfig
from mllm.data.formats import text, turns
from mllm.data.records import Record, Records, file_records, hub_records, sound_records
from mllm.data.tasks.answers import final_answer
from mllm.data.tasks.arithmetic import arithmetic
from mllm.data.tasks.gym import reasoning_gym
from mllm.data.tasks.task import Example, Task, messages, split_task
from mllm.errors import UserError, brief

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""verl's prompt for GSM8K (examples/data_preprocess/gsm8k.py)."""


def load(config: TaskConfig, seed: int) -> Task:
    """The task that `config` names. `seed` only determines which problems reasoning_gym makes for training.

    UserError is raised if the data or package isn't there, a record of it is bad, or there are too few problems.
    """
    if config.kind == "arithmetic":
        return arithmetic(config)
    if config.kind == "reasoning_gym":
        return reasoning_gym(config, seed)
    is_gsm8k = config.kind == "gsm8k"
    read: Callable[[str, Record], Example] = partial(gsm8k_example if is_gsm8k else listed_example, config)
    train, test = listed_records(config)
    problems = read_problems(train, "task.path" if is_gsm8k else "task.train", read)
    tests = None if test is None else read_problems(test, "task.path" if is_gsm8k else "task.test", read)
    return split_task(config.name, problems, config.heldout_of(len(problems)), tests)


def read_problems(records: Records, key: str, read: Callable[[str, Record], Example]) -> list[Example]:
    """The problems that `read` makes of records; UserError, which names the setting `key`, where there are none."""
    problems = list(sound_records(records, key, read))
    if not problems:
        raise UserError(f"{key}: there is no problem in it")
    return problems


def listed_records(config: TaskConfig) -> tuple[Records, Records | None]:
    """The records of the training problems, and those of the test set if there is one."""
    match config.kind:
        case "jsonl":
            assert config.train is not None
            test = file_records(config.test, "task.test") if config.test else None
            return file_records(config.train, "task.train"), test
        case "hub":
            assert config.id is not None
            rows = partial(hub_records, config.id, config.subset)
            return rows(config.train or "train", "task.id"), rows(config.test, "task.test") if config.test else None
        case "gsm8k":
            return gsm8k_records(config, "train"), gsm8k_records(config, "test")
    return function_records(config.name)


def gsm8k_records(config: TaskConfig, split: str) -> Records:
    """A split of GSM8K (arXiv:2110.14168), from a folder or the hub."""
    if config.path is None:
        return hub_records("openai/gsm8k", "main", split, "task.path")
    return file_records(f"{config.path}/{split}.jsonl", "task.path")


def function_records(name: str) -> tuple[Records, Records | None]:
    """The records that the function `package.module:function` returns, or a mapping with `train` and perhaps `test`.

    UserError is raised if it can't be imported, fails or returns something else.
    """
    module, _, function = name.partition(":")
    try:
        with places.importable():
            returned = getattr(importlib.import_module(module), function)()
            parts = {**returned} if isinstance(returned, Mapping) else {"train": returned}
            lists = {part: list(rows) for part, rows in parts.items()}
    except (Exception, SystemExit) as error:  # the user's code may do anything
        hint = (
            "; modules are looked for beside the configuration, too" if isinstance(error, ModuleNotFoundError) else ""
        )
        raise UserError(f"task.name: {name} can't be used: {type(error).__name__}: {brief(error)}{hint}") from None
    if not {"train"} <= {*lists} <= {"train", "test"}:
        raise UserError(f"task.name: {name} returned {', '.join(map(repr, lists))}: expected train, and test")
    return returned_records(name, lists["train"]), returned_records(name, lists["test"]) if "test" in lists else None


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


def gsm8k_example(config: TaskConfig, place: str, row: Record) -> Example:
    """The problem in a line of GSM8K; UserError where it is not as expected."""
    question, solution = text(place, row, "question"), text(place, row, "answer")
    answer = final_answer(solution, "hashes")
    if answer is None or not re.search("[0-9]", answer):
        raise UserError(f"{place}: answer has no line '#### N' with the result")
    return Example(messages(config, question, GSM8K_INSTRUCTION), answer, solution, "hashes", place=place)


def listed_example(config: TaskConfig, place: str, record: Record) -> Example:
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
