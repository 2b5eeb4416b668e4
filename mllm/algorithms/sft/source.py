"""SFT's source of data: which documents there are, how many steps they last, and their batches; DPO's extends it.

Each batch is determined by the position at which it begins. Every process plans the whole batch from the documents'
sizes, so each knows the denominator of its loss and the order of the data doesn't depend on the number of processes;
but it reads only the documents of its own rows. Packing is first-fit: an example that fits in none of a batch's rows
opens the next batch. Mixtures are left out.
"""

import hashlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice, tee
from typing import Any, TypeVar

import grain
import numpy as np
from jaxtyping import Int
from tqdm import tqdm

from mllm.config.data import DataConfig, PreferenceForm, SourceConfig, names_files
from mllm.config.section import LARGEST_NUMBER
from mllm.data.batch import Batch, bucket
from mllm.data.cache import cached_documents, signed
from mllm.data.dataset import DataIterator, mixed_order, training_order
from mllm.data.packing import add_sequence, empty_batch, first_fit
from mllm.data.records import Origin
from mllm.data.source import WAY_OUT, Fixed, Step
from mllm.data.tasks.task import OnDemand, Task
from mllm.data.tokenizing import Document, Documents, Skipped, encode_document, encode_preference, joined
from mllm.errors import UserError
from mllm.model.layout import Params
from mllm.model.tokenizer import Renderer
from mllm.parallel.processes import ALL_ROWS, RowShare, raise_everywhere
from mllm.stopwatch import Stopwatch
from mllm.training.algorithm import Parts

log = logging.getLogger(__name__)

CACHED_DOCUMENTS = 2**16
"""How many documents of a task, which are made to know their sizes, are kept until they are read."""
MOST_PREFERENCES = 2**17
"""How many pairs of a task, which are all made at once."""
BatchPlan = list[tuple[int, int]]
"""The documents of a batch, in their order, each with the row that it is in."""


T = TypeVar("T")


class RowBatches(grain.IterDataset[T], ABC):
    """Training's batches of `batch_size` rows of up to `config.max_length` tokens; this process has its share of rows.

    They are a data set of Grain's, over the order of the documents.
    """

    def __init__(
        self,
        config: DataConfig,
        documents: Documents,
        batch_size: int,
        seed: int = 0,
        share: RowShare = ALL_ROWS,
    ) -> None:
        order_seed = seed if config.shuffle else None
        self.order = training_order(len(documents), order_seed, config.epochs)
        if config.mix and documents.parts:
            self.order = mixed_order(documents.parts, [entry.weight for entry in config.mix], order_seed)
        """The documents' numbers in the order of training."""
        super().__init__(self.order)
        self.config = config
        self.documents = documents
        self.batch_size = batch_size
        self.share, self.rows = share, share.part_of(batch_size)

    def __iter__(self) -> "BatchIterator[T]":
        return BatchIterator(self.read)

    def train(self) -> DataIterator[T]:
        """Training's batches, for `config.epochs`.

        The first one is made at once, so that what is wrong with the data is an error here. UserError is raised if
        there are too few examples for one batch.
        """
        size = len(self.documents)
        try:
            self.read(0)
        except StopIteration:
            fault = f"{self.config.source} has {size} examples, too few for one batch in {self.config.epochs} epochs"
            raise UserError(f"data.source: {fault}: lower batch_size, or raise data.epochs") from None
        return DataIterator(self, self.order, size, self.config.epochs, self.documents.content)

    def validate(self) -> Iterator[T]:
        """The batches that hold every document once, in order; the last one is padded."""
        return map(self.make, self.plans_of_all())

    def plans_of_all(self) -> Iterator[BatchPlan]:
        """The plans of the batches that hold every document once, in order."""
        position = 0
        while position < len(self.documents):
            plan = self.plan(range(position, len(self.documents)))
            position += len(plan)
            yield plan

    def count(self, most: int) -> int:
        """The number of training's batches, at most `most`; no document is read.

        With packing they are planned, half a minute for a million documents. A warning says how many examples don't
        fill a last batch.
        """
        if self.config.epochs is None:
            return most
        end = len(self.order)
        # A batch holds at most so many tokens; problems that are made on demand have one at least.
        sizes, room = self.documents.sizes, self.batch_size * self.config.max_length
        tokens = int(sizes[:, 0].sum(dtype=np.int64)) if isinstance(sizes, np.ndarray) else len(sizes)
        if self.config.packing and tokens * self.config.epochs >= (most + 1) * room:
            return most
        if self.config.packing:
            plans = tqdm(islice(self.plans(), most), "counting", unit=" batches", delay=2, disable=None)
            examples = [len(plan) for plan in plans]
            batches, planned = len(examples), sum(examples)
        else:
            batches = min(end // self.batch_size, most)
            planned = batches * self.batch_size
        if batches < most and planned < end:
            log.warning("data.epochs: the last %d examples do not fill a batch and are left out", end - planned)
        return batches

    def read(self, position: int) -> tuple[T, int]:
        """Training's batch that begins at a position, and the position behind it; StopIteration at the end."""
        plan = next(self.plans(position))
        return self.make(plan), position + len(plan)

    def plans(self, position: int = 0) -> Iterator[BatchPlan]:
        """The plans of training's full batches from a position on."""
        while True:
            plan = self.plan(self.order[index] for index in range(position, len(self.order)))
            if len({row for _, row in plan}) < self.batch_size:
                return
            yield plan
            position += len(plan)

    def plan(self, indices: Iterable[int]) -> BatchPlan:
        """The batch of the first of these documents, as many as fit; without packing each fills a row."""
        config, sizes = self.config, self.documents.sizes
        chosen, measured = tee(indices)
        lengths = (sizes[index][0] if config.packing else config.max_length for index in measured)
        return list(zip(chosen, first_fit(lengths, config.max_length, self.batch_size), strict=False))

    @abstractmethod
    def make(self, plan: BatchPlan) -> T:
        """This process's rows of a batch, as an update takes them, in numpy."""

    def empty(self, plan: BatchPlan) -> tuple[Batch, BatchPlan]:
        """This process's empty rows, as long as the longest of all processes, and the documents that they will hold."""
        sizes = [self.documents.sizes[index][0] for index, _ in plan]
        longest = int(np.bincount([row for _, row in plan], sizes).max())
        shape = self.rows.stop - self.rows.start, min(bucket(longest), self.config.max_length)
        local = [(index, row - self.rows.start) for index, row in plan if self.rows.start <= row < self.rows.stop]
        return empty_batch(shape), local


class BatchIterator(grain.DatasetIterator[T]):
    """Training's batches from the first; the state is the position in the order at which the next one begins."""

    def __init__(self, read: Callable[[int], tuple[T, int]]) -> None:
        super().__init__()
        self.read, self.position = read, 0

    def __next__(self) -> T:
        batch, self.position = self.read(self.position)
        return batch

    def get_state(self) -> dict[str, int]:
        return {"next_index": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["next_index"]


class SftBatches(RowBatches[Batch]):
    """Batches of documents; weights are 1 over the number of learned tokens in the whole batch, and 0 elsewhere."""

    def make(self, plan: BatchPlan) -> Batch:
        """This process's rows, padded; rows without a document are padding."""
        batch, local = self.empty(plan)
        weight = 1 / np.sum([self.documents.sizes[index][1] for index, _ in plan])
        documents = self.documents.read([index for index, _ in local])
        for (_, row), document in zip(local, documents, strict=True):
            add_sequence(batch, row, document.tokens, document.learned, weight, len(document.tokens))
        return batch


class SftSource:
    """A `mllm.data.source.Source` over training's batches."""

    form: PreferenceForm | None = None
    kind: type[RowBatches[Any]] = SftBatches

    def __init__(self, parts: Parts) -> None:
        """UserError is raised where there is too little data, or it is bad."""
        config, data, steps = parts.config, parts.config.data, parts.config.steps
        assert data is not None
        self.rows = RowShare.of_mesh(parts.mesh)
        training, self.validation = load_documents(data, parts.renderer, parts.task, self.form)
        self.learned = training.learned
        self.batches = batches = self.kind(data, training, config.batch_size, config.seed, self.rows)
        self.data = batches.train()
        if (examples := len(next(batches.plans()))) > len(training):
            excess = f"a batch holds {examples} examples, and there are {len(training)}"
            log.warning("data.source: %s: each is learned several times in an update; lower batch_size", excess)
        if steps is None and training.content is None and len(training) * (data.epochs or 1) > 2**24:
            raise UserError(f"steps: set them: the task has {len(training)} problems, too many to count the batches of")
        # `steps`, or fewer where the data ends before: so the schedule of the learning rate always comes to its end.
        self.steps = batches.count(steps or LARGEST_NUMBER)
        passes = f"data.epochs: {data.epochs} passes over the {len(training)} examples are {self.steps} batches"
        if config.optimizer.warmup_steps > self.steps:
            shortage = f"{config.optimizer.warmup_steps} are more than the run has ({passes})"
            raise UserError(f"optimizer.warmup_steps: {shortage}: set fewer, or more epochs")
        if steps is not None and self.steps < steps:
            log.warning("%s: the run and its schedule end at step %d instead of %d", passes, self.steps, steps)
        self.num_tokens = 0

    @property
    def counts(self) -> str:
        heldout = f", {len(self.validation):,} for validation" if self.validation else ""
        return f"{len(self.batches.documents):,} examples to train on{heldout}"

    def next(self, params: Params, step: int, watch: Stopwatch, fixed: Fixed) -> Step:
        return self.step_of(*self.read(watch))

    def count_sources(self, begin: int, end: int) -> dict[str, Any]:
        """How many of the examples between two positions are of each source, where there are several."""
        batches = self.batches
        if not batches.config.mix:
            return {}
        numbers = [batches.order[index] for index in range(begin, end)]
        owners = np.searchsorted(np.cumsum(batches.documents.parts), numbers, "right")
        counts = np.bincount(owners, minlength=len(batches.config.mix)).tolist()
        names = [os.path.basename(entry.source) for entry in batches.config.mix]
        names = [f"{name}:{number}" if names.count(name) > 1 else name for number, name in enumerate(names, 1)]
        return {f"data/{name}": count for name, count in zip(names, counts, strict=True)}

    def read(self, watch: Stopwatch) -> tuple[Any, dict[str, Any]]:
        """The next of training's batches, as `make` gives them, and how many of its examples are of each source."""
        begin = self.data.position
        with watch.phase("data"), raise_everywhere():
            batch = next(self.data)
        return batch, self.count_sources(begin, self.data.position)

    def step_of(self, batch: Batch, metrics: dict[str, Any]) -> Step:
        tokens = sum(self.rows.gather(int(np.count_nonzero(batch.segments))))
        self.num_tokens += tokens
        return Step(batch, {"num_tokens": self.num_tokens, **metrics}, [], tokens)

    def position(self) -> dict[str, Any]:
        position = {"data": self.data.get_state(), "num_tokens": self.num_tokens}
        return position if self.validation is None else position | {"validation": self.validation.content}

    def seek(self, position: Mapping[str, Any]) -> None:
        self.data.set_state(position["data"])
        if self.validation and position.get("validation", self.validation.content) != self.validation.content:
            raise UserError(f"data.validation: the run began with other examples: {WAY_OUT}")
        self.num_tokens = position["num_tokens"]

    def resumable(self, step: int) -> bool:
        return True


def load_documents(
    config: DataConfig, renderer: Renderer, task: Task | None, form: PreferenceForm | None = None
) -> tuple[Documents, Documents | None]:
    """The documents to train on, which are preferences where a `form` is given, and the validation's, if there is one.

    UserError is raised if a source can't be read, a line is bad, or a share leaves nothing to train on.
    """
    if config.mix:
        training, mix_heldout = load_mix(config, config.mix, renderer, form)
        if mix_heldout is not None:
            return training, mix_heldout
    elif config.source == "task":
        assert task is not None
        training = (task_preferences if form else task_documents)(task, renderer, config.max_length)
    else:
        origin = origin_of("data.source", config.source, config.subset, config.split)
        training = cached_documents(origin, config, renderer, form)
    validation = config.validation
    if validation is None:
        return training, None
    if validation.share is not None:
        return hold_out(training, validation.share)
    if validation.split is not None:
        named = config.mix[0] if config.mix else config  # which data.source is the name of
        config = config.model_copy(update={"columns": named.columns or config.columns})
        heldout = Origin("data.validation.split", named.source, named.subset, validation.split)
    else:
        assert validation.source is not None
        heldout = origin_of("data.validation.source", validation.source)
    return training, cached_documents(heldout, config, renderer, form)


def load_mix(
    config: DataConfig, mix: Sequence[SourceConfig], renderer: Renderer, form: PreferenceForm | None
) -> tuple[Documents, Documents | None]:
    """The documents of several sources to train on, and the share of each that `validation.share` holds out."""
    loaded = []
    for entry in mix:
        entry_config = config.model_copy(update={"columns": entry.columns or config.columns})
        origin = origin_of("data.source", entry.source, entry.subset, entry.split)
        loaded.append(cached_documents(origin, entry_config, renderer, form))
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


def task_preferences(task: Task, renderer: Renderer, max_length: int) -> Documents:
    """The right and wrong completions of a task's training problems; UserError where one lacks either, or too many."""
    if len(task.train) > MOST_PREFERENCES:
        fault = (
            f"task {task.name} has {len(task.train)} problems, and at most {MOST_PREFERENCES} pairs can be made of them"
        )
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
            encoded = encode_preference("pairs", renderer, max_length, {"prompt": example.prompt, **record})
        except UserError as error:
            raise UserError(f"{location}: {error}") from None
        if isinstance(encoded, Skipped):
            raise UserError(f"{location}: {encoded.reason}")
        pairs.append(encoded[0])
    content = hashlib.sha256(b"".join(signed(pair).tobytes() for pair in pairs)).hexdigest()
    sizes = np.array([pair.size for pair in pairs], np.int32)
    return Documents(sizes, lambda indices: [pairs[index] for index in indices], content, renderer.form, "pairs")


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
