"""A run in a bucket ends as one on a disk does, and survives the same: kills, damage, a second run, bad requests."""

import signal

import pytest
from object_store import object_store
from runs import assert_same_end, run, start, wait
from tiny import config

from mllm.bucket import Bucket
from mllm.run.mirror import working_folder

SETTINGS = {"steps": 24, "checkpoint": {"every": 2}, "eval": {"every": 12}}


@pytest.fixture(params=["gs", "s3"])
def store(request, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with object_store(request.param) as server:
        yield server


google = pytest.mark.parametrize("store", ["gs"], indirect=True)


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    settings = config("sft", run_dir=str(tmp_path_factory.mktemp("disk") / "run"), **SETTINGS)
    assert run(settings) == 0
    return settings


def in_bucket(store, **sections):
    return config("sft", run_dir=f"{store.url}/team/run", **{**SETTINGS, **sections})


def as_found(settings):
    """The run as another machine finds it in the bucket."""
    with working_folder(settings, False) as folder:
        return settings.model_copy(update={"run_dir": str(folder)})


def lists(objects):
    return [name.removeprefix("checkpoints/") for name in objects.names("checkpoints/") if name.endswith(".json")]


@pytest.mark.slow
def test_a_run_that_is_killed_and_has_lost_its_newest_checkpoint_ends_as_one_on_a_disk(store, on_disk, caplog):
    settings = in_bucket(store)
    objects = Bucket(settings.run_dir)
    process = start(settings)
    wait(process, lambda: sum(".json" in path and "jsonl" not in path for path in store.written) >= 2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    *older, newest = sorted(int(name.removesuffix(".json")) for name in lists(objects))
    [data, *_] = [name for name in objects.names(f"checkpoints/{newest}-") if "/params/d/" in name]
    objects.write(data, objects.read(data)[:-1] + b"?")
    assert run(settings) == 0
    assert f"put aside as damaged_{newest}.json" in caplog.text or not older
    assert_same_end(on_disk, as_found(settings))
    assert {*lists(objects)} == {"22.json", "24.json"} | ({f"damaged_{newest}.json"} if older else set())
    assert "lock" not in objects.names()
