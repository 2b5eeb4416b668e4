"""SFT's source of data: the batches of the pipeline, read one ahead to know which is the last."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from mllm.config.data import DataConfig
from mllm.config.schema import Config
from mllm.data.batch import Batch
from mllm.data.cache import cached_documents
from mllm.data.documents import Documents, Origin, TaskDocuments, hold_out
from mllm.data.iteration import DataIterator
from mllm.data.pipeline import sft_batches
from mllm.data.source import Step
from mllm.data.tasks.task import Task
from mllm.model.layout import Params
from mllm.model.load import Policy
from mllm.model.tokenizer import Tokenizer
from mllm.parallel.processes import ALL_ROWS, RowShare
from mllm.stopwatch import Stopwatch


def make_sft_source(config: Config, policy: Policy, mesh: Mesh, task: Task | None) -> "SftSource":
    assert config.data is not None
    rows = RowShare.of_mesh(mesh)
    training, validation = load_documents(config.data, policy.tokenizer, task)
    batches = sft_batches(
        config.data,
        training,
        batch_size=config.batch_size,
        seed=config.seed,
        process_index=rows.index,
        process_count=rows.count,
    )
    return SftSource(batches, rows, validation)


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

    def __init__(
        self, data: DataIterator[Batch], rows: RowShare = ALL_ROWS, validation: Documents | None = None
    ) -> None:
        self.data = data
        self.rows = rows
        self.validation = validation
        self.num_tokens = 0
        self.after = data.get_state()
        self.upcoming: Batch | None = None

    def next(self, params: Params, step: int, watch: Stopwatch) -> Step:
        with watch.phase("data"):
            batch = next(self.data) if self.upcoming is None else self.upcoming
            self.after = self.data.get_state()
            self.upcoming = next(self.data, None)
        tokens = sum(self.rows.gather(int(np.count_nonzero(batch.segments))))
        self.num_tokens += tokens
        return Step(batch, {"num_tokens": self.num_tokens}, [], tokens, last=self.upcoming is None)

    def position(self) -> dict[str, Any]:
        return {"data": self.after, "num_tokens": self.num_tokens}

    def seek(self, position: Mapping[str, Any]) -> None:
        self.data.set_state(position["data"])
        self.num_tokens = position["num_tokens"]
        self.after, self.upcoming = position["data"], None

    def resumable(self, step: int) -> bool:
        return True
