"""What the training loop knows of its data, a `Source` that gives a `Step` for each update; and what sources share.

A source's position is JSON and goes into the checkpoint; with the parameters it determines every later batch.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from grain.experimental import ThreadPrefetchDatasetIterator

from mllm.data.batch import Batch
from mllm.data.tasks.task import permute_index
from mllm.data.tokenizing import Documents
from mllm.errors import StepError, UserError
from mllm.model.layout import Params
from mllm.stopwatch import Stopwatch

T = TypeVar("T")
Read = Callable[[int], tuple[T, int]]
"""The item that begins at a position in the order of examples, and the position behind it. StopIteration at the end."""

WAY_OUT = "restore the data, or begin a new run_dir (model.source can be this run)"


@dataclass(frozen=True)
class Step:
    """The data of one update."""

    batch: Batch
    """This process's rows in numpy, or all rows in JAX's arrays."""
    metrics: dict[str, Any]
    """Numbers by name, under TRL's names."""
    samples: list[dict[str, Any]]
    """Lines of samples.jsonl (prompt, completion, rewards), from all processes, as the metrics are."""
    tokens: int
    """Tokens in the whole batch, prompts included."""


@runtime_checkable
class Source(Protocol):
    steps: int
    """The number of updates of the run: `steps` of the configuration, or fewer where the data ends before."""

    @property
    def needs_reference(self) -> bool:
        """Whether `next` compares the policy with a reference."""

    @property
    def validation(self) -> Documents | None:
        """The documents that SFT's validation measures; None: there are none."""

    def next(self, params: Params, step: int, watch: Stopwatch, reference: Params | None = None) -> Step:
        """The data of update `step`, counted from 0 and below `steps`.

        `params` are those of the policy, `reference` those that the run began with, where they are needed.
        """

    def position(self) -> dict[str, Any]:
        """The position after the last step, from which `seek` continues: JSON."""

    def seek(self, position: Mapping[str, Any]) -> None:
        """Continue at a position that `position()` gave, perhaps in another process."""

    def resumable(self, step: int) -> bool:
        """Whether a run can be resumed from the position after `step` updates."""


class Reader(Generic[T]):
    """Items that are read one after the other, as Grain's prefetching takes them; the state is a position."""

    def __init__(self, read: Read[T]) -> None:
        self.read = read
        self.position = 0

    def __next__(self) -> T:
        item, self.position = self.read(self.position)
        return item

    def get_state(self) -> int:
        return self.position

    def set_state(self, position: int) -> None:
        self.position = position


class DataIterator(Generic[T]):
    """Items that a thread reads ahead, and a position from which another iterator continues exactly."""

    def __init__(
        self, read: Read[T], examples: int, epochs: int | None, content: str | None = None, ahead: int = 2
    ) -> None:
        """An epoch has `examples` positions; `content` is a hash of the examples, where it is known.

        So many items are read `ahead` of the step that needs them.
        """
        self.examples = examples
        self.content = content
        self.epochs = epochs
        self.given = 0
        """How many items were given since training began."""
        self.items = ThreadPrefetchDatasetIterator(Reader(read), ahead)
        # Otherwise the garbage collector may close it in the very thread that closing joins.
        weakref.finalize(self, self.items.close)

    def __iter__(self) -> "DataIterator[T]":
        return self

    def __next__(self) -> T:
        """The next item; StopIteration after the last epoch.

        StepError is raised where an example can't be made or read; a process that isn't alone must tell the others.
        """
        try:
            item = next(self.items)
        except UserError as error:
            raise StepError(str(error)) from None
        self.given += 1
        return item

    @property
    def position(self) -> int:
        """How many examples training has come to since it began, in the order of `example_index`."""
        return self.items.get_state()

    def get_state(self) -> dict[str, Any]:
        """The position after the items so far: JSON."""
        state = {"examples": self.examples, "given": self.given, "position": self.position}
        return state if self.content is None else state | {"content": self.content}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a position that `get_state` gave; UserError where the examples are others than then."""
        if (state["examples"], state.get("content")) != (self.examples, self.content):
            numbers = f"{state['examples']} then, {self.examples} now"
            raise UserError(f"data: the run began with other examples: {WAY_OUT} ({numbers})")
        if self.epochs is not None and state["position"] > self.examples * self.epochs:
            raise UserError(f"data.epochs: {self.epochs}: the run has gone through more of its data: raise it")
        self.given = state["given"]
        self.items.set_state(state["position"])


def example_index(position: int, count: int, seed: int | None) -> int:
    """The index of the example at a position, of `count`: a new order each epoch; seed None: always ascending."""
    epoch, index = divmod(position, count)
    return index if seed is None else permute_index(index, count, key=f"{seed} {epoch}")
