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

from mllm.algorithms.dpo.settings import PreferenceForm
from mllm.config.task import Form
from mllm.data.formats import labelled, messages_of, pair_of, text, turns
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


class Preference(NamedTuple):
    """Two sequences that belong together: completions of a prompt, or one with a label and what it is compared with."""

    first: Document
    second: Document
    """The rejected completion; beside a label the same prompt with another example's completion."""
    desirable: bool | None = None
    """The label of `first`; None: it was chosen, and `second` rejected."""

    @property
    def size(self) -> tuple[int, int]:
        """The tokens in a row, and how many of them are learned: both sequences' of a pair; those with a label have
        rows of their own."""
        (one, learned), (other, also) = self.first.size, self.second.size
        return (one + other, learned + also) if self.desirable is None else (max(one, other), learned)


NO_DOCUMENT = Document(np.zeros(0, np.int32), np.zeros(0, bool))


@dataclass(frozen=True)
class Documents:
    """A sequence of documents, or of preferences, whose sizes can be had alone."""

    sizes: Any
    """Int [N, 2], or a sequence of pairs: the tokens of each document, and how many of them are learned."""
    read: Callable[[Sequence[int]], list[Any]]
    """The documents of these indices; to read many at once is faster than one by one."""
    content: str | None = None
    """A hash of all of them; None where they are made on demand."""
    learned: Form = "chats"
    form: PreferenceForm | None = None
    """What preferences they are; None: each is a `Document`."""

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Any:
        return self.read([index])[0]


Encoded = tuple[str, tuple[Document | Preference, bool, bool] | BadRecord]
"""The place of a record, and its document with whether that is all of it and is a text, or what is wrong with it."""

Encode = Callable[..., tuple[Document | Preference, bool, bool]]
FEW = 32
"""About as many blocks are faster tokenized here than processes start, which import transformers."""
MOST_WORKERS = 16


def encode_blocks(
    renderer: Renderer, max_length: int, blocks: Iterable[Block], form: PreferenceForm | None = None
) -> Iterator[list[Encoded]]:
    """The documents of blocks of records, in their order; no more than some blocks of them are held at a time.

    With a `form` they are preferences. UserError is raised if a worker process is killed.
    """
    encode: Encode = partial(encode_preference, form) if form else encode_document
    encode, left = partial(encode, renderer, max_length), iter(blocks)
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
    return cut(ids, learned, max_length, max_length), len(ids) <= max_length, is_text


def cut(ids: list[int], learned: list[bool], most: int, max_length: int) -> Document:
    """The document of the first `most` tokens; UserError where none of them is learned."""
    document = Document(np.array(ids[:most], np.int32), np.array(learned[:most], bool))
    document.learned[:1] = False
    if not document.learned.any():
        raise UserError(f"none of the tokens to learn lies within data.max_length ({max_length})")
    return document


def encode_preference(
    form: PreferenceForm, renderer: Renderer, max_length: int, record: Record
) -> tuple[Preference, bool, bool]:
    """The record as a preference, whether that is all of it, and whether it is a text.

    Sequences end with their last learned token, since nothing depends on those behind it. Both of a pair have at most
    `max_length` tokens together: where they have more, neither is cut to less than a half. `mismatched` adds the second
    sequence to one with a label.
    """
    records, label = ([*pair_of(record)], None) if form == "pairs" else ([(found := labelled(record))[0]], found[1])
    encoded = [encode_record(renderer, one) for one in records]
    ends = [len(learned) - learned[::-1].index(True) if True in learned else 0 for _, learned, _ in encoded]
    most = [min(ends[0], max(max_length // 2, max_length - sum(ends[1:])) if ends[1:] else max_length)]
    most += [min(end, max_length - most[0]) for end in ends[1:]]
    first, *others = (cut(ids, learned, n, max_length) for (ids, learned, _), n in zip(encoded, most, strict=True))
    second = others[0] if others else NO_DOCUMENT
    return Preference(first, second, label), most == ends, all(one[2] for one in encoded)


def mismatched(encoded: Iterable[Encoded], max_length: int) -> Iterator[Encoded]:
    """The labelled completions, each beside its prompt with the next example's completion; the last has the first's."""

    def join(one: Any, other: Any) -> Encoded:
        (place, ((own, _, label), *about)), ((next_own, *_), *_) = one, other
        prompt, completion = own.learned.argmax(), next_own.learned.argmax()
        parts = zip((own.tokens, own.learned), (next_own.tokens, next_own.learned), strict=True)
        second = Document(*(np.concatenate([a[:prompt], b[completion:]])[:max_length] for a, b in parts))
        return place, (Preference(own, second, label), *about)

    first: Any = None
    last: Any = None
    for one in encoded:
        place, found = one
        if isinstance(found, BadRecord):
            yield one
            continue
        if last:
            yield join(last, found)
        first, last = first or found, (place, found)
    if last:
        yield join(last, first)


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


encode_here: Encode
"""A worker's function, which has the tokenizer."""


def start_worker(encode: Encode) -> None:
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
