"""What the pipelines of SFT and GRPO share: the order of examples, and an iterator whose position is a little JSON."""

import logging
import weakref
from typing import Any, Generic, TypeVar

import grain
from grain.experimental import ThreadPrefetchIterDataset

from mllm.data.permutation import permute_index
from mllm.data.tasks.task import MAX_LENGTH
from mllm.errors import StepError, UserError

log = logging.getLogger(__name__)

T = TypeVar("T")

CACHED_EXAMPLES = 2**16

WAY_OUT = "restore the data, or begin a new run_dir (model.source can be this run)"

READ_IN_CALLER = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class DataIterator(Generic[T]):
    """Batches, and a position from which another iterator continues exactly, with prefetching or without."""

    def __init__(
        self,
        dataset: grain.IterDataset[tuple[T, int]],
        examples: int,
        epochs: int | None,
        prefetch: int,
        content: str | None = None,
    ) -> None:
        """`dataset` gives batches, each with its number of examples; an epoch has `examples` of them.

        `content` is a hash of the examples, where it is known.
        """
        self.examples = examples
        self.content = content
        self.epochs = epochs
        self.consumed = 0
        self.batches = iter(ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=prefetch))
        # Otherwise the garbage collector may close it in the very thread that closing joins.
        weakref.finalize(self, self.batches.close)

    def __iter__(self) -> "DataIterator[T]":
        return self

    def __next__(self) -> T:
        """The next batch; StopIteration after the last epoch, with a warning where examples don't fill a last batch.

        StepError is raised where an example can't be made or read; a process that isn't alone must tell the others.
        """
        try:
            batch, examples = next(self.batches)
        except UserError as error:
            raise StepError(str(error)) from None
        except StopIteration:
            left = self.examples * (self.epochs or 0) - self.consumed
            if left > 0:
                log.warning("data.epochs: the last %d examples did not fill a batch and were left out", left)
            raise
        self.consumed += examples
        return batch

    def get_state(self) -> dict[str, Any]:
        """The position after the batches so far: JSON."""
        state = {"examples": self.examples, "given": self.consumed, "pipeline": self.batches.get_state()}
        return state if self.content is None else state | {"content": self.content}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a position that `get_state` gave; UserError where the examples are others than then."""
        if state["examples"] != self.examples:
            raise UserError(
                f"data: the run began with {state['examples']} examples and now there are {self.examples}: {WAY_OUT}"
            )
        if state.get("content", self.content) != self.content:
            raise UserError(f"data: the run began with other examples: {WAY_OUT}")
        self.consumed = state["given"]
        try:
            self.batches.set_state(state["pipeline"])
        except IndexError:
            raise UserError(
                f"data.epochs: {self.epochs}: the run has gone through more of its data: raise it"
            ) from None


def example_indices(count: int, epochs: int | None, seed: int | None) -> grain.MapDataset[int]:
    """The indices of `count` examples, `epochs` times over, in a new order each epoch; seed None: always ascending.

    Grain's `shuffle` takes 0.7 ms an index, holds at most 2^32, and makes seed 0's second epoch seed 1's first.
    """
    if count == 0:
        raise UserError("task: there is no example in it")
    length = min(count * epochs, MAX_LENGTH) if epochs else MAX_LENGTH
    return grain.MapDataset.range(length).map(lambda position: example_index(int(position), count, seed))


def example_index(position: int, count: int, seed: int | None) -> int:
    """The index of the example at a position of `example_indices`."""
    epoch, index = divmod(position, count)
    return index if seed is None else permute_index(index, count, key=f"{seed} {epoch}")


def process_rows(total: int, process_index: int, process_count: int, key: str) -> slice:
    """This process's rows of a batch, if `process_count` processes share its `total` rows; `key` names that setting."""
    if total % process_count:
        raise UserError(
            f"{key}: {total} is not divisible by the number of processes that share its rows ({process_count})"
        )
    share = total // process_count
    return slice(process_index * share, (process_index + 1) * share)
