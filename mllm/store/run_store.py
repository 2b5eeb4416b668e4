"""A run's place, on a disk or in a bucket: its files, its logs, and what its checkpoints say of themselves.

    config.yaml                   a run has begun where this is
    config.json, tokenizer.json   and the other files of a model's folder but its parameters
    lock                          who writes the run, or wrote it last
    metrics.jsonl                 a log
    checkpoints/7/state           arrays, as Orbax's CheckpointManager writes them
    checkpoints/7/document        JSON: positions, counts, and checksums of arrays and logs; sealed with its own
    checkpoints/damaged_7         a checkpoint that was found damaged

A run in a bucket has a copy of its files on this machine, where they are read and written; it is sent to the bucket
with each checkpoint. Here nothing knows JAX: `mllm.run.checkpoint` writes and reads the arrays.
"""

import hashlib
import json
import logging
import math
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from etils import epath

from mllm.errors import UserError
from mllm.store.fetch import fetch, fetch_folder, naming, send
from mllm.store.files import below, bucket_path, failing, is_bucket, is_plain, local_place

CONFIG, LOCK, CHECKPOINTS = "config.yaml", "lock", "checkpoints"
STEP = re.compile(r"[0-9]{1,18}")
LARGEST_FILE = 2**31
UNFINISHED = ".tmp"
"""How the name of a file ends that is not whole yet."""
MIRRORS = "runs"
"""The folder of `local_place` with the files of runs in buckets that this machine writes."""
PUBLISHED = "commit_success.txt"
"""Orbax's mark of a checkpoint that is complete, which counts in buckets; on a disk a rename does."""
RECORDED = ("arrays", "logs", "digests", "frozen")
"""What every document has: by name, the checksums of arrays, logs, and what the run depends on."""
READ = ("*.yaml", "*.json", "*.jsonl", "*.txt", "*.jinja")
"""The files of a run in a bucket that tools read."""
logger = logging.getLogger(__name__)


Mark = tuple[int, str]
"""How far a log has come: its bytes, and their SHA-256."""


class Damaged(Exception):
    """The data that was read is not what was written."""


class Log:
    """A file that only grows, without a buffer here; a run that resumes cuts it where its checkpoint says."""

    def __init__(self, path: Path, size: int, writing: Callable[[], AbstractContextManager[None]]) -> None:
        """Open a log, of which `size` bytes stay. All that is written is written inside of `writing`."""
        self.writing = writing
        with writing():
            self.file = path.open("ab", buffering=0)
            self.file.truncate(size)
            content = path.read_bytes()
        self.size, self.checksum = len(content), hashlib.sha256(content)

    def append(self, record: bytes) -> None:
        with self.writing():
            left = record
            while left:
                left = left[self.file.write(left) :]
        self.size += len(record)
        self.checksum.update(record)

    def sync(self) -> Mark:
        """Wait until all of the log survives a crash of the machine."""
        with self.writing():
            os.fsync(self.file.fileno())
        return self.size, self.checksum.hexdigest()

    def close(self) -> None:
        self.sync()
        self.file.close()


class RunStore:
    """The place of one run: a folder, or gs://bucket/path."""

    def __init__(self, url: str | Path, copy: Path | None = None) -> None:
        """Opens nothing. `copy` is a folder with a bucket's files, to be read; by default the folder of a writer."""
        self.in_bucket = is_bucket(url)
        self.url = str(url).rstrip("/") if self.in_bucket else str(Path(url))
        self.folder = copy or (local_place(self.url, MIRRORS) if self.in_bucket else Path(url))
        """The folder of this machine with the run's files."""
        self.place = bucket_path(self.url) if self.in_bucket else epath.Path(self.folder.absolute())
        """Where the run is for everybody; absolute."""
        self.checkpoints = self.place / CHECKPOINTS
        self.check: Callable[[], None] = lambda: None
        """Raises UserError where this process may not write any more."""
        self.logs: dict[str, Log] = {}

    def __str__(self) -> str:
        return self.url

    def reading(self, name: str = "") -> AbstractContextManager[None]:
        """Turn errors of the disk or bucket into a UserError."""
        return failing(f"{self.url}/{name}: can't be read")

    @contextmanager
    def writing(self, name: str = "") -> Iterator[None]:
        """Make sure that the run is still this process's; turn errors of the disk or bucket into a UserError."""
        self.check()
        end = ", and the same command goes on from the newest checkpoint"
        with failing(f"{self.url}/{name}: can't be written", end):
            yield

    # Files

    def entries(self) -> list[str]:
        """The names of the files and folders just below the run's folder, in order; none where there is no folder."""
        with self.reading():
            return sorted(path.name for path in below(self.place))

    def is_run(self) -> bool:
        """Whether a run has begun there."""
        return CONFIG in self.entries()

    def read(self, name: str) -> bytes | None:
        """A file's content; None where there is no such file.

        UserError is raised for what is no regular file, or a huge one: the run may be a stranger's.
        """
        path = self.folder / name
        with self.reading(name):
            try:
                handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for its writer
            except (FileNotFoundError, NotADirectoryError):
                return None
            with open(handle, "rb") as file:
                status = os.fstat(handle)
                if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST_FILE:
                    raise UserError(f"{path}: is no regular file of up to {LARGEST_FILE >> 30} GiB: remove it")
                return file.read(status.st_size)

    def write(self, name: str, data: bytes) -> None:
        """Write a file as a whole or not at all; it has survived a crash of the machine from then on."""
        with self.writing(name):
            path = self.folder / name
            if path.parent != self.folder:
                path.parent.mkdir(exist_ok=True)
            unfinished = path.with_name(path.name + UNFINISHED)
            with unfinished.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
            handle = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        self.send([name])

    # Logs

    def read_log(self, name: str) -> bytes:
        """A log's content; empty where there is none."""
        return self.read(name) or b""

    def keep_log(self, name: str, suffix: str) -> None:
        """Copy a log, as it is, to a name that ends so and that nothing has yet."""
        while (self.folder / f"{name}{suffix}").exists():
            suffix += "_again"
        self.write(f"{name}{suffix}", self.read_log(name))

    def open_log(self, name: str, size: int = 0) -> Log:
        """A log to append to, of which `size` bytes stay."""
        self.logs[name] = log = Log(self.folder / name, size, partial(self.writing, name))
        return log

    def compare_log(self, name: str, mark: Sequence[Any]) -> str:
        """How a log differs from what stood there when `mark` was made, in words; empty where it does not."""
        content, (size, sha256) = self.read_log(name), mark
        if len(content) < size:
            return f"lacks its last {size - len(content):,} bytes"
        return "has changed" if hashlib.sha256(content[:size]).hexdigest() != sha256 else ""

    def sync(self) -> dict[str, Mark]:
        """Wait until the logs survive a crash of the machine, in a bucket until it has them; returns their marks."""
        marks = {name: log.sync() for name, log in self.logs.items()}
        self.send_logs()
        return marks

    # A bucket's copy

    def fetch_files(self) -> None:
        """Make this machine's folder a copy of the bucket's files but the checkpoints."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with self.reading():
            names = [str(path.relative_to(self.place)) for path in files_below(self.place, (CHECKPOINTS, LOCK))]
        fetch(self.url, [*filter(is_plain, names)], "run_dir", MIRRORS)

    def send_logs(self) -> None:
        """Send the logs, and the newest file of events, to the bucket."""
        events = sorted(self.folder.glob("tensorboard/*"))[-1:]
        self.send([*self.logs, *(str(path.relative_to(self.folder)) for path in events)])

    def send(self, names: Sequence[str]) -> None:
        """Send files to the bucket; nothing where the run is on a disk."""
        if self.in_bucket:
            with self.writing():
                send(self.folder, self.url, names)

    # Checkpoints

    def steps(self) -> list[int]:
        """The steps of the checkpoints, ascending."""
        with self.reading(CHECKPOINTS):
            paths = [path for path in below(self.checkpoints) if STEP.fullmatch(path.name)]
            return sorted(int(path.name) for path in paths if not self.in_bucket or (path / PUBLISHED).exists())

    def document(self, step: int | str) -> dict[str, Any]:
        """The document of a checkpoint; Damaged where it is missing or has changed, UserError where a disk fails."""
        name = f"{CHECKPOINTS}/{step}/document/metadata"
        with self.reading(name):
            path = self.place / name
            content = self.read(name) if not self.in_bucket else path.read_bytes() if path.exists() else None
        try:
            document = unseal(json.loads(content or "null"))
        except (ValueError, RecursionError) as error:
            raise Damaged(f"{type(error).__name__}: {error}"[:200]) from None
        if not all(isinstance(document.get(name), dict) for name in RECORDED):
            raise Damaged("another version of this program wrote its document")
        return document

    def best_step(self, steps: Sequence[int], known: Mapping[int, float] | None = None) -> int | None:
        """The best of these checkpoints, the newest among equals, with `known` scores; None if none has a score."""
        scores: dict[int, Any] = dict(known or {})
        for step in steps:
            if step not in scores:
                with suppress(Damaged):
                    scores[step] = self.document(step).get("score")
        scored = {step: x for step, x in scores.items() if isinstance(x, float) and math.isfinite(x)}
        return max(scored, key=lambda step: (scored[step], step), default=None)

    def put_aside(self, step: int, reason: str) -> None:
        """Rename a damaged checkpoint, so that nothing takes it for one again; nothing is deleted."""
        self.check()
        path, aside = self.checkpoints / str(step), f"damaged_{step}"
        with failing(f"{path}: can't be read ({reason}), nor put aside as {aside}"):
            while (self.checkpoints / aside).exists():
                aside += "_again"
            path.rename(self.checkpoints / aside)
        logger.warning("checkpoint %d can't be read (%s); put aside as %s/%s", step, reason, CHECKPOINTS, aside)


def files_below(folder: epath.Path, but: Sequence[str] = ()) -> Iterator[epath.Path]:
    """All files below a folder, none where it is missing, without the folders and files of some names just in it."""
    for path in below(folder):
        if path.name not in but:
            yield from files_below(path) if path.stat().is_directory else [path]


def find_run(run: str, key: str) -> RunStore | None:
    """The store of a run, to be read; None where no run is there. Errors of a bucket name the setting `key`."""
    with naming(key, run):
        if not is_bucket(run):
            store = RunStore(os.path.expanduser(run))
            return store if os.path.isfile(store.folder / CONFIG) else None
        has_begun = RunStore(run).is_run()
    return RunStore(run, fetch_folder(run, READ, key)) if has_begun else None


def tool_run(run: str) -> RunStore:
    """The store of a tool's argument; UserError where a bucket has no run there."""
    if not is_bucket(run):
        return RunStore(os.path.expanduser(run))
    if (store := find_run(run, "RUN")) is None:
        raise UserError(f"{run}: no config.yaml; give a run_dir")
    return store


def seal(document: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the document, which must be JSON, with its checksum under one more key."""
    copy = json.loads(json.dumps(document))
    return {**copy, "crc32": f"{zlib.crc32(json.dumps(copy, sort_keys=True).encode()):08x}"}


def unseal(sealed: Any) -> dict[str, Any]:
    """The document that `seal` was given; Damaged where it has changed since then."""
    if not isinstance(sealed, dict):
        raise Damaged("it has no document, or an earlier version of this program wrote it")
    document = {key: value for key, value in sealed.items() if key != "crc32"}
    if sealed.get("crc32") != seal(document)["crc32"]:
        raise Damaged("the document's checksum differs")
    return document
