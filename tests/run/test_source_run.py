"""The beginning of a run: another run as its model, and models and data in a bucket."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow
import pytest
from object_store import object_store
from pyarrow import parquet
from runs import arguments, assert_same_end, changed, checksums, killed_after, newest, run, write_lines
from tiny import SUMS, config
from transformers import AutoConfig, AutoTokenizer

import train
from mllm.config.load import read
from mllm.config.model import MeshConfig
from mllm.errors import UserError
from mllm.model import weights
from mllm.model.compute_copy import Rounding, compute_copy
from mllm.parallel.mesh import make_mesh
from mllm.run import folder as run_dir
from mllm.run.checkpoint import by_name, restore_params
from mllm.run.source_run import load_policy, pin, source_run
from mllm.run.store import RunStore, tool_run
from mllm.storage import cache_folder, fetch_folder, send
from tools import export, generate, plot, samples

STOP = "~"


@pytest.fixture
def first(finished):
    """A run with checkpoints 4 and 8. Its configuration sets a stop token."""
    return finished("sft")


def following(first, folder, algorithm="sft", **model):
    """A configuration with a model that begins as the first run's model ends."""
    source = {"init": "pretrained", "architecture": None, "source": first.run_dir, **model}
    return changed(config(algorithm, run_dir=str(folder), steps=2), model=source)


@pytest.mark.slow
def test_a_symbolic_step_resolves_to_a_recorded_number(first, tmp_path, monkeypatch):
    """The source's masters are loaded in the run's own dtype and mesh, with the source's stop tokens."""
    copy = changed(killed_after(first, 8, tmp_path / "first"), checkpoint={"keep_best": True})
    run_dir.write(RunStore(copy.run_dir), copy)
    monkeypatch.setattr(RunStore, "best_step", lambda self, steps: min(steps))
    symbolic = {step: following(copy, tmp_path / "run", step=step) for step in ("newest", 4, "best")}
    assert {step: pin(one.model)["step"] for step, one in symbolic.items()} == {"newest": 8, 4: 4, "best": 4}
    settings = changed(symbolic["best"], model={"param_dtype": "bfloat16"}, mesh={"fsdp": 2})
    pinned = changed(settings, model=pin(settings.model))
    policy = load_policy(settings, make_mesh(settings.mesh))
    assert ord(STOP) in policy.stop_ids
    masters = restore_params(source_run(settings.model), load_policy(first, make_mesh(first.mesh)).trained, 4)
    rounding = Rounding(jnp.dtype("bfloat16"), dithered=True)
    for (name, mine), theirs in zip(by_name(policy.initial_params()).items(), jax.tree.leaves(masters), strict=True):
        np.testing.assert_array_equal(mine, compute_copy(theirs, rounding, name))
    Path(settings.run_dir).mkdir()
    run_dir.write(RunStore(settings.run_dir), pinned)
    with run_dir.open_run(settings) as (_, resumed):
        assert resumed == pinned


@pytest.mark.slow
def test_a_run_begins_at_the_end_of_its_source(first, tmp_path):
    """The run is then a model folder that needs no source."""
    shutil.copytree(first.run_dir, source := tmp_path / "source")
    second = changed(following(first, tmp_path / "second", source=str(source)), eval=None, rollout=None)
    assert run(second) == 0
    assert read(Path(second.run_dir, "config.yaml"))["model"]["step"] == 8
    shutil.rmtree(source)
    assert AutoConfig.from_pretrained(second.run_dir).hidden_size == 32
    assert AutoTokenizer.from_pretrained(second.run_dir)("1+2=")["input_ids"] == [*b"1+2="]
    assert export.main([second.run_dir]) == 0
    third = following(second, tmp_path / "third")
    assert train.main([*arguments(third), "--plan"]) == 0
    policy = load_policy(third, make_mesh(third.mesh))
    assert ord(STOP) in policy.stop_ids  # which is the first one's setting alone
    both = map(jax.tree.leaves, (policy.initial_params(), newest(second).train.params))
    for mine, yours in zip(*both, strict=True):
        np.testing.assert_array_equal(mine, yours)


@pytest.mark.slow
def test_exported_adapters_name_the_export_of_their_base_run(first, tmp_path):
    """Other programs can read that export."""
    settings = following(first, tmp_path / "run", lora={"rank": 2, "alpha": 4.0}, step=4)
    policy = load_policy(settings, make_mesh(settings.mesh))
    adapters, _ = policy.split(policy.initial_params())
    base = f"{first.run_dir}/export"
    base_name = export.save_adapter(settings, policy, adapters, str(tmp_path / "adapter"))
    assert base_name == f"{base}, which tools/export.py {first.run_dir} --step 4 writes"
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == base


@pytest.mark.parametrize(
    ("source", "steps", "step", "message"),
    [
        ("nowhere", [], 3, "no run is at nowhere: give its run_dir, or remove the step"),
        ("first", [], "best", "first has no checkpoint yet: start it again, or set checkpoint.every"),
        ("first", [4], 3, r"first has no checkpoint 3; there are \[4\]"),
        ("first", [4], "best", "first has no checkpoint best, as checkpoint.keep_best keeps one;"),
    ],
)
def test_a_missing_step_is_a_one_line_error(tmp_path, monkeypatch, source, steps, step, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RunStore, "steps", lambda self: steps)
    Path("first").mkdir()
    run_dir.write(RunStore("first"), first := config(run_dir="first"))
    with pytest.raises(UserError, match=f"^model.step: {message}"):
        pin(following(first, tmp_path / "run", source=source, step=step).model)


@pytest.mark.nightly
def test_a_run_in_a_bucket_equals_a_run_of_local_files(tmp_path, monkeypatch, capsys):
    """Tools and other runs read it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = tmp_path / "files"
    policy = load_policy(config("sft"), make_mesh(MeshConfig(fsdp=1)))
    save = policy.tokenizer.save_pretrained
    weights.save(files / "model", policy.architecture, policy.initial_params(), stop_ids=policy.stop_ids, also=save)
    write_lines(files / "train-1.jsonl", SUMS[:20])
    write_lines(files / "train-2.jsonl", SUMS[20:])
    parquet.write_table(pyarrow.Table.from_pylist(SUMS[:9]), files / "heldout.parquet")

    def settings(place):
        model = {"init": "pretrained", "architecture": None, "source": f"{place}/model"}
        data = {"source": f"{place}/train-*.jsonl", "validation": {"source": f"{place}/heldout.parquet"}}
        parts = {"model": model, "data": data, "task": None, "rollout": None, "eval": None}
        return config("sft", run_dir=f"{place}/run", **parts)

    with object_store() as store:
        send(files, store.url, [str(path.relative_to(files)) for path in files.rglob("*") if path.is_file()])
        on_disk, in_bucket = both = settings(files), settings(store.url)
        assert run(on_disk) == run(in_bucket) == 0
        assert_same_end(on_disk, in_bucket)
        assert len([*cache_folder().glob("*.npz")]) == 2  # the documents are found again

        assert [export.main([one.run_dir]) for one in both] == [0, 0]
        fetched = checksums(fetch_folder(f"{in_bucket.run_dir}/export", ("*",), "model.source"))
        of_disk = checksums(Path(on_disk.run_dir, "export"))
        assert fetched == of_disk | {"README.md": fetched["README.md"]}  # which names the run
        assert [generate.main([one.run_dir, "1+2=", "--max-tokens", "4"]) for one in both] == [0, 0]
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == lines[-2]
        next_one = following(in_bucket, f"{store.url}/grpo", "grpo")
        assert run(next_one) == 0
        assert samples.main([next_one.run_dir]) == plot.main([next_one.run_dir, in_bucket.run_dir]) == 0
        assert str(tool_run(next_one.run_dir).folder / "curves.png") in capsys.readouterr().out
