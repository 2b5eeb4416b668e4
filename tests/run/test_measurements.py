"""The times of measurements, the best checkpoint by them, and the end of a run."""

import logging
import math
import signal
from dataclasses import replace

import pytest
from runs import changed, checkpoints, records, run, write_lines
from tiny import SUMS, config

from mllm.config.data import ValidationConfig
from mllm.run import build
from mllm.run.build import Run
from mllm.run.state import Measurement, Measurements, PendingEvaluation, RunState
from mllm.training.optimizer import make_optimizer, make_schedule
from mllm.training.step import TrainState


def validating(losses: list[float], patience: int | None) -> Measurements:
    validation = Measurement(lambda params, step: {"validation/loss": losses[step]}, 1)
    at_ends = Measurement(lambda params, step: {"ends": step}, None)
    options = ValidationConfig(share=0.5, every=1, patience=patience)
    return Measurements([validation, at_ends], [lambda params, step: {"test": step}], options)


@pytest.mark.parametrize(
    ("losses", "patience", "end"),
    [
        ([3.0, 2.0, 2.5, 2.0, 1.0], 2, 3),  # an equal loss is no gain
        ([3.0, 2.0, 2.5, 1.0, 1.5], 2, None),
        ([float("nan"), 2.0, float("nan"), 3.0], 2, 3),
        ([3.0, 4.0, 5.0, 6.0], None, None),
    ],
)
def test_a_run_ends_when_patience_runs_out(losses, patience, end):
    """Then every measurement is made, also one that was not due."""
    measurements, now = validating(losses, patience), RunState(0, TrainState({}, {}, 0), {})
    ended = []
    for step in range(len(losses)):
        now = replace(now, step=step, pending_evaluation=PendingEvaluation({}, []))
        # As a checkpoint would keep it: the count survives that the run is killed.
        now = RunState.from_document(step, now.train, now.document())
        now, metrics, final = measurements.measure_pending(now, {}, False)
        assert measurements.end_early(now) == final == ("test" in metrics)
        assert ("ends" in metrics) == (final or step == 0)
        ended += [step] * final
    assert ended[:1] == ([] if end is None else [end])


def test_the_best_checkpoint_is_by_validation_or_held_out():
    everything = {"validation/loss": 2.0, "eval/greedy_accuracy": 0.5, "eval/reward": 0.7, "test/greedy_accuracy": 0.9}
    validates = validating([], None)
    assert validates.score(everything) == -2.0
    assert validates.score({"eval/greedy_accuracy": 0.5}) is None
    assert Measurements(judged=True).score(everything) == 0.5
    assert Measurements(judged=True).score({"eval/reward": 0.7, "test/reward": 1.0}) == 0.7
    assert Measurements(judged=False).score(everything) == 0.7
    assert Measurements().score({"loss": 1.0}) is None
    for wrong in (math.nan, math.inf, -math.inf):
        assert validates.score(everything | {"validation/loss": wrong}) is None
        assert Measurements().score({"eval/reward": wrong}) is None


@pytest.fixture
def settings(tmp_path):
    """A function that makes the configuration of a run on 40 examples; 8 examples are held out."""
    source = write_lines(tmp_path / "train.jsonl", SUMS)
    data = {"source": source, "max_length": 16, "packing": False, "validation": {"share": 0.2, "every": 2}}

    def make(**sections):
        given = {"run_dir": str(tmp_path / "run"), "task": None, "rollout": None, "eval": None, "batch_size": 8}
        return config("sft", **{**given, "data": data, "optimizer": {"schedule": "linear"}, **sections})

    return make


@pytest.mark.slow
def test_data_that_end_before_steps_end_run_and_schedule(settings, tmp_path, caplog, capsys, monkeypatch):
    calls = []
    monkeypatch.setattr(build, "make_optimizer", lambda *given: calls.append(given) or make_optimizer(*given))
    done = changed(settings(), steps=100, data={"epochs": 1})
    with caplog.at_level(logging.WARNING):
        assert run(done) == 0
    assert "data.epochs: 1 passes over the 32 examples are 4 batches: the run and its schedule end" in caplog.text
    lines = records(done)
    assert calls == [(done.optimizer, 4)]
    assert lines[-1]["learning_rate"] == pytest.approx(float(make_schedule(done.optimizer, 4)(3)))
    assert "validation/loss" in lines[-1]
    assert checkpoints(done) == [4]
    with Run.build(changed(done, steps=None, run_dir=str(tmp_path / "no_steps"))) as built:
        assert built.source.steps == 4
    capsys.readouterr()
    assert run(done) == 0  # and the same command has nothing to do
    assert "at step 4" in capsys.readouterr().out
    assert records(done) == lines


@pytest.mark.slow
def test_a_run_without_a_number_of_steps_that_works_is_refused(settings, capsys):
    done = changed(settings(), steps=None, data={"epochs": 1}, optimizer={"warmup_steps": 5})
    assert run(done) == 2
    assert "optimizer.warmup_steps: 5 are more than the run has (data.epochs: 1 passes over" in capsys.readouterr().err


@pytest.mark.slow
def test_an_early_end_is_announced_and_keeps_the_best(settings, monkeypatch, capsys):
    """The learning rate is so large that the loss soon rises. A step is not saved if a signal ends its validation."""
    measure = Measurements.measure_pending

    def stopped(self, state, *given):
        if state.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return measure(self, state, *given)

    learning = {"optimizer": {"schedule": "constant", "learning_rate": 0.3, "max_grad_norm": None}}
    validation = {"share": 0.2, "every": 1, "patience": 3}
    done = changed(settings(**learning), steps=60, data={"validation": validation})
    done = changed(done, checkpoint={"every": 1, "keep": 1, "keep_best": True})
    with monkeypatch.context() as patch:
        patch.setattr(Measurements, "measure_pending", stopped)
        assert run(done) == 143
    assert checkpoints(done) == [1]
    reason = "the validation loss has not fallen in 3 validations (data.validation.patience)"
    for _ in range(2):  # the second time it knows that it has ended
        assert run(done) == 0
        losses = [line["validation/loss"] for line in records(done)]
        assert f"\nended              after step {len(losses) - 1} of 60: {reason}\n" in capsys.readouterr().out
        assert min(losses) == losses[-4]
        assert checkpoints(done) == [losses.index(min(losses)), len(losses) - 1]
