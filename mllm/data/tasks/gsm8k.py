"""The task `gsm8k` (arXiv:2110.14168), from a folder or the hub."""

import re
from itertools import islice
from pathlib import Path

from mllm.config.task import TaskConfig
from mllm.data.records import Record, Records, hub_rows, json_lines, text
from mllm.data.tasks.answers import final_answer
from mllm.data.tasks.task import Example, Task, messages
from mllm.errors import UserError

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""verl's prompt for GSM8K (examples/data_preprocess/gsm8k.py)."""


def gsm8k(config: TaskConfig) -> Task:
    """GSM8K's own splits; the first `heldout` of its test split are held out."""
    heldout = [gsm8k_example(config, *row) for row in islice(gsm8k_rows(config, "test"), config.heldout)]
    if len(heldout) < config.heldout:
        raise UserError(f"task.heldout: gsm8k's test split has {len(heldout)} problems: set it to at most that")
    heldout_questions = {example.prompt[-1]["content"] for example in heldout}
    train = [gsm8k_example(config, *row) for row in gsm8k_rows(config, "train")]
    train = [example for example in train if example.prompt[-1]["content"] not in heldout_questions]
    if not train:
        raise UserError("task.path: gsm8k's train split has no problem that isn't held out")
    return Task(config.name, train, heldout)


def gsm8k_rows(config: TaskConfig, split: str) -> Records:
    if config.path is None:
        return hub_rows("openai/gsm8k", "main", split, key="task.path")
    return json_lines(Path(config.path) / f"{split}.jsonl", key="task.path")


def gsm8k_example(config: TaskConfig, place: str, row: Record | UserError) -> Example:
    if isinstance(row, UserError):
        raise row
    question, solution = text(place, row, "question"), text(place, row, "answer")
    answer = final_answer(solution, "hashes")
    if answer is None or not re.search("[0-9]", answer):
        raise UserError(f"{place}: answer has no line '#### N' with the result")
    return Example(messages(config, question, INSTRUCTION), answer, solution, "hashes")
