"""What an unreadable checkpoint costs: nothing where the machine fails, or shows an older state of the folder."""

import errno
import math
import os
import resource
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import Mock

import jax
import pytest
from test_checkpoint import assert_equal, chunks, like, make_state, restored, save
from tiny import config

from mllm.config.model import MeshConfig
from mllm.config.schema import CheckpointConfig
from mllm.errors import UserError
from mllm.parallel.processes import gather_objects
from mllm.run.checkpoint import Checkpoints, restore_params
from mllm.run.source_run import SourceRun
from mllm.store import checkpoints
from mllm.store.run_store import Damaged, RunStore


@pytest.fixture
def store(tmp_path):
    """A run on a disk with checkpoints 1 and 2, of which 1 is the best."""
    store = RunStore(tmp_path / "run")
    save(store, 1, 2, accuracies={1: 0.9, 2: 0.1})
    return store


# Errors of the machine


@contextmanager
def no_files_left():
    """Let this process open no more files than it has open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("reads", "name"),
    [((RunStore, "steps"), ""), ((RunStore, "manifest"), r"/\d.json"), ((checkpoints, "open_arrays"), "/2")],
)
def test_a_process_without_files_left_puts_nothing_aside_and_takes_no_older_checkpoint(store, monkeypatch, reads, name):
    read = getattr(*reads)

    def without_files(*arguments):
        with no_files_left():
            return read(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(*reads, without_files)
        place = f"{store}/checkpoints{name}"
        with pytest.raises(UserError, match=rf"^{place}: can't be read \(Too many open files\); allow more open files"):
            restored(store)
    assert store.steps() == [1, 2]
    assert restored(store).step == 2


def system_error(number):
    return OSError(number, os.strerror(number))


def tensorstore_error(number):
    return ValueError(f"UNKNOWN: Error reading local file: {os.strerror(number)} [os_error_code='{number}']")


MACHINE = {
    "EIO": system_error(errno.EIO),
    "ENOMEM": system_error(errno.ENOMEM),
    "EACCES": system_error(errno.EACCES),
    "ESTALE": system_error(errno.ESTALE),
    "EMFILE of tensorstore": tensorstore_error(errno.EMFILE),
    "EIO of tensorstore": tensorstore_error(errno.EIO),
    "no memory on the device": jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"),
    "no memory": MemoryError(),
    "a bug": AttributeError("no such attribute"),
}


@pytest.mark.parametrize("name", MACHINE)
def test_an_error_of_the_machine_while_restoring_is_no_damage(store, monkeypatch, name):
    """Errors of the system are a line; the others pass, and `mllm.errors.ending` says what they are."""
    error = MACHINE[name]
    refused = UserError if isinstance(error, OSError | ValueError) else type(error)
    monkeypatch.setattr(checkpoints, "read_arrays", Mock(side_effect=error))
    for read in (lambda: restored(store), lambda: restore_params(store, like().params)):
        with pytest.raises(refused) as raised:
            read()
        if refused is UserError:
            assert f"{store}/checkpoints/2: can't be read (" in str(raised.value)
            assert "older" not in str(raised.value)
    assert store.steps() == [1, 2]


DAMAGE = {
    "a file that is missing": system_error(errno.ENOENT),
    "a folder for a file": tensorstore_error(errno.EISDIR),
    "a short chunk": ValueError("FAILED_PRECONDITION: Error reading local file: Not enough data"),
    "another shape": ValueError("params.embed is float32[3], not float32[4]"),
    "no such field": KeyError("arrays"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_data_that_are_missing_or_not_what_was_written_are_damage(store, monkeypatch, name):
    monkeypatch.setattr(checkpoints, "read_arrays", Mock(side_effect=DAMAGE[name]))
    with pytest.raises(Damaged):
        checkpoints.load(store, 2, {})


def test_a_manifest_that_the_machine_can_not_read_is_kept_with_its_chunks_also_as_the_best(store, monkeypatch):
    read = Path.read_bytes

    def fails(path):
        if path.name == "1.json":
            raise system_error(errno.EIO)
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fails)
        with pytest.raises(UserError, match=r"1.json: can't be read \(Input/output error\); check the disk"):
            save(store, 3, keep=1, keep_best=True)
    save(store, 4, keep=1, keep_best=True)
    assert store.steps() == [1, 4]
    assert all(store.read(name) for name in chunks(store, 1))


def test_a_checkpoint_that_is_published_keeps_its_chunks_when_removing_the_others_fails(store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", Mock(side_effect=system_error(errno.EIO)))
        with pytest.raises(UserError, match=r"can't be written \(Input/output error\)"):
            save(store, 3, keep=1)
    assert restored(store).step == 3


# What several processes see


@contextmanager
def blind(looks):
    """Let this process find an empty folder of checkpoints when it looks the first times, as NFS may show it."""
    left = iter(range(looks))

    def hidden(store, name=""):
        return name.startswith("checkpoints") and next(left, None) is not None

    with pytest.MonkeyPatch.context() as patch:
        for name, nothing in (("entries", []), ("read", None)):
            look = getattr(RunStore, name)
            patch.setattr(RunStore, name, lambda *args, look=look, no=nothing: no if hidden(*args) else look(*args))
        yield


def check_processes(folder):
    """What both of two processes do: the second one sees the run's checkpoints late, or not at all."""
    mesh, second = MeshConfig(dp=2, fsdp=2, tp=2), jax.process_index() == 1
    store, settings = RunStore(folder), CheckpointConfig()
    checkpoints.POLLING = 0.05
    store.token = gather_objects(store.token)[0]
    saved = Checkpoints(store, settings)
    for step in (1, 2):
        saved.save(make_state(step, mesh), "seed: 0\n")
        saved.wait()
    source = SourceRun(store, config(), config().model, ())
    with blind(5 * second), closing(Checkpoints(store, settings)) as late:
        assert_equal(late.restore(like(mesh)), make_state(2, mesh))
    for use in (lambda: (source.choose_step("newest"), 2), lambda: (restore_params(store, like(mesh).params)[0], 2)):
        with blind(3 * second):
            found, expected = use()
            assert found == expected
    checkpoints.VISIBLE = 0.3
    never = r"^process 1: .*/checkpoints/2: process 1 has not seen for 0.3 s what process 0 sees there; let run_dir be"
    with blind(10**9 * second), pytest.raises(UserError, match=never):
        Checkpoints(store, settings).restore(like(mesh))
    assert gather_objects(store.steps()) == [[1, 2]] * 2


def test_a_process_waits_until_it_sees_the_checkpoint_that_process_0_sees(store, monkeypatch, capsys):
    """With several processes: tests/parallel/test_processes.py."""
    monkeypatch.setattr(checkpoints, "POLLING", 0.01)
    folder = store.manifest(2)["folder"]
    seen = [Damaged("the document is no JSON object"), ({"folder": "2-01"}, {}), ValueError("NOT_FOUND: .zarray")]
    opened = Mock(side_effect=[*seen, found := ({"folder": folder, "best": math.nan}, {})])
    assert checkpoints.opened_as_seen(opened, folder, "run/checkpoints/2") is found
    said = "waiting up to 90 s until run/checkpoints/2 is seen here as process 0 sees it\n"
    assert capsys.readouterr().err == said
    opened = Mock(side_effect=[system_error(errno.EIO)])
    with pytest.raises(OSError, match="Input/output error"):  # which is not waited for
        checkpoints.opened_as_seen(opened, folder, "run/checkpoints/2")
