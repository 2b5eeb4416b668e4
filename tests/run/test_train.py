"""The trainer end to end: what stops a run changes nothing of its end, and its folder holds all of its results."""

import json
import math
import shutil
import signal
import struct
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import (
    assert_same_end,
    changed,
    checkpoints,
    checksums,
    environment,
    newest,
    records,
    run,
    start,
    wait,
)
from tensorboardX.proto.event_pb2 import Event
from tiny import config

import mllm.train.step
from mllm import stopwatch
from mllm.config import load as configs
from mllm.model.load import Policy, load_policy
from mllm.parallel.mesh import make_mesh
from mllm.run.checkpoint import Checkpoints

EVEN = "user_rewards:even_characters"
SETTINGS = {
    "sft": config("sft", steps=24, checkpoint={"every": 4}, eval={"every": 8}),
    "grpo": config(
        steps=24,
        grpo={"num_iterations": 2, "beta": 0.1, "reference": "initial"},
        task={"rewards": [{"name": EVEN}]},
        checkpoint={"every": 4},
        eval={"every": 8, "sampled": True},
    ),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Makes the configuration `name` after a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")

    @cache
    def finished(name):
        settings = changed(SETTINGS[name], run_dir=str(folder / name))
        assert run(settings) == 0
        return settings

    return finished


def placed(name, tmp_path, **sections):
    return changed(SETTINGS[name], run_dir=str(tmp_path / name), **sections)


# A run that is told to stop, or has lost its newest checkpoint


def test_a_signal_saves_and_the_same_command_resumes(undisturbed, tmp_path):
    settings = placed("grpo", tmp_path, checkpoint={"every": None})
    process = start(settings, REWARD_SECONDS="0.03")
    wait(process, lambda: len(records(settings)) > 1)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 143
    (stopped,) = checkpoints(settings)
    assert stopped % settings.grpo.num_iterations == 0
    assert 0 < stopped < settings.steps
    assert records(settings)[-1]["step"] == stopped
    assert f"stopped by a signal after step {stopped}; saved: the same command resumes" in errors
    assert "Traceback" not in errors
    assert output == ""
    assert run(settings) == 0
    assert_same_end(settings, undisturbed("grpo"))


@pytest.mark.faults
def test_a_run_that_is_killed_does_the_steps_since_its_checkpoint_again(undisturbed, tmp_path):
    settings = placed("grpo", tmp_path)
    process = start(settings, REWARD_SECONDS="0.03")
    wait(process, lambda: checkpoints(settings) and records(settings)[-1]["step"] > checkpoints(settings)[-1])
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert 0 < checkpoints(settings)[-1] <= records(settings)[-1]["step"] < settings.steps
    assert run(settings) == 0
    assert_same_end(settings, undisturbed("grpo"))


@pytest.mark.parametrize(
    ("phase", "number", "exit_code"),
    [("reward", signal.SIGINT, 130), ("eval", signal.SIGTERM, 143)],
)
def test_a_signal_within_a_step_saves_the_last_complete_one(
    undisturbed, tmp_path, monkeypatch, phase, number, exit_code
):
    settings = placed("grpo", tmp_path, checkpoint={"every": None})
    entered = []

    def signalled(watch, name, phase_of=stopwatch.Stopwatch.phase):
        entered.append(name)
        if name == phase and entered.count("rollout") == (4 if name == "eval" else 5):
            signal.raise_signal(number)
            time.sleep(0.1)  # for the thread that hears it
        return phase_of(watch, name)

    monkeypatch.setattr(stopwatch.Stopwatch, "phase", signalled)
    assert run(settings) == exit_code
    assert entered[-1] == phase
    assert checkpoints(settings) == [8]
    assert records(settings)[-1]["step"] == (7 if phase == "eval" else 8)
    assert (newest(settings).pending_evaluation is not None) == (phase == "eval")
    monkeypatch.undo()
    assert run(settings) == 0
    assert_same_end(settings, undisturbed("grpo"))


# A finished run


@pytest.mark.parametrize("name", SETTINGS)
def test_the_command_of_a_finished_run_trains_nothing_and_prints_the_summary_again(undisturbed, capsys, name):
    settings = undisturbed(name)
    before = checksums(Path(settings.run_dir))
    capsys.readouterr()
    assert run(settings) == 0
    printed = capsys.readouterr()
    assert f"step {settings.steps}" in printed.out
    assert str(Path(settings.run_dir, "metrics.jsonl")) in printed.out
    (line,) = [line for line in printed.err.splitlines() if "parameters" in line]
    assert line == (
        "1 of 8 devices (cpu); mesh dp 1, fsdp 1, tp 1; 27,040 parameters in float32; "
        "head xla (no TPU or Hopper GPU here); attention xla (no kernel for cpu devices); resumed from step 24"
    )
    after = checksums(Path(settings.run_dir))
    assert {path: after.get(path) for path in before} == before
    assert all(path.startswith("tensorboard/") for path in after.keys() - before.keys())


def test_a_run_with_more_steps_ends_as_if_it_had_had_them_from_the_beginning(undisturbed, tmp_path, capsys):
    settings = placed("sft", tmp_path)
    assert run(changed(settings, steps=16)) == 0
    assert "from the beginning" in capsys.readouterr().err
    before = records(settings)
    assert run(settings) == 0
    assert records(settings)[: len(before)] == before
    assert configs.load(f"{settings.run_dir}/config.yaml") == settings
    assert_same_end(settings, undisturbed("sft"))


# Parameters


def test_the_initial_parameters_are_loaded_once_and_only_where_they_are_needed(tmp_path, monkeypatch):
    loads, load = [], Policy.initial_params

    def counted(policy):
        loads.append(policy)
        return load(policy)

    monkeypatch.setattr(Policy, "initial_params", counted)
    for name, steps, count in (("sft", 1, 1), ("sft", 2, 0), ("grpo", 2, 1), ("grpo", 4, 1)):
        loads.clear()
        assert run(placed(name, tmp_path, steps=steps)) == 0
        assert len(loads) == count, (name, steps)


# What a run leaves


@pytest.mark.parametrize("name", SETTINGS)
def test_the_folder_holds_the_configuration_the_lines_of_every_step_and_the_newest_checkpoints(undisturbed, name):
    settings = undisturbed(name)
    assert configs.load(f"{settings.run_dir}/config.yaml") == settings
    steps, lines = list(range(1, settings.steps + 1)), records(settings)
    assert [line["step"] for line in lines] == [0, *steps]
    assert all(math.isfinite(line["loss"]) for line in lines[1:])
    evaluated = [line["step"] for line in lines if "eval/greedy_accuracy" in line]
    assert evaluated == list(range(0, settings.steps + 1, settings.eval.every))
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
    document = Path(settings.run_dir, "checkpoints", str(settings.steps), "document", "metadata")
    assert json.loads(document.read_text())["best"] == lines[-1]["eval/greedy_accuracy"]
    assert name == "grpo" or lines[-1]["loss"] < lines[1]["loss"] / 2


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """All scalars of a TensorBoard folder, by name and step. A record is its length, 4 bytes, data, 4 bytes."""
    found = {}
    for path in folder.iterdir():
        content, place = path.read_bytes(), 0
        while place < len(content):
            (length,) = struct.unpack_from("<Q", content, place)
            event = Event.FromString(content[place + 12 : place + 12 + length])
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            place += 16 + length
    return found


def test_every_completion_of_a_rollout_is_in_the_samples(undisturbed):
    settings = undisturbed("grpo")
    samples = records(settings, "samples.jsonl")
    rollouts = range(1, settings.steps + 1, settings.grpo.num_iterations)
    assert [sample["step"] for sample in samples] == [step for step in rollouts for _ in range(settings.batch_size)]
    assert set(samples[0]) == {"step", "prompt", "completion", "rewards", "advantage"}
    for line in records(settings)[1:]:
        if line["step"] in rollouts:
            rewards = [sample["rewards"][EVEN] for sample in samples if sample["step"] == line["step"]]
            assert np.mean(rewards) == pytest.approx(line["reward"])


# Rewards and data that give less than was asked


def test_updates_without_a_gradient_change_nothing_are_counted_and_a_run_resumes_between_them(tmp_path):
    sections = {
        "steps": 12,
        "grpo": {"num_iterations": 1, "beta": 0, "reference": None},
        "task": {"rewards": [{"name": "user_rewards:seldom"}]},
        "optimizer": {"weight_decay": 0.1, "warmup_steps": 12},
        "checkpoint": {"every": 1, "keep": 20},
        "eval": None,
    }
    settings = placed("grpo", tmp_path, **sections)
    assert run(settings) == 0
    lines = records(settings)
    empty = [line["step"] for line in lines if line["frac_without_gradient"] == 1]
    assert 0 < len(empty) < len(lines)
    made = 0
    for line in lines:
        assert line["updates_without_gradient"] == sum(step <= line["step"] for step in empty)
        assert line["skipped"] == 0
        assert (line["grad_norm"] == 0) == (line["entropy"] is None) == (line["step"] in empty)
        assert line["learning_rate"] == pytest.approx(1e-2 * (1 + made) / 12)
        made += line["step"] not in empty
    reader = Checkpoints(Path(settings.run_dir, "checkpoints"), settings.checkpoint, read_only=True)
    like = load_policy(settings, make_mesh(settings.mesh)).params
    params = [jax.tree.leaves(reader.restore_params(like, step)[1]) for step in range(1, 13)]
    reader.close()
    for step in range(2, 13):
        same = all(map(np.array_equal, params[step - 2], params[step - 1]))
        assert same == (step in empty)

    resumed = changed(settings, run_dir=str(tmp_path / "resumed"))
    shutil.copytree(settings.run_dir, resumed.run_dir)
    for step in range(empty[0] + 1, 13):
        shutil.rmtree(Path(resumed.run_dir, "checkpoints", str(step)))
    assert run(resumed) == 0
    assert_same_end(resumed, settings)


def test_rewards_that_raise_or_hang_are_counted_and_training_goes_on(tmp_path):
    names = ["user_rewards:fussy", "user_rewards:slow_at_times"]
    rewards = {"rewards": [{"name": name} for name in names], "reward_timeout": 0.5, "max_failed_groups": 1}
    settings = placed("grpo", tmp_path, steps=2, task=rewards, log={"samples": 6})
    assert run(settings) == 0
    first = records(settings)[1]
    samples = records(settings, "samples.jsonl")
    assert len(samples) == 6
    for name, kind in zip(names, ("raised", "timed_out"), strict=True):
        failed = sum(sample["rewards"][name] is None for sample in samples)
        assert 0 < failed <= first[f"rewards/{name}/{kind}"] < settings.batch_size
    assert all(math.isfinite(record["loss"]) and not record["skipped"] for record in records(settings)[1:])


def test_data_that_ends_before_the_steps_ends_the_run(tmp_path, capsys):
    settings = placed("sft", tmp_path, steps=60, data={"epochs": 2})
    assert run(settings) == 0
    lines = records(settings)
    assert 0 < lines[-1]["step"] < settings.steps
    assert "eval/greedy_accuracy" in lines[-1]
    assert newest(settings).step == lines[-1]["step"]
    capsys.readouterr()
    assert run(settings) == 0
    assert f"step {lines[-1]['step']}" in capsys.readouterr().out
    assert records(settings) == lines


# Skipped updates


def test_an_update_that_is_not_finite_is_skipped_and_its_batch_kept(tmp_path):
    # The first update throws the parameters out of float32's range, the others can't be computed.
    settings = placed("sft", tmp_path, steps=3, optimizer={"learning_rate": 9e18})
    assert run(settings) == 0
    lines = records(settings)[1:]
    assert [line["skipped"] for line in lines] == [0, 1, 1]
    assert lines[1]["loss"] is None
    folder = Path(settings.run_dir, "skipped")
    assert sorted(path.name for path in folder.iterdir()) == ["step_2.npz", "step_3.npz"]
    with np.load(folder / "step_2.npz") as batch:
        assert batch["tokens"].shape == (settings.batch_size, settings.data.max_length)
        assert batch["weights"].sum() == pytest.approx(1)
        assert (batch["step"], batch["seed"]) == (2, settings.seed)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(newest(settings).train.params))


def test_only_updates_that_are_skipped_without_a_break_stop_the_run_also_across_a_resume(tmp_path, monkeypatch, capsys):
    skipped_steps = {2, 3, 5, 6, 8, 9, 10}
    make_train_step = mllm.train.step.make_train_step

    def make_marking_step(*args, **options):
        train_step = make_train_step(*args, **options)

        def marked(state, *inputs):
            state, metrics = train_step(state, *inputs)
            return state, {**metrics, "skipped": float(int(state.step) in skipped_steps)}

        return marked

    monkeypatch.setattr(mllm.train.step, "make_train_step", make_marking_step)
    settings = placed("sft", tmp_path, optimizer={"max_skipped": 2}, checkpoint={"every": 3})
    for steps in (5, 9):  # the run is resumed after one, and after two skipped updates
        assert run(changed(settings, steps=steps)) == 0
        assert newest(settings).skipped_in_a_row == {5: 1, 9: 2}[steps]
    capsys.readouterr()
    assert run(settings) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: optimizer.max_skipped: the last 3 updates were not finite and skipped; ")
    assert error.endswith(
        "step_10.npz, and tools/replay.py looks into it (saved after step 10: the same command resumes)"
    )


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
    assert {"jax", "numpy", "transformers", "orbax", "flax", "grain", "kernels"}.isdisjoint(modules.split())
    assert process.stderr.count("error: ") == (exit_code == 2)
    assert ("key.sub=value" in text) == ("--help" in options)
    assert ("\nseed: 7\n" in text) == ("seed=7" in options)


def test_an_evaluation_between_two_updates_of_a_rollout_is_logged_at_its_own_step_alone(tmp_path):
    settings = placed("grpo", tmp_path, steps=6, eval={"every": 3})
    assert run(settings) == 0
    evaluated = [line["step"] for line in records(settings) if "eval/greedy_accuracy" in line]
    assert evaluated == [0, 3, 6]
