"""Runs on a user's files: their length by epochs, validation, the best checkpoint by it, early stopping, resume."""

import json
import logging
import signal

import pytest
from runs import assert_same_end, changed, checkpoints, killed_after, records, run, signal_trainer
from tiny import config

from mllm.algorithms.sft.source import SftSource
from mllm.errors import StepError
from mllm.run.measurements import Measurements
from mllm.store.run_store import RunStore
from mllm.training.optimizer import make_schedule

pytestmark = pytest.mark.slow


@pytest.fixture
def settings(tmp_path):
    """A function that makes the configuration of a run on 40 examples, 8 of which are held out."""
    path = tmp_path / "train.jsonl"
    lines = [{"prompt": f"{i % 9}+{i % 5}=", "completion": str(i % 9 + i % 5)} for i in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"source": str(path), "max_length": 16, "packing": False, "validation": {"share": 0.2, "every": 2}}

    def make(**sections):
        given = {"run_dir": str(tmp_path / "run"), "task": None, "rollout": None, "eval": None, "batch_size": 8}
        return config("sft", **{**given, "data": data, "optimizer": {"schedule": "linear"}, **sections})

    return make


@pytest.mark.nightly
def test_epochs_give_the_steps_and_the_schedule_of_a_run_that_goes_on_after_a_kill(settings, tmp_path, monkeypatch):
    """And after data that could not be read: what was measured of the step before is known of its checkpoint."""
    give = SftSource.next

    def damaged(self, params, step, *others):
        if step == 4:
            raise StepError("damaged")
        return give(self, params, step, *others)

    done = changed(settings(checkpoint={"every": 1, "keep": 20}), steps=None, data={"epochs": 2})
    assert run(done) == 0
    lines = records(done)
    assert [line["step"] for line in lines] == list(range(9))  # 32 examples, 8 a batch, twice
    assert [line["step"] for line in lines if "validation/loss" in line] == [0, 2, 4, 6, 8]
    assert lines[-1]["validation/loss"] < lines[0]["validation/loss"]
    schedule = make_schedule(done.optimizer, 8)
    assert [line["learning_rate"] for line in lines[1:]] == pytest.approx([float(schedule(i)) for i in range(8)])
    killed = killed_after(done, 2, tmp_path / "killed")
    with monkeypatch.context() as patch:
        patch.setattr(SftSource, "next", damaged)
        assert run(changed(killed, checkpoint={"every": None})) == 2
    assert checkpoints(killed)[-1] == 4
    assert RunStore(killed.run_dir).document(4)["score"] == -lines[4]["validation/loss"]
    assert run(killed) == 0
    assert_same_end(done, killed)


def test_data_that_end_before_steps_are_announced_and_run_and_schedule_end_with_them(settings, caplog, capsys):
    done = changed(settings(), steps=100, data={"epochs": 1})
    with caplog.at_level(logging.WARNING):
        assert run(done) == 0
    assert "data.epochs: 1 passes over the 32 examples are 4 batches: the run and its schedule end" in caplog.text
    lines = records(done)
    assert lines[-1]["learning_rate"] == pytest.approx(float(make_schedule(done.optimizer, 4)(3)))
    assert "validation/loss" in lines[-1]
    assert checkpoints(done) == [4]
    capsys.readouterr()
    assert run(done) == 0  # and the same command has nothing to do
    assert "at step 4" in capsys.readouterr().out
    assert records(done) == lines


def test_a_run_without_a_number_of_steps_that_works_is_refused(settings, tmp_path, capsys):
    done = changed(settings(), steps=None, data={"epochs": 1}, optimizer={"warmup_steps": 5})
    assert run(done) == 2
    assert "optimizer.warmup_steps: 5 are more than the run has (data.epochs: 1 passes over" in capsys.readouterr().err
    many = {"name": "arithmetic", "arithmetic": {"operands": 4, "digits": 3}}
    endless = config("sft", run_dir=str(tmp_path / "run"), steps=None, task=many, data={"epochs": 1})
    assert run(endless) == 2
    assert "steps: set them: the task has 999999999984 problems, too many to count the" in capsys.readouterr().err


def test_a_run_ends_early_says_so_and_keeps_the_best_by_its_validation(settings, monkeypatch, capsys):
    """The learning rate is so large that the loss soon rises. A step whose validation a signal ends is not saved."""
    measure = Measurements.measure_pending

    def stopped(self, state, *given):
        if state.step == 2:
            signal_trainer(signal.SIGTERM)
        return measure(self, state, *given)

    learning = {"optimizer": {"schedule": "constant", "learning_rate": 0.3, "max_grad_norm": None}}
    validation = {"share": 0.2, "every": 1, "patience": 3}
    done = changed(settings(**learning), steps=60, data={"validation": validation})
    done = changed(done, checkpoint={"every": 1, "keep": 1, "keep_best": True})
    with monkeypatch.context() as patch:
        patch.setattr(Measurements, "measure_pending", stopped)
        assert run(done) == 143
    assert checkpoints(done) == [1]
    assert run(done) == 0
    losses = [line["validation/loss"] for line in records(done)]
    assert len(losses) < 60
    assert min(losses) == losses[-4]
    assert checkpoints(done) == [losses.index(min(losses)), len(losses) - 1]
    printed = capsys.readouterr()
    last = len(losses) - 1
    reason = "the validation loss has not fallen in 3 validations (data.validation.patience)"
    assert f"\nended              after step {last} of 60: {reason}\n" in printed.out
    assert f"\nstep {last} of 60  validation loss {losses[-1]:.3f}\n" in printed.err
    assert run(done) == 0  # which knows that it has ended
    assert reason in capsys.readouterr().out
    assert len(records(done)) == len(losses)
