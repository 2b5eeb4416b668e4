"""SFT's source of data: which documents there are, how many steps they last, and their batches."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from mllm.config.data import DataConfig
from mllm.config.section import LARGEST_NUMBER
from mllm.data.batch import Batch
from mllm.data.cache import cached_documents
from mllm.data.documents import Documents, TaskDocuments, hold_out
from mllm.data.iteration import WAY_OUT, DataIterator
from mllm.data.pipeline import count_batches, sft_batches
from mllm.data.records import Origin
from mllm.data.source import Step
from mllm.data.tasks.task import Task
from mllm.errors import UserError
from mllm.model.layout import Params
from mllm.model.tokenizer import Tokenizer
from mllm.parallel.processes import ALL_ROWS, RowShare, raise_everywhere
from mllm.stopwatch import Stopwatch

log = logging.getLogger(__name__)


def make_sft_source(
    config: DataConfig,
    *,
    batch_size: int,
    steps: int | None,
    warmup_steps: int,
    seed: int,
    tokenizer: Tokenizer,
    mesh: Mesh,
    task: Task | None,
) -> "SftSource":
    """The source of a configuration's data; UserError where there is too little of it, or it is bad."""
    rows = RowShare.of_mesh(mesh)
    training, validation = load_documents(config, tokenizer, task)
    batches = sft_batches(
        config, training, batch_size=batch_size, seed=seed, process_index=rows.index, process_count=rows.count
    )
    last = count_steps(config, training, batch_size=batch_size, steps=steps, warmup_steps=warmup_steps, seed=seed)
    return SftSource(batches, rows, validation, last)


def count_steps(
    config: DataConfig, documents: Documents, *, batch_size: int, steps: int | None, warmup_steps: int, seed: int
) -> int:
    """The number of steps of a run: `steps`, or fewer, with a warning, where the data ends before.

    So the schedule of the learning rate always comes to its end. UserError is raised if it is shorter than the warm-up.
    """
    if steps is None and documents.content is None and len(documents) * (config.epochs or 1) > 2**24:
        raise UserError(f"steps: set them: the task has {len(documents)} problems, too many to count the batches of")
    counted = count_batches(config, documents, batch_size=batch_size, seed=seed, most=steps or LARGEST_NUMBER)
    passes = f"data.epochs: {config.epochs} passes over the {len(documents)} examples are {counted} batches"
    if warmup_steps > counted:
        raise UserError(
            f"optimizer.warmup_steps: {warmup_steps} are more than the run has ({passes}): set fewer, or more epochs"
        )
    if steps is not None and counted < steps:
        log.warning("%s: the run and its schedule end at step %d instead of %d", passes, counted, steps)
    return counted


def load_documents(config: DataConfig, tokenizer: Tokenizer, task: Task | None) -> tuple[Documents, Documents | None]:
    """The documents to train on, and those of the validation if there is one.

    UserError is raised if a source can't be read, a line is bad, or a share leaves nothing to train on.
    """
    if config.source == "task":
        assert task is not None
        training: Documents = TaskDocuments(task, tokenizer, config.max_length)
    else:
        training = cached_documents(
            Origin("data.source", config.source, config.subset, config.split), config, tokenizer
        )
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
    return training, cached_documents(origin, config, tokenizer)


class SftSource:
    """A `mllm.data.source.Source` over the batches of `mllm.data.pipeline.sft_batches`."""

    needs_reference = False

    def __init__(
        self,
        data: DataIterator[Batch],
        rows: RowShare = ALL_ROWS,
        validation: Documents | None = None,
        steps: int = LARGEST_NUMBER,
    ) -> None:
        self.data = data
        self.rows = rows
        self.validation = validation
        self.steps = steps
        self.num_tokens = 0

    def next(self, params: Params, step: int, watch: Stopwatch, reference: Params | None = None) -> Step:
        with watch.phase("data"), raise_everywhere():
            batch = next(self.data)
        tokens = sum(self.rows.gather(int(np.count_nonzero(batch.segments))))
        self.num_tokens += tokens
        return Step(batch, {"num_tokens": self.num_tokens}, [], tokens)

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
