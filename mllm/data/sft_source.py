"""SFT's source of data: which documents there are, how many steps they last, and their batches."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from mllm.config.data import DataConfig
from mllm.config.section import LARGEST_NUMBER
from mllm.data.cache import cached_documents
from mllm.data.documents import Documents, TaskDocuments, hold_out
from mllm.data.iteration import WAY_OUT
from mllm.data.pipeline import count_batches, sft_batches
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
    """A `mllm.data.source.Source` over the batches of `mllm.data.pipeline.sft_batches`."""

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
        place = {"process_index": self.rows.index, "process_count": self.rows.count}
        self.data = sft_batches(config, training, batch_size=batch_size, seed=seed, **place)
        if steps is None and training.content is None and len(training) * (config.epochs or 1) > 2**24:
            raise UserError(f"steps: set them: the task has {len(training)} problems, too many to count the batches of")
        # `steps`, or fewer where the data ends before: so the schedule of the learning rate always comes to its end.
        most = steps or LARGEST_NUMBER
        self.steps = count_batches(config, training, batch_size=batch_size, seed=seed, most=most)
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
