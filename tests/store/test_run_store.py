"""A run's files, logs and lock are the same on a disk and in a bucket; a failure of either is one line."""

import errno
import fcntl
import logging
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from random import Random
from unittest.mock import Mock

import pytest
from runs import ROOT, environment
from test_full_disk import limited_files

from mllm.errors import UserError
from mllm.run.metrics import RunLog
from mllm.store import lock
from mllm.store.bucket import Bucket, LeaseLost
from mllm.store.folder import Folder
from mllm.store.lock import hold
from mllm.store.run_store import CONFIG, LOCK, RunStore

disk = pytest.mark.parametrize("place", ["disk"], indirect=True)
buckets = pytest.mark.parametrize("place", ["gs", "s3"], indirect=True)
google = pytest.mark.parametrize("place", ["gs"], indirect=True)

# Files


def test_files_are_written_whole_listed_and_removed(store):
    assert (store.read(CONFIG), store.entries(), store.is_run()) == (None, [], False)
    for name in (CONFIG, "skipped/step_2.npz", "checkpoints/7-x/a/0.1"):
        store.write(name, name.encode())
        store.write(name, name.encode() * 2)
    assert store.read("skipped/step_2.npz") == b"skipped/step_2.npz" * 2
    assert store.local(CONFIG).read_bytes() == CONFIG.encode() * 2
    assert (store.entries(), store.is_run()) == (["checkpoints", CONFIG, "skipped"], True)
    assert (store.entries("skipped"), store.entries("nowhere")) == (["step_2.npz"], [])
    store.place.rename(CONFIG, "other.yaml", store.check)
    store.place.delete_folder("checkpoints")
    store.place.delete(["skipped/step_2.npz", "nothing"])
    assert [name for name in store.entries() if store.entries(name) or name != "skipped"] == ["other.yaml"]


MESSAGES = {
    errno.ENOSPC: "(No space left on device); make room, and",
    errno.EDQUOT: "(Disk quota exceeded); make room, or have the quota raised, and",
    errno.EFBIG: "(File too large); allow larger files there, and",
    errno.EACCES: "(Permission denied); allow access there, and",
    errno.EROFS: "(Read-only file system); allow writing there, and",
    errno.EIO: "(Input/output error); check the disk, and",
}


def tensorstore_error(number, *_):
    return ValueError(f"RESOURCE_EXHAUSTED: Failed to open: {os.strerror(number)} [os_error_code='{number}'] [spec]")


@pytest.mark.parametrize("error", [OSError, tensorstore_error])
@pytest.mark.parametrize("number", MESSAGES, ids=errno.errorcode.get)
def test_the_message_names_the_remedy_and_the_checkpoint_that_goes_on(tmp_path, monkeypatch, error, number):
    store = RunStore(tmp_path)
    for name in ("8.json", "10.json", "12-0123abcd.0/a/0", "damaged_14.json"):
        store.write(f"checkpoints/{name}", b"")
    failed = ValueError("a save failed")
    failed.__cause__ = error(number, os.strerror(number))
    monkeypatch.setattr(Folder, "write", Mock(side_effect=failed))
    with pytest.raises(UserError) as failure:
        store.write("checkpoints/12", b"")
    place = f"{tmp_path}/checkpoints/12"
    line = f"{place}: can't be written {MESSAGES[number]} the same command goes on from checkpoint 10"
    assert str(failure.value) == line
    other = ValueError("INVALID_ARGUMENT: shape")
    assert store.place.failure(other, "a", "read") is None  # no fault of the disk


# Logs


def after(store, *records, lines=None):
    """The log when it has been cut to some lines, and records were appended, each of which was sent."""
    log = store.open_log("metrics.jsonl", None if lines is None else lambda all: sum(map(len, list(all)[:lines])))
    for record in records:
        log.append(record)
        log.sync()
    log.close()
    return store.read_log("metrics.jsonl")


def test_a_log_grows_and_is_cut_anywhere(store):
    assert store.read_log("metrics.jsonl") == b""
    assert after(store, b"1\n", b"2\n3\n", b"4\n") == b"1\n2\n3\n4\n"
    assert after(store, b"5\n") == b"1\n2\n3\n4\n5\n"
    assert after(store, b"x\n", lines=2) == b"1\n2\nx\n"  # in the midst of a part
    assert after(store, lines=1) == b"1\n"
    assert after(store, b"y\n", b"z\n", lines=0) == b"y\nz\n"


@google
def test_parts_that_a_lost_holder_has_left_are_no_part_of_a_log(store):
    after(store, b"1\n", b"2\n")
    assert after(store, b"3\n") == b"1\n2\n3\n"
    for series, offset in ((1, 0), (1, 6), (2, 9), (3, 6)):  # another start's, one after a gap, one without a beginning
        store.write(f"metrics.jsonl.{series:06}.{offset:015}", b"?\n")
    assert store.read_log("metrics.jsonl") == b"1\n2\n3\n"
    assert after(store, b"4\n") == b"1\n2\n3\n4\n"
    assert store.entries() == [f"metrics.jsonl.000004.{offset:015}" for offset in (0, 6)]


@google
def test_a_bucket_has_what_was_appended_and_replaced_when_the_run_is_let_go(store):
    with hold(store):
        store.write(CONFIG, b"{}")
        store.open_log("metrics.jsonl").append(b"1\n")
        store.replace("heartbeat.json", b"{}")
        assert store.entries() == [CONFIG, LOCK]
    assert store.entries() == [CONFIG, "heartbeat.json", "metrics.jsonl.000001.000000000000000"]


@google
def test_a_thread_sends_logs_and_its_error_is_raised_where_more_is_appended(store, server, monkeypatch):
    monkeypatch.setattr(lock, "SENDING_SECONDS", 0.05)
    told = ""
    with suppress(UserError), hold(store):  # which raises what it could not send, too
        log = store.open_log("metrics.jsonl")
        log.append(b"1\n")
        while not any("metrics" in name for name in server.written):
            time.sleep(0.01)
        server.fault = lambda method, path: "503"
        try:
            while True:
                log.append(b"1\n")
                time.sleep(0.02)
        except UserError as error:
            told = str(error)
    assert re.search(r"can't be written \(.*\); check the bucket", told)


@pytest.mark.parametrize("name", ["metrics.jsonl", "timings.jsonl"])
def test_a_record_that_does_not_fit_is_an_error(tmp_path, capfd, name):
    RunStore(tmp_path).write("checkpoints/3.json", b"")
    log = RunLog(RunStore(tmp_path), -1, 1)
    file = log.files[name]
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), file.file.fileno())
    place = rf"{name}\S*: can't be written \(No space left on device\); make room, .* from checkpoint 3$"
    with pytest.raises(UserError, match=place):  # noqa: PT012
        log.write(1, {"loss": 1.0}, [{"completion": "1"}])
        log.write_timings(1, {"tokens_per_second": 1.0}, {})
    if name == "metrics.jsonl":  # its line must be the last: where it stands, the step's samples stand, too
        assert (tmp_path / "samples.jsonl").read_text() == '{"step": 1, "completion": "1"}\n'
    with pytest.raises(UserError, match=rf"{name}\S*: can't be written \(Invalid argument\)"):
        log.close()  # no buffer tries to write a second time; /dev/full can't be synced
    assert "Traceback" not in capfd.readouterr().err


def test_a_record_of_which_only_a_part_fits_is_an_error(tmp_path):
    file = RunStore(tmp_path).open_log("metrics.jsonl")
    with limited_files(20), pytest.raises(UserError, match=r"can't be written \(File too large\)"):
        file.append(b"x" * 30)
    file.close()


# The lock


def holding(url):
    """Another process that holds a run."""
    program = (
        "import sys; from mllm.store import lock; from mllm.store.run_store import RunStore; lock.RENEWALS = 600\n"
        "with lock.hold(RunStore(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program, url]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdin=pipe, stdout=pipe, text=True)
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("place", ["disk", "gs"], indirect=True)
def test_a_run_that_a_process_holds_is_refused_to_others_until_it_is_killed(store, url, capsys):
    store.write(CONFIG, b"{}")
    process = holding(url)
    try:
        for _ in range(2):  # a refusal leaves the holder's lock as it was
            with pytest.raises(UserError, match=rf"^run_dir: .* is in use by process {process.pid} on .*; wait for it"):
                hold(store).__enter__()
    finally:
        process.kill()
        process.communicate()
    assert str(process.pid) in store.read(LOCK).decode()
    capsys.readouterr()
    with hold(store):
        assert str(os.getpid()) in store.read(LOCK).decode()
    assert "waiting" not in capsys.readouterr().err  # since it is known to be dead
    assert not store.read(LOCK)


@pytest.mark.parametrize("there", [".", "there", "there/is/no/folder"])
def test_a_run_that_did_not_begin_leaves_the_folder_as_it_found_it(tmp_path, there):
    (tmp_path / "there").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with hold(RunStore(tmp_path / there)):
        assert (tmp_path / there).is_dir()
    assert sorted(tmp_path.rglob("*")) == before


@disk
def test_a_file_system_without_locks_is_warned_of_and_written(store, monkeypatch, caplog):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), hold(store):
        store.write(CONFIG, b"{}")
    assert f"can't be locked ({os.strerror(errno.ENOLCK)}): let no other run write it" in caplog.text


@disk
def test_a_lock_file_that_another_process_removes_before_it_is_locked_is_no_lock(store, monkeypatch):
    removed = []
    flock = fcntl.flock

    def remove_first(file, operation):
        if not removed:
            removed.append((store.folder / LOCK).unlink())
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with hold(store), pytest.raises(UserError, match="in use by"), hold(store):
        pass


# Requests to a bucket


@pytest.mark.parametrize("wrong", ["gs://", "s3://", "gs://A_B!/run"])
def test_a_url_without_a_bucket_is_refused(wrong):
    with pytest.raises(UserError, match=r"is no place in a bucket: give (gs|s3)://bucket/path"):
        Bucket(wrong).read("config.yaml")


@buckets
@pytest.mark.parametrize("fault", ["429", "503", "reset", "lost"])
def test_requests_that_fail_are_repeated(url, server, fault):
    objects = Bucket(url)
    dice = Random(0)
    server.fault = lambda method, path: fault if dice.random() < 0.5 else None
    objects.write("a", b"1")
    content, generation = objects.read_generation("a")
    assert content == b"1"
    assert objects.names() == objects.entries() == ["a"]
    assert objects.replace("a", b"2", generation)
    assert objects.read("a") == b"2"
    with pytest.raises(LeaseLost, match="was taken by another process"):
        objects.replace("a", b"3", generation)
    objects.remove("a", generation)
    objects.delete(["a"])
    assert objects.read("a") is None
    assert server.faults[fault] >= 3


@buckets
def test_a_bucket_that_fails_for_good_is_one_line(url, server):
    server.fault = lambda method, path: "503"
    with pytest.raises(UserError, match=rf"^{url}/a: can't be read \(All 8 retry attempts .*\); check the bucket"):
        Bucket(url).read("a")
    server.fault = lambda method, path: "403"
    with pytest.raises(UserError, match=rf"^{url}/a: can't be written \(.*\); check the bucket and its credentials"):
        Bucket(url).write("a", b"")
