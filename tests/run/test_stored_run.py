"""A run in a bucket ends as one on a disk does, and survives the same; models, data and other runs are read there."""

import gzip
import json
import signal
from functools import cache
from pathlib import Path

import pyarrow
import pytest
from object_store import object_store
from pyarrow import parquet
from runs import (
    arguments,
    assert_same_end,
    assert_same_metrics,
    changed,
    checkpoints,
    checksums,
    outputs,
    run,
    signal_trainer,
    start_group,
)
from tiny import METHODS, config

from mllm.config.model import MeshConfig
from mllm.model import weights
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh
from mllm.stopwatch import Stopwatch
from mllm.store.bucket import bucket_path, cache_folder
from mllm.store.fetch import fetch_folder, send
from mllm.store.run_store import tool_run
from tools import export, generate, plot, samples

LINES = [json.dumps({"prompt": f"{i % 9}+{i % 5}=", "completion": str(i % 9 + i % 5)}) + "\n" for i in range(40)]


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An object store with an empty folder `url`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with object_store() as store:
        yield store


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on a disk, with checkpoints 2 and 4."""
    settings = config("sft", run_dir=str(tmp_path_factory.mktemp("trained") / "run"), checkpoint={"every": 2})
    settings = changed(settings, eval=None, rollout=None)
    assert run(settings) == 0
    return settings


# Every method


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Makes the configuration of a run on a disk, on two devices of this process, that nothing disturbed."""

    @cache
    def finished(method):
        settings = changed(METHODS[method], run_dir=str(tmp_path_factory.mktemp(method) / "run"), mesh={"dp": 2})
        assert run(settings) == 0
        return settings

    return finished


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_a_signal_stops_and_that_goes_on_from_the_checkpoint_before_ends_as_if_nothing_had_been(
    method, store, undisturbed, monkeypatch
):
    settings = changed(undisturbed(method), run_dir=f"{store.url}/run")
    phases, phase_of = [], Stopwatch.phase

    def signalled(watch, phase):
        phases.append(phase)
        if (phase, phases.count(phase)) == (("rollout", 4) if method == "turns" else ("update", 3)):
            signal_trainer(signal.SIGTERM)
        return phase_of(watch, phase)

    with monkeypatch.context() as patch:
        patch.setattr(Stopwatch, "phase", signalled)
        assert run(settings) == 143
    assert checkpoints(settings) == [2, 3]
    (tool_run(settings.run_dir).checkpoints / "3").rmtree()
    assert run(settings) == 0
    assert_same_end(undisturbed(method), settings)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["turns", "distill"])  # DPO: tests/run/test_dpo.py
def test_two_processes_log_what_one_logs(method, store, undisturbed):
    one, two = undisturbed(method), changed(undisturbed(method), run_dir=f"{store.url}/run")
    outputs(start_group(["train.py", *arguments(two)], 2, 1))
    assert_same_metrics(two, one)
    assert tool_run(two.run_dir).read_log("samples.jsonl") == tool_run(one.run_dir).read_log("samples.jsonl")


# What a run reads, and what reads it


def upload(folder, url):
    """Write a folder's files as objects."""
    send(folder, url, [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()])


@pytest.mark.slow
def test_a_model_and_data_in_a_bucket_make_the_run_that_their_files_make(store, tmp_path):
    files = tmp_path / "files"
    policy = load_policy(config("sft"), make_mesh(MeshConfig()))
    save = policy.tokenizer.save_pretrained
    weights.save(files / "model", policy.architecture, policy.initial_params(), stop_ids=policy.stop_ids, also=save)
    (files / "train-1.jsonl.gz").write_bytes(gzip.compress("".join(LINES[:20]).encode()))
    (files / "train-2.jsonl").write_text("".join(LINES[20:]))
    parquet.write_table(pyarrow.Table.from_pylist([*map(json.loads, LINES[:9])]), files / "heldout.parquet")
    upload(files, store.url)

    def settings(place, run_dir):
        model = {"init": "pretrained", "architecture": None, "source": f"{place}/model"}
        data = {"source": f"{place}/train-*.jsonl*", "validation": {"source": f"{place}/heldout.parquet"}}
        parts = {"model": model, "data": data, "task": None, "rollout": None, "eval": None}
        return config("sft", run_dir=str(tmp_path / run_dir), **parts)

    on_disk, in_bucket = settings(files, "disk"), settings(store.url, "bucket")
    assert run(on_disk) == run(in_bucket) == 0
    assert_same_end(on_disk, in_bucket)
    assert len([*cache_folder().glob("*/summary")]) == 2  # the documents are found again


@pytest.mark.faults
def test_grpo_in_a_bucket_begins_with_a_run_there_and_tools_read_it(store, trained, tmp_path, capsys):
    first = changed(trained, run_dir=f"{store.url}/first")
    assert run(first) == 0
    problems = [json.dumps({"prompt": f"{i}+{i % 5}=", "answer": i + i % 5}) + "\n" for i in range(12)]
    (bucket_path(store.url) / "task/problems.jsonl").write_text("".join(problems))
    model = {"init": "pretrained", "architecture": None, "source": first.run_dir}
    task = {"name": "jsonl", "train": f"{store.url}/task/problems.jsonl", "heldout": None}
    in_bucket = config(run_dir=f"{store.url}/grpo", model=model, task=task)
    assert run(in_bucket) == 0
    assert samples.main([in_bucket.run_dir, "--print"]) == plot.main([in_bucket.run_dir, first.run_dir]) == 0
    assert str(tool_run(in_bucket.run_dir).folder / "curves.png") in capsys.readouterr().out
    for options in ([trained.run_dir], [first.run_dir], [first.run_dir, "--out", str(tmp_path / "export")]):
        assert export.main(options) == 0
    exported = fetch_folder(f"{first.run_dir}/export", ("*",), "model.source")
    in_bucket = {name: checksum for name, checksum in checksums(exported).items() if name[0] != "."}
    local, of_disk = checksums(tmp_path / "export"), checksums(Path(trained.run_dir, "export"))
    assert in_bucket == local
    assert of_disk == local | {"README.md": of_disk["README.md"]}  # which names the run
    answers = [generate.main([place, "1+2=", "--max-tokens", "4"]) for place in (first.run_dir, trained.run_dir)]
    said = capsys.readouterr().out.splitlines()
    assert answers == [0, 0]
    assert said[-1] == said[-2]
