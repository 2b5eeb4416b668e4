"""What the data of SFT and GRPO share: the order of examples, and an iterator whose position is a little JSON.

This file does not import JAX, because tasks, which rewards import, permute their problems.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from mllm.errors import StepError, UserError

T = TypeVar("T")
Read = Callable[[int], tuple[T, int]]
"""The item that begins at a position in the order of examples, and the position behind it. StopIteration at the end."""

CACHED_EXAMPLES = 2**16

WAY_OUT = "restore the data, or begin a new run_dir (model.source can be this run)"


class DataIterator(Generic[T]):
    """Items, the next of which a thread reads ahead, and a position from which another iterator continues exactly."""

    def __init__(self, read: Read[T], examples: int, epochs: int | None, content: str | None = None) -> None:
        """An epoch has `examples` positions; `content` is a hash of the examples, where it is known.

        UserError is raised where there is no example.
        """
        if examples == 0:
            raise UserError("task: there is no example in it")
        self.read = read
        self.examples = examples
        self.content = content
        self.epochs = epochs
        self.given = 0
        """How many items were given since training began."""
        self.position = 0
        """How many examples training has come to since it began, in the order of `example_index`."""
        self.thread = ThreadPoolExecutor(1)
        self.ahead: Future[tuple[T, int]] | None = None

    def __iter__(self) -> "DataIterator[T]":
        return self

    def __next__(self) -> T:
        """The next item; StopIteration after the last epoch.

        StepError is raised where an example can't be made or read; a process that isn't alone must tell the others.
        """
        ahead = self.ahead or self.thread.submit(self.read, self.position)
        try:
            item, self.position = ahead.result()
        except UserError as error:
            raise StepError(str(error)) from None
        self.ahead = self.thread.submit(self.read, self.position)
        self.given += 1
        return item

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
        self.given, self.position, self.ahead = state["given"], state["position"], None


def example_index(position: int, count: int, seed: int | None) -> int:
    """The index of the example at a position, of `count`: a new order each epoch; seed None: always ascending."""
    epoch, index = divmod(position, count)
    return index if seed is None else permute_index(index, count, key=f"{seed} {epoch}")


def permute_index(index: int, size: int, key: str = "") -> int:
    """The image of `index` under the pseudo-random permutation of range(size) that `key` names; nothing is stored.

    Four Feistel rounds permute the next power of four, and repeating them until the result is in range restricts the
    permutation to `size` (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", section 3).
    """
    half = (max(size - 1, 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    keyed = hashlib.blake2b(key.encode(), digest_size=16)
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            mixer = keyed.copy()
            mixer.update(turn.to_bytes(1, "little") + right.to_bytes(16, "little"))
            left, right = right, left ^ (int.from_bytes(mixer.digest(), "little") & mask)
        index = left << half | right
        if index < size:
            return index


def process_rows(total: int, process_index: int, process_count: int, key: str) -> slice:
    """This process's rows of a batch, if `process_count` processes share its `total` rows; `key` names that setting."""
    if total % process_count:
        raise UserError(
            f"{key}: {total} is not divisible by the number of processes that share its rows ({process_count})"
        )
    share = total // process_count
    return slice(process_index * share, (process_index + 1) * share)
