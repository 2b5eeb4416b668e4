"""Models and data are read from a bucket as from a disk, fetched once, and exports are written there."""

from random import Random
from unittest.mock import patch

import jax
import numpy as np
import pytest
from tiny import FIXTURES, load_weights

from mllm import storage
from mllm.errors import UserError
from mllm.model import weights
from mllm.model.folder import SMALL, local_folder, replacing
from mllm.run.store import find_run
from mllm.storage import bucket_path, cache_folder

pytestmark = pytest.mark.parametrize("place", ["gs"], indirect=True)


def put(url, name, content):
    (bucket_path(url) / name).write_bytes(content)


def test_an_object_is_fetched_once_until_it_changes(server, url):
    dice, data = Random(0), f"{url}/data"
    contents = {f"part-{size}.jsonl": dice.randbytes(size) for size in (1, 1000, 1001, 9999)}
    for name, content in (contents | {"part-1.txt": b"?", "old/part-2.jsonl": b"?", ".part-3.jsonl": b"?"}).items():
        put(data, name, content)
    server.fault = lambda method, path: "503" if dice.random() < 0.05 else None  # and is repeated
    fetched = storage.fetch_files(f"{data}/part-*.jsonl", "data.source")
    assert {path.name: path.read_bytes() for path in fetched} == contents
    assert fetched == sorted(fetched)

    requests, changing = [], fetched[-1]
    server.fault = lambda method, path: requests.append(path)
    assert storage.fetch_files(f"{data}/{changing.name}", "data.source") == [changing]
    assert not [path for path in requests if "alt=media" in path]  # only whether it has changed
    put(data, changing.name, b"new")
    storage.fetch_files(f"{data}/{changing.name}", "data.source")
    assert changing.read_bytes() == b"new"


def test_an_interrupted_fetch_leaves_no_file(server, url):
    put(url, "train.jsonl", content := Random(0).randbytes(9999))

    def killed(source, target, size):
        target.write(source.read(1000))
        raise KeyboardInterrupt

    with patch.object(storage.shutil, "copyfileobj", killed), pytest.raises(KeyboardInterrupt):
        storage.fetch_files(f"{url}/train.jsonl", "data.source")
    assert not [*cache_folder().rglob("train.jsonl")]
    [path] = storage.fetch_files(f"{url}/train.jsonl", "data.source")
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("source", "answer", "message"),
    [
        ("nowhere.jsonl", None, "nothing there is called"),
        ("nowhere-*.jsonl", None, "nothing there is called"),
        ("nowhere/*/a.jsonl", None, "a pattern is only for the last part of a name in a bucket"),
        ("train.jsonl", "403", "can't be had .*Forbidden"),
    ],
)
def test_a_failed_fetch_is_a_one_line_error(server, url, source, answer, message):
    server.fault = lambda method, path: answer
    with pytest.raises(UserError, match=rf"^data.source: [^\n]*{message}"):
        storage.fetch_files(f"{url}/{source}", "data.source")


def test_an_error_of_a_run_in_a_bucket_names_the_setting_once(server, url):
    (bucket_path(url) / "config.yaml").write_bytes(b"algorithm: sft")
    server.fault = lambda method, path: "403" if "alt=media" in path else None
    with pytest.raises(UserError, match=r"^model\.source: gs://(?!.*model\.source)"):
        find_run(url, "model.source")


def test_no_url_leads_out_of_the_folder_of_copies(server, url, tmp_path):
    """The URL may come from the config.yaml of a stranger's run."""
    (mine := tmp_path / "mine").mkdir()
    outside = "../" * 20 + str(mine)[1:]
    for name in (outside, "..", "a/../b", "a//b", "a\\b", ".a"):
        server.objects[f"{url.partition('test-runs/')[2]}/{name}/config.json"] = b"theirs", "1"
        for read in (
            lambda url: local_folder(url, SMALL),
            lambda url: find_run(url, "model.source"),
            lambda url: storage.fetch_files(f"{url}/config.json", "model.source"),
            lambda url: storage.fetch_files(f"{url}/*.json", "model.source"),
        ):
            with pytest.raises(UserError, match=r"^model.source: .* is no place in a bucket: give gs://bucket/"):
                read(f"{url}/{name}")
    assert [*tmp_path.rglob("*")] == [mine]


def test_an_object_name_that_leads_elsewhere_is_not_fetched(server, url):
    key = url.partition("test-runs/")[2]
    hostile = ("a\\b.jsonl", "..\\b.jsonl", "\x1b[2J.jsonl", ".a.jsonl", "../b.jsonl", "b/../c.jsonl")
    for name in ("a.jsonl", *hostile):
        server.objects[f"{key}/data/{name}"] = b"theirs", "1"
    assert [path.name for path in storage.fetch_files(f"{url}/data/*.jsonl", "data.source")] == ["a.jsonl"]


@pytest.mark.slow
def test_a_bucket_export_loads_and_a_partial_export_does_not(server, url, monkeypatch):
    url, params = f"{url}/model", load_weights(FIXTURES / "tied")
    architecture = weights.read_config(FIXTURES / "tied")
    monkeypatch.setattr(weights, "SHARD_BYTES", 20_000)
    weights.save(url, architecture, params, dtype="float32")

    def names():
        return [path.name for path in bucket_path(url).iterdir()]

    assert len(shards := [name for name in names() if name.endswith(".safetensors")]) > 1
    same = load_weights(local_folder(url))
    assert all(map(np.array_equal, jax.tree.leaves(same), jax.tree.leaves(params)))

    sent = []
    server.fault = lambda method, path: "upload" in path and (sent.append(path) or "403" * (len(sent) > 4))
    with pytest.raises(UserError, match=r"can't be written .*Forbidden"):
        weights.save(url, architecture, params)
    server.fault = lambda method, path: None
    assert names()
    with pytest.raises(UserError, match=r"config.json: missing|nothing there is called"):
        load_weights(local_folder(url))
    monkeypatch.setattr(weights, "SHARD_BYTES", 2**30)
    weights.save(url, architecture, params, dtype="float32")
    assert load_weights(local_folder(url))
    assert not {*shards} & {path.name for path in local_folder(url).iterdir()}

    put(url, "notes.txt", b"mine")
    with pytest.raises(UserError, match=rf"^{url}/notes.txt: no export wrote this, and it would be lost"):
        weights.save(url, architecture, params)


def test_subfolders_of_an_export_are_sent_and_fetched(server, url):
    names = ["additional_chat_templates/tool_use.jinja", "chat_template.jinja", "config.json"]
    for _ in range(2):  # the second replaces the first
        with replacing(f"{url}/export") as folder:
            (folder / names[0]).parent.mkdir()
            for name in names:
                (folder / name).write_text(name)
    assert sorted(server.objects) == [f"{url.rpartition('test-runs/')[2]}/export/{name}" for name in names]
    assert server.written[-1].endswith("config.json")
    folder = local_folder(f"{url}/export", SMALL)
    assert (folder / names[0]).read_text() == names[0]
    (bucket_path(f"{url}/export") / names[0]).unlink()
    assert not (local_folder(f"{url}/export", SMALL) / names[0]).exists()
