"""The trainer end to end: what stops a run changes nothing of its end, and its folder holds all of its results."""

import math
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from runs import assert_same_end, changed, checkpoints, checksums, environment, newest, records, run, signal_trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import config

from mllm import stopwatch
from mllm.config import load as configs
from mllm.parallel import group
from mllm.run.checkpoint import Checkpoints
from mllm.store.run_store import RunStore

pytestmark = pytest.mark.slow

EVEN = "user_rewards:even_characters"
SETTINGS = {
    "sft": config("sft", steps=8, checkpoint={"every": 4}, eval={"every": 4}),
    "grpo": config(
        steps=10,
        model={"dtype": "bfloat16"},  # whose masters are dithered
        grpo={"num_iterations": 2, "beta": 0.1, "reference": "initial"},
        task={"rewards": [{"name": EVEN}]},
        checkpoint={"every": 2},
        eval={"every": 6, "samples": 1},
    ),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Makes the configuration `name` after a run that nothing disturbed; no checkpoint was newer than its logs."""
    folder = tmp_path_factory.mktemp("undisturbed")

    synced, save, sync = {}, Checkpoints.save, os.fsync

    def noted(handle):
        sync(handle)
        synced[os.readlink(f"/proc/self/fd/{handle}")] = os.fstat(handle).st_size

    def saved(self, *args):
        logged = {str(path): path.stat().st_size for path in folder.glob("*/[ms]*.jsonl")}
        save(self, *args)
        self.wait()
        for name, size in logged.items():
            assert synced.get(name, 0) >= size, f"{name} may be lost by a crash of the machine, and the checkpoint not"

    @cache
    def finished(name):
        settings = changed(SETTINGS[name], run_dir=str(folder / name))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", noted)
            patch.setattr(Checkpoints, "save", saved)
            assert run(settings) == 0
        return settings

    return finished


# A run that is told to stop, or has lost its newest checkpoint


def test_a_signal_saves_the_last_complete_step_and_the_same_command_resumes(undisturbed, tmp_path, monkeypatch, capsys):
    """Between a rollout's updates, so that the next one's evaluation is left; then in a rollout's rewards."""
    settings = changed(SETTINGS["grpo"], run_dir=str(tmp_path / "run"), checkpoint={"every": None})
    for phase, updates, number, saved, logged in (
        ("update", 5, signal.SIGTERM, [6], 5),
        ("reward", 2, signal.SIGINT, [6, 8], 8),
    ):
        entered, phase_of = [], stopwatch.Stopwatch.phase

        def signalled(watch, name, entered=entered, phase_of=phase_of, stop=(phase, updates, number)):
            entered.append(name)
            if (name, entered.count("update")) == stop[:2]:
                signal_trainer(stop[2])
            return phase_of(watch, name)

        with monkeypatch.context() as patch:
            patch.setattr(stopwatch.Stopwatch, "phase", signalled)
            assert run(settings) == 128 + number
        assert checkpoints(settings) == saved
        assert records(settings)[-1]["step"] == logged
        assert (newest(settings).pending_evaluation is not None) == (logged < saved[-1])
        if logged < saved[-1]:  # as a kill would leave it after the evaluation and before the next checkpoint
            with Path(settings.run_dir, "metrics.jsonl").open("a") as log:
                log.write(f'{{"step": {saved[-1]}}}\n')
        output, errors = capsys.readouterr()
        assert f"stopped by a signal after step {saved[-1]}; saved: the same command resumes" in errors
        assert output == ""
    assert run(settings) == 0
    assert_same_end(settings, undisturbed("grpo"))


# A finished run


def test_the_command_of_a_finished_run_trains_nothing_and_prints_the_summary_again(undisturbed, capsys):
    settings = undisturbed("grpo")
    before = checksums(Path(settings.run_dir))
    capsys.readouterr()
    assert run(settings) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"\nended              after all {settings.steps} steps\nheld-out reward    ")
    assert "held-out, greedy" not in printed.out  # nobody asked for the exact answer
    assert str(Path(settings.run_dir, "metrics.jsonl")) in printed.out
    (line,) = [line for line in printed.err.splitlines() if "parameters" in line]
    assert line == (
        "1 of 8 devices (cpu); mesh dp 1, fsdp 1, tp 1; 27,040 parameters in float32; "
        "head xla (no TPU or Hopper GPU here); attention xla (no kernel for cpu devices); resumed from step 10"
    )
    after = checksums(Path(settings.run_dir))
    assert [path for path in before if after.get(path) != before[path]] == []
    assert all(path.startswith("tensorboard/") for path in after.keys() - before.keys())


# What a run leaves


def test_the_watch_is_told_the_stall_limit_and_every_phase(tmp_path, monkeypatch):
    told = []

    class Watch(group.Watch):
        def __init__(self, limit):
            told.append(limit)
            super().__init__(limit)

        def mark(self, step, phase):
            told.append((step, phase))

    monkeypatch.setattr(group, "Watch", Watch)
    settings = changed(config("sft", run_dir=str(tmp_path / "run"), steps=2), eval=None, rollout=None)
    assert run(settings, "--stall-limit", "300") == 0
    assert told == [300.0, (0, "data"), (0, "update"), (1, "data"), (1, "update"), (1, "save")]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_folder_holds_the_configuration_the_lines_of_every_step_and_the_newest_checkpoints(undisturbed, name):
    settings = undisturbed(name)
    assert configs.load(f"{settings.run_dir}/config.yaml") == settings
    steps, lines = list(range(1, settings.steps + 1)), records(settings)
    assert [line["step"] for line in lines] == [0, *steps]
    assert all(math.isfinite(line["loss"]) for line in lines[1:])
    evaluated = [line["step"] for line in lines if "eval/greedy_accuracy" in line]
    assert evaluated == sorted({*range(0, settings.steps, settings.eval.every), settings.steps})
    timings = records(settings, "timings.jsonl")
    assert [record["step"] for record in timings] == steps
    assert {"time/update", "tokens_per_second", "memory/peak_bytes"} <= timings[0].keys()
    drawn = scalars(Path(settings.run_dir, "tensorboard"))
    for line in lines:
        for key in ("loss", "eval/greedy_accuracy"):
            if key in line:
                assert drawn[key, line["step"]] == pytest.approx(line[key])
    assert ("time/update", settings.steps) in drawn
    assert checkpoints(settings) == [settings.steps - settings.checkpoint.every, settings.steps]
    assert RunStore(settings.run_dir).document(settings.steps)["score"] == lines[-1]["eval/greedy_accuracy"]
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
    for values, metric in (
        ([sample["rewards"]["even_characters"] for sample in samples], "reward"),
        ([sample["reward"] for sample in samples], "reward"),
        ([sample["length"] for sample in samples], "completions/mean_length"),
        ([sample["truncated"] for sample in samples], "completions/clipped_ratio"),
    ):
        assert np.mean(values[:8]) == pytest.approx(lines[1][metric])


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """All scalars of a TensorBoard folder, by name and step."""
    events = EventAccumulator(str(folder)).Reload()
    return {(name, event.step): event.value for name in events.Tags()["scalars"] for event in events.Scalars(name)}


# Rewards that give less than was asked


def test_updates_without_a_gradient_are_counted_and_the_learning_rate_waits_for_the_others(tmp_path, capsys):
    """That they change nothing: tests/train/test_train_step.py."""
    sections = {
        "steps": 6,
        "grpo": {"num_iterations": 1, "beta": 0, "reference": None},
        "task": {"rewards": [{"name": "user_rewards:seldom"}]},
        "optimizer": {"warmup_steps": 6},
        "checkpoint": {"every": None},
        "eval": None,
        "log": {"samples": 3},
        "run_dir": str(tmp_path / "run"),
    }
    settings = changed(SETTINGS["grpo"], **sections)
    assert run(settings) == 0
    lines = records(settings)
    sampled = [sample["step"] for sample in records(settings, "samples.jsonl")]
    assert sampled == [step for step in range(1, 7) for _ in range(3)]
    empty = [line["step"] for line in lines if line["frac_without_gradient"] == 1]
    assert 0 < len(empty) < len(lines)
    assert f"\nnothing to learn   in {len(empty)} of 6 updates: no completion's reward" in capsys.readouterr().out
    for line in lines:
        count = sum(step <= line["step"] for step in empty)
        made = sum(step not in empty for step in range(1, line["step"]))
        assert (line["updates_without_gradient"], line["skipped"]) == (count, 0)
        assert (line["grad_norm"] == 0) == (line["entropy"] is None) == (line["step"] in empty)
        assert line["learning_rate"] == pytest.approx(1e-2 * (1 + made) / 6)


# The command line


@pytest.mark.parametrize(
    ("options", "exit_code"), [(["--print-config", "seed=7"], 0), (["--help"], 0), (["stepz=3"], 2), (["--config"], 2)]
)
def test_the_command_line_and_the_configuration_are_handled_before_anything_heavy_is_imported(options, exit_code):
    program = (
        "import atexit, sys, train\n"
        "atexit.register(lambda: print('imported:', *{name.split('.')[0] for name in sys.modules}))\n"
        "sys.exit(train.main(sys.argv[1:]))"
    )
    process = subprocess.run(
        [sys.executable, "-c", program, "--config", "tiny_sft.yaml", *options],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert process.returncode == exit_code
    text, modules = process.stdout.split("imported:")
    assert {"jax", "numpy", "transformers", "orbax", "flax", "grain", "lm_head"}.isdisjoint(modules.split())
    assert process.stderr.count("error: ") == (exit_code == 2)
    assert ("key.sub=value" in text) == ("--help" in options)
    assert ("\nseed: 7\n" in text) == ("seed=7" in options)
