"""The source of given examples: how many steps they last, and the data of each step."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Float

from mllm.algorithms.documents import load_documents
from mllm.algorithms.rows import RowBatches
from mllm.config.run import ExampleRun
from mllm.config.section import LARGEST_NUMBER
from mllm.data.batch import Batch
from mllm.data.source import WAY_OUT, Evaluate, FrozenModels, Step
from mllm.errors import UserError
from mllm.model.layout import Params
from mllm.parallel.mesh import shard_batch, sharding
from mllm.parallel.processes import RowShare, raise_everywhere
from mllm.stopwatch import Stopwatch
from mllm.training.recipe import Parts
from mllm.training.step import Forward, Metrics

log = logging.getLogger(__name__)

Rows = TypeVar("Rows", bound=RowBatches)
Validation = Callable[[Forward, Params, Batch], tuple[Metrics, Float[Array, ""]]]
"""(model and head, parameters, a batch) -> the means of its metrics, and their weight. A `perplexity` is given by its
logarithm."""


class ExampleSource(Generic[Rows]):
    """A `mllm.data.source.Source` over training's batches of one kind of rows."""

    def __init__(
        self,
        config: ExampleRun,
        parts: Parts,
        kind: type[Rows],
        validation: Validation,
        pairs: bool = False,
    ) -> None:
        """UserError is raised where there is too little data, or it is bad."""
        data, steps = config.data, config.steps
        self.rows, self.forward, self.validation = RowShare.of_mesh(parts.mesh), parts.forward, validation
        training, heldout = load_documents(data, parts.renderer, parts.examples_task, pairs)
        self.form = training.form
        self.batches = batches = kind(data, training, config.batch_size, config.seed, self.rows)
        self.heldout = None if heldout is None else kind(data, heldout, config.batch_size, share=self.rows)
        """The validation's batches; None: there is no validation."""
        self.data = batches.train()
        if (examples := len(next(batches.plans()))) > len(training):
            excess = f"a batch holds {examples} examples, and there are {len(training)}"
            log.warning("data.source: %s: each is learned several times in an update; lower batch_size", excess)
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
    def summary(self) -> str:
        heldout = f", {len(self.heldout.documents):,} for validation" if self.heldout else ""
        return f"{len(self.batches.documents):,} examples to train on{heldout}"

    def next(self, params: Params, step: int, watch: Stopwatch, frozen: FrozenModels) -> Step:
        with watch.phase("data"), raise_everywhere():
            batch = next(self.data)
        tokens = sum(self.rows.gather(int(np.count_nonzero(batch.segments))))
        self.num_tokens += tokens
        return Step(batch, {"num_tokens": self.num_tokens}, [], tokens)

    def position(self) -> dict[str, Any]:
        position = {"data": self.data.get_state(), "num_tokens": self.num_tokens}
        return position | ({"validation": self.heldout.documents.content} if self.heldout else {})

    def seek(self, position: Mapping[str, Any]) -> None:
        self.data.set_state(position["data"])
        heldout = self.heldout and self.heldout.documents.content
        if self.heldout and position.get("validation", heldout) != heldout:
            raise UserError(f"data.validation: the run began with other examples: {WAY_OUT}")
        self.num_tokens = position["num_tokens"]

    def resumable(self, step: int) -> bool:
        return True

    def evaluations(self, poll: Callable[[], None]) -> Iterable[Evaluate]:
        if self.heldout is not None:
            yield make_validation(self.validation, self.forward, self.heldout.validate, poll)


def make_validation(
    metrics: Validation, forward: Forward, batches: Callable[[], Iterable[Batch]], poll: Callable[[], None]
) -> Evaluate:
    """The function (parameters, step) -> means of the `metrics` of `batches`. The batches have each example once.

    All processes call `poll` between two batches; its exceptions end the validation.
    """
    rows = sharding(forward.mesh, ("batch",))
    validation_pass = jax.jit(partial(metrics, forward), in_shardings=(None, rows))

    def validate(params: Params, step: int) -> dict[str, float]:
        results = []
        for batch in batches():
            poll()
            results.append(validation_pass(params, shard_batch(forward.mesh, batch)))
        parts, weights = zip(*jax.device_get(results), strict=True)
        values = {name: np.array([part[name] for part in parts], np.float64) for name in parts[0]}
        means = {name: float(np.average(each, weights=weights)) for name, each in values.items()}
        if "perplexity" in means:  # the exponential of a mean, not the mean of exponentials
            means["perplexity"] = math.exp(min(means["perplexity"], 700.0))
        return {f"validation/{name}": value for name, value in means.items()}

    return validate
