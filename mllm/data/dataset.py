"""The training order as a Grain data set, and an iterator with one integer as its position.

The order depends only on the number of examples, the seed and the epochs, and can be computed at any position. So a run
resumes with the same examples, also with another number of processes.
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
    """The indices of `examples` examples in training order; an epoch has every index once.

    The seed shuffles every epoch anew; without a seed the order is ascending. Without `epochs` the order never ends.
    """
    numbers = grain.MapDataset.range(examples)
    if seed is not None:
        numbers = numbers.seed(seed).shuffle()
    return numbers.repeat(epochs if epochs and examples * epochs <= sys.maxsize else None)


def mixed_order(parts: Sequence[int], weights: Sequence[float], seed: int | None) -> grain.MapDataset[int]:
    """The training order of several sources, as indices into their concatenation; the order never ends.

    The sources are interleaved by their weights. Each source is in its own `training_order`.
    """
    starts = itertools.accumulate((0, *parts[:-1]))
    orders = [
        training_order(count, None if seed is None else seed + number).map(partial(operator.add, start))
        for number, (count, start) in enumerate(zip(parts, starts, strict=True))
    ]
    return grain.MapDataset.mix(orders, [weight / sum(weights) for weight in weights])


def close(attributes: dict[str, Any]) -> None:
    """Close and release the Grain iterator in a `DataIterator`'s attributes."""
    attributes.pop("items").close()


class DataIterator(Generic[T]):
    """An iterator that a Grain thread prefetches; another iterator can continue at its position."""

    def __init__(
        self,
        items: grain.IterDataset[T],
        order: grain.MapDataset[int],
        examples: int,
        epochs: int | None = None,
        content: str = "",
    ) -> None:
        """An epoch has `examples` positions of the order; `content` is a hash of the examples.

        The state of an iterator over `items` is Grain's `{"next_index": position}`.
        """
        self.examples, self.epochs, self.content = examples, epochs, content
        self.first = [order[index] for index in range(min(examples, 8))]
        """The order's first numbers, which identify it: another version of Grain may give another order."""
        self.items = iter(ThreadPrefetchIterDataset(items, prefetch_buffer_size=2))
        # Grain's iterator closes itself too late where a program ends, and perhaps in the thread that closing joins.
        weakref.finalize(self, close, vars(self))

    def __iter__(self) -> "DataIterator[T]":
        return self

    def __next__(self) -> T:
        """The next item; StopIteration after the last epoch.

        StepError is raised if an example can't be made or read; the caller must tell other processes.
        """
        try:
            return next(self.items)
        except UserError as error:
            raise StepError(str(error)) from None

    @property
    def position(self) -> int:
        """The number of examples read since training began, in the order of `training_order`."""
        return self.items.get_state()["next_index"]

    def get_state(self) -> dict[str, Any]:
        """The position after the items so far: JSON, with the state of Grain's iterator under `grain`."""
        state = {"examples": self.examples, "content": self.content, "first": self.first}
        return state | {"grain": self.items.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state that `get_state` returned; UserError if the examples or their order differ."""
        if (state["examples"], state.get("content")) != (self.examples, self.content):
            numbers = f"{state['examples']} then, {self.examples} now"
            raise UserError(f"data: the run began with other examples: {WAY_OUT} ({numbers})")
        if state["first"] != self.first:
            raise UserError("data: the run began with another order of them: install the Grain it began with")
        if self.epochs is not None and state["grain"]["next_index"] > self.examples * self.epochs:
            raise UserError(f"data.epochs: {self.epochs}: the run has gone through more of its data: raise it")
        self.items.set_state(state["grain"])
