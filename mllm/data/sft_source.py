"""SFT's source of data: which documents there are, how many steps they last, and their batches."""

import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from mllm.config.data import DataConfig, names_files
from mllm.config.section import LARGEST_NUMBER
from mllm.data.cache import cached_documents
from mllm.data.documents import Documents, hold_out, task_documents
from mllm.data.iteration import WAY_OUT
from mllm.data.pipeline import SftBatches
from mllm.data.records import Origin
from mllm.data.source import Step
from mllm.data.tasks.task import Task
from mllm.errors import UserError
from mllm.model.layout import Params
from mllm.model.tokenizer import Tokenizer
from mllm.parallel.processes import RowShare, raise_everywhere
from mllm.stopwatch import Stopwatch

log = logging.getLogger(__name__)


class SftSource:
    """A `mllm.data.source.Source` over the batches of `mllm.data.pipeline.SftBatches`."""

    needs_reference = False

    def __init__(
        self,
        config: DataConfig,
        task: Task | None,
        tokenizer: Tokenizer,
        mesh: Mesh,
        *,
        batch_size: int,
        steps: int | None,
        warmup_steps: int,
        seed: int,
    ) -> None:
        """UserError is raised where there is too little data, or it is bad."""
        self.rows = RowShare.of_mesh(mesh)
        training, self.validation = load_documents(config, tokenizer, task)
        batches = SftBatches(config, training, batch_size, seed, self.rows)
        self.data = batches.train()
        if steps is None and training.content is None and len(training) * (config.epochs or 1) > 2**24:
            raise UserError(f"steps: set them: the task has {len(training)} problems, too many to count the batches of")
        # `steps`, or fewer where the data ends before: so the schedule of the learning rate always comes to its end.
        self.steps = batches.count(steps or LARGEST_NUMBER)
        passes = f"data.epochs: {config.epochs} passes over the {len(training)} examples are {self.steps} batches"
        if warmup_steps > self.steps:
            longer = f"{warmup_steps} are more than the run has ({passes})"
            raise UserError(f"optimizer.warmup_steps: {longer}: set fewer, or more epochs")
        if steps is not None and self.steps < steps:
            log.warning("%s: the run and its schedule end at step %d instead of %d", passes, self.steps, steps)
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


def load_documents(config: DataConfig, tokenizer: Tokenizer, task: Task | None) -> tuple[Documents, Documents | None]:
    """The documents to train on, and those of the validation if there is one.

    UserError is raised if a source can't be read, a line is bad, or a share leaves nothing to train on.
    """
    if config.source == "task":
        assert task is not None
        training = task_documents(task, tokenizer, config.max_length)
    else:
        training = cached_documents(
            origin_of("data.source", config.source, config.subset, config.split), config, tokenizer
        )
    validation = config.validation
    if validation is None:
        return training, None
    if validation.share is not None:
        return hold_out(training, validation.share)
    if validation.split is not None:
        heldout = Origin("data.validation.split", config.source, config.subset, validation.split)
    else:
        assert validation.source is not None
        heldout = origin_of("data.validation.source", validation.source)
    return training, cached_documents(heldout, config, tokenizer)


def origin_of(key: str, source: str, subset: str | None = None, split: str = "train") -> Origin:
    """The files of that name, or else the split of a data set on the hub; `key` is the setting."""
    is_files = names_files(source) or os.path.exists(source)
    return Origin(key, source) if is_files else Origin(key, source, subset, split)
