"""The trainer end to end: a stop changes nothing of a run's end, and its folder holds every result."""

import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from object_store import object_store
from runs import assert_same_end, changed, checkpoints, environment, killed_after, newest, records, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import config

import mllm
from mllm import stopwatch
from mllm.algorithms.examples import ExampleSource
from mllm.config import load as configs
from mllm.errors import CommonError
from mllm.run.state import Measurements, RunState
from mllm.run.store import RunStore, tool_run
from mllm.training.step import TrainState

slow, nightly = pytest.mark.slow, pytest.mark.nightly


@pytest.mark.parametrize(
    "method",
    [
        "plain",
        *(pytest.param(name, marks=slow) for name in ("dpo", "turns", "distill")),
        pytest.param("delta", marks=nightly),
    ],
)
def test_a_killed_run_ends_with_the_same_bytes(method, finished, tmp_path):
    """SFT with an evaluation, and GRPO: in the next three tests."""
    whole = finished(method)
    killed = killed_after(whole, whole.steps - whole.checkpoint.every, tmp_path / "killed")
    if method == "dpo":  # as a notebook does it
        folder = killed.run_dir
        assert mllm.train(mllm.load_config(f"{folder}/config.yaml", [f"run_dir={folder}"])) == 0
    else:
        assert run(killed) == 0
    assert_same_end(killed, whole)


@slow
def test_a_kill_before_the_first_checkpoint_does_not_show(finished, tmp_path):
    killed = changed(whole := finished("sft"), run_dir=str(tmp_path / "killed"))
    folder = Path(shutil.copytree(whole.run_dir, killed.run_dir))
    for checkpoint in checkpoints(whole):
        shutil.rmtree(folder / "checkpoints" / str(checkpoint))
    for name in ("metrics.jsonl", "samples.jsonl", "timings.jsonl"):
        lines = (folder / name).read_bytes().splitlines(keepends=True)
        (folder / name).write_bytes(b"".join(lines[:3])[:-2])
    (folder / "checkpoints/4.orbax-checkpoint-tmp/state/d").mkdir(parents=True)
    assert run(killed) == 0
    assert_same_end(killed, whole)


@slow
def test_a_stopped_bucket_run_ends_like_a_run_on_a_disk(finished, tmp_path, monkeypatch):
    """A signal stops the run, and the bucket loses a checkpoint."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with object_store() as store:
        settings = changed(whole := finished("sft"), run_dir=f"{store.url}/run")
        assert run_with_signal(settings, monkeypatch, "update", 5, signal.SIGTERM) == 143
        assert checkpoints(settings) == [4, 5]
        (tool_run(settings.run_dir).checkpoints / "5").rmtree()
        assert run(settings) == 0
        assert_same_end(whole, settings)
        assert records(settings, "timings.jsonl")[-1]["step"] == settings.steps  # written behind the last checkpoint


def run_with_signal(settings, monkeypatch, phase, count, number):
    """Run until a phase is entered for the count-th time, where a signal comes; returns the exit code."""
    entered, phase_of = [], stopwatch.Stopwatch.phase

    def signalled(watch, name):
        entered.append(name)
        if (name, entered.count(phase)) == (phase, count):
            signal.raise_signal(number)
        return phase_of(watch, name)

    with monkeypatch.context() as patch:
        patch.setattr(stopwatch.Stopwatch, "phase", signalled)
        return run(settings)


@slow
def test_a_signal_within_a_rollout_saves_without_evaluation(finished, tmp_path, monkeypatch, capsys):
    whole = finished("grpo")
    settings = changed(killed_after(whole, 4, tmp_path / "run"), checkpoint={"every": None})
    capsys.readouterr()
    assert run_with_signal(settings, monkeypatch, "update", 1, signal.SIGTERM) == 143
    assert checkpoints(settings)[-1] == 6
    assert records(settings)[-1]["step"] == 5
    assert newest(settings).pending_evaluation is not None
    with Path(settings.run_dir, "metrics.jsonl").open("a") as log:
        log.write('{"step": 6}\n')  # as a kill would leave it after the evaluation and before the next checkpoint
    output, errors = capsys.readouterr()
    assert "stopped by a signal after step 6; saved: the same command resumes" in errors
    assert output == ""
    assert run(settings) == 0
    assert_same_end(settings, whole)


@slow
@pytest.mark.parametrize("name", ["sft", "grpo"])
def test_the_folder_holds_configuration_logs_and_checkpoints(finished, name):
    settings = finished(name)
    noted = changed(settings, micro_batch_size=settings.batch_shape.micro, model={"remat": "products"})
    assert configs.load(f"{settings.run_dir}/config.yaml") == noted
    steps, lines = list(range(1, settings.steps + 1)), records(settings)
    assert [line["step"] for line in lines] == [0, *steps]
    assert all(math.isfinite(line["loss"]) for line in lines[1:])
    best_by = "eval/greedy_accuracy" if name == "sft" else "eval/reward"  # here the reward judges no answer
    evaluated = [line["step"] for line in lines if best_by in line]
    assert evaluated == sorted({*range(0, settings.steps, settings.eval.every), settings.steps})
    timings = records(settings, "timings.jsonl")
    assert [record["step"] for record in timings] == steps
    assert {"time/update", "tokens_per_second", "memory/peak_bytes"} <= timings[0].keys()
    events = EventAccumulator(f"{settings.run_dir}/tensorboard").Reload()
    drawn = {event.step: event.value for event in events.Scalars(best_by)}
    assert drawn == pytest.approx({step: lines[step][best_by] for step in evaluated})
    assert events.Scalars("time/update")[-1].step == settings.steps
    saved = range(settings.checkpoint.every, settings.steps + 1, settings.checkpoint.every)
    assert checkpoints(settings) == [*saved][-settings.checkpoint.keep :]
    assert RunStore(settings.run_dir).document(settings.steps)["score"] == lines[-1][best_by]
    if name == "sft":
        assert 0 < lines[-1]["loss"] < lines[1]["loss"] * 0.8
        seconds = [sum(timing.get(f"time/{phase}", 0) for phase in ("data", "update")) for timing in timings]
        tokens = [second * timing["tokens_per_second"] for second, timing in zip(seconds, timings, strict=True)]
        assert np.cumsum(tokens) == pytest.approx([line["num_tokens"] for line in lines[1:]])
        return
    samples = records(settings, "samples.jsonl")
    rollouts = range(1, settings.steps + 1, settings.grpo.num_iterations)
    assert [sample["step"] for sample in samples] == [step for step in rollouts for _ in range(settings.batch_size)]
    assert set(samples[0]) == {"step", "prompt", "completion", "rewards", "reward", "advantage", "length", "truncated"}
    assert samples[0]["rewards"]["even_characters"] == samples[0]["reward"]


COMMANDS = """
import sys, mllm
assert callable(mllm.train) and mllm.load_config("tiny_sft.yaml")
for command in (["--print-config", "seed=7"], ["--help"], ["stepz=3"], ["--config"]):
    sys.argv = ["mllm-train", "--config", "tiny_sft.yaml", *command]
    try:
        mllm.main()  # the console command
    except SystemExit as ended:
        print("exit code", ended.code)
print("imported", *{name.split(".")[0] for name in sys.modules})
"""


def test_arguments_are_handled_before_heavy_imports():
    process = subprocess.run([sys.executable, "-c", COMMANDS], env=environment(), capture_output=True, text=True)
    printed, helped, unknown, missing = process.stdout.split("exit code ")[:4]
    assert "\nseed: 7\n" in printed
    assert helped.startswith("0\n")
    assert "key.sub=value" in helped
    assert [text.split()[0] for text in process.stdout.split("exit code ")[1:]] == ["0", "0", "2", "2"], missing
    modules = process.stdout.split("imported")[1].split()
    assert {"jax", "numpy", "transformers", "orbax", "flax", "grain", "lm_head"}.isdisjoint(modules)
    assert process.stderr.count("error: ") == 2, unknown


@pytest.mark.slow
def test_too_many_skipped_updates_stop_and_a_rerun_counts_on(tmp_path, capsys):
    """The first update moves the parameters so far that nothing can be computed. No later update changes any."""
    optimizer = {"learning_rate": 9e18, "max_skipped": 1}
    settings = config("sft", run_dir=str(tmp_path / "run"), steps=8, optimizer=optimizer, eval=None, rollout=None)
    for step, skipped in ((3, 2), (4, 3)):
        assert run(settings) == 2
        why = f"the last {skipped} updates were not finite and skipped"
        message = f"error: optimizer.max_skipped: {why} (saved after step {step}: the same command resumes)"
        assert capsys.readouterr().err.splitlines()[-1] == message
        assert newest(settings).step == step
    lines = records(settings)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["skipped"] for line in lines] == [0, 1, 1, 1]
    assert lines[1]["loss"] is None
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(newest(settings).train.params))


@pytest.mark.slow
def test_a_failed_step_or_evaluation_costs_no_earlier_step(tmp_path, monkeypatch, capsys):
    """The process of a reward function that can't be started again raises such an error in both."""
    settings, own_next = config("sft", run_dir=str(tmp_path / "run"), eval=None, rollout=None), ExampleSource.next

    def fail(*_):
        raise CommonError("task.rewards: gone")

    def failing_next(self, params, step, *rest):
        return fail() if step == 1 else own_next(self, params, step, *rest)

    monkeypatch.setattr(ExampleSource, "next", failing_next)
    assert run(settings) == 2
    monkeypatch.setattr(ExampleSource, "next", own_next)
    monkeypatch.setattr(Measurements, "are_due", lambda self, step, final: step == 3)
    monkeypatch.setattr(Measurements, "measure_pending", fail)
    assert run(settings) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert errors == [f"error: task.rewards: gone (saved after step {n}: the same command resumes)" for n in (1, 3)]
    assert (newest(settings).step, newest(settings).pending_evaluation is None) == (3, False)


def test_a_finite_update_resets_the_count_of_skipped_updates():
    train = TrainState({}, {}, 0)
    state, counts = RunState(0, train, {}), []
    for skipped in (True, True, False, True):
        state = state.after_update(train, {}, skipped)
        counts.append(state.skipped_in_a_row)
    assert counts == [1, 2, 0, 1]
