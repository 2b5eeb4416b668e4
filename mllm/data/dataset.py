"""The order of training's examples as Grain's data sets, and an iterator with one integer as its position.

The order depends on the number of examples, the seed and the epochs alone. It is computed at any position, so a run
goes on with the same examples from its checkpoint, also with another number of processes.
"""

import itertools
import operator
import sys
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import grain
from grain.experimental import ThreadPrefetchIterDataset

from mllm.data.source import WAY_OUT
from mllm.errors import StepError, UserError

T = TypeVar("T")


def training_order(examples: int, seed: int | None, epochs: int | None = None) -> grain.MapDataset[int]:
    """The numbers, from 0, of so many examples in the order of training, which has each of them once in an epoch.

    The seed shuffles every epoch anew; None: the order is always ascending. `epochs` None: they never end.
    """
    numbers = grain.MapDataset.range(examples)
    if seed is not None:
        numbers = numbers.seed(seed).shuffle()
    return numbers.repeat(epochs if epochs and examples * epochs <= sys.maxsize else None)


def mixed_order(parts: Sequence[int], weights: Sequence[float], seed: int | None) -> grain.MapDataset[int]:
    """The numbers of the examples of several sources, numbered one source after the other; the order never ends.

    The sources take turns by their weights, evenly spread, and each comes in a `training_order` of its own.
    """
    starts = itertools.accumulate((0, *parts[:-1]))
    orders = [
        training_order(count, None if seed is None else seed + number).map(partial(operator.add, start))
        for number, (count, start) in enumerate(zip(parts, starts, strict=True))
    ]
    return grain.MapDataset.mix(orders, [weight / sum(weights) for weight in weights])


def close(attributes: dict[str, Any]) -> None:
    """Close and release the iterator of Grain's among a `DataIterator`'s attributes."""
    attributes.pop("items").close()


class DataIterator(Generic[T]):
    """Items that a thread of Grain's reads ahead; another iterator continues exactly at its position."""

    def __init__(
        self,
        items: grain.IterDataset[T],
        order: grain.MapDataset[int],
        examples: int,
        epochs: int | None = None,
        content: str | None = None,
        ahead: int = 2,
    ) -> None:
        """An epoch has `examples` positions of the order; `content` is a hash of the examples, where it is known.

        The state of an iterator over `items` is Grain's `{"next_index": position}`. So many items are read `ahead` of
        the step that needs them.
        """
        self.examples, self.epochs, self.content = examples, epochs, content
        self.first = [order[index] for index in range(min(examples, 8))]
        """The order's first numbers, which identify it: another version of Grain may give another order."""
        self.given = 0
        """How many items were given since training began."""
        self.items = iter(ThreadPrefetchIterDataset(items, prefetch_buffer_size=ahead))
        # Grain's iterator closes itself too late where a program ends, and perhaps in the thread that closing joins.
        weakref.finalize(self, close, vars(self))

    def __iter__(self) -> "DataIterator[T]":
        return self

    def __next__(self) -> T:
        """The next item; StopIteration after the last epoch.

        StepError is raised where an example can't be made or read; the caller must tell other processes.
        """
        try:
            item = self.take()
        except UserError as error:
            raise StepError(str(error)) from None
        self.given += 1
        return item

    def take(self) -> T:
        """The next item, which is not counted yet; UserError where an example can't be made or read."""
        return next(self.items)

    @property
    def position(self) -> int:
        """How many examples training has come to since it began, in the order of `training_order`."""
        return self.items.get_state()["next_index"]

    def get_state(self) -> dict[str, Any]:
        """The position after the items so far: JSON, with the state of Grain's iterator under `grain`."""
        state = {"examples": self.examples, "first": self.first, "given": self.given, "grain": self.items.get_state()}
        return state if self.content is None else state | {"content": self.content}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a position that `get_state` gave; UserError where the examples or their order differ."""
        if (state["examples"], state.get("content")) != (self.examples, self.content):
            numbers = f"{state['examples']} then, {self.examples} now"
            raise UserError(f"data: the run began with other examples: {WAY_OUT} ({numbers})")
        if state["first"] != self.first:
            raise UserError("data: the run began with another order of them: install the Grain it began with")
        if self.epochs is not None and state["grain"]["next_index"] > self.examples * self.epochs:
            raise UserError(f"data.epochs: {self.epochs}: the run has gone through more of its data: raise it")
        self.given = state["given"]
        self.items.set_state(state["grain"])
