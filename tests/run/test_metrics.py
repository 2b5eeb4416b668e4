"""The metrics of a run: whole JSON in its folder, lines on the terminal, and events for Weights & Biases."""

import io
import math
import shutil
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import config

from mllm.run.events import open_events, optional, run_id, write_numbers
from mllm.run.metrics import RunLog, summary
from mllm.run.store import RunStore


def test_tensorboard_reads_finite_numbers_and_hides_redone_steps(tmp_path):
    for last, steps, loss in ((-1, (1, 2, 3), 0.5), (1, (2, 3, 4), 0.25)):
        log = RunLog(RunStore(tmp_path), last, 4)
        for step in steps:
            log.write(step, {"loss": loss, "num_tokens": step, "kl": math.nan, "reward": math.inf})
            log.write_timings(step, {"tokens_per_second": 5.0}, {})
        log.close()
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(read.Tags()["scalars"]) == ["loss", "num_tokens", "tokens_per_second"]
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(1, 0.5), (2, 0.25), (3, 0.25), (4, 0.25)]
    assert [event.value for event in read.Scalars("num_tokens")] == [1, 2, 3, 4]
    last_line = '{"step": 4, "loss": 0.25, "num_tokens": 4, "kl": null, "reward": null}'
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[-1] == last_line


def test_an_evaluation_shows_the_rewards_that_were_given(tmp_path, capsys):
    """Tools alone give no reward."""
    log = RunLog(RunStore(tmp_path), -1, 4)
    log.write(0, {"eval/rewards/right/mean": 0.5, "eval/rewards/length/mean": 0.25, "eval/rewards/game/mean": math.nan})
    log.close()
    assert capsys.readouterr().err == "step 0 of 4  eval/rewards/right/mean 0.500  eval/rewards/length/mean 0.250\n"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("folder", "fault"), [("", "No space left on device"), ("file", "Not a directory")])
def test_unwritable_events_are_a_warning_and_block_nothing(tmp_path, monkeypatch, caplog, folder, fault):
    (tmp_path / "file").touch()
    full = lambda path: io.BufferedWriter(io.FileIO("/dev/full", "w"))  # noqa: E731
    monkeypatch.setattr("tensorboardX.record_writer.open_file", full)
    with optional("TensorBoard's events"), closing(open_events(tmp_path / folder / "tensorboard", 0)) as events:
        for step in range(100):  # more than tensorboardX's queue holds
            write_numbers(events, step, {f"number {n}": 0.5 for n in range(20)})
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("TensorBoard's events: ")
    assert fault in warning


def test_the_summary_shows_first_last_and_lowest_values(tmp_path):
    log = RunLog(store := RunStore(tmp_path), -1, 3)
    for step, value in enumerate((0.25, math.nan, 0.5, 0.75)):
        accuracy = {"eval/greedy_accuracy": value, "eval/greedy_accuracy_low": 0.2, "eval/greedy_accuracy_high": 0.9}
        log.write(step, {**accuracy, "validation/loss": (value - 0.5) ** 2, "loss": 4.0 - step})
    for step, speed in (1, 1234.0), (2, 1000.0), (3, 3000.0):  # a step with a rollout, and a step with the same tokens
        log.write_timings(step, {"time/update": 0.5, "tokens_per_second": speed, "memory/peak_bytes": 2**20}, {})
    log.close()
    lines = [" ".join(line.split()) for line in summary(store, "after it all", {"loss": "loss"}).splitlines()]
    assert lines[1:6] == [
        "ended after it all",
        "eval/greedy_accuracy 0.250 (0.200 .. 0.900) at step 0, 0.750 (0.200 .. 0.900) at step 3",
        "validation/loss 0.062 at step 0, 0.000 at step 2, 0.062 at step 3",
        "loss 4.000 in the first tenth, 1.000 in the last of 4 steps",
        "tokens/s 1,500 (of all steps but the first; prompts and completions)",
    ]


SETTINGS = config("sft", steps=4, checkpoint={"every": 2}, eval=None, rollout=None, log={"wandb": "project"})


def test_a_run_keeps_its_id_and_a_copied_run_gets_another(tmp_path):
    first, copied = (RunStore(tmp_path / name) for name in ("first", "copied"))
    first.folder.mkdir()
    number = run_id(first)
    shutil.copytree(first.folder, copied.folder)
    assert run_id(first) == number != run_id(copied)


def test_wandb_sees_all_events_and_its_failure_is_a_warning(tmp_path, monkeypatch, caplog):
    """With a module that stands for the package."""
    seen = []

    def finish():
        seen.append([path.stat().st_size > 100 for path in tmp_path.glob("tensorboard/*")])
        raise OSError("no network")

    def init(**options):
        seen.append((options["project"], options["id"], options["sync_tensorboard"], [*tmp_path.glob("tensorboard")]))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, finish=finish, Settings=dict))
    log = RunLog(store := RunStore(tmp_path), -1, 1, SETTINGS)
    log.write(1, {"loss": 1.0})
    log.close()
    assert seen == [("project", run_id(store), True, []), [True]]
    assert "log.wandb: no network; the run goes on without it" in caplog.text
