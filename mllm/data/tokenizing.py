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
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from mllm.config.task import Form
from mllm.data.formats import messages_of, text, turns
from mllm.data.records import BadRecord, Block, Record, read_records
from mllm.errors import UserError
from mllm.model.tokenizer import Message, Renderer, encode_example, encode_text, texts_of


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
    learned: Form = "chats"

    def __len__(self) -> int:
        return len(self.sizes)


Encoded = tuple[str, tuple[Document, bool, bool] | BadRecord]
"""The place of a record, and its document with whether that is all of it and is a text, or what is wrong with it."""

FEW = 32
"""About as many blocks are faster tokenized here than processes start, which import transformers."""
MOST_WORKERS = 16


def encode_blocks(renderer: Renderer, max_length: int, blocks: Iterable[Block]) -> Iterator[list[Encoded]]:
    """The documents of blocks of records, in their order; no more than some blocks of them are held at a time.

    UserError is raised if a worker process is killed.
    """
    encode, left = partial(encode_document, renderer, max_length), iter(blocks)
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


def encode_document(renderer: Renderer, max_length: int, record: Record) -> tuple[Document, bool, bool]:
    """The record as a document of at most `max_length` tokens, whether that is all of it, and whether it is a text."""
    ids, learned, is_text = encode_record(renderer, record)
    document = Document(np.array(ids[:max_length], np.int32), np.array(learned[:max_length], bool))
    document.learned[:1] = False
    if not document.learned.any():
        raise UserError(f"none of the tokens to learn lies within data.max_length ({max_length})")
    return document, len(ids) <= max_length, is_text


def encode_record(renderer: Renderer, record: Record) -> tuple[list[int], list[bool], bool]:
    """The ids of a record, which of them are learned, and whether it is a text; UserError where it is in no format.

    `messages`, `conversations`, `question` and `answer`: the assistant's turns are learned. `prompt` and `completion`:
    the completion is, be they texts or lists of messages. `text`: every token is. The first of these that a record has
    counts. The renderer's rule may make a chat of a prompt and its completion, and the reverse.
    """
    tokenizer, rule = renderer.tokenizer, renderer.rule
    prompt: list[Message] = []
    if not {"messages", "conversations", "question"}.isdisjoint(record):
        answer = messages_of(record)
    elif isinstance(record.get("prompt"), list):
        prompt, answer = turns(record, "prompt"), messages_of({"messages": record.get("completion", [])})
    elif "completion" in record:
        asked, given = text(record, "prompt"), text(record, "completion")
        if rule != "always":
            return *encode_text(tokenizer, asked, given), True
        answer = [{"role": "user", "content": asked}, {"role": "assistant", "content": given}]
    elif "text" in record:
        if rule == "always":
            raise UserError("text has no turns, which chat_template: always renders: give prompt and completion")
        return *encode_text(tokenizer, "", text(record, "text")), True
    else:
        known = "messages, conversations, question and answer, prompt and completion, text"
        raise UserError(f"none of {known} is there")
    if rule == "never":
        return *encode_text(tokenizer, *texts_of(prompt + answer, "user", "assistant")), True
    if record.get("tools"):
        renderer = replace(renderer, args={**renderer.args, "tools": record["tools"]})
    return *encode_example(renderer, prompt + answer, len(prompt)), False


encode_here: Callable[[Record], tuple[Document, bool, bool]]
"""A worker's function, which has the tokenizer."""


def start_worker(encode: Callable[[Record], tuple[Document, bool, bool]]) -> None:
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
