"""The training and the validation documents of a run: from files, the hub, a mix, or a task."""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int, UInt64

from mllm.config.data import Column, DataConfig, names_files
from mllm.data.cache import cached_documents, hash_of
from mllm.data.dataset import training_order
from mllm.data.records import Origin
from mllm.data.tasks.task import Example, Task
from mllm.data.tokenizing import Document, Documents, Pair, Skipped, encode_document, encode_pair, joined
from mllm.errors import UserError
from mllm.model.tokenizer import Renderer

log = logging.getLogger(__name__)


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
    """The solutions of a task's training problems, or `pairs` of solutions and rejected completions.

    UserError is raised for a problem without a solution.
    """
    needed = {"chosen": "solution", "rejected": "rejected"} if pairs else {"completion": "solution"}
    encode = encode_pair if pairs else encode_document

    def make(example: Example) -> Document | Pair:
        record: dict[str, Any] = {"prompt": example.prompt}
        for field, name in needed.items():
            if (text := getattr(example, name)) is None:
                raise UserError(f"data.source: {example.place} has no {name} to learn from: give a file of JSON lines")
            record[field] = [{"role": "assistant", "content": text}]
        try:
            encoded = encode(renderer, max_length, record)
        except UserError as error:
            raise UserError(f"{example.place}: {error}") from None
        if isinstance(encoded, Skipped):
            raise UserError(f"{example.place}: {encoded.reason}")
        return encoded[0]

    documents = [*map(make, task.train)]
    sizes, hashes = np.array([one.size for one in documents], np.int32), np.array([*map(hash_of, documents)], np.uint64)
    return Documents(sizes, hashes, lambda indices: [documents[i] for i in indices], task.content, renderer.form)


def hold_out(sources: Sequence[Documents], share: float) -> tuple[list[Documents], list[Documents]]:
    """Split each source into training documents and a held-out `share`.

    Equal documents are on the same side, also if they are from several sources.
    """
    hashes = [source.hashes for source in sources]
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
        hashes=documents.hashes[indices],
    )


def warn_of_repeats(key: str, training: Documents, heldout: Documents) -> None:
    """Warn if validation documents are also trained on."""
    if repeated := np.isin(heldout.hashes, training.hashes).sum():
        log.warning("%s: %d of %d examples are also trained on", key, repeated, len(heldout))


def origin_of(key: str, source: str, subset: str | None = None, split: str = "train") -> Origin:
    """The files named `source`, or else the split of a data set on the hub; errors name the setting `key`."""
    is_files = names_files(source) or os.path.exists(source)
    return Origin(key, source) if is_files else Origin(key, source, subset, split)
