"""Batches of examples for SFT, each determined by the position at which it begins.

Every process plans the whole batch from the documents' sizes, so each knows the denominator of its loss and the order
of the data doesn't depend on the number of processes; but it reads only the documents of its own rows. Packing is
first-fit: an example that fits in none of a batch's rows opens the next batch. Mixtures are left out.
"""

import logging
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from mllm.config.data import DataConfig
from mllm.data.batch import Batch, padded_length
from mllm.data.documents import Documents
from mllm.data.iteration import DataIterator, example_index, process_rows
from mllm.data.packing import first_fit
from mllm.errors import UserError

log = logging.getLogger(__name__)

PREFETCHED = 2
"""Batches that are made ahead of the step that reads them."""


class BatchPlan(NamedTuple):
    """The documents of a batch, in their order, and the row that each is in."""

    documents: list[int]
    rows: list[int]


def sft_batches(
    config: DataConfig,
    documents: Documents,
    *,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> DataIterator[Batch]:
    """This process's share of batches of `batch_size` rows of up to `config.max_length` tokens, in numpy.

    Weights are 1 over the number of learned tokens in the whole batch, and 0 elsewhere. The first batch is made at
    once, so that what is wrong with the data is an error here. UserError is raised if there are too few examples for
    one batch.
    """
    rows = process_rows(batch_size, process_index, process_count, "batch_size")

    def read(position: int) -> tuple[Batch, int]:
        plan = next(batch_plans(config, documents, batch_size, seed, position))
        return make_batch(config, documents, batch_size, rows, plan), position + len(plan.documents)

    batches = DataIterator(read, len(documents), config.epochs, PREFETCHED, documents.content)
    try:
        read(0)
    except StopIteration:
        raise UserError(
            f"data.source: {config.source} has {len(documents)} examples, too few for one batch in {config.epochs} "
            "epochs: lower batch_size, or raise data.epochs"
        ) from None
    return batches


def count_batches(config: DataConfig, documents: Documents, *, batch_size: int, seed: int, most: int) -> int:
    """The number of batches that `data.epochs` passes over the documents have, at most `most`; none is read.

    With packing they are planned, half a minute for a million documents, unless there are tokens enough. A warning
    says how many examples don't fill a last batch.
    """
    if config.epochs is None:
        return most
    examples = len(documents) * config.epochs
    if config.packing and documents.tokens() * config.epochs >= (most + 1) * batch_size * config.max_length:
        return most
    if not config.packing:
        batches = min(examples // batch_size, most)
        planned = batches * batch_size
    else:
        batches = planned = 0
        with tqdm(desc="counting batches", total=examples, unit=" examples", delay=2, disable=None) as bar:
            for plan in islice(batch_plans(config, documents, batch_size, seed), most):
                batches, planned = batches + 1, planned + len(plan.documents)
                bar.update(len(plan.documents))
    if batches < most and planned < examples:
        log.warning("data.epochs: the last %d examples do not fill a batch and are left out", examples - planned)
    return batches


def validation_batches(
    config: DataConfig, documents: Documents, *, batch_size: int, process_index: int = 0, process_count: int = 1
) -> Iterator[Batch]:
    """This process's share of the batches that hold every document once, in order; the last one is padded."""
    rows = process_rows(batch_size, process_index, process_count, "batch_size")
    position = 0
    while position < len(documents):
        plan = plan_batch(config, documents, batch_size, range(position, len(documents)))
        position += len(plan.documents)
        yield make_batch(config, documents, batch_size, rows, plan)


def batch_plans(
    config: DataConfig, documents: Documents, batch_size: int, seed: int, position: int = 0
) -> Iterator[BatchPlan]:
    """The plans of training's full batches from a position on."""
    end, order = None if config.epochs is None else len(documents) * config.epochs, seed if config.shuffle else None
    while True:
        positions = count(position) if end is None else range(position, end)
        indices = (example_index(place, len(documents), order) for place in positions)
        plan = plan_batch(config, documents, batch_size, indices)
        if len({*plan.rows}) < batch_size:
            return
        yield plan
        position += len(plan.documents)


def plan_batch(config: DataConfig, documents: Documents, batch_size: int, indices: Iterable[int]) -> BatchPlan:
    """The batch of the first of these documents, as many as fit; without packing each fills a row."""
    chosen: list[int] = []

    def lengths() -> Iterator[int]:
        for index in indices:
            chosen.append(index)
            yield documents.size(index).tokens if config.packing else config.max_length

    rows = first_fit(lengths(), config.max_length, batch_size)
    return BatchPlan(chosen[: len(rows)], rows)


def make_batch(config: DataConfig, documents: Documents, batch_size: int, rows: slice, plan: BatchPlan) -> Batch:
    """This process's rows, as long as all processes' longest, padded; rows without a document are padding."""
    sizes = [documents.size(index) for index in plan.documents]
    learned_tokens = sum(size.learned for size in sizes)
    longest = int(np.bincount(plan.rows, [size.tokens for size in sizes]).max())
    shape = (rows.stop - rows.start, padded_length(longest, config.max_length))
    tokens, positions, segments, labels = np.zeros((4, *shape), np.int32)
    weights = np.zeros(shape, np.float32)
    ours = [(index, row) for index, row in zip(*plan, strict=True) if rows.start <= row < rows.stop]
    for (_, row), document in zip(ours, documents.read([index for index, _ in ours]), strict=True):
        row -= rows.start
        start = np.count_nonzero(segments[row])
        places = row, slice(start, start + len(document))
        tokens[places], label, learned = document.T
        positions[places] = np.arange(len(document))
        segments[places] = segments[row].max() + 1
        labels[places] = label * learned
        weights[places] = learned / learned_tokens
    return Batch(tokens, positions, segments, labels, weights)
