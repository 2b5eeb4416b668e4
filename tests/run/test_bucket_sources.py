"""Models, data and other runs are read from a bucket as from a disk, fetched once, and exports are written there."""

import gzip
import json
import re
from pathlib import Path
from random import Random

import jax
import numpy as np
import pyarrow
import pytest
from object_store import object_store
from pyarrow import parquet
from runs import assert_same_end, changed, checksums, run
from tiny import config, load_weights

from mllm import bucket, fetch
from mllm.bucket import Bucket
from mllm.config.model import MeshConfig
from mllm.errors import UserError
from mllm.model import weights
from mllm.model.folder import local_folder
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh
from mllm.run.bucket_copy import find_run
from mllm.run.mirror import working_folder
from tools import export, generate, plot, samples

FIXTURES = Path(__file__).parent.parent / "fixtures"
LINES = [json.dumps({"prompt": f"{i % 9}+{i % 5}=", "completion": str(i % 9 + i % 5)}) + "\n" for i in range(40)]


@pytest.fixture(scope="module", params=["gs", pytest.param("s3", marks=pytest.mark.faults)])
def server(request):
    with object_store(request.param) as server:
        yield server


@pytest.fixture
def store(server, tmp_path, monkeypatch):
    """A server without faults, and requests that are repeated after milliseconds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bucket, "RETRIES", {"max_retries": 8, "initial_delay": "5ms", "max_delay": "20ms"})
    server.renew()
    return server


@pytest.fixture
def pieces(monkeypatch):
    """Objects are read in pieces of a kilobyte."""
    for module in (bucket, fetch):
        monkeypatch.setattr(module, "PART_BYTES", 1000)


@pytest.fixture
def requests(store):
    """The paths that objects have been asked for, each as often as it was."""
    paths: list[str] = []
    store.fault = lambda method, path: paths.append(path) if method in ("GET", "HEAD") else None
    return paths


def upload(folder, url):
    """Write a folder's files as objects."""
    objects = Bucket(url)
    for path in folder.rglob("*"):
        if path.is_file():
            objects.write(path.relative_to(folder).as_posix(), path.read_bytes())


# Objects


def test_an_object_is_fetched_once_whole_and_again_when_it_has_changed(store, pieces, requests):
    objects, dice = Bucket(f"{store.url}/data"), Random(0)
    contents = {f"part-{size}.jsonl": dice.randbytes(size) for size in (1, 1000, 1001, 9999)}
    for name, content in (contents | {"part-1.txt": b"?", "old/part-2.jsonl": b"?", ".part-3.jsonl": b"?"}).items():
        objects.write(name, content)
    fetched = fetch.fetch_files(f"{store.url}/data/part-*.jsonl", "data.source")
    assert {path.name: path.read_bytes() for path in fetched} == contents
    assert fetched == sorted(fetched)
    assert len(fetch.fetch_files(f"{store.url}/data/**/part-[12].jsonl", "data.source")) == 2

    once, changing = len(requests), fetched[-1]
    assert fetch.fetch_files(f"{store.url}/data/{changing.name}", "data.source") == [changing]
    assert len(requests) == once + 1  # whether it has changed
    objects.write(changing.name, b"new")
    fetch.fetch_files(f"{store.url}/data/{changing.name}", "data.source")
    assert changing.read_bytes() == b"new"


def test_what_was_half_fetched_is_never_taken_for_whole(store, pieces, monkeypatch):
    """The process ends when it has read three of ten pieces."""
    Bucket(store.url).write("train.jsonl", content := Random(0).randbytes(9999))
    read, left = Bucket.read_piece, [None] * 3

    def killed(self, *piece):
        left.pop()
        return read(self, *piece)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "read_piece", killed)
        with pytest.raises(IndexError):
            fetch.fetch_files(f"{store.url}/train.jsonl", "data.source")
    [folder] = {path.parent for path in Path(bucket.cache_folder()).rglob("*.unfinished")}
    assert not (folder / "train.jsonl").exists()
    [path] = fetch.fetch_files(f"{store.url}/train.jsonl", "data.source")
    assert path.read_bytes() == content


@pytest.mark.parametrize("fault", ["429", "503", "reset", "late"])
def test_requests_that_fail_are_repeated(store, pieces, fault):
    Bucket(store.url).write("train.jsonl", content := Random(0).randbytes(9999))
    dice = Random(0)
    store.fault = lambda method, path: fault if dice.random() < 0.5 else None
    [path] = fetch.fetch_files(f"{store.url}/train.jsonl", "data.source")
    assert path.read_bytes() == content
    assert store.faults[fault] >= 3


@pytest.mark.parametrize(
    ("source", "answer", "message"),
    [
        ("nowhere.jsonl", None, "there is no such object: correct the URL"),
        ("nowhere-*.jsonl", None, "no object matches"),
        ("train.jsonl", "403", "check the bucket and its credentials"),
        ("train.jsonl", "503", "All 8 retry attempts failed"),
    ],
)
def test_what_cannot_be_had_is_one_line(store, source, answer, message):
    store.fault = lambda method, path: answer
    with pytest.raises(UserError, match=rf"^data.source: .*{re.escape(message)}") as error:
        fetch.fetch_files(f"{store.url}/{source}", "data.source")
    assert f"{store.url}/{source}" in str(error.value)


# Exports


def test_an_export_to_a_bucket_is_loaded_as_it_was_and_none_when_it_was_cut_off(store, monkeypatch):
    url, params = f"{store.url}/model", load_weights(FIXTURES / "tied")
    architecture = weights.read_config(FIXTURES / "tied")
    monkeypatch.setattr(weights, "SHARD_BYTES", 20_000)
    weights.save(url, architecture, params, dtype="float32")
    shards = [name for name in Bucket(url).names() if name.endswith(".safetensors")]
    assert len(shards) > 1
    same = load_weights(local_folder(url))
    assert all(map(np.array_equal, jax.tree.leaves(same), jax.tree.leaves(params)))

    monkeypatch.undo()
    sent = []
    store.fault = lambda method, path: (
        sent.append(path) or "403" * (len(sent) > 2) if method in ("PUT", "POST") else None
    )
    with pytest.raises(UserError, match="can't be written"):
        weights.save(url, architecture, params)
    store.fault = lambda method, path: None
    assert Bucket(url).names()
    with pytest.raises(UserError, match=r"config.json: missing"):
        load_weights(local_folder(url))
    weights.save(url, architecture, params, dtype="float32")
    assert load_weights(local_folder(url))
    assert not {*shards} & {path.name for path in local_folder(url).iterdir()}

    Bucket(url).write("notes.txt", b"mine")
    with pytest.raises(UserError, match=rf"^{url}/notes.txt: no export wrote this, and it would be lost"):
        weights.save(url, architecture, params)


# Runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on a disk, with checkpoints 2 and 4 and an export."""
    settings = config("sft", run_dir=str(tmp_path_factory.mktemp("trained") / "run"), checkpoint={"every": 2})
    settings = changed(settings, eval=None, rollout=None)
    assert run(settings) == 0
    assert export.main([settings.run_dir]) == 0
    return settings


@pytest.mark.slow
def test_a_model_and_data_in_a_bucket_make_the_run_that_their_files_make(store, requests, tmp_path):
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
    assert len([*bucket.cache_folder().glob("*/summary")]) == 2  # the documents are found again

    objects = sum(path.is_file() for path in files.rglob("*"))
    requests.clear()
    moved = changed(on_disk, steps=6, data={**on_disk.data.model_dump(), "source": in_bucket.data.source})
    assert run(moved) == 0  # a run goes on when its data have moved
    assert len(requests) < 2 * objects


@pytest.mark.faults
def test_grpo_in_a_bucket_begins_with_a_run_there_and_tools_read_it(store, trained, tmp_path, capsys):
    first = changed(trained, run_dir=f"{store.url}/first")
    assert run(first) == 0
    problems = [{"prompt": f"{i}+{i % 5}=", "answer": i + i % 5} for i in range(12)]
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    upload(tmp_path / "task", f"{store.url}/task")

    def settings(run_dir, source, problems, steps=4):
        model = {"init": "pretrained", "architecture": None, "source": source}
        task = {"name": "jsonl", "train": str(problems), "heldout": None}
        return config(run_dir=str(run_dir), steps=steps, model=model, task=task, checkpoint={"every": 2})

    on_disk = settings(tmp_path / "disk", trained.run_dir, tmp_path / "task" / "problems.jsonl")
    there = f"{store.url}/grpo", first.run_dir, f"{store.url}/task/problems.jsonl"
    in_bucket = settings(*there)
    assert run(on_disk) == run(settings(*there, steps=2)) == run(in_bucket) == 0
    with working_folder(in_bucket, False) as folder:
        assert_same_end(on_disk, changed(in_bucket, run_dir=str(folder)))

    assert samples.main([in_bucket.run_dir, "--print"]) == plot.main([in_bucket.run_dir, first.run_dir]) == 0
    assert str(find_run(in_bucket.run_dir, "RUN") / "curves.png") in capsys.readouterr().out
    for arguments in ([first.run_dir], [first.run_dir, "--out", str(tmp_path / "export")]):
        assert export.main(arguments) == 0
    exported = fetch.fetch_folder(f"{first.run_dir}/export", ("*",), "model.source")
    assert {name: sum_ for name, sum_ in checksums(exported).items() if name[0] != "."} == checksums(
        tmp_path / "export"
    )
    assert checksums(tmp_path / "export") == checksums(Path(trained.run_dir, "export"))
    answers = [generate.main([place, "1+2=", "--max-tokens", "4"]) for place in (first.run_dir, trained.run_dir)]
    said = capsys.readouterr().out.splitlines()
    assert answers == [0, 0]
    assert said[-1] == said[-2]
