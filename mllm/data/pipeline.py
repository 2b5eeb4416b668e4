"""Batches of examples for SFT: a Grain pipeline whose position is a little JSON.

Every process runs the whole pipeline and keeps its own rows, so each knows the denominator of the whole batch's loss,
and the order of the data doesn't depend on the number of processes. Packing is Grain's first-fit (an example that fits
in none of a batch's rows opens the next batch). Data sets larger than memory, and mixtures, are left out.
"""

import logging
import os
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
from grain.experimental import FirstFitPackIterDataset
from jaxtyping import Int32

from mllm.config.data import DataConfig, names_files
from mllm.data.batch import Batch, padded_length
from mllm.data.formats import encode_record
from mllm.data.iteration import CACHED_EXAMPLES, READ_IN_CALLER, DataIterator, example_indices, process_rows
from mllm.data.records import FORMATS, Record, Records, bad_lines, file_records, hub_rows
from mllm.data.tasks.task import Task
from mllm.errors import UserError
from mllm.model.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Document = Int32[np.ndarray, "tokens 3"]
"""An example in tokens. Columns: the token, the next token, and 1 where that is learned, else 0."""


def sft_batches(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    task: Task | None = None,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> DataIterator[Batch]:
    """This process's share of batches of `batch_size` rows of up to `config.max_length` tokens, in numpy.

    Weights are 1 over the number of the assistant's tokens in the whole batch, and 0 elsewhere. The first batch is
    made at once, so that what is wrong with the data is an error here. UserError is raised if the source can't be
    read, a line is bad, or there are too few examples for one batch.
    """
    rows = process_rows(batch_size, process_index, process_count, "batch_size")
    document: Callable[[int], Document]
    if config.source == "task":
        assert task is not None
        examples = len(task.train)
        document = lru_cache(CACHED_EXAMPLES)(partial(encode_solution, task, tokenizer, config.max_length))
    else:
        documents = read_documents(config, tokenizer)
        examples, document = len(documents), documents.__getitem__
    indices = example_indices(examples, config.epochs, seed if config.shuffle else None)
    packed = FirstFitPackIterDataset(
        indices.map(lambda index: {"document": document(index)}).to_iter_dataset(READ_IN_CALLER),
        length_struct={"document": config.max_length},
        num_packing_bins=batch_size,
        shuffle_bins=False,
        max_sequences_per_bin=None if config.packing else 1,
    )
    batches = packed.batch(batch_size, drop_remainder=True).map(lambda packs: make_batch(packs, rows))
    if next(iter(batches), None) is None:
        raise UserError(
            f"data.source: {config.source} has {examples} examples, too few for one batch in {config.epochs} "
            "epochs: lower batch_size, or raise data.epochs"
        )
    return DataIterator(batches, examples, config.epochs, config.prefetch)


def make_batch(packs: dict[str, np.ndarray], rows: slice) -> tuple[Batch, int]:
    """This process's rows, as long as all processes' longest, padded, and the number of examples in the whole batch."""
    tokens, labels, learned = np.moveaxis(packs["document"], -1, 0)
    segments = packs["document_segment_ids"]
    weights = (learned / learned.sum()).astype(np.float32)
    fields = (tokens, packs["document_positions"], segments, labels * learned, weights)
    length = padded_length(int(np.count_nonzero(segments, axis=1).max()), segments.shape[1])
    ours: list[Any] = [np.ascontiguousarray(field[rows, :length]) for field in fields]
    return Batch(*ours), int(segments.max(axis=1).sum())


def read_documents(config: DataConfig, tokenizer: Tokenizer) -> list[Document]:
    """All examples of a file or hub id, tokenized; a warning counts those that were skipped or cut."""
    documents: list[Document] = []
    bad: list[tuple[str, UserError]] = []
    cut = 0
    for place, record in read_records(config):
        try:
            if isinstance(record, UserError):
                raise record
            document, complete = encode_document(tokenizer, config.max_length, place, record)
        except UserError as error:
            bad.append((place, error))
            continue
        documents.append(document)
        cut += not complete
    if bad and config.on_bad_line == "error":
        raise bad_lines(bad, "data.source")
    if not documents:
        none = f"all {len(bad)} lines are bad, the first: {bad[0][1]}" if bad else "there is no example in it"
        raise UserError(f"data.source: {config.source}: {none}")
    for count, what in ((len(bad), "bad lines were skipped"), (cut, "examples were cut at data.max_length")):
        if count:
            log.warning("data.source: %s: %d %s", config.source, count, what)
    return documents


def read_records(config: DataConfig) -> Records:
    """The records of files or of a hub id."""
    if os.path.isdir(config.source):
        raise UserError(f"data.source: {config.source} is a folder: give {FORMATS}, or a hub id")
    if names_files(config.source) or os.path.exists(config.source):
        return file_records(config.source, "data.source")
    return hub_rows(config.source, config.subset, config.split, "data.source")


def encode_document(tokenizer: Tokenizer, max_length: int, place: str, record: Record) -> tuple[Document, bool]:
    """The record as a document of at most `max_length` tokens, and whether that is all of it."""
    ids, learned = encode_record(tokenizer, place, record)
    document = np.stack([ids, np.roll(ids, -1), np.roll(learned, -1)], axis=1).astype(np.int32)[:max_length]
    document[-1:, 1:] = 0  # what follows the last token is cut off, or another document's
    if not document[:, 2].any():
        raise UserError(f"{place}: none of the tokens to learn lies within data.max_length ({max_length})")
    return document, len(ids) <= max_length


def encode_solution(task: Task, tokenizer: Tokenizer, max_length: int, index: int) -> Document:
    """Training problem `index` of the task with its solution."""
    example = task.train[index]
    place = f"{task.name}[{index}]"
    if example.solution is None:
        raise UserError(f"data.source: {place} has no solution to learn from: give a file of JSON lines")
    messages = [*example.prompt, {"role": "assistant", "content": example.solution}]
    return encode_document(tokenizer, max_length, place, {"messages": messages})[0]
