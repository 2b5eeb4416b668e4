"""A run's files, logs and holder are the same on a disk and in a bucket; a failure of either is one line."""

import errno
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress

import jax
import pytest
from runs import spawn
from states import make_state, opened

from mllm.errors import UserError
from mllm.run.metrics import RunLog
from mllm.store import files, holder
from mllm.store.files import bucket_path
from mllm.store.holder import hold
from mllm.store.run_store import CONFIG, LOCK, RunStore, tool_run

disk = pytest.mark.parametrize("place", ["disk"], indirect=True)
google = pytest.mark.parametrize("place", ["gs"], indirect=True)

# Files


def test_files_are_written_whole_and_read_by_others(store):
    assert (store.entries(), store.is_run()) == ([], False)
    with hold(store):
        for name in ("skipped/step_2.npz", CONFIG):
            store.write(name, name.encode())
            store.write(name, name.encode() * 2)
        assert store.read("skipped/step_2.npz") == b"skipped/step_2.npz" * 2
    assert store.is_run()
    assert {*store.entries()} - {LOCK} == {CONFIG, "skipped"}
    assert tool_run(store.url).read(CONFIG) == CONFIG.encode() * 2


def tensorstore_error(number, *_):
    return ValueError(f"RESOURCE_EXHAUSTED: Failed to open: {os.strerror(number)} [os_error_code='{number}'] [spec]")


@pytest.mark.parametrize("error", [OSError, tensorstore_error])
def test_the_message_names_the_remedy_and_what_goes_on(tmp_path, error):
    failed = ValueError("a save failed")
    failed.__cause__ = error(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(UserError) as failure, RunStore(tmp_path).writing("checkpoints"):
        raise failed
    line = f"{tmp_path}/checkpoints: can't be written (No space left on device); make room, and the same command goes"
    assert str(failure.value) == f"{line} on from the newest checkpoint"
    with pytest.raises(ValueError, match="shape"), files.failing("a: can't be read"):
        raise ValueError("INVALID_ARGUMENT: shape")  # no fault of the disk


def test_a_log_grows_is_cut_anywhere_and_knows_what_it_holds(store):
    with hold(store):
        assert store.read_log("metrics.jsonl") == b""
        log = store.open_log("metrics.jsonl")
        log.append(b"1\n2\n")
        mark = store.sync()["metrics.jsonl"]
        log.append(b"3\n")
        log.close()
        assert store.compare_log("metrics.jsonl", mark) == ""
        store.write(CONFIG, b"")
    with hold(again := RunStore(store.url)):
        assert again.read_log("metrics.jsonl") == b"1\n2\n3\n"
        for _ in range(2):  # a copy is never written over another
            again.keep_log("metrics.jsonl", ".until_3")
        again.open_log("metrics.jsonl", mark[0]).append(b"x\n")
        assert again.read_log("metrics.jsonl") == b"1\n2\nx\n"
        kept = [again.read(f"metrics.jsonl.until_3{more}") for more in ("", "_again")]
        assert kept == [b"1\n2\n3\n"] * 2
        assert again.sync()["metrics.jsonl"][0] == 6
        (again.folder / "metrics.jsonl").write_bytes(b"1\n?\n")
        assert again.compare_log("metrics.jsonl", mark) == "has changed"


@google
def test_a_bucket_has_the_logs_with_each_checkpoint_and_at_the_end(store, server):
    with hold(store):
        store.write(CONFIG, b"{}")
        log = store.open_log("metrics.jsonl")
        log.append(b"1\n")
        assert "metrics.jsonl" not in store.entries()
        store.sync()
        assert (store.place / "metrics.jsonl").read_bytes() == b"1\n"
        log.append(b"2\n")
    assert (store.place / "metrics.jsonl").read_bytes() == b"1\n2\n"
    assert LOCK not in store.entries()


def test_a_record_that_does_not_fit_is_an_error(tmp_path, capfd):
    log = RunLog(RunStore(tmp_path), -1, 1)
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), log.files["metrics.jsonl"].file.fileno())
    place = r"metrics.jsonl: can't be written \(No space left on device\); make room, .* checkpoint$"
    with pytest.raises(UserError, match=place):
        log.write(1, {"loss": 1.0}, [{"completion": "1"}])
    # The line must be the last: where it stands, the step's samples stand, too.
    assert (tmp_path / "samples.jsonl").read_text() == '{"step": 1, "completion": "1"}\n'
    with pytest.raises(UserError, match=r"metrics.jsonl: can't be written \(Invalid argument\)"):
        log.close()  # no buffer tries to write a second time; /dev/full can't be synced
    assert "Traceback" not in capfd.readouterr().err


def test_only_a_disk_or_a_bucket_that_fails_is_said_to(store):
    for error in (TypeError("a bug"), MemoryError(), jax.errors.JaxRuntimeError("UNAVAILABLE: Gloo closed")):
        with pytest.raises(type(error)), store.writing("checkpoints"):
            raise error


HOLDER = """
import sys, time
from mllm.store import holder
from mllm.store.run_store import RunStore
holder.SECONDS = 0.5
with holder.hold(RunStore(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_run_that_a_process_holds_is_refused_to_others_until_it_is_killed(store, url, monkeypatch):
    monkeypatch.setattr(holder, "SECONDS", 0.5)
    process = spawn(["-c", HOLDER, url], subprocess.DEVNULL)
    try:
        assert process.stdout.readline() == "held\n"
        for _ in range(2):  # a refusal leaves the holder's lock as it was
            with pytest.raises(UserError, match=rf"^run_dir: .* is in use by .*process {process.pid} on .*; wait for"):
                hold(store).__enter__()
    finally:
        process.kill()
        process.communicate()
    with hold(store):
        assert str(os.getpid()).encode() in (store.place / LOCK).read_bytes()


def test_a_run_that_did_not_begin_leaves_no_file(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/mine").write_text("")
    for folder in (tmp_path / "there", tmp_path / "new"):
        with hold(RunStore(folder)):
            assert (folder / LOCK).exists()
    assert [*tmp_path.rglob("*")] == [tmp_path / "there", tmp_path / "there/mine"]


def move(folder):
    folder.rename(folder.with_name("moved"))


def replace(folder):
    """Another run is held where the first one was."""
    move(folder)
    hold(RunStore(folder)).__enter__()


@disk
@pytest.mark.parametrize("change", [move, replace, shutil.rmtree], ids=["moved", "replaced", "removed"])
def test_a_folder_that_is_moved_removed_or_replaced_under_a_run_ends_it_and_nothing_is_made_there(store, change):
    with hold(store):
        store.write(CONFIG, b"{}")
        log = store.open_log("metrics.jsonl")
        with opened(store) as checkpoints:
            change(store.folder)
            before = sorted(store.folder.parent.rglob("*"))
            attempts = (
                lambda: log.append(b"1\n"),
                lambda: store.write("a", b""),
                lambda: checkpoints.save(make_state(1), ""),
                lambda: checkpoints.should_preserve([], context=None),
            )
            for attempt in attempts:
                with pytest.raises(UserError, match=r"^run_dir: .* was moved, removed or replaced while"):
                    attempt()
    assert sorted(store.folder.parent.rglob("*")) == before


@disk
def test_a_holder_that_lost_its_folder_leaves_the_lock_of_the_next_one(store):
    with hold(store):
        move(store.folder)
        successor = RunStore(store.url)
        held = hold(successor)
        held.__enter__()  # it has not begun yet
    successor.check()
    held.__exit__(None, None, None)


@google
def test_a_lease_that_another_process_took_or_that_can_not_be_renewed_ends_the_run(store, server, monkeypatch):
    monkeypatch.setattr(holder, "SECONDS", 0.5)
    with suppress(UserError), hold(store):  # which sends at its end, too
        store.check()
        server.fault = lambda method, path: "503" if LOCK in path else None
        time.sleep(0.6)
        with pytest.raises(UserError, match=r"the lease of .* could not be renewed; the same command"):
            store.write("a", b"")
        server.fault = lambda method, path: None
        with hold(RunStore(store.url)):  # it has expired
            time.sleep(0.2)
            with pytest.raises(UserError, match="was taken by another process"):
                store.write("a", b"")


@disk
def test_a_file_system_without_locks_is_warned_of_and_written(store, monkeypatch, caplog):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), hold(store):
        store.write(CONFIG, b"{}")
        assert tool_run(store.url).read(CONFIG) == b"{}"
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
    with hold(store), pytest.raises(UserError, match="in use by"), hold(RunStore(store.url)):
        pass


def test_a_bucket_needs_gcsfs(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"needs the package gcsfs: pip install -e '\.\[gcs\]'"):
        bucket_path("gs://a/b")


@google
def test_a_bucket_that_refuses_is_one_line_and_not_taken_for_an_empty_one(store, server):
    """Else a run in it would begin anew."""
    with hold(store):
        store.write(CONFIG, b"{}")
    server.fault = lambda method, path: "403"
    for look in (store.steps, store.entries, store.is_run, lambda: tool_run(store.url)):
        with pytest.raises(UserError, match="check the bucket and its credentials"):
            look()
    server.fault = lambda method, path: "404"
    with pytest.raises(UserError, match=r"no config\.yaml; give a run_dir"):
        tool_run(store.url)
