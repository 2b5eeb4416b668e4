"""What a run measures of its parameters and when, which checkpoint is the best by it, and when that ends the run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from mllm.config.schema import Config
from mllm.data.source import Source
from mllm.data.tasks.task import Task
from mllm.errors import UserError
from mllm.model.layout import Params
from mllm.parallel.processes import RowShare
from mllm.rl.evaluation import make_evaluation
from mllm.rl.rewards import RewardRunner
from mllm.rl.rollout import Sampler
from mllm.run.state import RunState
from mllm.train.step import Forward
from mllm.train.validation import make_validation

Measure = Callable[[Params, int], dict[str, float]]
"""(parameters, step) -> metrics. All processes call it at the same place."""


class Measurement(NamedTuple):
    """A measurement at step 0, every `every` steps (None: not between them) and at the end."""

    measure: Measure
    every: int | None

    def is_due(self, step: int) -> bool:
        return step == 0 or (self.every is not None and step % self.every == 0)


@dataclass(frozen=True)
class Measurements:
    """All measurements of a run but those that come with an update."""

    repeated: Sequence[Measurement] = ()
    at_end: Sequence[Measure] = ()
    """Measured once, on the last parameters; the best checkpoint does not depend on them."""
    validates: bool = False
    """Whether SFT's validation is among `repeated`."""
    patience: int | None = None
    """The run ends after so many validations in a row without a lower loss; None: it does not."""

    def are_due(self, step: int, final: bool) -> bool:
        """Whether something is to be measured after `step` updates; `final` says that there are no more of them."""
        if final:
            return bool(self.repeated or self.at_end)
        return any(measurement.is_due(step) for measurement in self.repeated)

    def measure_pending(self, state: RunState, params: Params, final: bool) -> tuple[RunState, dict[str, Any], bool]:
        """Measure what is due at the state's pending step; `params` are all of its parameters.

        Returns the state with nothing pending, the step's metrics, and whether the run ends with this step: because it
        is the `final` one, or because the loss has not fallen.
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
        """Whether the validation loss has not fallen for too long."""
        return self.patience is not None and state.validations_without_gain >= self.patience

    def score(self, metrics: Mapping[str, Any]) -> float | None:
        """What `checkpoint.keep_best` compares, higher is better; None where it was not measured at this step.

        It is the validation's loss, negated, if the run validates; else the greedy accuracy on held-out problems, or
        their reward where they have no answers.
        """
        if self.validates:
            return -metrics["validation/loss"] if "validation/loss" in metrics else None
        return metrics.get("eval/greedy_accuracy", metrics.get("eval/reward"))


def make_measurements(
    config: Config,
    task: Task | None,
    sampler: Sampler | None,
    rewards: RewardRunner | None,
    source: Source,
    forward: Forward,
    poll: Callable[[], None],
) -> Measurements:
    """The evaluation on held-out problems, SFT's validation and the test set, as far as the run has them.

    UserError is raised as by `make_evaluation`, and if there is no test set to be measured.
    """
    repeated: list[Measurement] = []
    at_end: list[Measure] = []
    if config.eval and config.task and task and sampler and rewards:
        rows = RowShare.of_mesh(forward.mesh)
        make = partial(make_evaluation, config.eval, config.task, sampler=sampler, rewards=rewards, rows=rows)
        repeated.append(Measurement(make(task.heldout), config.eval.every))
        if config.eval.test:
            if task.test is None:
                raise UserError(f"eval.test: task {task.name} has no test set: remove it, or give the task one")
            at_end.append(make(task.test, prefix="test/"))
    validation = config.data.validation if config.data else None
    if config.data and validation and source.validation:
        validate = make_validation(config.data, config.batch_size, source.validation, forward, poll)
        repeated.append(Measurement(validate, validation.every))
    return Measurements(repeated, at_end, validation is not None, validation.patience if validation else None)
