"""A run in a bucket ends as one on a disk does, and survives the same: kills, damage, a second run, bad requests."""

import json
import re
import signal
import socket
import time
from random import Random

import pytest
from object_store import object_store
from runs import arguments, assert_same_end, outputs, run, start, start_group, wait
from tiny import config

from mllm import bucket
from mllm.bucket import Bucket
from mllm.errors import UserError
from mllm.run import lease
from mllm.run.lease import Lease
from mllm.run.mirror import Mirror, working_folder

SETTINGS = {"steps": 24, "checkpoint": {"every": 2}, "eval": {"every": 12}}


@pytest.fixture(scope="module", params=["gs", "s3"])
def server(request):
    with object_store(request.param) as server:
        yield server


@pytest.fixture
def store(server, tmp_path, monkeypatch):
    """A server without faults, and with an empty folder `url`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server.renew()
    return server


google = pytest.mark.parametrize("server", ["gs"], indirect=True)


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    settings = config("sft", run_dir=str(tmp_path_factory.mktemp("disk") / "run"), **SETTINGS)
    assert run(settings) == 0
    return settings


def in_bucket(store, **sections):
    return config("sft", run_dir=f"{store.url}/run", **{**SETTINGS, **sections})


def as_found(settings):
    """The run as another machine finds it in the bucket."""
    with working_folder(settings, False) as folder:
        return settings.model_copy(update={"run_dir": str(folder)})


def lists(objects):
    return [name.removeprefix("checkpoints/") for name in objects.names("checkpoints/") if name.endswith(".json")]


def published(store):
    """How many checkpoints have been made whole."""
    return sum(bool(re.search(r"checkpoints/\d+\.json", path)) for path in store.written)


@pytest.mark.slow
@pytest.mark.parametrize("server", ["gs", pytest.param("s3", marks=pytest.mark.faults)], indirect=True)
def test_a_run_that_is_killed_and_has_lost_its_newest_checkpoint_ends_as_one_on_a_disk(store, on_disk, caplog):
    settings = in_bucket(store)
    objects = Bucket(settings.run_dir)
    process = start(settings)
    wait(process, lambda: published(store) >= 2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    *older, newest = sorted(int(name.removesuffix(".json")) for name in lists(objects))
    [data, *_] = [name for name in objects.names(f"checkpoints/{newest}-") if "/params/params.embed/0" in name]
    objects.write(data, objects.read(data)[:-1] + b"?")
    assert run(settings) == 0
    assert f"put aside as damaged_{newest}.json" in caplog.text or not older
    assert_same_end(on_disk, as_found(settings))
    assert {*lists(objects)} == {"22.json", "24.json"} | ({f"damaged_{newest}.json"} if older else set())
    assert "lock" not in objects.names()


@pytest.mark.parametrize("url", ["gs://", "s3://", "gs://A_B!/run"])
def test_a_url_without_a_bucket_is_refused(url):
    with pytest.raises(UserError, match=r"is no place in a bucket: give (gs|s3)://bucket/path"):
        Bucket(url).read("config.yaml")


# Requests that fail


@pytest.fixture
def soon(monkeypatch):
    """Requests are repeated after milliseconds."""
    monkeypatch.setattr(bucket, "RETRIES", {"max_retries": 8, "initial_delay": "5ms", "max_delay": "20ms"})


@pytest.mark.parametrize("fault", ["429", "503", "reset", "lost", "late"])
def test_requests_that_fail_are_repeated(store, soon, fault):
    objects = Bucket(f"{store.url}/run")
    dice = Random(0)
    store.fault = lambda method, path: fault if dice.random() < 0.5 else None
    objects.write("a", b"1")
    content, generation = objects.read_generation("a")
    assert content == b"1"
    assert objects.names() == ["a"]
    # With a lost answer the repeated request finds its own work; the lease looks who was first.
    assert bool(objects.replace("a", b"2", generation)) or fault == "lost"
    assert objects.read("a") == b"2"
    assert objects.replace("a", b"3", generation) is None
    objects.delete(["a"])
    assert objects.read("a") is None
    assert store.faults[fault] >= 3


@pytest.mark.faults
@google
def test_a_bucket_that_fails_for_good_ends_the_run_with_one_line_and_it_resumes(store, on_disk, soon, capfd):
    settings = in_bucket(store)

    def fault(method, path):
        return "503" if published(store) else None

    store.fault = fault
    assert run(settings) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert re.match(
        rf"error: {settings.run_dir}/\S+: can't be \w+ \(All 8 retry attempts failed: .*\); check the bucket", errors[0]
    )
    store.fault = lambda method, path: None
    assert run(settings) == 0
    assert_same_end(on_disk, as_found(settings))


# The lease


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(lease, "SECONDS", 1)


def taken_by(objects, monkeypatch, host="another"):
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: host)
        return Lease(objects)


def test_a_run_that_is_held_is_refused_and_one_whose_holder_is_gone_is_taken(store, short, monkeypatch):
    objects = Bucket(f"{store.url}/run")
    first = taken_by(objects, monkeypatch)
    with pytest.raises(UserError, match=r"run_dir: .*/run is in use by process \d+ on another; wait for it"):
        Lease(objects)
    first.ended.set()  # as if killed
    second = Lease(objects)
    second.check()
    with pytest.raises(UserError, match="taken by another process"):
        first.take(first.generation)
    second.end()
    assert objects.names() == []


@google
def test_the_lease_of_a_dead_process_of_this_host_is_taken_at_once(store):
    objects = Bucket(f"{store.url}/run")
    objects.write("lock", json.dumps({"token": "x", "host": socket.gethostname(), "process": 2**22 + 1}).encode())
    begun = time.monotonic()
    Lease(objects).end()
    assert time.monotonic() - begun < 5


@google
def test_who_could_not_renew_the_lease_publishes_nothing(store, soon, short, capsys):
    held = Lease(Bucket(f"{store.url}/run"))
    store.fault = lambda method, path: "503"
    time.sleep(1)
    with pytest.raises(UserError, match="could not be renewed; the same command resumes"):
        held.check()
    store.fault = lambda method, path: None
    time.sleep(0.3)
    held.end()


# Logs


@google
def test_a_log_is_sent_in_parts_and_again_from_where_it_was_cut(store, tmp_path):
    objects = Bucket(f"{store.url}/run")
    copy = Mirror(objects, tmp_path, in_bucket(store).checkpoint, None, "")
    path = tmp_path / "timings.jsonl"

    def after(content):
        path.write_bytes(content)
        copy.send()
        names = objects.names("timings.jsonl.")
        assert b"".join(objects.read(name) for name in names) == content
        return [int(name.rpartition(".")[2]) for name in names]

    assert after(b"1\n2\n") == [0]
    written = len(store.written)
    assert after(b"1\n2\n3\n") == [0, 4]
    assert len(store.written) == written + 1
    assert after(b"1\n2\n3\n4\n") == [0, 4, 6]
    assert after(b"1\n2\n3\n5\n6\n") == [0, 4, 6]  # cut to three lines, and two new ones
    assert after(b"1\n") == [0]


@pytest.mark.faults
@google
def test_two_processes_that_share_no_disk_are_killed_and_end_as_two_that_share_one(store, tmp_path):
    sections = {"mesh": {"fsdp": 2}, "steps": 6, "eval": None, "rollout": None}
    shared = config("sft", run_dir=str(tmp_path / "shared"), checkpoint={"every": 2}, **sections)
    outputs(start_group(["train.py", *arguments(shared)], 2, 1))
    apart = in_bucket(store, **sections)
    processes = start_group(["train.py", *arguments(apart)], 2, 1)
    wait(processes[0], lambda: published(store) >= 1, seconds=300)
    for process in processes:
        process.kill()  # the second may have ended before, because the first did
    for process in processes:
        process.communicate()
    outputs(start_group(["train.py", *arguments(apart)], 2, 1))
    assert_same_end(shared, as_found(apart))
