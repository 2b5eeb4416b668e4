"""A run's place, on a disk or in a bucket: its files, its logs, and its checkpoints' documents.

    config.yaml                   marks a folder as a run
    config.json, tokenizer.json   and the other files of a model's folder but its parameters
    lock                          locked by the process that writes the run
    metrics.jsonl                 a log
    checkpoints/7/state           arrays, as Orbax's CheckpointManager writes them
    checkpoints/7/document        JSON: the step, positions, counts, checksums of arrays, lengths of logs
    checkpoints/damaged_7         a checkpoint that could not be read

A run in a bucket is read and written in a local copy of its files; the copy is sent to the bucket with each checkpoint.
This module must not import JAX: `mllm.run.checkpoint` writes and reads the arrays.
"""

import fcntl
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from etils import epath

from mllm.errors import UserError
from mllm.storage import (
    below,
    bucket_path,
    failing,
    fetch_folder,
    is_bucket,
    local_place,
    naming,
    send,
)

CONFIG, LOCK, CHECKPOINTS = "config.yaml", "lock", "checkpoints"
STEP = re.compile(r"[0-9]{1,18}")
MIRRORS = "runs"
"""The folder in `local_place` with local copies of runs in buckets."""
PUBLISHED = "commit_success.txt"
"""Orbax's mark of a complete checkpoint in a bucket; on a disk Orbax renames a complete checkpoint."""
READ = ("*.yaml", "*.json", "*.jsonl", "*.txt", "*.jinja")
"""The files of a run in a bucket that are copied to this machine."""
logger = logging.getLogger(__name__)


class Damaged(Exception):
    """Missing or wrong contents of a checkpoint."""


class RunStore:
    """The place of one run: a folder, or gs://bucket/path."""

    def __init__(self, url: str | Path, copy: Path | None = None) -> None:
        """Opens nothing. `copy` is a folder with a bucket's files, for reading; by default the writer's folder."""
        self.in_bucket = is_bucket(url)
        self.url = str(url).rstrip("/") if self.in_bucket else str(Path(url))
        self.folder = copy or (local_place(self.url, MIRRORS) if self.in_bucket else Path(url))
        """The local folder with the run's files."""
        self.place = bucket_path(self.url) if self.in_bucket else epath.Path(self.folder.absolute())
        """The absolute path of the run, shared by all processes."""
        self.checkpoints = self.place / CHECKPOINTS

    def __str__(self) -> str:
        return self.url

    def reading(self, name: str = "") -> AbstractContextManager[None]:
        """Turn errors of the disk or bucket into a UserError."""
        return failing(f"{self.url}/{name}: can't be read")

    def writing(self, name: str = "") -> AbstractContextManager[None]:
        """Turn errors of the disk or bucket into a UserError."""
        return failing(f"{self.url}/{name}: can't be written", "; the same command resumes from the newest checkpoint")

    # Files

    def entries(self) -> list[str]:
        """The sorted names of the files and folders in the run's folder; empty if the folder is missing."""
        with self.reading():
            return sorted(path.name for path in below(self.place))

    def is_run(self) -> bool:
        """Whether a run has begun there."""
        return CONFIG in self.entries()

    def read(self, name: str) -> bytes:
        """A file's content; empty if the file is missing."""
        with self.reading(name), suppress(FileNotFoundError, NotADirectoryError):
            return (self.folder / name).read_bytes()
        return b""

    def records(self, name: str) -> list[dict[str, Any]]:
        """The JSON objects of a log; other lines are skipped, such as the unfinished line of a running run."""
        values = []
        for line in self.read(name).split(b"\n"):
            with suppress(ValueError, RecursionError):
                values.append(json.loads(line))
        return [record for record in values if isinstance(record, dict)]

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically."""
        with self.writing(name):
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            unfinished = path.with_name(f".{path.name}.tmp")
            unfinished.write_bytes(data)
            unfinished.replace(path)
        self.send(name)

    def send(self, *names: str) -> None:
        """Send files to the bucket; does nothing for a run on a disk."""
        if self.in_bucket:
            with self.writing():
                send(self.folder, self.url, names)

    # Checkpoints

    def steps(self) -> list[int]:
        """The steps of the checkpoints, ascending."""
        with self.reading(CHECKPOINTS):
            paths = [path for path in below(self.checkpoints) if STEP.fullmatch(path.name)]
            return sorted(int(path.name) for path in paths if not self.in_bucket or (path / PUBLISHED).exists())

    def document(self, step: int) -> dict[str, Any]:
        """The document of a checkpoint; Damaged if it is missing or of another step, UserError if the disk fails."""
        name = f"{CHECKPOINTS}/{step}/document/metadata"
        with self.reading(name):
            try:
                document = json.loads((self.place / name).read_bytes())
            except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError) as error:
                raise Damaged(f"its document: {type(error).__name__}") from None
        if not isinstance(document, dict) or "arrays" not in document:
            raise Damaged("another version of this program wrote its document")
        if document.get("step", step) != step:
            raise Damaged(f"it is a checkpoint of step {document.get('step')}")
        return document

    def best_step(self, steps: Sequence[int], known: Mapping[int, float] | None = None) -> int | None:
        """The best of these checkpoints, the newest among equals; None without scores. `known` scores aren't read."""
        scores: dict[int, Any] = dict(known or {})
        for step in steps:
            if step not in scores:
                with suppress(Damaged):
                    scores[step] = self.document(step).get("score")
        scored = {step: x for step, x in scores.items() if isinstance(x, float) and math.isfinite(x)}
        return max(scored, key=lambda step: (scored[step], step), default=None)

    def put_aside(self, step: int, reason: str) -> None:
        """Rename a damaged checkpoint, so that it is not read again; nothing is deleted."""
        path, aside = self.checkpoints / str(step), f"damaged_{step}"
        with failing(f"{path}: can't be read ({reason}), nor put aside as {aside}"):
            while (self.checkpoints / aside).exists():
                aside += "_again"
            path.rename(self.checkpoints / aside)
        logger.warning("checkpoint %d can't be read (%s); put aside as %s/%s", step, reason, CHECKPOINTS, aside)


@contextmanager
def lock_run(store: RunStore) -> Iterator[None]:
    """Lock a run against other processes; the system releases the lock when the process ends.

    The lock of a run in a bucket is on this machine. So processes of other machines are not found, nor processes on
    file systems without locks. The files of a run in a bucket are copied to this machine. UserError is raised if
    another process holds the lock.
    """
    folder = store.folder
    lock = folder.parent / f"{folder.name}.{LOCK}" if store.in_bucket else folder / LOCK
    with failing(f"run_dir: {folder} can't be written"):
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"run_dir: {store} is in use by another process; wait for it, or give another") from None
        except OSError as error:
            logger.warning("%s can't be locked (%s): let no other run write it", folder, error.strerror)
        if store.in_bucket:
            shutil.rmtree(folder, ignore_errors=True)
            if store.is_run():
                fetch_folder(store.url, READ, "run_dir", MIRRORS)
            with failing(f"run_dir: {folder} can't be written"):
                folder.mkdir(parents=True, exist_ok=True)
        try:
            yield
        finally:
            with suppress(OSError, UserError):
                if not store.in_bucket and not store.is_run():
                    lock.unlink()
                    folder.rmdir()


def find_run(run: str, key: str) -> RunStore | None:
    """The store of a run, for reading; None if there is no run. Errors of a bucket name the setting `key`."""
    with naming(key):
        if not is_bucket(run):
            store = RunStore(os.path.expanduser(run))
            return store if os.path.isfile(store.folder / CONFIG) else None
        has_begun = RunStore(run).is_run()
    return RunStore(run, fetch_folder(run, READ, key)) if has_begun else None


def tool_run(run: str) -> RunStore:
    """The store of a tool's argument; UserError if a bucket has no run there."""
    if not is_bucket(run):
        return RunStore(os.path.expanduser(run))
    if (store := find_run(run, "RUN")) is None:
        raise UserError(f"{run}: no config.yaml; give a run_dir")
    return store
