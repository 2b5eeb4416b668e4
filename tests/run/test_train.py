"""The trainer end to end: what stops a run changes nothing of what it ends with, and its folder says all of it."""

import math
import shutil
import signal
import struct
import time
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import (
    arguments,
    assert_same_end,
    changed,
    checkpoints,
    checksums,
    kill,
    newest,
    records,
    run,
    start,
    wait,
)
from tensorboardX.proto.event_pb2 import Event
from tiny import config

import train
from mllm.config import load as configs

EVEN = "user_rewards:even_characters"
SETTINGS = {
    "sft": config("sft", steps=60, checkpoint={"every": 4}, eval={"every": 20}),
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
    """The configuration `name` after a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")

    @cache
    def finished(name):
        settings = changed(SETTINGS[name], run_dir=str(folder / name))
        assert run(settings) == 0
        return settings

    return finished


@pytest.fixture
def again(undisturbed, tmp_path):
    """A copy of an undisturbed run, to be spoilt."""

    def copy(name):
        settings = undisturbed(name)
        shutil.copytree(settings.run_dir, tmp_path / name)
        return changed(settings, run_dir=str(tmp_path / name))

    return copy


def placed(name, tmp_path, **sections):
    return changed(SETTINGS[name], run_dir=str(tmp_path / name), **sections)


# A killed run


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_killed_after_a_checkpoint_ends_as_if_nothing_had_happened(undisturbed, tmp_path, name):
    settings = placed(name, tmp_path)
    process = start(settings, REWARD_SECONDS="0.01")
    wait(process, lambda: len(checkpoints(settings)) > 1)
    kill(process)
    assert max(checkpoints(settings)) < settings.steps
    assert run(settings) == 0
    assert_same_end(settings, undisturbed(name))


def test_a_run_killed_before_its_first_checkpoint_begins_again(undisturbed, tmp_path):
    settings = placed("grpo", tmp_path)
    process = start(settings, REWARD_SECONDS="0.1")
    wait(process, lambda: len(records(settings)) > 1)
    kill(process)
    assert checkpoints(settings) == []
    assert run(settings) == 0
    assert_same_end(settings, undisturbed("grpo"))


def test_a_run_killed_while_it_compiles_begins_again(undisturbed, tmp_path):
    settings = placed("sft", tmp_path)
    process = start(settings)
    wait(process, lambda: Path(settings.run_dir, "metrics.jsonl").exists())
    kill(process)
    assert records(settings) == []
    assert run(settings) == 0
    assert_same_end(settings, undisturbed("sft"))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(undisturbed, again, name):
    settings = again(name)
    shutil.rmtree(Path(settings.run_dir, "checkpoints", str(settings.steps), "params"))
    assert run(settings) == 0
    assert_same_end(settings, undisturbed(name))


# A run that is asked to stop


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_same_command_resumes(undisturbed, tmp_path, number, exit_code):
    settings = placed("grpo", tmp_path, checkpoint={"every": None})
    process = start(settings, REWARD_SECONDS="0.03")
    wait(process, lambda: len(records(settings)) > 1)
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == exit_code
    (stopped,) = checkpoints(settings)
    assert stopped % settings.grpo.num_iterations == 0
    assert 0 < stopped < settings.steps
    assert records(settings)[-1]["step"] == stopped
    assert f"stopped by a signal after step {stopped}; saved: the same command resumes" in errors
    assert "Traceback" not in errors
    assert output == ""
    assert run(settings) == 0
    assert_same_end(settings, undisturbed("grpo"))


@pytest.mark.parametrize("phase", ["rollout", "reward", "eval"])
def test_a_signal_in_the_middle_of_a_step_saves_the_last_whole_one(undisturbed, tmp_path, monkeypatch, phase):
    settings = placed("grpo", tmp_path, checkpoint={"every": None})
    entered = []

    class Signalled(train.Stopwatch):
        def phase(self, name):
            entered.append(name)
            if name == phase and entered.count("rollout") == (4 if name == "eval" else 5):
                signal.raise_signal(signal.SIGTERM)
                time.sleep(0.1)  # for whoever hears it
            return super().phase(name)

    monkeypatch.setattr(train, "Stopwatch", Signalled)
    assert run(settings) == 143
    assert entered[-1] == phase
    assert checkpoints(settings) == [8]
    assert records(settings)[-1]["step"] == (7 if phase == "eval" else 8)
    monkeypatch.undo()
    assert run(settings) == 0
    assert_same_end(settings, undisturbed("grpo"))


# A finished run


@pytest.mark.parametrize("name", SETTINGS)
def test_the_command_of_a_finished_run_trains_nothing_and_prints_the_summary_again(undisturbed, capsys, name):
    settings = undisturbed(name)
    before = checksums(Path(settings.run_dir))
    assert run(settings) == 0
    summary = capsys.readouterr().out
    assert f"step {settings.steps}" in summary
    assert str(Path(settings.run_dir, "metrics.jsonl")) in summary
    after = checksums(Path(settings.run_dir))
    assert {path: after.get(path) for path in before} == before
    assert all(path.startswith("tensorboard/") for path in after.keys() - before.keys())


def test_more_steps_continue_a_run_of_constant_learning_rate(again):
    settings = again("sft")
    longer = changed(settings, steps=64)
    before = records(settings)
    assert run(longer) == 0
    assert records(longer)[: len(before)] == before
    assert [record["step"] for record in records(longer)[len(before) :]] == [61, 62, 63, 64]
    assert newest(longer).step == 64
    assert configs.load(f"{longer.run_dir}/config.yaml") == longer


def test_more_steps_end_where_a_run_of_so_many_steps_ends(undisturbed, tmp_path):
    short = placed("sft", tmp_path, steps=52)
    assert run(short) == 0
    assert run(changed(short, steps=60)) == 0
    longer, whole = newest(short), newest(undisturbed("sft"))
    assert longer.position == whole.position
    for leaf, same in zip(jax.tree.leaves(longer.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_array_equal(leaf, same)


# Two heads


@pytest.mark.parametrize("name", SETTINGS)
def test_training_with_full_logits_gives_the_same_metrics_to_rounding(undisturbed, tmp_path, name):
    settings = placed(name, tmp_path, steps=6, head={"impl": "reference"})
    assert run(settings) == 0
    for one, other in zip(records(settings), records(undisturbed(name)), strict=False):
        # The shorter run evaluates at its end.
        names = [key for key in one if key in other]
        assert "loss" in names or one["step"] == 0
        for key in names:
            np.testing.assert_allclose(one[key], other[key], rtol=2e-4, atol=2e-5, err_msg=f"{key}, {one['step']}")


# What a run leaves


@pytest.mark.parametrize("name", SETTINGS)
def test_the_folder_holds_the_resolved_configuration(undisturbed, name):
    settings = undisturbed(name)
    assert configs.load(f"{settings.run_dir}/config.yaml") == settings


@pytest.mark.parametrize("name", SETTINGS)
def test_every_step_has_a_line_of_metrics_and_one_of_timings(undisturbed, name):
    settings = undisturbed(name)
    steps = list(range(1, settings.steps + 1))
    assert [record["step"] for record in records(settings)] == [0, *steps]
    timings = records(settings, "timings.jsonl")
    assert [record["step"] for record in timings] == steps
    assert {"time/update", "tokens_per_second", "memory/peak_bytes"} <= timings[0].keys()
    assert all(math.isfinite(record["loss"]) for record in records(settings)[1:])


@pytest.mark.parametrize("name", SETTINGS)
def test_evaluation_comes_first_every_so_many_steps_and_last(undisturbed, name):
    settings = undisturbed(name)
    evaluated = [record["step"] for record in records(settings) if "eval/greedy_accuracy" in record]
    assert evaluated == list(range(0, settings.steps + 1, settings.eval.every))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_newest_checkpoints_are_kept(undisturbed, name):
    settings = undisturbed(name)
    assert checkpoints(settings) == [settings.steps - settings.checkpoint.every, settings.steps]


def test_sft_lowers_the_loss(undisturbed):
    losses = [record["loss"] for record in records(undisturbed("sft"))[1:]]
    assert losses[-1] < losses[0] / 3


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


def test_fewer_samples_are_logged_on_request(tmp_path):
    settings = placed("grpo", tmp_path, steps=2, log={"samples": 3})
    assert run(settings) == 0
    assert len(records(settings, "samples.jsonl")) == 3


@pytest.mark.parametrize("name", SETTINGS)
def test_tensorboard_gets_what_the_metrics_say(undisturbed, name):
    settings = undisturbed(name)
    drawn = scalars(Path(settings.run_dir, "tensorboard"))
    for record in records(settings):
        for key in ("loss", "eval/greedy_accuracy"):
            if key in record:
                assert drawn[key, record["step"]] == pytest.approx(record[key])
    assert ("time/update", settings.steps) in drawn


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


# Rewards and data that give less than was asked


def test_rewards_that_raise_or_hang_are_counted_and_training_goes_on(tmp_path):
    names = ["user_rewards:fussy", "user_rewards:slow_at_times"]
    rewards = {"rewards": [{"name": name} for name in names], "reward_timeout": 0.5, "max_failed_groups": 1}
    settings = placed("grpo", tmp_path, steps=2, task=rewards)
    assert run(settings) == 0
    first = records(settings)[1]
    samples = records(settings, "samples.jsonl")
    for name, kind in zip(names, ("raised", "timed_out"), strict=True):
        failed = sum(sample["rewards"][name] is None for sample in samples)
        assert 0 < failed < len(samples)
        assert first[f"rewards/{name}/{kind}"] == failed
    assert all(math.isfinite(record["loss"]) and not record["skipped"] for record in records(settings)[1:])


def test_data_that_ends_before_the_steps_ends_the_run_in_good_order(tmp_path, capsys):
    settings = placed("sft", tmp_path, data={"epochs": 2})
    assert run(settings) == 0
    lines = records(settings)
    assert 0 < lines[-1]["step"] < settings.steps
    assert "eval/greedy_accuracy" in lines[-1]
    assert newest(settings).step == lines[-1]["step"]
    capsys.readouterr()
    assert run(settings) == 0
    assert f"step {lines[-1]['step']}" in capsys.readouterr().out
    assert records(settings) == lines


def test_an_update_that_is_not_finite_is_skipped_counted_and_its_batch_kept(tmp_path):
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
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(newest(settings).state.params))


# The command line


def test_help_says_how_to_call_it(capsys):
    with pytest.raises(SystemExit) as leaving:
        train.main(["--help"])
    assert leaving.value.code == 0
    assert "key.sub=value" in capsys.readouterr().out


def test_a_model_that_is_too_large_for_memory_is_one_line(tmp_path, capsys):
    architecture = {**SETTINGS["sft"].model.architecture, "hidden_size": 2**18, "intermediate_size": 2**18}
    settings = placed("sft", tmp_path, model={"architecture": architecture})  # 256 GiB a matrix
    assert run(settings) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: out of memory (RESOURCE_EXHAUSTED")
    assert said.endswith("--plan says what would fit\n")
    assert said.count("\n") == 1


def test_ctrl_c_before_training_is_no_traceback(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(train, "plan", interrupted)
    assert train.main([*arguments(placed("sft", tmp_path)), "--plan"]) == 130
    assert capsys.readouterr().err == ""


def test_the_printed_configuration_loads_again(tmp_path, capsys):
    settings = placed("grpo", tmp_path)
    assert train.main([*arguments(settings), "--print-config", "seed=7"]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert configs.load(str(printed)) == changed(settings, seed=7)
    assert not Path(settings.run_dir).exists()


def test_an_evaluation_between_two_updates_of_a_rollout_stands_at_its_own_step_alone(tmp_path):
    settings = changed(SETTINGS["grpo"], run_dir=str(tmp_path / "run"), steps=6, eval={"every": 3})
    assert run(settings) == 0
    evaluated = [r["step"] for r in records(settings, "metrics.jsonl") if "eval/greedy_accuracy" in r]
    assert evaluated == [0, 3, 6]
