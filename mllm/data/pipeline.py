"""Batches of examples for SFT: a Grain pipeline whose position is a little JSON.

Every process plans the whole batch from the documents' sizes, so each knows the denominator of its loss and the order
of the data doesn't depend on the number of processes; but it reads only the documents of its own rows. Packing is
Grain's first-fit (an example that fits in none of a batch's rows opens the next batch). Mixtures are left out.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import grain
import numpy as np
from grain.experimental import FirstFitPackIterDataset
from tqdm import tqdm

from mllm.config.data import DataConfig
from mllm.data.batch import Batch, padded_length
from mllm.data.documents import Documents
from mllm.data.iteration import READ_IN_CALLER, DataIterator, example_index, example_indices, process_rows
from mllm.errors import UserError

PREFETCHED = 2
"""Batches that are made ahead of the step that reads them."""
Packs = dict[str, np.ndarray]
"""Grain's packed rows [B, T]: for each place the index of its document, the document's number in the row from 1 (0 is
padding), and the place within the document."""


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
    indices = example_indices(len(documents), config.epochs, seed if config.shuffle else None)
    packed = pack(config, documents, indices, batch_size).batch(batch_size, drop_remainder=True)
    batches = packed.map(partial(make_batch, documents, batch_size, rows))
    if next(iter(batches), None) is None:
        raise UserError(
            f"data.source: {config.source} has {len(documents)} examples, too few for one batch in {config.epochs} "
            "epochs: lower batch_size, or raise data.epochs"
        )
    return DataIterator(batches, len(documents), config.epochs, PREFETCHED, documents.content)


def count_batches(config: DataConfig, documents: Documents, *, batch_size: int, seed: int, most: int) -> int:
    """The number of batches that `data.epochs` passes over the documents have, at most `most`; none is read.

    With packing Grain's first-fit is followed, half a minute for a million documents, unless there are tokens enough.
    """
    if config.epochs is None:
        return most
    positions = len(documents) * config.epochs
    if not config.packing:
        return min(positions // batch_size, most)
    if documents.tokens() * config.epochs >= (most + 1) * batch_size * config.max_length:
        return most
    order = seed if config.shuffle else None
    batches, room = 0, np.full(batch_size, config.max_length)
    for position in tqdm(range(positions), "counting batches", unit=" examples", delay=2, disable=None):
        tokens = documents.size(example_index(position, len(documents), order)).tokens
        if not (fits := room >= tokens).any():
            batches, room[:], fits[:] = batches + 1, config.max_length, True
            if batches == most:
                return most
        room[fits.argmax()] -= tokens
    return batches + int((room < config.max_length).all())


def validation_batches(
    config: DataConfig, documents: Documents, *, batch_size: int, process_index: int = 0, process_count: int = 1
) -> Iterator[Batch]:
    """This process's share of the batches that hold every document once, in order; the last one is padded."""
    rows = process_rows(batch_size, process_index, process_count, "batch_size")
    indices = example_indices(len(documents), 1, None)
    for packs in pack(config, documents, indices, batch_size).batch(batch_size):
        yield make_batch(documents, batch_size, rows, packs)[0]


def pack(
    config: DataConfig, documents: Documents, indices: grain.MapDataset[int], batch_size: int
) -> grain.IterDataset[Packs]:
    """The packed rows of the documents that `indices` name, one row an element."""

    def places(index: int) -> dict[str, np.ndarray]:
        return {"document": np.full(documents.size(index).tokens, index)}

    return FirstFitPackIterDataset(
        indices.map(places).to_iter_dataset(READ_IN_CALLER),
        length_struct={"document": config.max_length},
        num_packing_bins=batch_size,
        shuffle_bins=False,
        max_sequences_per_bin=None if config.packing else 1,
    )


def make_batch(documents: Documents, batch_size: int, rows: slice, packs: Packs) -> tuple[Batch, int]:
    """This process's rows, as long as all processes' longest, padded, and the number of examples in the whole batch.

    Rows that `packs` lacks are padding.
    """
    owner, segments, positions = (
        np.pad(packs[name], ((0, batch_size - len(packs[name])), (0, 0)))
        for name in ("document", "document_segment_ids", "document_positions")
    )
    starts = (segments > 0) & (positions == 0)
    learned_tokens = sum(documents.size(int(index)).learned for index in owner[starts])
    length = padded_length(int(np.count_nonzero(segments, axis=1).max()), segments.shape[1])
    owner, starts = owner[rows], starts[rows]
    content = np.zeros((len(owner), length, 3), np.int32)
    read = documents.read(owner[starts].tolist())
    for (row, start), document in zip(np.argwhere(starts), read, strict=True):
        content[row, start : start + len(document)] = document
    tokens, labels, learned = np.moveaxis(content, -1, 0)
    weights = (learned / learned_tokens).astype(np.float32)
    fields = (tokens, positions[rows, :length], segments[rows, :length], labels * learned, weights)
    ours: list[Any] = [np.ascontiguousarray(field) for field in fields]
    return Batch(*ours), int(segments.max(axis=1).sum())
