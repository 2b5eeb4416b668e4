"""Turns records into documents of tokens."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, UInt64

from mllm.config.task import Form
from mllm.data.formats import messages_of, pair_of, renamed, text, tools_of, turns
from mllm.data.records import BadRecord, Record, Records, read_records
from mllm.errors import UserError
from mllm.model.examples import encode_example, encode_text
from mllm.model.tokenizer import Message, Renderer, render, texts_of


class Document(NamedTuple):
    """An example in tokens."""

    tokens: Int32[np.ndarray, " T"]
    counts: Bool[np.ndarray, " T"]
    """The learned tokens; the first token is never learned."""

    @property
    def size(self) -> tuple[int, int]:
        """The number of tokens, and how many of them count."""
        return len(self.tokens), int(self.counts.sum())


class Pair(NamedTuple):
    """Two completions of a prompt."""

    chosen: Document
    rejected: Document

    @property
    def size(self) -> tuple[int, int]:
        """The number of tokens of both sequences, which share a row, and how many of them count."""
        (first, counted), (second, counted_too) = self.chosen.size, self.rejected.size
        return first + second, counted + counted_too


@dataclass(frozen=True)
class Documents:
    """A sequence of documents or pairs, read on demand; the sizes are in memory."""

    sizes: Int32[np.ndarray, "N 2"]
    """The tokens of each document, and how many of them count."""
    hashes: UInt64[np.ndarray, "N"]
    """A hash of each document, to find equal documents."""
    read: Callable[[Sequence[int]], list[Any]]
    """The documents of the given indices; one call for many is faster than many calls."""
    content: str
    """A hash of all documents."""
    form: Form = "chats"
    parts: tuple[int, ...] = ()
    """The number of documents of each source, in order; empty for a single source."""

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Any:
        return self.read([index])[0]


def joined(sources: Sequence[Documents]) -> Documents:
    """The documents of several sources, one source after the other; the documents of a single source unchanged."""
    if len(sources) == 1:
        return sources[0]
    parts = tuple(map(len, sources))
    starts = np.cumsum([0, *parts])

    def read(indices: Sequence[int]) -> list[Any]:
        index = np.array(indices, int)
        owners = np.searchsorted(starts, index, "right") - 1
        documents: list[Any] = [None] * len(index)
        for number in {*owners.tolist()}:
            slots = np.flatnonzero(owners == number)
            for at, document in zip(slots, sources[number].read((index[slots] - starts[number]).tolist()), strict=True):
                documents[at] = document
        return documents

    content = hashlib.sha256(" ".join(source.content for source in sources).encode()).hexdigest()
    sizes = np.concatenate([source.sizes for source in sources])
    form: Form = "texts" if all(source.form == "texts" for source in sources) else "chats"
    hashes = np.concatenate([source.hashes for source in sources])
    return Documents(sizes, hashes, read, content, form, parts)


class Skipped(NamedTuple):
    """A valid record without anything to learn, and the reason."""

    reason: str


EQUAL = Skipped("chosen and rejected have equal tokens")
Encoded = tuple[str, tuple[Document | Pair, bool, bool] | Skipped | BadRecord]
"""A record's place, and (document, whether it is complete, whether it is a text) or why there is no document."""


def encode_records(
    renderer: Renderer,
    max_length: int,
    records: Records,
    pairs: bool = False,
    columns: Mapping[str, str] | None = None,
) -> Iterator[Encoded]:
    """The documents of records, or their `pairs`, in their order. `columns` name the records' fields."""
    encode: Callable[..., Any] = encode_pair if pairs else encode_document
    return read_records(records, lambda record: encode(renderer, max_length, renamed(columns or {}, record)))


def encode_document(renderer: Renderer, max_length: int, record: Record) -> tuple[Document, bool, bool] | Skipped:
    """The record as a document of at most `max_length` tokens, whether it is complete, and whether it is a text."""
    ids, counts, is_text = encode_record(renderer, record)
    document = cut(ids, counts, max_length)
    return (document, len(ids) <= max_length, is_text) if document.counts.any() else nothing_within(max_length)


def cut(ids: list[int], counts: list[bool], most: int) -> Document:
    """The document of the first `most` tokens."""
    document = Document(np.array(ids[:most], np.int32), np.array(counts[:most], bool))
    document.counts[:1] = False
    return document


def nothing_within(max_length: int) -> Skipped:
    return Skipped(f"none of the tokens to learn lies within data.max_length ({max_length})")


def encode_pair(renderer: Renderer, max_length: int, record: Record) -> tuple[Pair, bool, bool] | Skipped:
    """The record's two completions, whether they are complete, and whether they are texts.

    Sequences end with their last learned token, since no loss depends on later tokens. Together they have at most
    `max_length` tokens; of a longer pair, no sequence is cut to less than half of `max_length`.
    """
    if "chosen" in record and record["chosen"] == record.get("rejected"):
        return EQUAL
    encoded = [encode_record(renderer, item) for item in pair_of(record)]
    ends = [len(counts) - counts[::-1].index(True) if True in counts else 0 for _, counts, _ in encoded]
    first = min(ends[0], max(max_length // 2, max_length - ends[1]))
    sizes = [first, min(ends[1], max_length - first)]
    chosen, rejected = (cut(ids, counts, size) for (ids, counts, _), size in zip(encoded, sizes, strict=True))
    if not (chosen.counts.any() and rejected.counts.any()):
        return nothing_within(max_length)
    if np.array_equal(chosen.tokens, rejected.tokens) and np.array_equal(chosen.counts, rejected.counts):
        return EQUAL
    return Pair(chosen, rejected), sizes == ends, all(is_text for *_, is_text in encoded)


def encode_record(renderer: Renderer, record: Record) -> tuple[list[int], list[bool], bool]:
    """(token ids, which are learned, whether it is a text) of a record; UserError if the record matches no format.

    `messages`, `conversations`, `question` and `answer`: the assistant's turns are learned. `prompt` and `completion`:
    the completion is learned, for texts and for lists of messages. `text`: every token is learned. A record's first
    form in this order counts. The renderer's rule may turn texts into chats, and chats into texts.
    """
    tokenizer, rule, tools = renderer.tokenizer, renderer.rule, tools_of(record)
    prompt: list[Message] = []

    def as_texts(*pieces: str) -> tuple[list[int], list[bool], bool]:
        if tools:
            raise UserError("tools: texts have no chat template that renders them: give messages, or no tools")
        return *encode_text(tokenizer, *pieces), True

    if not {"messages", "conversations", "question"}.isdisjoint(record):
        answer = messages_of(record)
    elif isinstance(record.get("prompt"), list):
        prompt, answer = turns(record, "prompt"), messages_of({"messages": record.get("completion", [])})
        if len(answer) > len(prompt) and answer[: len(prompt)] == prompt:  # it repeats the prompt
            answer = answer[len(prompt) :]
    elif "completion" in record:
        prompt_text, completion_text = text(record, "prompt"), text(record, "completion")
        if rule != "always":
            return as_texts(prompt_text, completion_text)
        answer = [{"role": "user", "content": prompt_text}, {"role": "assistant", "content": completion_text}]
    elif "text" in record:
        if rule == "always":
            raise UserError("text has no turns, which chat_template: always renders: give prompt and completion")
        return as_texts("", text(record, "text"))
    else:
        known = "messages, conversations, question and answer, prompt and completion, text"
        raise UserError(f"none of {known} is there: data.columns says what they are called")
    if rule == "never":
        return as_texts(*texts_of(prompt + answer, "user", "assistant"))
    if tools:
        with_tools = replace(renderer, args={**renderer.args, "tools": tools})
        if render(with_tools, prompt + answer) == render(renderer, prompt + answer):
            raise UserError("tools: the tokenizer's chat template leaves them out: use one that renders tools")
        renderer = with_tools
    return *encode_example(renderer, prompt + answer, len(prompt)), False
