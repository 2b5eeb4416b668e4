"""The documents that a run learns from, and the ones that it is validated on: of files, the hub, a mix, or a task."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from jaxtyping import Int

from mllm.config.data import DataConfig, SourceConfig, names_files
from mllm.data.cache import cached_documents, signed
from mllm.data.dataset import training_order
from mllm.data.records import Origin
from mllm.data.tasks.task import OnDemand, Task
from mllm.data.tokenizing import Document, Documents, Skipped, encode_document, encode_pair, joined
from mllm.errors import UserError
from mllm.model.tokenizer import Renderer

CACHED_DOCUMENTS = 2**16
"""How many documents of a task, which are made to know their sizes, are kept until they are read."""
MOST_PAIRS = 2**17
"""How many pairs of a task, which are all made at once."""


def load_documents(
    config: DataConfig, renderer: Renderer, task: Task | None, pairs: bool = False
) -> tuple[Documents, Documents | None]:
    """The documents to train on, or `pairs` of them, and the validation's, if there is one.

    UserError is raised if a source can't be read, a line is bad, or a share leaves nothing to train on.
    """
    if config.mix:
        training, mix_heldout = load_mix(config, config.mix, renderer, pairs)
        if mix_heldout is not None:
            return training, mix_heldout
    elif task is not None and config.source == "task":
        training = (task_pairs if pairs else task_documents)(task, renderer, config.max_length)
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
        named = config.mix[0] if config.mix else config  # which data.source is the name of
        config = config.model_copy(update={"columns": named.columns or config.columns})
        heldout = Origin("data.validation.split", named.source, named.subset, validation.split)
    return training, cached_documents(heldout, config, renderer, pairs)


def load_mix(
    config: DataConfig, mix: Sequence[SourceConfig], renderer: Renderer, pairs: bool
) -> tuple[Documents, Documents | None]:
    """The documents of several sources to train on, and the share of each that `validation.share` holds out."""
    loaded = []
    for entry in mix:
        entry_config = config.model_copy(update={"columns": entry.columns or config.columns})
        origin = origin_of("data.source", entry.source, entry.subset, entry.split)
        loaded.append(cached_documents(origin, entry_config, renderer, pairs))
    if config.validation is None or (share := config.validation.share) is None:
        return joined(loaded), None
    training, heldout = zip(*(hold_out(documents, share) for documents in loaded), strict=True)
    return joined(training), joined(heldout)


def task_documents(task: Task, renderer: Renderer, max_length: int) -> Documents:
    """The solutions of a task's training problems, made when they are needed; UserError then where one is missing."""

    @lru_cache(CACHED_DOCUMENTS)
    def make(index: int) -> Document:
        example = task.train[index]
        location = example.place or f"{task.name}[{index}]"
        if example.solution is None:
            raise UserError(f"data.source: {location} has no solution to learn from: give a file of JSON lines")
        completion = [{"role": "assistant", "content": example.solution}]
        try:
            encoded = encode_document(renderer, max_length, {"prompt": example.prompt, "completion": completion})
        except UserError as error:
            raise UserError(f"{location}: {error}") from None
        if isinstance(encoded, Skipped):
            raise UserError(f"{location}: {encoded.reason}")
        return encoded[0]

    sizes = OnDemand(lambda index: make(index).size, range(len(task.train)))
    return Documents(sizes, lambda indices: [make(index) for index in indices], task.content, renderer.form)


def task_pairs(task: Task, renderer: Renderer, max_length: int) -> Documents:
    """The right and wrong completions of a task's training problems; UserError where one lacks either, or too many."""
    if len(task.train) > MOST_PAIRS:
        fault = f"task {task.name} has {len(task.train)} problems, and at most {MOST_PAIRS} pairs can be made of them"
        raise UserError(f"data.source: {fault}: give a file")
    pairs = []
    for index, example in enumerate(task.train):
        location = example.place or f"{task.name}[{index}]"
        if example.solution is None or example.rejected is None:
            raise UserError(
                f"data.source: {location} has no {'rejected' if example.solution else 'solution'} to learn from"
            )
        answers = {"chosen": example.solution, "rejected": example.rejected}
        record = {name: [{"role": "assistant", "content": answer}] for name, answer in answers.items()}
        try:
            encoded = encode_pair(renderer, max_length, {"prompt": example.prompt, **record})
        except UserError as error:
            raise UserError(f"{location}: {error}") from None
        if isinstance(encoded, Skipped):
            raise UserError(f"{location}: {encoded.reason}")
        pairs.append(encoded[0])
    content = hashlib.sha256(b"".join(signed(pair).tobytes() for pair in pairs)).hexdigest()
    sizes = np.array([pair.size for pair in pairs], np.int32)
    return Documents(sizes, lambda indices: [pairs[index] for index in indices], content, renderer.form)


def hold_out(documents: Documents, share: float) -> tuple[Documents, Documents]:
    """The documents to train on and the `share` of them that is held out, the first ones of a fixed permutation."""
    count = max(1, round(share * len(documents)))
    if count >= len(documents):
        raise UserError(f"data.validation.share: {share} of {len(documents)} examples leaves none to train on")
    order = training_order(len(documents), seed=0)
    heldout = np.sort([order[index] for index in range(count)])

    def choose(indices: Int[np.ndarray, " chosen"]) -> Documents:
        content = f"{documents.content} {len(indices)}"
        sizes = documents.sizes[indices]
        return replace(documents, sizes=sizes, read=lambda at: documents.read(indices[at].tolist()), content=content)

    return choose(np.delete(np.arange(len(documents)), heldout)), choose(heldout)


def origin_of(key: str, source: str, subset: str | None = None, split: str = "train") -> Origin:
    """The files of that name, or else the split of a data set on the hub; `key` is the setting."""
    is_files = names_files(source) or os.path.exists(source)
    return Origin(key, source) if is_files else Origin(key, source, subset, split)
