"""A disk that is full, read-only or forbidden stops a run with one line, and costs nothing that was complete."""

import errno
import os
import re
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest
from runs import changed, checkpoints, environment, run
from test_checkpoint import make_state, restored, save
from tiny import config

from mllm.config.schema import CheckpointConfig
from mllm.errors import UserError
from mllm.run.checkpoint import Checkpoints
from mllm.run.metrics import RunLog
from mllm.store.folder import Folder
from mllm.store.run_store import RunStore

SETTINGS = config("sft", steps=4, checkpoint={"every": 2}, eval=None, task={"heldout": 16}, rollout=None)


@contextmanager
def limited_files(size):
    """Let no file of this process grow past `size` bytes: writing fails with EFBIG, as it would on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    caching = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", caching)


# The message

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
def test_the_message_names_the_remedy_and_the_checkpoint_from_which_the_run_resumes(tmp_path, error, number):
    store = RunStore(tmp_path)
    for name in ("8.json", "10.json", "12-0123abcd.0/a/0", "damaged_14.json"):
        store.write(f"checkpoints/{name}", b"")
    failed = ValueError("a save failed")
    failed.__cause__ = error(number, os.strerror(number))
    with pytest.raises(UserError) as failure, store.failing("checkpoints/12", "written"):
        raise failed
    place = f"{tmp_path}/checkpoints/12"
    line = f"{place}: can't be written {MESSAGES[number]} the same command goes on from checkpoint 10"
    assert str(failure.value) == line


def test_other_errors_are_not_taken_for_faults_of_the_disk():
    assert Folder(Path()).failure(ValueError("INVALID_ARGUMENT: shape"), "a", "read") is None


# Checkpoints


@pytest.mark.parametrize(("method", "size"), [("save", 0), ("timings", 200), ("wait", 0), ("close", 200)])
def test_the_next_call_reports_that_a_checkpoint_did_not_fit_and_closing_is_silent_then(tmp_path, method, size):
    store = RunStore(tmp_path)
    save(store, 1)
    checkpoints = Checkpoints(store, CheckpointConfig())
    with limited_files(size):
        checkpoints.save(make_state(2), "")
        checkpoints.saving.thread.join()
    with pytest.raises(UserError, match=r"2: can't be written \(File too large\).* goes on from checkpoint 1$"):
        getattr(checkpoints, method)(*((make_state(3), "") if method == "save" else ()))
    checkpoints.close()
    assert [name.partition("-")[0] for name in store.entries("checkpoints")] == ["1", "1.json"]


def use_forbidden_folders(path):
    """Run in a process that isn't root, or doesn't have root's rights over files."""
    store, folder = RunStore(path), path / "checkpoints"
    save(store, 1, 2, 3, keep=2)
    newest = path / store.folder_of(3)
    folder.chmod(0o555)
    with pytest.raises(UserError, match=r"4: can't be written \(Permission denied\); .* goes on from checkpoint 3$"):
        save(store, 4)
    newest.chmod(0)
    with pytest.raises(UserError, match=r"3.json: can't be read \(.*\), nor put aside as .* \(Permission denied\)"):
        restored(store)
    assert store.steps() == [2, 3]
    folder.chmod(0o755)
    assert restored(store).step == 2
    assert (folder / "damaged_3.json").exists()
    newest.chmod(0o755)


def test_what_may_not_be_read_is_put_aside_and_what_may_not_be_written_is_an_error(tmp_path):
    if os.geteuid() == 0 and not shutil.which("setpriv"):
        pytest.skip("nothing is forbidden to root, and there is no setpriv to end that")
    prefix = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    program = "import sys, pathlib, test_storage; test_storage.use_forbidden_folders(pathlib.Path(sys.argv[1]))"
    command = [*prefix, sys.executable, "-c", program, str(tmp_path)]
    process = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


# The log


@pytest.mark.parametrize("name", ["metrics.jsonl", "timings.jsonl", "tensorboard"])
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


# Runs


def test_a_run_whose_checkpoint_does_not_fit_ends_with_one_line_and_resumes(tmp_path, capfd):
    settings = changed(SETTINGS, run_dir=str(tmp_path / "run"))
    with limited_files(20_000):
        assert run(settings) == 2
    said = capfd.readouterr().err
    last_line = said.splitlines()[-1]
    assert "checkpoints/2: can't be written (File too large)" in last_line
    assert last_line.endswith("the same command begins again: there is no checkpoint yet")
    assert said.count("error: ") == 1
    assert not re.search("Traceback|never retrieved", said)
    assert run(settings) == 0
    assert checkpoints(settings) == [2, 4]
