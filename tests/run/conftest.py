"""A place for a run on a disk, and in a bucket."""

import pytest
from object_store import object_store

from mllm.run.store import RunStore


@pytest.fixture(params=["disk", pytest.param("gs", marks=pytest.mark.slow)])
def place(request, tmp_path, monkeypatch):
    """A run's empty place: its URL, and the object store if it is in a bucket."""
    if request.param == "disk":
        yield str(tmp_path / "run"), None
        return
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with object_store() as server:
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
