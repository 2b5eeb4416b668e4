"""The task `gsm8k` (arXiv:2110.14168), from a folder or the hub."""

import re
from functools import partial

from mllm.config.task import TaskConfig
from mllm.data.records import Record, Records, file_records, hub_rows, sound_records, text
from mllm.data.tasks.answers import final_answer
from mllm.data.tasks.split import hold_out
from mllm.data.tasks.task import Example, Task, messages
from mllm.errors import UserError

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""verl's prompt for GSM8K (examples/data_preprocess/gsm8k.py)."""


def gsm8k(config: TaskConfig) -> Task:
    """GSM8K's own splits; held-out problems are training problems."""
    train, test = (
        [*sound_records(gsm8k_rows(config, split), "task.path", partial(gsm8k_example, config))]
        for split in ("train", "test")
    )
    return hold_out(config.name, train, config.heldout_of(len(train)), test)


def gsm8k_rows(config: TaskConfig, split: str) -> Records:
    if config.path is None:
        return hub_rows("openai/gsm8k", "main", split, key="task.path")
    return file_records(f"{config.path}/{split}.jsonl", key="task.path")


def gsm8k_example(config: TaskConfig, place: str, row: Record) -> Example:
    question, solution = text(place, row, "question"), text(place, row, "answer")
    answer = final_answer(solution, "hashes")
    if answer is None or not re.search("[0-9]", answer):
        raise UserError(f"{place}: answer has no line '#### N' with the result")
    return Example(messages(config, question, INSTRUCTION), answer, solution, "hashes", place=place)
