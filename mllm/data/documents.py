"""SFT's examples in tokens: what a batch is planned from, their sizes, apart from what only its own process reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int

from mllm.data.iteration import CACHED_EXAMPLES
from mllm.data.permutation import permute_index
from mllm.data.tasks.task import OnDemand, Task
from mllm.data.tokenizing import Document, encode_document
from mllm.errors import UserError
from mllm.model.tokenizer import Tokenizer


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

    def choose(self, indices: Int[np.ndarray, " chosen"]) -> "Documents":
        """These of the documents, whose sizes are an array, in this order."""
        content = self.content and f"{self.content} {len(indices)}"
        return Documents(self.sizes[indices], lambda chosen: self.read(indices[chosen].tolist()), content)


def task_documents(task: Task, tokenizer: Tokenizer, max_length: int) -> Documents:
    """The solutions of a task's training problems, each made when it is needed; UserError then where it has none."""

    @lru_cache(CACHED_EXAMPLES)
    def make(index: int) -> Document:
        example = task.train[index]
        place = example.place or f"{task.name}[{index}]"
        if example.solution is None:
            raise UserError(f"data.source: {place} has no solution to learn from: give a file of JSON lines")
        messages = [*example.prompt, {"role": "assistant", "content": example.solution}]
        return encode_document(tokenizer, max_length, place, {"messages": messages})[0]

    sizes = OnDemand(lambda index: make(index).size, range(len(task.train)))
    return Documents(sizes, lambda indices: [make(index) for index in indices], task.content)


def hold_out(documents: Documents, share: float) -> tuple[Documents, Documents]:
    """The documents to train on and the `share` of them that is held out, the first ones of a fixed permutation."""
    count = max(1, round(share * len(documents)))
    if count >= len(documents):
        raise UserError(f"data.validation.share: {share} of {len(documents)} examples leaves none to train on")
    heldout = np.sort([permute_index(i, len(documents), key="validation") for i in range(count)])
    return documents.choose(np.delete(np.arange(len(documents)), heldout)), documents.choose(heldout)
