"""A place for a run on a disk, and in a bucket of each kind."""

import pytest
from object_store import object_store

from mllm.store import bucket, lock
from mllm.store.run_store import RunStore


@pytest.fixture(scope="module")
def servers():
    """Makes object stores, each when it is first needed."""
    contexts = {}

    def server(scheme):
        if scheme not in contexts:
            contexts[scheme] = object_store(scheme)
            contexts[scheme] = contexts[scheme], contexts[scheme].__enter__()
        return contexts[scheme][1]

    yield server
    for context, _ in contexts.values():
        context.__exit__(None, None, None)


@pytest.fixture(params=["disk", "gs", "s3"])
def url(request, servers, tmp_path, monkeypatch):
    """A run's empty place; requests to buckets are repeated after milliseconds, and leases last a second."""
    if request.param == "disk":
        return str(tmp_path / "run")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bucket.make_context.cache_clear()
    monkeypatch.setattr(bucket, "RETRIES", {"max_retries": 8, "initial_delay": "5ms", "max_delay": "20ms"})
    monkeypatch.setattr(lock, "SECONDS", 1)
    server = servers(request.param)
    server.renew()
    return f"{server.url}/run"


@pytest.fixture
def store(url):
    return RunStore(url)


@pytest.fixture
def server(servers, url):
    """The object store of a place in a bucket."""
    return servers(url.partition("://")[0])
