"""SFT's examples in tokens: what a batch is planned from, their sizes, apart from what only its own process reads."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from mllm.config.data import names_files
from mllm.data.blocks import Content, file_blocks, read_content, runs
from mllm.data.iteration import CACHED_EXAMPLES
from mllm.data.permutation import permute_index
from mllm.data.records import FORMATS, Placed, Wanted, file_paths, hub_rows, hub_split
from mllm.data.tasks.task import Task
from mllm.data.tokenizing import Document, encode_document
from mllm.errors import UserError
from mllm.model.tokenizer import Tokenizer


class Size(NamedTuple):
    tokens: int
    learned: int


class Documents(ABC):
    """A sequence of documents whose sizes can be had alone."""

    content: str | None = None
    """A hash of all of them; None where they are made on demand."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def size(self, index: int) -> Size:
        """The number of tokens of a document, and how many of them are learned."""

    @abstractmethod
    def read(self, indices: Sequence[int]) -> list[Document]:
        """The documents of these indices; to read many at once is faster than one by one."""

    def __getitem__(self, index: int) -> Document:
        return self.read([index])[0]

    def tokens(self) -> int:
        """The number of tokens of all documents."""
        return sum(self.size(index).tokens for index in range(len(self)))


class TaskDocuments(Documents):
    """The solutions of a task's training problems, each made when it is needed."""

    def __init__(self, task: Task, tokenizer: Tokenizer, max_length: int) -> None:
        self.task = task
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.content = task.content
        self.document = lru_cache(CACHED_EXAMPLES)(self.make)

    def __len__(self) -> int:
        return len(self.task.train)

    def size(self, index: int) -> Size:
        return size_of(self.document(index))

    def read(self, indices: Sequence[int]) -> list[Document]:
        return [self.document(index) for index in indices]

    def tokens(self) -> int:
        """The least number of tokens of all documents, none of which is made for it."""
        return len(self)

    def make(self, index: int) -> Document:
        """Training problem `index` with its solution; UserError where it has none."""
        example = self.task.train[index]
        place = example.place or f"{self.task.name}[{index}]"
        if example.solution is None:
            raise UserError(f"data.source: {place} has no solution to learn from: give a file of JSON lines")
        messages = [*example.prompt, {"role": "assistant", "content": example.solution}]
        return encode_document(self.tokenizer, self.max_length, place, {"messages": messages})[0]


class Part(Documents):
    """Some of the documents, in another order."""

    def __init__(self, documents: Documents, indices: Int[np.ndarray, " part"]) -> None:
        self.documents = documents
        self.indices = indices
        self.content = documents.content and f"{documents.content} {len(indices)}"

    def __len__(self) -> int:
        return len(self.indices)

    def size(self, index: int) -> Size:
        return self.documents.size(int(self.indices[index]))

    def read(self, indices: Sequence[int]) -> list[Document]:
        return self.documents.read([int(self.indices[index]) for index in indices])


class Origin(NamedTuple):
    """Where records come from, and the setting that says so."""

    key: str
    source: str
    subset: str | None = None
    split: str = "train"

    def is_files(self) -> bool:
        """Whether files are meant, and no hub id; UserError where it is a folder."""
        if os.path.isdir(self.source):
            raise UserError(f"{self.key}: {self.source} is a folder: give {FORMATS}, or a hub id")
        return names_files(self.source) or os.path.exists(self.source)

    def rows(self) -> Any:
        """The rows of the hub id's split."""
        return hub_split(self.source, self.subset, self.split, self.key)

    def paths(self) -> list[Path]:
        """The files that hold the records."""
        if self.is_files():
            return file_paths(self.source, self.key)
        return [Path(file["filename"]) for file in self.rows().cache_files]

    def content(self) -> Content:
        """What is in the files; UserError as by `read_content`, whose digest is extended by what was chosen of them."""
        found = read_content(self.paths(), self.key)
        return found if self.is_files() else found._replace(digest=f"{self.subset} {self.split} {found.digest}")

    def blocks(self, content: Content, wanted: Wanted) -> Iterator[list[Placed]]:
        """The records of the wanted blocks; UserError where they can't be read."""
        if self.is_files():
            return file_blocks(self.paths(), content.newlines, self.key, wanted)
        return runs(hub_rows(self.source, self.subset, self.split, self.key), wanted)


def hold_out(documents: Documents, share: float) -> tuple[Documents, Documents]:
    """The documents to train on and the `share` of them that is held out, the first ones of a fixed permutation."""
    count = max(1, round(share * len(documents)))
    if count >= len(documents):
        raise UserError(f"data.validation.share: {share} of {len(documents)} examples leaves none to train on")
    heldout = np.sort([permute_index(i, len(documents), key="validation") for i in range(count)])
    return Part(documents, np.delete(np.arange(len(documents)), heldout)), Part(documents, heldout)


def size_of(document: Document) -> Size:
    return Size(len(document), int(document[:, 2].sum()))
