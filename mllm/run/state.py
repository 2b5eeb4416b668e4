"""The state of a run: everything that it needs to go on, and all that a checkpoint holds of it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from mllm.training.step import TrainState


@dataclass(frozen=True)
class PendingEvaluation:
    """A step that is done but for its evaluation: its lines, which are written together with the evaluation's."""

    metrics: Mapping[str, float | int]
    samples: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RunState:
    """A run between two updates. It is replaced at every update, never changed."""

    step: int
    """Updates done, skipped ones included."""
    train: TrainState
    position: Mapping[str, Any]
    """The position of the source of batches, JSON."""
    skipped_in_a_row: int = 0
    """How many updates before this moment were skipped without a break."""
    pending_evaluation: PendingEvaluation | None = None
    """None if the lines of `step` are written."""
    lowest_loss: float | None = None
    """The lowest loss of SFT's validation so far."""
    validations_without_gain: int = 0
    """How many validations in a row have not lowered the loss."""

    @property
    def logged_step(self) -> int:
        """The last step whose lines are written; -1 if there is none."""
        return self.step - (self.pending_evaluation is not None)

    def after_update(self, train: TrainState, position: Mapping[str, Any], skipped: bool) -> "RunState":
        """The state one update later."""
        in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        return replace(self, step=self.step + 1, train=train, position=position, skipped_in_a_row=in_a_row)

    def document(self) -> dict[str, Any]:
        """The part of the state that isn't arrays, as JSON, except for the step. `from_document` reads it."""
        items = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("step", "train")}
        return items | {"pending_evaluation": self.pending_evaluation and asdict(self.pending_evaluation)}

    @classmethod
    def from_document(cls, step: int, train: TrainState, document: Mapping[str, Any]) -> "RunState":
        """The state of a checkpoint from its document, in which other things may stand, too."""
        values = {field.name: document[field.name] for field in fields(cls) if field.name not in ("step", "train")}
        pending = values.pop("pending_evaluation")
        return cls(step, train, **values, pending_evaluation=pending and PendingEvaluation(**pending))
