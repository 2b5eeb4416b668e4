"""SFT's examples in tokens: what a batch is planned from, their sizes, apart from what only its own process reads."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from mllm.data.iteration import CACHED_EXAMPLES
from mllm.data.permutation import permute_index
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


class ChosenDocuments(Documents):
    """Some of the documents, in another order."""

    def __init__(self, documents: Documents, indices: Int[np.ndarray, " chosen"]) -> None:
        self.documents = documents
        self.indices = indices
        self.content = documents.content and f"{documents.content} {len(indices)}"

    def __len__(self) -> int:
        return len(self.indices)

    def size(self, index: int) -> Size:
        return self.documents.size(int(self.indices[index]))

    def read(self, indices: Sequence[int]) -> list[Document]:
        return self.documents.read([int(self.indices[index]) for index in indices])


def hold_out(documents: Documents, share: float) -> tuple[Documents, Documents]:
    """The documents to train on and the `share` of them that is held out, the first ones of a fixed permutation."""
    count = max(1, round(share * len(documents)))
    if count >= len(documents):
        raise UserError(f"data.validation.share: {share} of {len(documents)} examples leaves none to train on")
    heldout = np.sort([permute_index(i, len(documents), key="validation") for i in range(count)])
    trained = np.delete(np.arange(len(documents)), heldout)
    return ChosenDocuments(documents, trained), ChosenDocuments(documents, heldout)


def size_of(document: Document) -> Size:
    return Size(len(document), int(document[:, 2].sum()))
