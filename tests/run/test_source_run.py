"""A run is another one's `model.source`: parameters, sizes, tokenizer and stop tokens come from it as they are."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import arguments, changed, newest, records, run
from tiny import config

import train
from mllm.config.load import read
from mllm.errors import UserError
from mllm.parallel.mesh import make_mesh
from mllm.run import folder as run_dir
from mllm.run.measurements import Measurements
from mllm.run.source_run import load_policy, pin_step
from mllm.store.run_store import RunStore
from tools import export, generate

STOP = "+"


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run with checkpoints 2, 4 and 6, the best of which is 2."""
    folder = tmp_path_factory.mktemp("first") / "run"
    settings = config(
        "sft",
        run_dir=str(folder),
        steps=6,
        rollout={"stop": [STOP]},
        eval={"every": 2},
        checkpoint={"every": 2, "keep": 2, "keep_best": True},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Measurements, "score", lambda self, metrics: -1.0 * metrics["num_tokens"])
        assert run(settings) == 0
    return settings


def following(first, folder, algorithm="sft", **model):
    """A configuration whose model begins as the first one's ends."""
    source = {"init": "pretrained", "architecture": None, "source": first.run_dir, **model}
    return changed(config(algorithm, run_dir=str(folder), steps=2), model=source)


def initial(settings):
    return load_policy(settings, make_mesh(settings.mesh)).initial_params()


def test_the_masters_of_the_newest_step_are_taken_to_the_bit_with_sizes_tokenizer_and_stop_tokens(first, tmp_path):
    settings = following(first, tmp_path)
    policy, theirs = (load_policy(one, make_mesh(one.mesh)) for one in (settings, first))
    assert policy.architecture == theirs.architecture
    assert policy.stop_ids == theirs.stop_ids
    assert ord(STOP) in policy.stop_ids
    for mine, yours in zip(
        jax.tree.leaves(initial(settings)), jax.tree.leaves(newest(first).train.params), strict=True
    ):
        np.testing.assert_array_equal(mine, yours)


def test_other_parameters_dtype_and_mesh_are_this_runs_own(first, tmp_path):
    settings = changed(following(first, tmp_path, param_dtype="bfloat16"), mesh={"fsdp": 2})
    for mine, yours in zip(
        jax.tree.leaves(initial(settings)), jax.tree.leaves(newest(first).train.params), strict=True
    ):
        np.testing.assert_array_equal(mine, np.asarray(yours).astype("bfloat16"))


@pytest.mark.parametrize("step", ["newest", "best", 4])
def test_the_step_becomes_a_number_that_stays_when_the_source_goes_on(first, tmp_path, step):
    source = Path(shutil.copytree(first.run_dir, tmp_path / "source"))
    settings = changed(following(first, tmp_path / "run", step=step), model={"source": str(source)})
    with run_dir.claim(settings) as (store, begun):
        run_dir.write(store, begun)
    assert begun.model.step == {"newest": 6, "best": 2, 4: 4}[step]
    shutil.copy(source / "checkpoints" / "6.json", source / "checkpoints" / "8.json")
    with run_dir.claim(settings) as (_, resumed):
        assert resumed == begun


def test_a_run_begins_where_its_source_ends_and_is_exported_and_sampled_from_like_any(first, tmp_path, capsys):
    second = following(first, tmp_path / "second", "grpo", dtype="float32")
    second = changed(second, eval={"every": None}, grpo={"beta": 0.1, "reference": "initial"}, rollout={"stop": [STOP]})
    assert run(second) == 0
    assert records(second)[0]["eval/greedy_accuracy"] == records(first)[-1]["eval/greedy_accuracy"]
    assert read(Path(second.run_dir, "config.yaml"))["model"]["step"] == 6
    assert export.main([second.run_dir]) == 0
    assert generate.main([second.run_dir, "1+2=", "--max-tokens", "2"]) == 0
    third = following(second, tmp_path / "third")
    assert train.main([*arguments(third), "--plan"]) == 0
    for mine, yours in zip(jax.tree.leaves(initial(third)), jax.tree.leaves(newest(second).train.params), strict=True):
        np.testing.assert_array_equal(mine, yours)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"step": 3}, r"model.step: .*run has no checkpoint 3; there are \["),
        ({"source": "nowhere", "step": 3}, "model.step: nowhere is no run_dir: remove it"),
        ({"source": "empty"}, r"model.step: empty has no checkpoint; there are \[\]"),
        ({"source": "empty", "step": "best"}, r"model.step: empty has no checkpoint; there are \[\]"),
    ],
    ids=str,
)
def test_a_step_that_is_not_there_is_one_line(first, tmp_path, monkeypatch, model, message):
    monkeypatch.chdir(tmp_path)
    run_dir.write(RunStore("empty"), config(run_dir="empty"))
    with pytest.raises(UserError, match=f"^{message}"):
        pin_step(following(first, tmp_path / "run", **model))


def test_the_best_of_a_run_that_keeps_none_is_refused(first, tmp_path):
    source = shutil.copytree(first.run_dir, tmp_path / "source")
    run_dir.write(RunStore(source), changed(first, checkpoint={"keep_best": False}))
    with pytest.raises(UserError, match=r"^model.step: .*source has not kept its best checkpoint"):
        pin_step(changed(following(first, tmp_path, step="best"), model={"source": str(source)}))
