"""A task: problems to train on, problems that measure it, and what rewards know of each.

This folder does not import JAX, because rewards must start fast.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mllm.config.task import AnswerForm, TaskConfig

MAX_LENGTH = 2**62
"""The length of the longest sequence: `len()` is limited to sys.maxsize, and Grain counts batches in floating point."""


@dataclass(frozen=True)
class Example:
    """A problem, with what rewards and SFT need to know about it."""

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
    """Whether the record gave messages, not a text, so that rewards get messages, too."""
    place: str = ""
    """Where it comes from, for error messages: `train.jsonl:17`."""


Scorer = Callable[[str, str, Example], float]
"""(the user's message, completion, example) -> reward. It is sent to another process, so it must pickle."""


@dataclass(frozen=True)
class Task:
    """Problems with their split, and perhaps a reward of its own."""

    name: str
    train: Sequence[Example]
    heldout: Sequence[Example]
    """Problems for evaluation during training. They are the same in every run, and training never asks them."""
    test: Sequence[Example] | None = None
    """Problems of a test set, which is measured once, at the end; None: the task has none."""
    scorer: Scorer | None = None
    """The reward called `task`."""
    content: str | None = None
    """A hash of all problems, in their order; None: they are made on demand."""


class Problems(Sequence[Example]):
    """A sequence of examples that are made on demand, by `make(index)` for the indices of a range."""

    def __init__(self, make: Callable[[int], Example], indices: range) -> None:
        self.make = make
        self.indices = indices

    def __getitem__(self, index: Any) -> Any:
        chosen = self.indices[index]
        return Problems(self.make, chosen) if isinstance(chosen, range) else self.make(chosen)

    def __len__(self) -> int:
        return len(self.indices)


def messages(config: TaskConfig, question: str, instruction: str | None = None) -> list[dict[str, str]]:
    """The messages of a prompt; `task.system_prompt` replaces the task's instruction."""
    if config.system_prompt is not None:
        return [{"role": "system", "content": config.system_prompt}, {"role": "user", "content": question}]
    return [{"role": "user", "content": f"{question} {instruction}" if instruction else question}]
