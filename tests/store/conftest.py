"""A place for a run on a disk, and in a bucket of each kind."""

import pytest
from object_store import object_store

from mllm.store import bucket, lock
from mllm.store.run_store import RunStore


@pytest.fixture(params=["disk", "gs", "s3"])
def place(request, tmp_path, monkeypatch):
    """A run's empty place: its URL, and the object store if it is in a bucket.

    Requests to buckets are repeated after milliseconds, and leases renewed ten times a second.
    """
    if request.param == "disk":
        yield str(tmp_path / "run"), None
        return
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bucket, "RETRIES", {"max_retries": 8, "initial_delay": "5ms", "max_delay": "20ms"})
    monkeypatch.setattr(lock, "RENEWALS", 600)
    with object_store(request.param) as server:
        yield f"{server.url}/run", server


@pytest.fixture
def url(place):
    return place[0]


@pytest.fixture
def server(place):
    return place[1]


@pytest.fixture
def store(url):
    return RunStore(url)
