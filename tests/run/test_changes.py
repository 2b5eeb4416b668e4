"""`--change` goes on with other settings where that is sound, records it, and stays exact when the run is killed."""

import pytest
import yaml
from runs import assert_same_end, changed, killed_after, records, run
from tiny import config

from mllm.errors import UserError
from mllm.run import folder as run_dir
from mllm.store.run_store import RunStore


@pytest.fixture
def settings(tmp_path):
    """The configuration of a run in `tmp_path`, whose newest checkpoint is that of step 4."""
    settings = config(run_dir=str(tmp_path), steps=6, optimizer={"schedule": "linear", "warmup_steps": 2})
    run_dir.write(RunStore(tmp_path), settings)
    for checkpoint in (3, 4):
        (tmp_path / "checkpoints" / str(checkpoint)).mkdir(parents=True)
    return settings


def check(folder, settings, change=False):
    """The configuration with which the run in a folder goes on."""
    with run_dir.claim(changed(settings, run_dir=str(folder)), change) as (_, found):
        return found


def test_how_a_run_is_carried_out_may_change(tmp_path, settings):
    how = {
        "mesh": {"dp": 2},
        "micro_batch_size": 2,
        "head": {"impl": "full_logits"},
        "checkpoint": {"every": 2, "keep": 5},
        "log": {"samples": 1},
        "run_dir": "elsewhere",
        "optimizer": {"max_skipped": 1},
    }
    assert check(tmp_path, changed(settings, **how)).changes == ()


@pytest.mark.parametrize(
    "how",
    [
        {"steps": 5},
        {"optimizer": {"learning_rate": 1e-3, "schedule": "cosine", "final_fraction": 0.1, "max_grad_norm": 0.5}},
        {"grpo": {"beta": 0.1, "reference": "initial", "scale_rewards": "none", "baseline": "token"}},
        {"task": {"rewards": [{"name": "exact_match", "weight": 0.5}]}},
    ],
    ids=str,
)
def test_what_a_step_computes_may_change_with_the_flag(tmp_path, settings, how):
    other = changed(settings, **how)
    with pytest.raises(UserError, match=r"belongs to a run with .*; --change goes on with the new value; else give"):
        check(tmp_path, other)
    found = check(tmp_path, other, change=True)
    ((section, values),) = how.items()
    expected = {section} if section == "steps" else {f"{section}.{name}" for name in values}
    assert {change.key for change in found.changes} == expected
    assert {change.step for change in found.changes} == {4}
    run_dir.write(RunStore(tmp_path), found)
    assert check(tmp_path, other) == found
    assert check(tmp_path, settings, change=True).changes == ()  # taken back before any step


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ({"batch_size": 16}, "batch_size"),
        ({"model": {"param_dtype": "bfloat16"}}, "model.param_dtype"),
        ({"task": {"heldout": 8}}, "task.heldout"),
        ({"eval": {"every": 2}}, "eval"),
    ],
)
def test_what_the_steps_so_far_depend_on_may_not_change(tmp_path, settings, what, name):
    with pytest.raises(UserError, match=f"^{name}: .*; it can't change, since the steps so far, or the position in"):
        check(tmp_path, changed(settings, **what), change=True)


def test_a_change_that_has_no_effect_is_refused(tmp_path, settings):
    for place, steps, message in (("", 4, "steps: .* has done 4 already"), ("nowhere", 6, "--change: .* holds no run")):
        with pytest.raises(UserError, match=f"^{message}"):
            check(tmp_path / place, changed(settings, steps=steps), change=True)


@pytest.mark.slow
def test_a_change_is_recorded_and_a_kill_before_the_next_checkpoint_does_not_show_in_the_end(
    finished, tmp_path, capsys
):
    first = killed_after(finished("sft"), 4, tmp_path / "straight")
    straight = changed(first, steps=6, optimizer={"learning_rate": 1e-3, "schedule": "cosine"})
    capsys.readouterr()
    assert run(straight, "--change") == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "->" in line] == [
        "after step 4: steps 8 -> 6",
        "after step 4: optimizer.learning_rate 0.01 -> 0.001",
        'after step 4: optimizer.schedule "constant" -> "cosine"',
    ]
    killed = killed_after(straight, 4, tmp_path / "killed")
    assert run(killed) == 0
    assert_same_end(straight, killed)
    lines = records(killed)
    assert [line["step"] for line in lines if "changed" in line] == [5]
    expected = {"steps": 6, "optimizer.learning_rate": 1e-3, "optimizer.schedule": "cosine"}
    assert lines[5]["changed"] == expected
    assert lines[5]["learning_rate"] < 1e-3 < lines[4]["learning_rate"]
    resolved = yaml.safe_load((tmp_path / "killed" / "config.yaml").read_text())
    assert resolved["changes"][0] == {"step": 4, "key": "steps", "old": 8, "new": 6}
    assert {change["key"]: change["new"] for change in resolved["changes"]} == expected
