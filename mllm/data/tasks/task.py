"""A task: training problems, held-out problems, and a test set.

Modules of this folder must not import JAX, because reward processes must start fast.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mllm.config.answer_form import AnswerForm
from mllm.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    """A problem with its answer, solution and fields, for rewards and SFT."""

    prompt: list[dict[str, str]]
    """Messages; the last is the user's."""
    answer: str | None
    """The reference answer, if the data has one."""
    solution: str | None = None
    """The completion for SFT on the task, if the data has one."""
    answer_form: AnswerForm = "whole"
    """How a completion states its answer."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the record, which reward functions get by name."""
    conversational: bool = False
    """Whether the record has messages; batched reward functions then get messages."""
    place: str = ""
    """The record's place, for error messages: `train.jsonl:17`."""
    rejected: str | None = None
    """The rejected completion for DPO on the task, if the data has one."""

    @property
    def question(self) -> str:
        """The text of the prompt's last message."""
        return self.prompt[-1]["content"]


@dataclass(frozen=True)
class Task:
    """The problems of a task, split into training, held-out and test problems."""

    name: str
    train: Sequence[Example]
    heldout: Sequence[Example]
    """Problems for evaluation, never trained on; the same in every run."""
    test: Sequence[Example] | None = None
    """The test set, measured once at the end of a run, if the task has one."""
    content: str = ""
    """A hash of all problems, in order."""


def messages(system_prompt: str | None, question: str, instruction: str | None = None) -> list[dict[str, str]]:
    """The messages of a prompt; `task.system_prompt` replaces the task's instruction."""
    if system_prompt is not None:
        return [{"role": "system", "content": system_prompt}, {"role": "user", "content": question}]
    return [{"role": "user", "content": f"{question} {instruction}" if instruction else question}]


def split_task(
    name: str, problems: Sequence[Example], heldout: int, test: Sequence[Example] | None, fields: bool = False
) -> Task:
    """The task that trains on `problems`, without its test set's problems and `heldout` held-out problems.

    Problems with the smallest hashes of their prompts are held out. They are the same in every run and in every order
    of the list, and almost the same when problems are added. Problems with the same prompt are held out together; if
    `fields`, only problems with the same prompt, answer and fields. UserError is raised if nothing is left to train on.
    """
    tested = {prompt_hash(example, fields) for example in test or ()}
    hashes = [prompt_hash(example, fields) for example in problems]
    listed = {key: example for key, example in zip(hashes, problems, strict=True) if key not in tested}
    chosen = sorted(listed)[:heldout]
    trained = listed.keys() - {*chosen}
    train = [example for key, example in zip(hashes, problems, strict=True) if key in trained]
    if not train or len(chosen) < heldout:
        beside = " that are not in its test set" if tested else ""
        fault = f"{heldout} of task {name}'s {len(listed)} problems{beside} leave none to train on"
        raise UserError(f"task.heldout: {fault}: set it lower, or give more problems")
    if repeated := len(hashes) - len({*hashes}):
        log.warning(
            "task %s: %d problems share a prompt with another; equal prompts are all held out, or none is",
            name,
            repeated,
        )
    if left_out := sum(key in tested for key in hashes):
        log.warning("task %s: %d training problems are in its test set and are left out", name, left_out)
    return Task(name, train, [listed[key] for key in chosen], test, content_of([*problems, *(test or ())]))


def content_of(examples: Sequence[Example]) -> str:
    """A hash of the problems, in order."""
    return digest([(prompt_hash(e), e.answer, e.solution, e.answer_form, digest({**e.fields})) for e in examples])


def prompt_hash(example: Example, fields: bool = False) -> str:
    """A hash of the prompt's roles and texts; if `fields`, also of the answer and the record's other fields."""
    turns = [[message["role"], message["content"]] for message in example.prompt]
    return digest([turns, example.answer, {**example.fields}] if fields else turns)


def digest(value: Any) -> str:
    """A hash of a JSON or numpy value; for any other object inside it only the type is hashed."""

    def known(item: Any) -> Any:
        return item.tolist() if hasattr(item, "tolist") else type(item).__name__

    text = json.dumps(value, default=known, skipkeys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
