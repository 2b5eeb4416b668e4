"""What a run writes of itself is whole JSON, and what it says on the terminal and to Weights & Biases."""

import io
import math
import shutil
import sys
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
from runs import arguments, changed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import config

import train
from mllm.algorithms.grpo.algorithm import Grpo
from mllm.run.events import open_events, optional, run_id, write_numbers
from mllm.run.metrics import RunLog, summary
from mllm.stopwatch import Stopwatch
from mllm.store.run_store import RunStore


def test_a_number_that_is_not_finite_is_null_in_the_metrics_and_is_left_out_of_tensorboard(tmp_path, caplog, capsys):
    log = RunLog(RunStore(tmp_path), -1, 1)
    log.write(1, {"loss": math.nan, "kl": math.inf, "reward": 0.5})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": null, "kl": null, "reward": 0.5}\n'
    assert EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"] == ["reward"]
    assert "NaN or Inf" not in caplog.text + "".join(capsys.readouterr())


def test_plain_tensorboard_reads_the_numbers_of_all_steps_and_hides_those_that_a_resume_does_again(tmp_path):
    for last, steps, loss in ((-1, (1, 2, 3), 0.5), (1, (2, 3, 4), 0.25)):
        log = RunLog(RunStore(tmp_path), last, 4)
        for step in steps:
            log.write(step, {"loss": loss, "num_tokens": step})
            log.write_timings(step, {"tokens_per_second": 5.0}, {})
        log.close()
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(read.Tags()["scalars"]) == ["loss", "num_tokens", "tokens_per_second"]
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(1, 0.5), (2, 0.25), (3, 0.25), (4, 0.25)]
    assert [event.value for event in read.Scalars("num_tokens")] == [1, 2, 3, 4]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fault", ["No space left on device", "Not a directory"])
def test_events_that_can_not_be_written_are_a_warning_and_nothing_waits_for_them(tmp_path, monkeypatch, caplog, fault):
    folder = tmp_path / "tensorboard"
    if fault == "Not a directory":
        folder = tmp_path / "file" / "tensorboard"
        folder.parent.write_text("")
    monkeypatch.setattr(
        "tensorboardX.record_writer.open_file", lambda path: io.BufferedWriter(io.FileIO("/dev/full", "w"))
    )
    with optional("TensorBoard's events"), closing(open_events(folder, 0)) as events:
        for step in range(100):  # more than tensorboardX's queue holds
            write_numbers(events, step, {f"number {n}": 0.5 for n in range(20)})
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("TensorBoard's events: ")
    assert fault in warning


def test_a_line_at_most_every_second_one_for_each_measurement_and_one_for_the_last_step(tmp_path, capsys, monkeypatch):
    log, now = RunLog(RunStore(tmp_path), -1, 60), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for step in range(1, 61):
        now[0] = 0.05 * step
        metrics = {"loss": 1 / step} | ({"validation/loss": 2.0} if step in (30, 31) else {})
        log.write(step, metrics)
        log.write_timings(step, {"time/update": 0.1, "tokens_per_second": 5.0}, metrics)
    log.close()
    first, *others = capsys.readouterr().err.split("\n")
    assert first == "step 1 of 60  loss 1.000  5 tok/s"  # which compiles, so that nothing is known of the others yet
    assert others == [
        "step 21 of 60  loss 0.048  5 tok/s  ETA 00:01",
        "step 30 of 60  validation/loss 2.000",
        "step 31 of 60  validation/loss 2.000",
        "step 41 of 60  loss 0.024  5 tok/s  ETA 00:00",
        "step 60 of 60  loss 0.017  5 tok/s  ETA 00:00",
        "",
    ]
    assert len((tmp_path / "timings.jsonl").read_text().splitlines()) == 60


def test_the_line_of_a_grpo_step_has_its_reward_length_and_entropy(tmp_path, capsys):
    metrics = {"reward": 0.5, "loss": -0.0, "completions/mean_length": 12.25, "completions/clipped_ratio": 0.125}
    log = RunLog(RunStore(tmp_path), -1, 3, progress=Grpo.progress)
    for step, entropy in ((1, 0.25), (3, math.nan)):
        log.write_timings(step, {"tokens_per_second": 5.0}, {**metrics, "entropy": entropy})
    log.close()
    one, three = capsys.readouterr().err.splitlines()
    assert one == "step 1 of 3  reward 0.500  length 12.250  cut off 0.125  entropy 0.250  5 tok/s"
    assert three.startswith("step 3 of 3  reward 0.500  length 12.250  cut off 0.125  5 tok/s  ETA")


def test_phases_add_up_and_evaluation_is_not_part_of_the_speed():
    watch = Stopwatch()
    watch.seconds = {"rollout": 1.0, "update": 3.0}
    watch.count_tokens(40)
    with watch.phase("eval"):
        pass
    with watch.phase("update"):
        pass
    assert watch.timings()["tokens_per_second"] == 10.0
    assert watch.timings()["time/update"] >= 3.0
    assert set(watch.seconds) == {"rollout", "update", "eval"}


def test_the_summary_shows_what_was_measured_first_and_last_with_its_interval_and_a_loss_where_it_was_lowest(tmp_path):
    def measured(value):
        accuracy = {"eval/greedy_accuracy": value, "eval/greedy_accuracy_low": 0.2, "eval/greedy_accuracy_high": 0.9}
        paid = {f"{place}rewards/{name}/mean": value for name in ("mine:f", "g@2") for place in ("", "eval/")}
        return {**accuracy, **paid, "eval/reward": value, "validation/loss": (value - 0.5) ** 2}

    failed, last = {"eval/reward": math.nan, "loss": 2.0}, {"loss": 1.0, "test/reward": 0.75}
    last |= {"eval/pass@2": 0.5, "eval/pass@4": 0.75, "eval/pass@4_low": 0.5, "eval/pass@4_high": 0.875}
    log = RunLog(store := RunStore(tmp_path), -1, 3)
    for step, record in enumerate((measured(0.25), failed, measured(0.5), measured(0.75) | last)):
        log.write(step, record)
    timings = {"time/compile": 2.0, "time/update": 0.5, "tokens_per_second": 1234.0, "memory/peak_bytes": 3 * 2**20}
    log.write_timings(1, timings, {})
    for step, speed in (2, 1000.0), (3, 3000.0):  # as of a step with a rollout, and of one that takes the same again
        log.write_timings(step, {"tokens_per_second": speed}, {})
    log.close()
    lines = [" ".join(line.split()) for line in summary(store, "after it all", {"loss": "loss"}).splitlines()]
    assert lines[1:14] == [
        "ended after it all",
        "eval/reward 0.250 at step 0, 0.750 at step 3",
        "eval/greedy_accuracy 0.250 (0.200 .. 0.900) at step 0, 0.750 (0.200 .. 0.900) at step 3",
        "validation/loss 0.062 at step 0, 0.000 at step 2, 0.062 at step 3",
        "eval/rewards/mine:f/mean 0.250 at step 0, 0.750 at step 3",
        "eval/rewards/g@2/mean 0.250 at step 0, 0.750 at step 3",
        "test/reward 0.750 at step 3",
        "eval/pass@4 0.750 (0.500 .. 0.875) at step 3",
        "loss 2.000 in the first tenth, 1.000 in the last of 2 steps",
        "rewards/mine:f/mean 0.250 in the first tenth, 0.750 in the last of 3 steps",
        "rewards/g@2/mean 0.250 in the first tenth, 0.750 in the last of 3 steps",
        "tokens/s 1,500 (of all steps but the first; prompts and completions)",
        "seconds compile 2.0, update 0.5",
    ]
    assert lines[-1] == f"files {tmp_path}"


# Weights & Biases

SETTINGS = config("sft", steps=4, checkpoint={"every": 2}, eval=None, rollout=None, log={"wandb": "project"})


def test_a_moved_run_keeps_its_id_and_a_copied_one_gets_another(tmp_path):
    first, copied, moved = (RunStore(tmp_path / name) for name in ("first", "copied", "moved"))
    first.folder.mkdir()
    number = run_id(first)
    shutil.copytree(first.folder, copied.folder)
    other = run_id(copied)
    assert (run_id(first), run_id(copied)) == (number, other)
    first.folder.rename(moved.folder)
    copied.folder.rename(first.folder)
    assert (run_id(moved), run_id(first)) == (number, other)
    restored = shutil.copytree(moved.folder, tmp_path / "restored")  # from a copy, at the place where it was
    shutil.rmtree(moved.folder)
    restored.rename(moved.folder)
    assert run_id(moved) == number
    assert len({number, other}) == 2


def test_a_run_there_sees_all_events_and_its_trouble_is_a_warning(tmp_path, monkeypatch, caplog):
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


def test_without_the_package_nothing_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert train.main(arguments(changed(SETTINGS, run_dir=str(tmp_path / "mine")))) == 2
    assert capsys.readouterr().err.startswith("error: log.wandb needs the package wandb: pip install")
    assert not (tmp_path / "mine").exists()
