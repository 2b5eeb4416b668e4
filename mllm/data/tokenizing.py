"""Turns records into documents of tokens, in several processes where there are many records.

A worker process imports this file, which does not import JAX. Workers end with the process that started them.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice

import numpy as np
from jaxtyping import Int32

from mllm.data.formats import encode_record
from mllm.data.records import Record
from mllm.errors import UserError
from mllm.model.tokenizer import Tokenizer

Document = Int32[np.ndarray, "tokens 3"]
"""An example in tokens. Columns: the token, the next token, and 1 where that is learned, else 0."""
Placed = tuple[str, Record | UserError]
Encoded = tuple[str, Document | UserError, bool]
"""The place of a record, its document or what is wrong with it, and whether it had to be cut."""

FEW = 2000
"""As many records are faster tokenized here than processes start, which import transformers."""
CHUNK = 128
MOST_WORKERS = 16


def encode_records(tokenizer: Tokenizer, max_length: int, records: Iterable[Placed]) -> Iterator[Encoded]:
    """The documents of all records, in their order; no more than some chunks of them are held at a time.

    UserError is raised if a worker process is killed.
    """
    encode, left = partial(encode_chunk, tokenizer, max_length), iter(records)
    yield from encode(islice(left, FEW))
    chunks = iter(lambda: list(islice(left, CHUNK)), [])
    if (first := next(chunks, None)) is None:
        return
    workers = min(os.cpu_count() or 1, MOST_WORKERS)
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker, (encode,))
    try:
        pending: deque[Future[list[Encoded]]] = deque([pool.submit(encode_in_worker, first)])
        while pending:
            pending.extend(pool.submit(encode_in_worker, chunk) for chunk in islice(chunks, 4 * workers - len(pending)))
            yield from pending.popleft().result()
    except BrokenProcessPool:
        raise UserError("data.source: a process that tokenizes was killed; is there enough memory?") from None
    finally:
        pool.shutdown(cancel_futures=True)


def encode_chunk(tokenizer: Tokenizer, max_length: int, records: Iterable[Placed]) -> list[Encoded]:
    encoded: list[Encoded] = []
    for place, record in records:
        try:
            if isinstance(record, UserError):
                raise record
            document, complete = encode_document(tokenizer, max_length, place, record)
            encoded.append((place, document, complete))
        except UserError as error:
            encoded.append((place, error, True))
    return encoded


def encode_document(tokenizer: Tokenizer, max_length: int, place: str, record: Record) -> tuple[Document, bool]:
    """The record as a document of at most `max_length` tokens, and whether that is all of it."""
    ids, learned = encode_record(tokenizer, place, record)
    document = np.stack([ids, np.roll(ids, -1), np.roll(learned, -1)], axis=1).astype(np.int32)[:max_length]
    document[-1:, 1:] = 0  # what follows the last token is cut off, or another document's
    if not document[:, 2].any():
        raise UserError(f"{place}: none of the tokens to learn lies within data.max_length ({max_length})")
    return document, len(ids) <= max_length


encode_here: Callable[[Iterable[Placed]], list[Encoded]]
"""A worker's function, which has the tokenizer."""


def start_worker(encode: Callable[[Iterable[Placed]], list[Encoded]]) -> None:
    """Prepare a worker process: it leaves Ctrl-C to its parent, and does not outlive it."""
    global encode_here
    encode_here = encode
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=follow_parent, daemon=True).start()


def follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def encode_in_worker(records: list[Placed]) -> list[Encoded]:
    return encode_here(records)
