"""Loads the task that a configuration names: made by rule, or listed in files, on the hub, or by a function.

A record has `prompt` (a text, or messages) or `messages`, an optional `answer`, and any further fields. An answer may
be a worked solution that states the final answer in the task's form, as in GSM8K and MATH.
"""

import importlib
import math
import pickle
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import Any

from mllm.config import places
from mllm.config.answer_form import AnswerForm
from mllm.config.task import ColumnsConfig, TaskConfig
from mllm.data.formats import text, turns
from mllm.data.records import Origin, Record, Records, read_records, sound_records
from mllm.data.tasks.answers import HASHES, STATED, final_answer
from mllm.data.tasks.arithmetic import arithmetic
from mllm.data.tasks.task import Example, Task, messages, split_task
from mllm.errors import UserError, brief

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""verl's prompt for GSM8K (examples/data_preprocess/gsm8k.py)."""


def load(config: TaskConfig) -> Task:
    """The task that `config` names; UserError if the data is missing, a record is bad, or problems are too few."""
    if config.kind == "arithmetic":
        return arithmetic(config)
    instruction = None
    if config.kind == "gsm8k":  # arXiv:2110.14168
        columns, instruction = ColumnsConfig(prompt="question"), GSM8K_INSTRUCTION
        config = config.model_copy(update={"columns": columns, "answer_form": "hashes"})
    problems = dict[str, list[Example]]()
    for part, (key, records) in listed_records(config).items():
        examples = read_records(records, partial(listed_example, config, instruction))
        problems[part] = [replace(example, place=location) for location, example in sound_records(examples, key)]
        if not problems[part]:
            raise UserError(f"{key}: there is no problem in its part {part}")
    heldout = config.heldout_of(len(problems["train"]))
    return split_task(config.name, problems["train"], heldout, problems.get("test"), fields=config.converses)


def listed_records(config: TaskConfig) -> dict[str, tuple[str, Records]]:
    """For `train`, and for `test` if there is a test set: the setting that names the problems, and their records."""
    train, test = config.train, config.test
    if config.kind == "function":
        return {part: ("task.name", records) for part, records in function_records(config.name).items()}
    if config.kind == "gsm8k":
        parts = ("train", "test")
        if config.path is None:
            origins = {part: Origin("task.path", "openai/gsm8k", "main", part) for part in parts}
        else:
            origins = {part: Origin("task.path", f"{config.path}/{part}.jsonl") for part in parts}
    elif config.kind == "hub":
        origins = {"train": Origin("task.id", str(config.id), config.subset, train or "train")}
        if test is not None:
            origins["test"] = Origin("task.test", str(config.id), config.subset, test)
    else:
        origins = {part: Origin(f"task.{part}", file) for part, file in (("train", train), ("test", test)) if file}
    return {part: (origin.key, origin.records()) for part, origin in origins.items()}


def function_records(name: str) -> dict[str, Records]:
    """The records that `package.module:function` returns, by part: `train`, and `test` if it returns a mapping.

    UserError is raised if the function can't be imported, fails, or returns something else.
    """
    module, _, function = name.partition(":")
    try:
        with places.importable():
            returned = getattr(importlib.import_module(module), function)()
            parts = {**returned} if isinstance(returned, Mapping) else {"train": returned}
            lists = {part: list(rows) for part, rows in parts.items()}
    except (Exception, SystemExit) as error:  # the user's code may do anything
        hint = "; modules are also looked for beside the configuration" * isinstance(error, ModuleNotFoundError)
        raise UserError(f"task.name: {name} can't be used: {type(error).__name__}: {brief(error)}{hint}") from None
    if not {"train"} <= {*lists} <= {"train", "test"}:
        raise UserError(f"task.name: {name} returned {', '.join(map(repr, lists))}: expected train, and test")
    return {
        part: read_records(((f"{name}[{number}]", row) for number, row in enumerate(rows)), returned_record)
        for part, rows in lists.items()
    }


def returned_record(row: Any) -> Record:
    """The mapping that a function returned; UserError if it is no mapping, or can't be sent to reward processes."""
    try:
        pickle.dumps(row)
    except Exception as error:  # many types, depending on the contents
        raise UserError(f"can't be sent to the rewards' process: {brief(error)}") from None
    if not isinstance(row, Mapping):
        raise UserError(f"expected a mapping, got {type(row).__name__}")
    return dict(row)


def listed_example(config: TaskConfig, instruction: str | None, record: Record) -> Example:
    """The problem in a record; UserError if the record is malformed. `instruction` is appended to a text prompt."""
    named = dict(record)
    for name, column in config.columns or ColumnsConfig():
        if column != name:
            if column not in record:
                raise UserError(f"{column} is missing, which task.columns.{name} names")
            named[name] = record[column]
    named_alone = config.columns and config.columns.messages != "messages" and config.columns.prompt == "prompt"
    key = "prompt" if "prompt" in named and not named_alone else "messages"
    if key not in named:
        raise UserError("neither prompt nor messages are there")
    solution, conversational = None, key == "messages" or not isinstance(named[key], str)
    if conversational:
        prompt = turns(named, key)
        if key == "messages" and prompt and prompt[-1]["role"] == "assistant":
            last = prompt.pop()
            solution = None if last.get("weight") == 0 else last["content"]  # which is not to be learned
        if not prompt or prompt[-1]["role"] != "user":
            raise UserError("the last message of a prompt must be the user's")
        if config.system_prompt is not None:
            if prompt[0]["role"] == "system":
                raise UserError("has a system message, and so has task.system_prompt: remove one of them")
            prompt.insert(0, {"role": "system", "content": config.system_prompt})
    else:
        prompt = messages(config.system_prompt, text(named, key), instruction)
    answer = None
    if named.get("answer") is not None:
        reference = text({"answer": written(named["answer"])}, "answer")
        answer, worked_solution = reference_answer(reference, config.answer_form)
        solution = solution or worked_solution
    if instruction is not None and solution is None:  # GSM8K's answers are worked out
        raise UserError("answer has no line '#### N' with the result")
    fields = {name: value for name, value in named.items() if name not in (key, "answer")}
    rejected = named["rejected"] if isinstance(named.get("rejected"), str) else None
    return Example(prompt, answer, solution, config.answer_form, fields, conversational, rejected=rejected)


def written(answer: Any) -> Any:
    """A number as a text, as completions write it: 7.0 as 7, 1e-05 as 0.00001. UserError for NaN and infinity."""
    if type(answer) is float and not math.isfinite(answer):
        raise UserError(f"answer is {answer}, which is no number")
    if type(answer) is float:
        answer = int(answer) if answer.is_integer() else format(Decimal(str(answer)), "f")
    return str(answer) if type(answer) is int else answer


def reference_answer(given: str, form: AnswerForm) -> tuple[str, str | None]:
    """The final answer in the text `given`, and `given` itself if it is a solution in the form that completions need.

    UserError is raised if the form can't state the whole answer.
    """
    if form == "hashes":
        line = given.strip().rpartition("#### ")[2].partition("\n")[0].strip()
        if not HASHES.fullmatch(f"#### {line}"):
            raise UserError(f"answer {line:.40} is more than the number that #### states: set task.answer_form")
    stated = final_answer(given, form)
    bare = given.strip() if stated is None else stated
    answer = final_answer(STATED[form].format(bare), form)
    if not answer or (answer != bare and form != "hashes"):  # `hashes` removes commas
        raise UserError(f"answer {bare!r:.40} can't be stated as {STATED[form].format('ANSWER')}")
    return answer, None if stated is None else given
