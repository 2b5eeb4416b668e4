"""Turns records into documents of tokens, in several processes where there are many records.

A worker process imports this file, which does not import JAX. Workers end with the process that started them.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from mllm.data.formats import messages_of, text, turns
from mllm.data.records import Block, Record, read_records
from mllm.errors import UserError
from mllm.model.tokenizer import Tokenizer, encode_example, encode_text


class Document(NamedTuple):
    """An example in tokens."""

    tokens: Int32[np.ndarray, " T"]
    learned: Bool[np.ndarray, " T"]
    """Which tokens are learned, each from those before it; so never the first."""

    @property
    def size(self) -> tuple[int, int]:
        """The number of tokens, and how many of them are learned."""
        return len(self.tokens), int(self.learned.sum())


@dataclass(frozen=True)
class Documents:
    """A sequence of documents whose sizes can be had alone."""

    sizes: Any
    """Int [N, 2], or a sequence of pairs: the tokens of each document, and how many of them are learned."""
    read: Callable[[Sequence[int]], list[Document]]
    """The documents of these indices; to read many at once is faster than one by one."""
    content: str | None = None
    """A hash of all of them; None where they are made on demand."""

    def __len__(self) -> int:
        return len(self.sizes)


Encoded = tuple[str, tuple[Document, bool] | UserError]
"""The place of a record, and its document with whether that is all of it, or what is wrong with it."""

FEW = 32
"""About as many blocks are faster tokenized here than processes start, which import transformers."""
MOST_WORKERS = 16


def encode_blocks(tokenizer: Tokenizer, max_length: int, blocks: Iterable[Block]) -> Iterator[list[Encoded]]:
    """The documents of blocks of records, in their order; no more than some blocks of them are held at a time.

    UserError is raised if a worker process is killed.
    """
    encode, left = partial(encode_document, tokenizer, max_length), iter(blocks)
    for block in islice(left, FEW):
        yield list(read_records(block.records(), encode))
    workers = min(os.cpu_count() or 1, MOST_WORKERS)
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker, (encode,))
    pending: deque[Future[list[Encoded]]] = deque()
    try:
        while True:
            pending.extend(pool.submit(encode_in_worker, block) for block in islice(left, 4 * workers - len(pending)))
            if not pending:
                return
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise UserError("data.source: a process that tokenizes was killed; is there enough memory?") from None
    finally:
        pool.shutdown(cancel_futures=True)


def encode_document(tokenizer: Tokenizer, max_length: int, record: Record) -> tuple[Document, bool]:
    """The record as a document of at most `max_length` tokens, and whether that is all of it."""
    ids, learned = encode_record(tokenizer, record)
    document = Document(np.array(ids[:max_length], np.int32), np.array(learned[:max_length], bool))
    document.learned[:1] = False
    if not document.learned.any():
        raise UserError(f"none of the tokens to learn lies within data.max_length ({max_length})")
    return document, len(ids) <= max_length


def encode_record(tokenizer: Tokenizer, record: Record) -> tuple[list[int], list[bool]]:
    """The ids of a record, and which of them are learned; UserError where it is in no format.

    `messages`, `conversations`, `question` and `answer`: the assistant's turns are learned. `prompt` and `completion`:
    the completion is, be they texts or lists of messages. `text`: every token is. The first of these that a record has
    counts.
    """
    if not {"messages", "conversations", "question"}.isdisjoint(record):
        return encode_example(tokenizer, messages_of(record))
    if isinstance(record.get("prompt"), list):
        prompt = turns(record, "prompt")
        completion = messages_of({"messages": record.get("completion", [])})
        return encode_example(tokenizer, prompt + completion, len(prompt))
    if "completion" in record:
        return encode_text(tokenizer, text(record, "prompt"), text(record, "completion"))
    if "text" in record:
        return encode_text(tokenizer, "", text(record, "text"))
    known = "messages, conversations, question and answer, prompt and completion, text"
    raise UserError(f"none of {known} is there")


encode_here: Callable[[Record], tuple[Document, bool]]
"""A worker's function, which has the tokenizer."""


def start_worker(encode: Callable[[Record], tuple[Document, bool]]) -> None:
    """Prepare a worker process: it leaves Ctrl-C to its parent, and does not outlive it."""
    global encode_here
    encode_here = encode
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def encode_in_worker(block: Block) -> list[Encoded]:
    return list(read_records(block.records(), encode_here))
