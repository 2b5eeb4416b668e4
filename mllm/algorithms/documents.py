"""The training and the validation documents of a run: from files, the hub, a mix, or a task."""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int, UInt64

from mllm.config.data import Column, DataConfig, names_files
from mllm.data.cache import cached_documents, hash_of
from mllm.data.dataset import training_order
from mllm.data.records import Origin
from mllm.data.tasks.task import OnDemand, Task
from mllm.data.tokenizing import Document, Documents, Pair, Skipped, encode_document, encode_pair, joined
from mllm.errors import UserError
from mllm.model.tokenizer import Renderer

log = logging.getLogger(__name__)

CACHED_DOCUMENTS = 2**16
"""The number of a task's documents that are kept in memory after their sizes were computed."""

MAX_PAIRS = 2**17
"""The largest number of pairs from a task: every start computes the reference's log-probabilities of every pair."""


def load_documents(
    config: DataConfig, renderer: Renderer, task: Task | None, pairs: bool = False
) -> tuple[Documents, Documents | None]:
    """The training documents (or `pairs`), and the validation documents if `data.validation` is set.

    UserError is raised if a source can't be read, a line is bad, or a share leaves nothing to train on.
    """

    def load(origin: Origin, columns: dict[Column, str] | None = None) -> Documents:
        own = config.model_copy(update={"columns": columns or config.columns})
        return cached_documents(origin, own, renderer, pairs)

    mix, validation = config.mix or (config,), config.validation
    if task is not None and config.source == "task":
        sources = [task_documents(task, renderer, config.max_length, pairs)]
    else:
        sources = [load(origin_of("data.source", x.source, x.subset, x.split), x.columns) for x in mix]
    if validation is None:
        return joined(sources), None
    if validation.share is not None:
        kept, heldout = hold_out(sources, validation.share)
        return joined(kept), joined(heldout)
    if validation.source is not None:
        origin, columns = origin_of("data.validation.source", validation.source), None
    else:  # another split of data.source
        origin = Origin("data.validation.split", mix[0].source, mix[0].subset, validation.split)
        columns = mix[0].columns
    training, validating = joined(sources), load(origin, columns)
    warn_of_repeats(origin.key, training, validating)
    return training, validating


def task_documents(task: Task, renderer: Renderer, max_length: int, pairs: bool = False) -> Documents:
    """The solutions of a task's training problems, or `pairs` of solutions and rejected completions, made on demand.

    Reading a problem without a solution raises UserError.
    """
    if pairs and len(task.train) > MAX_PAIRS:
        fault = f"task {task.name} has {len(task.train)} problems, and at most {MAX_PAIRS} pairs can be compared"
        raise UserError(f"data.source: {fault}: give a file")
    needed = {"chosen": "solution", "rejected": "rejected"} if pairs else {"completion": "solution"}
    encode = encode_pair if pairs else encode_document

    @lru_cache(CACHED_DOCUMENTS)
    def make(index: int) -> Document | Pair:
        example = task.train[index]
        location = example.place or f"{task.name}[{index}]"
        record: dict[str, Any] = {"prompt": example.prompt}
        for field, name in needed.items():
            if (text := getattr(example, name)) is None:
                raise UserError(f"data.source: {location} has no {name} to learn from: give a file of JSON lines")
            record[field] = [{"role": "assistant", "content": text}]
        try:
            encoded = encode(renderer, max_length, record)
        except UserError as error:
            raise UserError(f"{location}: {error}") from None
        if isinstance(encoded, Skipped):
            raise UserError(f"{location}: {encoded.reason}")
        return encoded[0]

    sizes = OnDemand(lambda index: make(index).size, range(len(task.train)))
    return Documents(sizes, lambda indices: [make(index) for index in indices], task.content, renderer.form)


def hold_out(sources: Sequence[Documents], share: float) -> tuple[list[Documents], list[Documents]]:
    """Split each source into training documents and a held-out `share`.

    Equal documents are on the same side, also if they are from several sources.
    """
    hashes = [source.hashes for source in sources if source.hashes is not None]  # a task's has none, and no share
    chosen = np.concatenate([first_hashes(each, share) for each in hashes])
    sides = []
    for documents, each in zip(sources, hashes, strict=True):
        heldout = np.isin(each, chosen)
        if heldout.all():
            raise UserError(f"data.validation.share: {share} of {len(heldout)} examples leaves none to train on")
        sides.append([choose(documents, np.flatnonzero(side)) for side in (~heldout, heldout)])
    training, validating = zip(*sides, strict=True)
    return [*training], [*validating]


def first_hashes(hashes: UInt64[np.ndarray, "N"], share: float) -> UInt64[np.ndarray, " chosen"]:
    """The hashes that come first in a fixed permutation, of at most a `share` of all documents.

    A hash of more documents than are left to choose is passed over, unless there is no other.
    """
    order = training_order(len(hashes), seed=0, epochs=1)
    sizes = Counter(hashes[[order[index] for index in range(len(hashes))]].tolist())
    left, chosen = max(1, round(share * len(hashes))), []
    for value, size in sizes.items():
        if size <= left:
            chosen.append(value)
            left -= size
    return np.array(chosen or [min(sizes, key=sizes.__getitem__)], np.uint64)


def choose(documents: Documents, indices: Int[np.ndarray, " chosen"]) -> Documents:
    """The documents of these indices."""
    return replace(
        documents,
        sizes=documents.sizes[indices],
        read=lambda at: documents.read(indices[at].tolist()),
        content=f"{documents.content} {len(indices)}",
        hashes=None if documents.hashes is None else documents.hashes[indices],
    )


def warn_of_repeats(key: str, training: Documents, heldout: Documents) -> None:
    """Warn if validation documents are also trained on. A task's documents are compared if there are few of them."""
    hashes = training.hashes
    if hashes is None and len(training) <= CACHED_DOCUMENTS:
        hashes = np.array([hash_of(document) for document in training.read(range(len(training)))], np.uint64)
    if hashes is None or heldout.hashes is None:
        return
    if repeated := np.isin(heldout.hashes, hashes).sum():
        log.warning("%s: %d of %d examples are also trained on", key, repeated, len(heldout))


def origin_of(key: str, source: str, subset: str | None = None, split: str = "train") -> Origin:
    """The files named `source`, or else the split of a data set on the hub; errors name the setting `key`."""
    is_files = names_files(source) or os.path.exists(source)
    return Origin(key, source) if is_files else Origin(key, source, subset, split)
