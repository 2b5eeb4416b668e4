"""A run's files, logs and holder are the same on a disk and in a bucket; a failure of either is one line."""

import asyncio
import errno
import fcntl
import logging
import os
import sys

import jax
import pytest

from mllm.errors import RESTART, TemporaryError, UserError, ending
from mllm.run.metrics import RunLog
from mllm.run.store import CONFIG, LOCK, RunStore, lock_run, tool_run
from mllm.storage import bucket_path, failing

real_sleep = asyncio.sleep
disk = pytest.mark.parametrize("place", ["disk"], indirect=True)
google = pytest.mark.parametrize("place", ["gs"], indirect=True)

# Files


def test_files_are_written_whole_and_readable_by_tools(store):
    assert (store.entries(), store.is_run()) == ([], False)
    with lock_run(store):
        for name in ("skipped/step_2.npz", CONFIG):
            store.write(name, name.encode())
            store.write(name, name.encode() * 2)
        assert store.read("skipped/step_2.npz") == b"skipped/step_2.npz" * 2
    assert store.is_run()
    assert {*store.entries()} - {LOCK} == {CONFIG, "skipped"}
    assert tool_run(store.url).read(CONFIG) == CONFIG.encode() * 2


def tensorstore_error(number, text):
    return ValueError(f"RESOURCE_EXHAUSTED: Failed to open: {text} [os_error_code='{number}'] [spec]")


@pytest.mark.parametrize("error", [OSError, tensorstore_error])
def test_a_write_error_says_its_cause_and_how_to_resume(tmp_path, error):
    with pytest.raises(UserError) as failure, RunStore(tmp_path).writing("checkpoints"):
        raise error(errno.ENOSPC, os.strerror(errno.ENOSPC))
    line = f"{tmp_path}/checkpoints: can't be written (No space left on device); the same command resumes"
    assert str(failure.value) == f"{line} from the newest checkpoint"
    for bug in (ValueError("INVALID_ARGUMENT: shape"), jax.errors.JaxRuntimeError("UNAVAILABLE: Gloo closed")):
        with pytest.raises(type(bug)), failing("a: can't be read"):
            raise bug  # no fault of the disk


def test_unparsable_lines_are_left_out(tmp_path):
    (tmp_path / "timings.jsonl").write_bytes(b'{"step": 1}\n\xff\n[]\n' + b"[" * 9999 + b'\n{"step": 2}\n{"st')
    assert RunStore(tmp_path).records("timings.jsonl") == [{"step": 1}, {"step": 2}]


def test_a_record_that_does_not_fit_is_an_error(tmp_path, capfd):
    log = RunLog(RunStore(tmp_path), -1, 1)
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), log.files["metrics.jsonl"].fileno())
    place = r"metrics.jsonl: can't be written \(No space left on device\); .* checkpoint$"
    with pytest.raises(UserError, match=place):
        log.write(1, {"loss": 1.0}, [{"completion": "1"}])
    # The line must be the last: where it stands, the step's samples must stand as well.
    assert (tmp_path / "samples.jsonl").read_text() == '{"step": 1, "completion": "1"}\n'
    with pytest.raises(UserError, match=r"metrics.jsonl: can't be written \(Invalid argument\)"):
        log.close()  # no buffer tries to write a second time; /dev/full can't be synced
    assert "Traceback" not in capfd.readouterr().err


def test_a_held_run_is_refused_until_it_ends(store, url):
    """A lock that a killed process has left holds nothing: tests/run/test_train.py."""
    with (
        lock_run(store),
        pytest.raises(UserError, match=r"^run_dir: .* is in use by another process; wait for"),
        lock_run(RunStore(url)),
    ):
        pass
    with lock_run(store):
        pass


@disk
def test_a_file_system_without_locks_is_warned_of_and_written(store, monkeypatch, caplog):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), lock_run(store):
        store.write(CONFIG, b"{}")
        assert tool_run(store.url).read(CONFIG) == b"{}"
    assert f"can't be locked ({os.strerror(errno.ENOLCK)}): let no other run write it" in caplog.text


def test_a_bucket_needs_gcsfs(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"needs the package gcsfs: pip install -e '\.\[gcs\]'"):
        bucket_path("gs://a/b")


@google
def test_a_bucket_that_refuses_access_is_not_taken_as_empty(store, server):
    """Else a run in it would begin anew."""
    with lock_run(store):
        store.write(CONFIG, b"{}")
    looks = (store.steps, store.entries, store.is_run, lambda: tool_run(store.url))
    server.fault = lambda method, path: "403"
    for look in looks:
        with pytest.raises(UserError, match=r"can't be (read|had) \(.*Forbidden"):
            look()
    server.fault = lambda method, path: "404"
    with pytest.raises(UserError, match=r"no config\.yaml; give a run_dir"):
        tool_run(store.url)


@google
def test_an_unreachable_bucket_ends_with_the_restart_code(store, server, monkeypatch):
    monkeypatch.setattr("gcsfs.retry.asyncio.sleep", lambda seconds: real_sleep(0))
    server.fault = lambda method, path: "503"
    with pytest.raises(TemporaryError) as failure:
        store.entries()
    assert ending(failure.value)[0] == RESTART
