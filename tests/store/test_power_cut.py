"""A power cut costs steps, never the run: what a checkpoint needs is synced before an older one is removed."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import tensorstore
from runs import ROOT, environment
from test_checkpoint import assert_equal, make_state, restored, save

from mllm.store.folder import Folder
from mllm.store.lock import hold
from mllm.store.run_store import CONFIG, RunStore


class Disk:
    """A folder, and what a power cut would leave of it at each moment: what was synced.

    A file has the content that it had when it was synced, and a folder the names. A name that was removed is gone, but
    a manifest may also come back, without its chunks. What tensorstore has written is taken for synced: see below.
    """

    def __init__(self, folder):
        self.folder = str(folder)
        self.files: dict[str, bytes] = {}
        """The synced content of each file."""
        self.names: dict[str, list[str]] = {}
        """The synced names in each folder."""
        self.cuts: list[tuple[int, dict[str, bytes]]] = []
        """The newest checkpoint that must have survived, and the files that are left, by their paths."""
        self.saved = 0

    def sync(self, path):
        if os.path.isfile(path):
            self.files[path] = Path(path).read_bytes()
            return
        self.names[path] = os.listdir(path)
        if re.fullmatch(r"\d+-.*", os.path.basename(path)):
            for array in Path(path).iterdir():
                self.names[str(array)] = os.listdir(array)
                self.files |= {str(chunk): chunk.read_bytes() for chunk in array.iterdir()}

    def left(self, folder, manifests_return):
        """The files below a folder that a power cut would leave."""
        for name in self.names.get(folder, ()):
            path = f"{folder}/{name}"
            if os.path.exists(path) or (manifests_return and name.endswith(".json")):
                if path in self.names or os.path.isdir(path):
                    yield from self.left(path, manifests_return)
                else:
                    yield os.path.relpath(path, self.folder), self.files.get(path, b"")

    def cut(self):
        for manifests_return in (False, True):
            cut = self.saved, dict(self.left(self.folder, manifests_return))
            if cut not in self.cuts:
                self.cuts.append(cut)


@contextmanager
def recorded(folder):
    """What a power cut would leave of a new folder before and after every call that changes it for good."""
    folder.mkdir()
    disk = Disk(folder)

    def around(call, then):
        def change(*arguments, **options):
            paths = [os.readlink(f"/proc/self/fd/{a}") if isinstance(a, int) else str(a) for a in arguments]
            if here := paths[0].startswith(disk.folder):
                disk.cut()
            result = call(*arguments, **options)
            if here:
                then(*paths)
                disk.cut()
            return result

        return change

    def renamed(old, new):
        disk.files[new] = disk.files.pop(old, b"")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", around(os.fsync, disk.sync))
        patch.setattr(os, "replace", around(os.replace, renamed))
        patch.setattr(os, "unlink", around(os.unlink, lambda path: None))
        patch.setattr(shutil, "rmtree", around(shutil.rmtree, lambda path: None))
        yield disk


def test_after_a_power_cut_at_any_moment_the_newest_checkpoint_and_its_lines_are_there(tmp_path):
    with recorded(tmp_path / "disk") as disk, hold(store := RunStore(tmp_path / "disk" / "new" / "run")):
        store.write(CONFIG, b"{}")
        log = store.open_log("metrics.jsonl")
        for step in (1, 2):
            log.append(b"%d\n" % step)
            save(store, step, keep=1)
            disk.saved = step
            disk.cut()
    assert store.steps() == [2]
    assert len(disk.cuts) > 8
    for number, (saved, files) in enumerate(disk.cuts):
        for name, content in files.items():
            path = tmp_path / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        left = RunStore(tmp_path / str(number) / "new" / "run")
        state = restored(left)
        step = state.step if state else 0
        assert step >= saved
        if state:
            assert_equal(state, make_state(step))
            assert left.is_run()
            assert len(left.read_log("metrics.jsonl").splitlines()) >= step
        assert not [name for name in left.entries("checkpoints") if name.startswith("damaged")]


# What tensorstore does


def test_tensorstore_is_to_sync_what_it_writes(tmp_path):
    store = tensorstore.KvStore.open(Folder(tmp_path).array_spec("a"), context=Folder.context).result()
    assert store.spec(retain_context=True).to_json()["file_io_sync"] is True


PROGRAM = """
import sys; from test_checkpoint import RunStore, save
save(RunStore(sys.argv[1]), 1, 2, keep=1)
"""
CALL = re.compile(r'(mkdir|rename|unlink|fsync)\((?:\d+<(.*?)>|"(.*?)"(?:, "(.*?)")?)')


def system_calls(trace):
    """The calls that a trace of strace's has, in the order in which they ended; removals as they began."""
    begun = {}
    for line in trace.read_text().splitlines():
        thread, _, rest = line.partition(" ")
        if found := CALL.match(rest.strip()):
            name, handle, path, new = found.groups()
            begun[thread] = name, handle or path, new
        if thread in begun and ("unfinished" not in line or begun[thread][0] == "unlink"):
            yield begun.pop(thread)


@pytest.mark.faults
@pytest.mark.skipif(not shutil.which("strace"), reason="strace shows what tensorstore asks of the system")
def test_every_file_and_folder_of_a_checkpoint_is_synced_before_the_one_before_is_removed(tmp_path):
    trace, run = tmp_path / "trace", tmp_path / "run"
    calls = "trace=mkdir,rename,unlink,fsync"
    command = ["strace", "-f", "-y", "-o", str(trace), "-e", calls, sys.executable, "-c", PROGRAM, str(run)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True)
    done = [call for call in system_calls(trace) if call[1].startswith(f"{run}/checkpoints")]
    end = done.index(("unlink", f"{run}/checkpoints/1.json", None))
    made = 0
    for place, (name, path, new) in enumerate(done[:end]):
        if name in ("rename", "mkdir"):
            made += "/2-" in path
            assert ("fsync", os.path.dirname(new or path), None) in done[place:end] or path == f"{run}/checkpoints"
        if name == "rename":
            assert ("fsync", path, None) in done[:place]
    assert made > 16  # eight arrays, each with a description and a chunk
