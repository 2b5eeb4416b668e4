"""Models and data are read from a bucket as from a disk, fetched once, and exports are written there."""

import os
import re
import time
from itertools import islice
from pathlib import Path
from random import Random

import jax
import numpy as np
import pytest
from tiny import load_weights

from mllm.errors import UserError
from mllm.model import weights
from mllm.model.folder import SMALL, local_folder
from mllm.store import bucket, fetch
from mllm.store.bucket import Bucket
from mllm.store.run_store import find_run

FIXTURES = Path(__file__).parent.parent / "fixtures"
pytestmark = pytest.mark.parametrize("place", ["gs", pytest.param("s3", marks=pytest.mark.faults)], indirect=True)


@pytest.fixture
def pieces(monkeypatch):
    """Objects are read in pieces of a kilobyte."""
    monkeypatch.setattr(bucket, "PART_BYTES", 1000)


# Objects


def test_an_object_is_fetched_once_whole_and_again_when_it_has_changed(server, url, pieces):
    objects, dice = Bucket(f"{url}/data"), Random(0)
    server.fault = lambda method, path: "503" if dice.random() < 0.1 else None  # and is repeated
    contents = {f"part-{size}.jsonl": dice.randbytes(size) for size in (1, 1000, 1001, 9999)}
    for name, content in (contents | {"part-1.txt": b"?", "old/part-2.jsonl": b"?", ".part-3.jsonl": b"?"}).items():
        objects.write(name, content)
    fetched = fetch.fetch_files(f"{url}/data/part-*.jsonl", "data.source")
    assert {path.name: path.read_bytes() for path in fetched} == contents
    assert fetched == sorted(fetched)
    assert len(fetch.fetch_files(f"{url}/data/*/part-[12].jsonl", "data.source")) == 1

    requests, changing = [], fetched[-1]
    server.fault = lambda method, path: requests.append(path)
    assert fetch.fetch_files(f"{url}/data/{changing.name}", "data.source") == [changing]
    assert len(requests) == 1  # whether it has changed
    objects.write(changing.name, b"new")
    fetch.fetch_files(f"{url}/data/{changing.name}", "data.source")
    assert changing.read_bytes() == b"new"


def test_what_was_half_fetched_is_never_taken_for_whole(server, url, pieces, monkeypatch):
    """The process ends when it has read three of ten pieces."""
    Bucket(url).write("train.jsonl", content := Random(0).randbytes(9999))
    read = Bucket.read_parts

    def killed(self, name):
        yield from islice(read(self, name), 3)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "read_parts", killed)
        with pytest.raises(KeyboardInterrupt):
            fetch.fetch_files(f"{url}/train.jsonl", "data.source")
    [folder] = {path.parent for path in Path(bucket.cache_folder()).rglob("*.unfinished")}
    assert not (folder / "train.jsonl").exists()
    [path] = fetch.fetch_files(f"{url}/train.jsonl", "data.source")
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("source", "answer", "message"),
    [
        ("nowhere.jsonl", None, "there is no such object: correct the URL"),
        ("nowhere-*.jsonl", None, "no object matches"),
        ("train.jsonl", "403", "check the bucket and its credentials"),
        ("train.jsonl", "503", "All 8 retry attempts failed"),
    ],
)
def test_what_cannot_be_had_is_one_line(server, url, source, answer, message):
    server.fault = lambda method, path: answer
    with pytest.raises(UserError, match=rf"^data.source: .*{re.escape(message)}") as error:
        fetch.fetch_files(f"{url}/{source}", "data.source")
    assert f"{url}/{source}" in str(error.value)


# A stranger's names


def test_no_url_leads_out_of_the_folder_of_copies(server, url, tmp_path):
    """It may stand in the config.yaml of a stranger's run."""
    (mine := tmp_path / "mine").mkdir()
    outside = "../" * 20 + str(mine)[1:]
    for name in (outside, "..", "a/../b", "a//b", "a\\b", ".a"):
        server.objects[f"{url.partition('test-runs/')[2]}/{name}/config.json"] = b"theirs", "1"
        for read in (
            lambda url: local_folder(url, SMALL),
            lambda url: find_run(url, "model.source"),
            lambda url: fetch.fetch_files(f"{url}/config.json", "model.source"),
            lambda url: fetch.fetch_files(f"{url}/*.json", "model.source"),
        ):
            with pytest.raises(UserError, match=r"^model.source: .* is no place in a bucket: give (gs|s3)://bucket/"):
                read(f"{url}/{name}")
    assert [*tmp_path.rglob("*")] == [mine]


def test_an_object_whose_name_could_lead_elsewhere_is_not_fetched(server, url):
    key = url.partition("test-runs/")[2]
    hostile = ("a\\b.jsonl", "..\\b.jsonl", "\x1b[2J.jsonl", ".a.jsonl", "../b.jsonl", "/b.jsonl", "b/../c.jsonl")
    for name in ("a.jsonl", *hostile):
        server.objects[f"{key}/data/{name}"] = b"theirs", "1"
    assert [path.name for path in fetch.fetch_files(f"{url}/data/*.jsonl", "data.source")] == ["a.jsonl"]
    with pytest.raises(UserError, match="no object matches"):
        fetch.fetch_files(f"{url}/data/*/*.jsonl", "data.source")
    with pytest.raises(UserError, match="there is no such object"):
        fetch.fetch(f"{url}/data", ["../b.jsonl"], "data.source")


# What copies take


def test_copies_that_nothing_uses_any_more_are_removed_by_age_and_then_by_size(server, url, monkeypatch):
    def get(name):
        Bucket(f"{url}/{name}").write("a.jsonl", bytes(1000)) if name not in copies else None
        copies[name] = fetch.fetch_files(f"{url}/{name}/a.jsonl", "data.source")[0]

    copies = dict[str, Path]()
    ages = {"new": 0, "day": 0.9, "days": 2, "week": 7, "old": 31, "being fetched": 32, "in use again": 33}
    for name in ages:
        get(name)
    for name, days in ages.items():
        for path in copies[name].parent.iterdir():
            os.utime(path, (time.time() - days * 86400,) * 2)
    requests = []
    server.fault = lambda method, path: requests.append(path)
    with fetch.locked(copies["being fetched"].parent):
        get("in use again")
    assert len(requests) == 1  # it was still there
    assert [name for name in ages if not copies[name].exists()] == ["old"]

    monkeypatch.setattr(fetch, "MOST_BYTES", 5500)
    get("new")  # six of more than a thousand bytes
    assert [name for name in ages if not copies[name].exists()] == ["week", "old"]
    get("old")
    assert copies["old"].read_bytes() == bytes(1000)
    monkeypatch.setattr(fetch, "MOST_BYTES", 0)
    get("new")
    assert not copies["days"].exists()
    assert copies["day"].exists()


# Exports


def test_an_export_to_a_bucket_is_loaded_as_it_was_and_none_when_it_was_cut_off(server, url, monkeypatch):
    url, params = f"{url}/model", load_weights(FIXTURES / "tied")
    architecture = weights.read_config(FIXTURES / "tied")
    monkeypatch.setattr(weights, "SHARD_BYTES", 20_000)
    weights.save(url, architecture, params, dtype="float32")
    shards = [name for name in Bucket(url).names() if name.endswith(".safetensors")]
    assert len(shards) > 1
    same = load_weights(local_folder(url))
    assert all(map(np.array_equal, jax.tree.leaves(same), jax.tree.leaves(params)))

    monkeypatch.undo()
    sent = []
    server.fault = lambda method, path: method in ("PUT", "POST") and (sent.append(path) or "403" * (len(sent) > 2))
    with pytest.raises(UserError, match="can't be written"):
        weights.save(url, architecture, params)
    server.fault = lambda method, path: None
    assert Bucket(url).names()
    with pytest.raises(UserError, match=r"config.json: missing"):
        load_weights(local_folder(url))
    weights.save(url, architecture, params, dtype="float32")
    assert load_weights(local_folder(url))
    assert not {*shards} & {path.name for path in local_folder(url).iterdir()}

    Bucket(url).write("notes.txt", b"mine")
    with pytest.raises(UserError, match=rf"^{url}/notes.txt: no export wrote this, and it would be lost"):
        weights.save(url, architecture, params)
