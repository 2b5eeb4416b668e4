"""Models, data and other runs are read in a bucket. That a run there ends as one on a disk: tests/run/test_train.py."""

import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from object_store import object_store
from pyarrow import parquet
from runs import assert_same_end, changed, checksums, killed_after, run
from tiny import config

from mllm.config.model import MeshConfig
from mllm.model import weights
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh
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


@pytest.mark.nightly
def test_a_model_and_data_in_a_bucket_make_the_run_that_their_files_make(store, tmp_path):
    files = tmp_path / "files"
    policy = load_policy(config("sft"), make_mesh(MeshConfig()))
    save = policy.tokenizer.save_pretrained
    weights.save(files / "model", policy.architecture, policy.initial_params(), stop_ids=policy.stop_ids, also=save)
    (files / "train-1.jsonl.gz").write_bytes(gzip.compress("".join(LINES[:20]).encode()))
    (files / "train-2.jsonl").write_text("".join(LINES[20:]))
    parquet.write_table(pyarrow.Table.from_pylist([*map(json.loads, LINES[:9])]), files / "heldout.parquet")
    send(files, store.url, [str(path.relative_to(files)) for path in files.rglob("*") if path.is_file()])

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
def test_grpo_in_a_bucket_begins_with_a_run_there_and_tools_read_it(store, finished, tmp_path, capsys):
    trained = killed_after(finished("sft"), 8, tmp_path / "trained")
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
