"""The training and the validation documents of a run: from files, the hub, a mix, or a task."""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int

from mllm.config.data import DataConfig, SourceConfig, names_files
from mllm.data.cache import cached_documents
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
    if config.mix:
        training, mix_heldout = load_mix(config, config.mix, renderer, pairs)
        if mix_heldout is not None:
            return training, mix_heldout
    elif task is not None and config.source == "task":
        training = task_documents(task, renderer, config.max_length, pairs)
    else:
        origin = origin_of("data.source", config.source, config.subset, config.split)
        training = cached_documents(origin, config, renderer, pairs)
    validation = config.validation
    if validation is None:
        return training, None
    if validation.share is not None:
        return hold_out(training, validation.share)
    if validation.source is not None:
        heldout = origin_of("data.validation.source", validation.source)
    else:
        named = config.mix[0] if config.mix else config  # data.source has the name of this entry
        config = config.model_copy(update={"columns": named.columns or config.columns})
        heldout = Origin("data.validation.split", named.source, named.subset, validation.split)
    validating = cached_documents(heldout, config, renderer, pairs)
    warn_of_repeats(heldout.key, training, validating)
    return training, validating


def load_mix(
    config: DataConfig, mix: Sequence[SourceConfig], renderer: Renderer, pairs: bool
) -> tuple[Documents, Documents | None]:
    """The training documents of several sources, and the share of each source that `validation.share` holds out."""
    loaded = []
    for entry in mix:
        entry_config = config.model_copy(update={"columns": entry.columns or config.columns})
        origin = origin_of("data.source", entry.source, entry.subset, entry.split)
        loaded.append(cached_documents(origin, entry_config, renderer, pairs))
    if config.validation is None or (share := config.validation.share) is None:
        return joined(loaded), None
    training, heldout = zip(*(hold_out(documents, share) for documents in loaded), strict=True)
    return joined(training), joined(heldout)


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


def hold_out(documents: Documents, share: float) -> tuple[Documents, Documents]:
    """Split documents into training documents and the held-out `share`, the first documents of a fixed permutation.

    Equal documents are on the same side.
    """
    count, hashes = max(1, round(share * len(documents))), documents.hashes
    if hashes is None:
        raise UserError("data.validation.share: the examples are made on demand: give a source")
    _, group = np.unique(hashes, return_inverse=True)
    order, members = training_order(len(documents), seed=0, epochs=1), np.bincount(group)
    in_order = list(dict.fromkeys(group[[order[index] for index in range(len(order))]].tolist()))
    chosen = in_order[: 1 + int(np.searchsorted(np.cumsum(members[in_order]), count))]
    heldout = np.isin(group, chosen)
    if heldout.all():
        raise UserError(f"data.validation.share: {share} of {len(documents)} examples leaves none to train on")

    def choose(indices: Int[np.ndarray, " chosen"]) -> Documents:
        return replace(
            documents,
            sizes=documents.sizes[indices],
            read=lambda at: documents.read(indices[at].tolist()),
            content=f"{documents.content} {len(indices)}",
            hashes=hashes[indices],
        )

    return choose(np.flatnonzero(~heldout)), choose(np.flatnonzero(heldout))


def warn_of_repeats(key: str, training: Documents, heldout: Documents) -> None:
    """Warn if validation documents are also trained on."""
    if training.hashes is None or heldout.hashes is None:
        return
    if repeated := np.isin(heldout.hashes, training.hashes).sum():
        log.warning("%s: %d of %d examples are also trained on", key, repeated, len(heldout))


def origin_of(key: str, source: str, subset: str | None = None, split: str = "train") -> Origin:
    """The files named `source`, or else the split of a data set on the hub; errors name the setting `key`."""
    is_files = names_files(source) or os.path.exists(source)
    return Origin(key, source) if is_files else Origin(key, source, subset, split)
