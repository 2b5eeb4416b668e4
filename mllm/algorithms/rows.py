"""Packs examples into the rows of batches, in Grain's order.

A batch is determined by its first position in the order. Every process plans the whole batch from the documents' sizes.
The loss's denominator and the data order thus don't depend on the number of processes. A process reads only the
documents of its own rows. Packing is first-fit: an example that fits in no row of a batch opens the next batch.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, tee

import grain
import numpy as np
from tqdm import tqdm

from mllm.config.data import DataConfig
from mllm.data.batch import Batch, bucket
from mllm.data.dataset import DataIterator, mixed_order, training_order
from mllm.data.packing import empty_batch, first_fit
from mllm.data.tokenizing import Documents
from mllm.errors import UserError
from mllm.parallel.processes import ALL_ROWS, RowShare

log = logging.getLogger(__name__)

BatchPlan = list[tuple[int, int]]
"""The documents of a batch, in order: (document index, row)."""


class RowBatches(grain.IterDataset[Batch], ABC):
    """A Grain data set of batches: this process's share of `batch_size` rows of up to `config.max_length` tokens."""

    def __init__(
        self,
        config: DataConfig,
        documents: Documents,
        batch_size: int,
        seed: int = 0,
        share: RowShare = ALL_ROWS,
    ) -> None:
        order_seed = seed if config.shuffle else None
        self.order = training_order(len(documents), order_seed, config.epochs)
        if config.mix and documents.parts:
            self.order = mixed_order(documents.parts, [entry.weight for entry in config.mix], order_seed)
        """The documents' indices in training order."""
        super().__init__(self.order)
        self.config = config
        self.documents = documents
        self.batch_size = batch_size
        self.share, self.rows = share, share.part_of(batch_size)

    def __iter__(self) -> "BatchIterator":
        return BatchIterator(self.read)

    def train(self) -> DataIterator[Batch]:
        """An iterator over the training batches of `config.epochs`.

        The first batch is made at once, so that bad data raises UserError here. So do too few examples for one batch.
        """
        size = len(self.documents)
        try:
            self.read(0)
        except StopIteration:
            fault = f"{self.config.source} has {size} examples, not enough for one batch in {self.config.epochs} epochs"
            raise UserError(f"data.source: {fault}: lower batch_size, or raise data.epochs") from None
        return DataIterator(self, self.order, size, self.config.epochs, self.documents.content)

    def validate(self) -> Iterator[Batch]:
        """Batches with every document once, in order; the last batch is padded."""
        return map(self.make, self.plans_of_all())

    def plans_of_all(self) -> Iterator[BatchPlan]:
        """The plans of batches with every document once, in order."""
        position = 0
        while position < len(self.documents):
            plan = self.plan(range(position, len(self.documents)))
            position += len(plan)
            yield plan

    def count(self, most: int) -> int:
        """The number of training batches, at most `most`; no document is read.

        With packing the batches are planned, which takes half a minute for a million documents. A warning counts the
        examples that don't fill a last batch.
        """
        if self.config.epochs is None:
            return most
        end = len(self.order)
        room = self.batch_size * self.config.max_length  # the most tokens of a batch
        tokens = int(self.documents.sizes[:, 0].sum(dtype=np.int64))
        if self.config.packing and tokens * self.config.epochs >= (most + 1) * room:
            return most
        if self.config.packing:
            plans = tqdm(islice(self.plans(), most), "counting", unit=" batches", delay=2, disable=None)
            examples = [len(plan) for plan in plans]
            batches, planned = len(examples), sum(examples)
        else:
            batches = min(end // self.batch_size, most)
            planned = batches * self.batch_size
        if batches < most and planned < end:
            log.warning("data.epochs: the last %d examples do not fill a batch and are left out", end - planned)
        return batches

    def read(self, position: int) -> tuple[Batch, int]:
        """The training batch that begins at a position, and the next batch's position; StopIteration at the end."""
        plan = next(self.plans(position))
        return self.make(plan), position + len(plan)

    def plans(self, position: int = 0) -> Iterator[BatchPlan]:
        """The plans of full training batches from a position on."""
        while True:
            plan = self.plan(self.order[index] for index in range(position, len(self.order)))
            if len({row for _, row in plan}) < self.batch_size:
                return
            yield plan
            position += len(plan)

    def plan(self, indices: Iterable[int]) -> BatchPlan:
        """The plan of a batch with as many of these documents as fit, in order; without packing one per row."""
        config, sizes = self.config, self.documents.sizes
        chosen, measured = tee(indices)
        lengths = (sizes[index][0] if config.packing else config.max_length for index in measured)
        return list(zip(chosen, first_fit(lengths, config.max_length, self.batch_size), strict=False))

    @abstractmethod
    def make(self, plan: BatchPlan) -> Batch:
        """This process's rows of a batch, as NumPy arrays."""

    def empty(self, plan: BatchPlan) -> tuple[Batch, BatchPlan]:
        """This process's empty rows, padded to the longest row of all processes, and the plan of their documents."""
        sizes = [self.documents.sizes[index][0] for index, _ in plan]
        longest = int(np.bincount([row for _, row in plan], sizes).max())
        shape = self.rows.stop - self.rows.start, min(bucket(longest), self.config.max_length)
        local = [(index, row - self.rows.start) for index, row in plan if self.rows.start <= row < self.rows.stop]
        return empty_batch(shape), local


class BatchIterator(grain.DatasetIterator[Batch]):
    """Training batches from the first; the state is the next batch's position in the order."""

    def __init__(self, read: Callable[[int], tuple[Batch, int]]) -> None:
        super().__init__()
        self.read, self.position = read, 0

    def __next__(self) -> Batch:
        batch, self.position = self.read(self.position)
        return batch

    def get_state(self) -> dict[str, int]:
        return {"next_index": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["next_index"]
