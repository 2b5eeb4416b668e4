"""Batches of examples for SFT, each determined by the position at which it begins.

Every process plans the whole batch from the documents' sizes, so each knows the denominator of its loss and the order
of the data doesn't depend on the number of processes; but it reads only the documents of its own rows. Packing is
first-fit: an example that fits in none of a batch's rows opens the next batch. Mixtures are left out.
"""

import logging
from collections.abc import Iterable, Iterator
from itertools import count, islice, tee

import numpy as np
from tqdm import tqdm

from mllm.config.data import DataConfig
from mllm.data.batch import Batch, padded_length
from mllm.data.documents import Documents
from mllm.data.iteration import DataIterator, example_index, process_rows
from mllm.data.packing import add_sequence, empty_batch, first_fit
from mllm.errors import UserError
from mllm.parallel.processes import ALL_ROWS, RowShare

log = logging.getLogger(__name__)

BatchPlan = list[tuple[int, int]]
"""The documents of a batch, in their order, each with the row that it is in."""


class SftBatches:
    """Batches of `batch_size` rows of up to `config.max_length` tokens, of which this process has its share, in numpy.

    Weights are 1 over the number of learned tokens in the whole batch, and 0 elsewhere.
    """

    def __init__(
        self, config: DataConfig, documents: Documents, batch_size: int, seed: int = 0, share: RowShare = ALL_ROWS
    ) -> None:
        self.config = config
        self.documents = documents
        self.batch_size = batch_size
        self.rows = process_rows(batch_size, share.index, share.count, "batch_size")
        self.order_seed = seed if config.shuffle else None
        self.end = None if config.epochs is None else len(documents) * config.epochs
        """The position at which the last epoch ends."""

    def train(self) -> DataIterator[Batch]:
        """Training's batches, for `config.epochs`.

        The first one is made at once, so that what is wrong with the data is an error here. UserError is raised if
        there are too few examples for one batch.
        """
        size = len(self.documents)
        batches = DataIterator(self.read, size, self.config.epochs, self.documents.content)
        try:
            self.read(0)
        except StopIteration:
            raise UserError(
                f"data.source: {self.config.source} has {size} examples, too few for one batch in "
                f"{self.config.epochs} epochs: lower batch_size, or raise data.epochs"
            ) from None
        return batches

    def validate(self) -> Iterator[Batch]:
        """The batches that hold every document once, in order; the last one is padded."""
        position = 0
        while position < len(self.documents):
            plan = self.plan(range(position, len(self.documents)))
            position += len(plan)
            yield self.make(plan)

    def count(self, most: int) -> int:
        """The number of training's batches, at most `most`; no document is read.

        With packing they are planned, half a minute for a million documents. A warning says how many examples don't
        fill a last batch.
        """
        if self.end is None:
            return most
        if not self.config.packing:
            batches = min(self.end // self.batch_size, most)
            planned = batches * self.batch_size
        else:
            batches = planned = 0
            with tqdm(desc="counting batches", total=self.end, unit=" examples", delay=2, disable=None) as bar:
                for plan in islice(self.plans(), most):
                    batches, planned = batches + 1, planned + len(plan)
                    bar.update(len(plan))
        if batches < most and planned < self.end:
            log.warning("data.epochs: the last %d examples do not fill a batch and are left out", self.end - planned)
        return batches

    def read(self, position: int) -> tuple[Batch, int]:
        """Training's batch that begins at a position, and the position behind it; StopIteration at the end."""
        plan = next(self.plans(position))
        return self.make(plan), position + len(plan)

    def plans(self, position: int = 0) -> Iterator[BatchPlan]:
        """The plans of training's full batches from a position on."""
        while True:
            positions = count(position) if self.end is None else range(position, self.end)
            plan = self.plan(example_index(place, len(self.documents), self.order_seed) for place in positions)
            if len({row for _, row in plan}) < self.batch_size:
                return
            yield plan
            position += len(plan)

    def plan(self, indices: Iterable[int]) -> BatchPlan:
        """The batch of the first of these documents, as many as fit; without packing each fills a row."""
        config, sizes = self.config, self.documents.sizes
        chosen, measured = tee(indices)
        lengths = (sizes[index][0] if config.packing else config.max_length for index in measured)
        return list(zip(chosen, first_fit(lengths, config.max_length, self.batch_size), strict=False))

    def make(self, plan: BatchPlan) -> Batch:
        """This process's rows, as long as all processes' longest, padded; rows without a document are padding."""
        sizes = np.array([self.documents.sizes[index] for index, _ in plan])
        longest = int(np.bincount([row for _, row in plan], sizes[:, 0]).max())
        weight = 1 / sizes[:, 1].sum()
        batch = empty_batch((self.rows.stop - self.rows.start, padded_length(longest, self.config.max_length)))
        own = [(index, row - self.rows.start) for index, row in plan if self.rows.start <= row < self.rows.stop]
        for (_, row), document in zip(own, self.documents.read([index for index, _ in own]), strict=True):
            add_sequence(batch, row, *document, weight, len(document.tokens))
        return batch
