"""A task: problems to train on, held-out problems, and the facts about each problem for rewards.

This folder does not import JAX, because rewards must start fast.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mllm.config.answer_form import AnswerForm
from mllm.errors import UserError

log = logging.getLogger(__name__)

MAX_LENGTH = 2**62
"""The length of the longest sequence: `len()` is limited to sys.maxsize."""


@dataclass(frozen=True)
class Example:
    """A problem with its answer, solution and fields, for rewards and SFT."""

    prompt: list[dict[str, str]]
    """Messages; the last is the user's."""
    answer: str | None
    """None: the data has none."""
    solution: str | None = None
    """The completion that SFT from the task learns; None: the task has none."""
    answer_form: AnswerForm = "whole"
    """How a completion states its answer."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the record, which rewards get by name."""
    conversational: bool = False
    """Whether the record gave messages; then rewards get messages."""
    place: str = ""
    """The record's place, for error messages: `train.jsonl:17`."""
    rejected: str | None = None
    """A wrong completion, beside which DPO from the task prefers the solution; None: the task has none."""

    @property
    def question(self) -> str:
        """The text of the prompt's last message."""
        return self.prompt[-1]["content"]


@dataclass(frozen=True)
class Task:
    """Problems with their split."""

    name: str
    train: Sequence[Example]
    heldout: Sequence[Example]
    """Problems for evaluation during training. They are the same in every run, and training never asks them."""
    test: Sequence[Example] | None = None
    """Problems of a test set, which is measured once, at the end; None: the task has none."""
    content: str | None = None
    """A hash of all problems, in their order; None: they are made on demand."""


class OnDemand(Sequence[Any]):
    """A sequence that makes its items on demand, by `make(index)` for the indices of a range."""

    def __init__(self, make: Callable[[int], Any], indices: range) -> None:
        self.make = make
        self.indices = indices

    def __getitem__(self, index: Any) -> Any:
        chosen = self.indices[index]
        return OnDemand(self.make, chosen) if isinstance(chosen, range) else self.make(chosen)

    def __len__(self) -> int:
        return len(self.indices)


def messages(system_prompt: str | None, question: str, instruction: str | None = None) -> list[dict[str, str]]:
    """The messages of a prompt; `task.system_prompt` replaces the task's instruction."""
    if system_prompt is not None:
        return [{"role": "system", "content": system_prompt}, {"role": "user", "content": question}]
    return [{"role": "user", "content": f"{question} {instruction}" if instruction else question}]


def split_task(
    name: str, problems: Sequence[Example], heldout: int, test: Sequence[Example] | None, fields: bool = False
) -> Task:
    """The task that trains on `problems`, without its test set's problems and `heldout` held-out problems.

    Problems with the smallest hashes of their prompts are held out: the same in every run and in every order of the
    list, and almost the same when problems are added. A prompt that is listed twice counts once, unless its records
    have different `fields` and these count.
    UserError is raised if nothing is left to train on.
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
            "task %s: %d problems repeat another's prompt, and are held out with it or not at all", name, repeated
        )
    if left_out := sum(key in tested for key in hashes):
        log.warning("task %s: %d training problems are in its test set and are left out", name, left_out)
    examples = (*problems, *(test or ()))
    contents = [(prompt_hash(e), e.answer, e.solution, e.answer_form, digest({**e.fields})) for e in examples]
    return Task(name, train, [listed[key] for key in chosen], test, content=digest(contents))


def prompt_hash(example: Example, fields: bool = False) -> str:
    """A hash of the prompt's roles and texts, and of the record's other fields and answer, if they count."""
    turns = [[message["role"], message["content"]] for message in example.prompt]
    return digest([turns, example.answer, {**example.fields}] if fields else turns)


def digest(value: Any) -> str:
    """A hash of a value of JSON, or numpy's; whatever else a function may have put into it counts by its type alone."""

    def known(item: Any) -> Any:
        return item.tolist() if hasattr(item, "tolist") else type(item).__name__

    text = json.dumps(value, default=known, skipkeys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
