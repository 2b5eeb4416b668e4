"""The training loop's view of its data: a `Source` that gives a `Step` for each update.

A source's position is JSON and goes into the checkpoint; with the parameters it determines every later batch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from mllm.config.task import Form
from mllm.data.batch import Batch
from mllm.model.layout import Params
from mllm.stopwatch import Stopwatch

Evaluate = Callable[[Params, int], dict[str, float]]
"""(parameters, step) -> metrics. All processes call it at the same place."""
WAY_OUT = "restore the data, or begin a new run_dir (model.source can be this run)"


@dataclass(frozen=True)
class Step:
    """The data of one update."""

    batch: Batch
    """This process's rows in numpy, or all rows in JAX's arrays."""
    metrics: dict[str, Any]
    """Numbers by name, under TRL's names."""
    samples: list[dict[str, Any]]
    """Lines of samples.jsonl (prompt, completion, rewards). Metrics and samples are from all processes."""
    tokens: int
    """Tokens in the whole batch, prompts included."""


class FrozenModels(NamedTuple):
    """The parameters of further models, which no update changes; None if the algorithm has no such model."""

    reference: Params | None = None
    """The parameters that the run began with."""
    teacher: Params | None = None


@runtime_checkable
class Source(Protocol):
    steps: int
    """The number of updates of the run: the setting `steps`, or fewer if the data ends earlier."""

    @property
    def form(self) -> Form:
        """The form of its examples: texts or chats."""

    @property
    def summary(self) -> str:
        """The number of examples, for the first line of a run."""

    def next(self, params: Params, step: int, watch: Stopwatch, frozen: FrozenModels) -> Step:
        """The data of update `step`, counted from 0 and below `steps`; `params` are the policy's."""

    def position(self) -> dict[str, Any]:
        """The position after the last step, as JSON for `seek`."""

    def seek(self, position: Mapping[str, Any]) -> None:
        """Continue at a position that `position()` returned, perhaps in another process."""

    def resumable(self, step: int) -> bool:
        """Whether a run can be resumed from the position after `step` updates."""

    def evaluations(self, poll: Callable[[], None]) -> Iterable[Evaluate]:
        """The evaluations that `data.validation` asks for.

        All processes call `poll` between two batches; its exceptions end the measurement.
        """


@runtime_checkable
class ReferencedSource(Source, Protocol):
    """A source that compares the policy with the run's initial parameters."""

    def set_reference(self, params: Params, checksum: str) -> None:
        """Take `params` as the reference, before the first update; a resume compares their `checksum`."""
