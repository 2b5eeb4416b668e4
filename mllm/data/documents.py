"""SFT's examples in tokens: what a batch is planned from, their sizes, apart from what only its own process reads."""

import logging
import os
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from mllm.config.data import DataConfig, names_files
from mllm.data.formats import encode_record
from mllm.data.iteration import CACHED_EXAMPLES
from mllm.data.permutation import permute_index
from mllm.data.records import FORMATS, Record, Records, bad_lines, file_records, hub_rows
from mllm.data.tasks.task import Task
from mllm.errors import UserError
from mllm.model.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Document = Int32[np.ndarray, "tokens 3"]
"""An example in tokens. Columns: the token, the next token, and 1 where that is learned, else 0."""


class Size(NamedTuple):
    tokens: int
    learned: int


class Documents(ABC):
    """A sequence of documents whose sizes can be had alone."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def size(self, index: int) -> Size:
        """The number of tokens of a document, and how many of them are learned."""

    @abstractmethod
    def __getitem__(self, index: int) -> Document: ...


class ListedDocuments(Documents):
    """Documents in memory."""

    def __init__(self, documents: list[Any]) -> None:
        self.documents = documents

    def __len__(self) -> int:
        return len(self.documents)

    def size(self, index: int) -> Size:
        return size_of(self[index])

    def __getitem__(self, index: int) -> Document:
        return self.documents[index]


class TaskDocuments(Documents):
    """The solutions of a task's training problems, each made when it is needed."""

    def __init__(self, task: Task, tokenizer: Tokenizer, max_length: int) -> None:
        self.task = task
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.document = lru_cache(CACHED_EXAMPLES)(self.make)

    def __len__(self) -> int:
        return len(self.task.train)

    def size(self, index: int) -> Size:
        return size_of(self.document(index))

    def __getitem__(self, index: int) -> Document:
        return self.document(index)

    def make(self, index: int) -> Document:
        """Training problem `index` with its solution; UserError where it has none."""
        example = self.task.train[index]
        place = f"{self.task.name}[{index}]"
        if example.solution is None:
            raise UserError(f"data.source: {place} has no solution to learn from: give a file of JSON lines")
        messages = [*example.prompt, {"role": "assistant", "content": example.solution}]
        return encode_document(self.tokenizer, self.max_length, place, {"messages": messages})[0]


class Part(Documents):
    """Some of the documents, in another order."""

    def __init__(self, documents: Documents, indices: Int[np.ndarray, " part"]) -> None:
        self.documents = documents
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def size(self, index: int) -> Size:
        return self.documents.size(int(self.indices[index]))

    def __getitem__(self, index: int) -> Document:
        return self.documents[int(self.indices[index])]


class Origin(NamedTuple):
    """Where records come from, and the setting that says so."""

    key: str
    source: str
    subset: str | None = None
    split: str = "train"

    def records(self) -> Records:
        """The records of files or of a hub id."""
        if os.path.isdir(self.source):
            raise UserError(f"{self.key}: {self.source} is a folder: give {FORMATS}, or a hub id")
        if names_files(self.source) or os.path.exists(self.source):
            return file_records(self.source, self.key)
        return hub_rows(self.source, self.subset, self.split, self.key)


def load_documents(config: DataConfig, tokenizer: Tokenizer, task: Task | None) -> tuple[Documents, Documents | None]:
    """The documents to train on, and those of the validation if there is one.

    UserError is raised if a source can't be read, a line is bad, or a share leaves nothing to train on.
    """
    if config.source == "task":
        assert task is not None
        training: Documents = TaskDocuments(task, tokenizer, config.max_length)
    else:
        training = read_documents(Origin("data.source", config.source, config.subset, config.split), config, tokenizer)
    validation = config.validation
    if validation is None:
        return training, None
    if validation.share is not None:
        return hold_out(training, validation.share)
    if validation.split is not None:
        origin = Origin("data.validation.split", config.source, config.subset, validation.split)
    else:
        assert validation.source is not None
        origin = Origin("data.validation.source", validation.source)
    return training, read_documents(origin, config, tokenizer)


def hold_out(documents: Documents, share: float) -> tuple[Documents, Documents]:
    """The documents to train on and the `share` of them that is held out, the first ones of a fixed permutation."""
    count = max(1, round(share * len(documents)))
    if count >= len(documents):
        raise UserError(f"data.validation.share: {share} of {len(documents)} examples leaves none to train on")
    heldout = np.sort([permute_index(i, len(documents), key="validation") for i in range(count)])
    return Part(documents, np.delete(np.arange(len(documents)), heldout)), Part(documents, heldout)


def read_documents(origin: Origin, config: DataConfig, tokenizer: Tokenizer) -> Documents:
    """All examples of a file or hub id, tokenized; a warning counts those that were skipped or cut."""
    documents: list[Document] = []
    bad: list[tuple[str, UserError]] = []
    cut = 0
    for place, record in origin.records():
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
        raise bad_lines(bad, origin.key)
    if not documents:
        none = f"all {len(bad)} lines are bad, the first: {bad[0][1]}" if bad else "there is no example in it"
        raise UserError(f"{origin.key}: {origin.source}: {none}")
    for count, what in ((len(bad), "bad lines were skipped"), (cut, "examples were cut at data.max_length")):
        if count:
            log.warning("%s: %s: %d %s", origin.key, origin.source, count, what)
    return ListedDocuments(documents)


def encode_document(tokenizer: Tokenizer, max_length: int, place: str, record: Record) -> tuple[Document, bool]:
    """The record as a document of at most `max_length` tokens, and whether that is all of it."""
    ids, learned = encode_record(tokenizer, place, record)
    document = np.stack([ids, np.roll(ids, -1), np.roll(learned, -1)], axis=1).astype(np.int32)[:max_length]
    document[-1:, 1:] = 0  # what follows the last token is cut off, or another document's
    if not document[:, 2].any():
        raise UserError(f"{place}: none of the tokens to learn lies within data.max_length ({max_length})")
    return document, len(ids) <= max_length


def size_of(document: Document) -> Size:
    return Size(len(document), int(document[:, 2].sum()))
