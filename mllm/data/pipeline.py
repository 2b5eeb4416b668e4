"""Batches of examples for SFT and of prompts for GRPO: Grain pipelines whose position is a little JSON.

Every process runs the whole pipeline and keeps its own rows, so each knows the denominator of the whole batch's loss,
and the order of the data doesn't depend on the number of processes. Packing is Grain's first-fit (an example that fits
in none of a batch's rows opens the next batch). Data sets larger than memory, and mixtures, are left out.
"""

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import grain
import numpy as np
from grain.experimental import FirstFitPackIterDataset, ThreadPrefetchIterDataset
from jaxtyping import Int32

from mllm.config.schema import DataConfig
from mllm.data.batch import Batch, padded_length
from mllm.data.records import Records, hub_rows, json_lines, messages_of
from mllm.data.tasks import MAX_LENGTH, Example, Task, permute_index
from mllm.errors import UserError
from mllm.model.tokenizer import Message, Tokenizer, encode_example, encode_prompt

log = logging.getLogger(__name__)

T = TypeVar("T")

Document = Int32[np.ndarray, "tokens 3"]
"""A chat in tokens. Columns: the token, the next token, and 1 where that is the assistant's and so learned, else 0."""

CACHED_EXAMPLES = 2**16

READ_IN_CALLER = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


@dataclass(frozen=True)
class PromptBatch:
    examples: list[Example]
    tokens: list[list[int]]


class DataIterator(Generic[T]):
    """Batches, and a position from which another iterator continues exactly, with prefetching or without."""

    def __init__(
        self, dataset: grain.IterDataset[tuple[T, int]], examples: int, epochs: int | None, prefetch: int
    ) -> None:
        """`dataset` gives batches, each with its number of examples; an epoch has `examples` of them."""
        self.examples = examples
        self.epochs = epochs
        self.consumed = 0
        self.batches = iter(ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=prefetch))
        # Otherwise the garbage collector may close it in the very thread that closing joins.
        weakref.finalize(self, self.batches.close)

    def __iter__(self) -> "DataIterator[T]":
        return self

    def __next__(self) -> T:
        """The next batch; StopIteration after the last epoch, with a warning where examples don't fill a last batch.

        UserError is raised if an example that was made on demand is too long.
        """
        try:
            batch, examples = next(self.batches)
        except StopIteration:
            left = self.examples * (self.epochs or 0) - self.consumed
            if left > 0:
                log.warning("data.epochs: the last %d examples did not fill a batch and were left out", left)
            raise
        self.consumed += examples
        return batch

    def get_state(self) -> dict[str, Any]:
        """The position after the batches so far: JSON."""
        return {"examples": self.examples, "given": self.consumed, "pipeline": self.batches.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a position that `get_state` gave; UserError where the number of examples has changed since."""
        if state["examples"] != self.examples:
            raise UserError(
                f"data: the run began with {state['examples']} examples and now there are {self.examples}: "
                "restore the data, or start a new run_dir"
            )
        self.consumed = state["given"]
        self.batches.set_state(state["pipeline"])


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


def prompt_batches(
    task: Task,
    tokenizer: Tokenizer,
    *,
    prompts_per_step: int,
    max_prompt_length: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> DataIterator[PromptBatch]:
    """This process's share of the task's prompts, for ever: each once in an epoch, in another order in each.

    UserError is raised if a prompt is longer than `max_prompt_length` tokens. If problems are made on demand, only
    the first hundred are checked here; a later one raises when its turn comes.
    """
    rows = process_rows(prompts_per_step, process_index, process_count, "batch_size / grpo.num_generations")
    prompt = lru_cache(CACHED_EXAMPLES)(partial(encode_task_prompt, task, tokenizer, max_prompt_length))
    for index in range(len(task.train) if isinstance(task.train, list) else min(len(task.train), 100)):
        prompt(index)

    def make_prompt_batch(prompts: Sequence[tuple[Example, list[int]]]) -> tuple[PromptBatch, int]:
        examples, tokens = zip(*prompts[rows], strict=True)
        return PromptBatch(list(examples), list(tokens)), len(prompts)

    prompts = example_indices(len(task.train), None, seed).map(prompt)
    batches = prompts.batch(prompts_per_step, batch_fn=make_prompt_batch).to_iter_dataset(READ_IN_CALLER)
    return DataIterator(batches, len(task.train), epochs=None, prefetch=2)


def process_rows(total: int, process_index: int, process_count: int, key: str) -> slice:
    """This process's rows of a batch, if `process_count` processes share its `total` rows; `key` names that setting."""
    if total % process_count:
        raise UserError(
            f"{key}: {total} is not divisible by the number of processes that share its rows ({process_count})"
        )
    share = total // process_count
    return slice(process_index * share, (process_index + 1) * share)


def example_indices(count: int, epochs: int | None, seed: int | None) -> grain.MapDataset[int]:
    """The indices of `count` examples, `epochs` times over, in a new order each epoch; seed None: always ascending.

    Grain's `shuffle` takes 0.7 ms an index, holds at most 2^32, and makes seed 0's second epoch seed 1's first.
    """
    if count == 0:
        raise UserError("task: there is no example in it")

    def example_index(position: int) -> int:
        epoch, index = divmod(int(position), count)
        return index if seed is None else permute_index(index, count, key=f"{seed} {epoch}")

    length = min(count * epochs, MAX_LENGTH) if epochs else MAX_LENGTH
    return grain.MapDataset.range(length).map(example_index)


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
    skipped: list[UserError] = []
    cut = 0
    for place, record in read_records(config):
        try:
            if isinstance(record, UserError):
                raise record
            document, complete = tokenize(tokenizer, config.max_length, place, messages_of(place, record))
        except UserError as error:
            if config.on_bad_line == "error":
                raise
            skipped.append(error)
            continue
        documents.append(document)
        cut += not complete
    if not documents:
        bad = f"all {len(skipped)} lines are bad, the first: {skipped[0]}" if skipped else "there is no example in it"
        raise UserError(f"data.source: {config.source}: {bad}")
    for count, what in ((len(skipped), "bad lines were skipped"), (cut, "examples were cut at data.max_length")):
        if count:
            log.warning("data.source: %s: %d %s", config.source, count, what)
    return documents


def read_records(config: DataConfig) -> Records:
    """The records of a file or hub id."""
    if os.path.isdir(config.source):
        raise UserError(f"data.source: {config.source} is a folder: give a file of JSON lines, or a hub id")
    if config.source.endswith(".jsonl") or os.path.exists(config.source):
        return json_lines(Path(config.source), "data.source")
    return hub_rows(config.source, config.subset, config.split, "data.source")


def tokenize(tokenizer: Tokenizer, max_length: int, place: str, messages: Sequence[Message]) -> tuple[Document, bool]:
    """The chat as a document of at most `max_length` tokens, and whether that is all of it."""
    try:
        ids, assistant = encode_example(tokenizer, messages)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    document = np.stack([ids, np.roll(ids, -1), np.roll(assistant, -1)], axis=1).astype(np.int32)[:max_length]
    document[-1:, 1:] = 0  # what follows the last token is cut off, or another document's
    if not document[:, 2].any():
        raise UserError(f"{place}: none of the assistant's tokens lies within data.max_length ({max_length})")
    return document, len(ids) <= max_length


def encode_solution(task: Task, tokenizer: Tokenizer, max_length: int, index: int) -> Document:
    """Training problem `index` of the task with its solution."""
    example = task.train[index]
    place = f"{task.name}[{index}]"
    if example.solution is None:
        raise UserError(f"data.source: {place} has no solution to learn from: give a file of JSON lines")
    messages = [*example.prompt, {"role": "assistant", "content": example.solution}]
    return tokenize(tokenizer, max_length, place, messages)[0]


def encode_task_prompt(task: Task, tokenizer: Tokenizer, max_length: int, index: int) -> tuple[Example, list[int]]:
    """Training problem `index` of the task, and its prompt's tokens; UserError where they are too many."""
    example = task.train[index]
    try:
        tokens = encode_prompt(tokenizer, example.prompt)
    except UserError as error:
        raise UserError(f"{task.name}[{index}]: {error}") from None
    if len(tokens) > max_length:
        raise UserError(
            f"rollout.max_prompt_length: prompt {index} of task {task.name} has {len(tokens)} tokens, "
            f"and the limit is {max_length}"
        )
    return example, tokens
