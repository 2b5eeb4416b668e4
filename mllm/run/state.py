"""The state of a run, as saved in a checkpoint, and the schedule of evaluations and validations."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from mllm.config.data import ValidationConfig
from mllm.model.layout import Params
from mllm.training.step import TrainState


@dataclass(frozen=True)
class PendingEvaluation:
    """The log lines of a step that still lacks its evaluation; they are written together with the evaluation."""

    metrics: Mapping[str, float | int]
    samples: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RunState:
    """The state of a run between two updates; immutable."""

    step: int
    """Updates done, skipped ones included."""
    train: TrainState
    position: Mapping[str, Any]
    """The position of the source of batches, JSON."""
    skipped_in_a_row: int = 0
    """The number of consecutive skipped updates up to now."""
    pending_evaluation: PendingEvaluation | None = None
    """None if the lines of `step` are written."""
    lowest_loss: float | None = None
    """The lowest validation loss so far."""
    validations_without_gain: int = 0
    """The number of consecutive validations without a lower loss."""

    def after_update(self, train: TrainState, position: Mapping[str, Any], skipped: bool) -> "RunState":
        """The state one update later."""
        in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        return replace(self, step=self.step + 1, train=train, position=position, skipped_in_a_row=in_a_row)

    def document(self) -> dict[str, Any]:
        """The state without its arrays and its step, as JSON for `from_document`."""
        items = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("step", "train")}
        return items | {"pending_evaluation": self.pending_evaluation and asdict(self.pending_evaluation)}

    @classmethod
    def from_document(cls, step: int, train: TrainState, document: Mapping[str, Any]) -> "RunState":
        """The state of a checkpoint from its document."""
        values = {field.name: document[field.name] for field in fields(cls) if field.name not in ("step", "train")}
        pending = values.pop("pending_evaluation")
        return cls(step, train, **values, pending_evaluation=pending and PendingEvaluation(**pending))


# Evaluations and validations


Measure = Callable[[Params, int], dict[str, float]]
"""(parameters, step) -> metrics. All processes call it at the same place."""


class Measurement(NamedTuple):
    """A measurement at step 0, every `every` steps (unless None) and at the end."""

    measure: Measure
    every: int | None

    def is_due(self, step: int) -> bool:
        return step == 0 or (self.every is not None and step % self.every == 0)


@dataclass(frozen=True)
class Measurements:
    """A run's evaluations, validation and test set."""

    repeated: Sequence[Measurement] = ()
    at_end: Sequence[Measure] = ()
    """Measured once, on the last parameters; they don't affect the choice of the best checkpoint."""
    validation: ValidationConfig | None = None
    """The settings of the validation, if it is among `repeated`."""
    judged: bool = False
    """Whether the task's rewards depend on whether an answer is right."""

    def are_due(self, step: int, final: bool) -> bool:
        """Whether a measurement is due after `step` updates; `final` says that this is the last update."""
        if final:
            return bool(self.repeated or self.at_end)
        return any(measurement.is_due(step) for measurement in self.repeated)

    def measure_pending(self, state: RunState, params: Params, final: bool) -> tuple[RunState, dict[str, Any], bool]:
        """Make the measurements that are due at the state's pending step, with all parameters `params`.

        Returns the state with nothing pending, the step's metrics, and whether the run ends with this step: as its
        `final` step, or because of `data.validation.patience`.
        """
        assert state.pending_evaluation is not None
        metrics = dict(state.pending_evaluation.metrics)
        due = [measurement for measurement in self.repeated if final or measurement.is_due(state.step)]
        for measurement in due:
            metrics |= measurement.measure(params, state.step)
        if (loss := metrics.get("validation/loss")) is not None:
            if math.isfinite(loss) and (state.lowest_loss is None or loss < state.lowest_loss):
                state = replace(state, lowest_loss=loss, validations_without_gain=0)
            else:
                state = replace(state, validations_without_gain=state.validations_without_gain + 1)
        if not final and self.end_early(state):
            final = True
            for measurement in self.repeated:
                if measurement not in due:
                    metrics |= measurement.measure(params, state.step)
        for measure in self.at_end if final else ():
            metrics |= measure(params, state.step)
        return replace(state, pending_evaluation=None), metrics, final

    def end_early(self, state: RunState) -> bool:
        """Whether `data.validation.patience` ends the run."""
        patience = self.validation.patience if self.validation else None
        return patience is not None and state.validations_without_gain >= patience

    def score(self, metrics: Mapping[str, Any]) -> float | None:
        """The score for `checkpoint.keep_best`, higher is better; None if it was not measured or is not finite.

        If the run validates, the negated validation loss; else the greedy accuracy on held-out problems, or their
        reward if no reward compares answers.
        """
        accuracy = metrics.get("eval/greedy_accuracy") if self.judged else None
        reward = metrics.get("eval/reward", math.nan) if accuracy is None else accuracy
        score = -metrics.get("validation/loss", math.nan) if self.validation else float(reward)
        return score if math.isfinite(score) else None
