"""A run's place, on a disk or in a bucket: its files, its logs, and what its checkpoints say of themselves.

    config.yaml                   a run has begun where this is
    config.json, tokenizer.json   and the other files of a model's folder but its parameters
    lock                          who writes the run
    metrics.jsonl                 a log
    checkpoints/7/state           arrays, as Orbax's CheckpointManager writes them
    checkpoints/7/document        JSON: positions, counts, and checksums of arrays and logs; sealed with its own
    checkpoints/damaged_7         a checkpoint that was found damaged

A run in a bucket has a copy of its files on this machine, where they are read and written; it is sent to the bucket
with each checkpoint. Here nothing knows JAX: `mllm.run.checkpoint` writes and reads the arrays.
"""

import json
import logging
import math
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from etils import epath

from mllm.errors import UserError, brief
from mllm.store.bucket import below, bucket_path, cache_folder, is_bucket, local_place
from mllm.store.fetch import fetch, fetch_folder, is_of_storage, naming, prune, send
from mllm.store.folder import UNFINISHED, failing, write_file
from mllm.store.log import Log, Mark, compare
from mllm.store.names import is_plain

CONFIG, LOCK, CHECKPOINTS = "config.yaml", "lock", "checkpoints"
STEP = re.compile(r"[0-9]{1,18}")
LARGEST_DOCUMENT = 2**28
LARGEST_FILE = 2**31
MIRRORS = "runs"
"""The folder of `local_place` with the files of runs in buckets that this machine writes."""
PUBLISHED = "commit_success.txt"
"""Orbax's mark of a checkpoint that is complete, which counts in buckets; on a disk a rename does."""
RECORDED = ("arrays", "logs", "digests", "frozen")
"""What every document has: by name, the checksums of arrays, logs, and what the run depends on."""
logger = logging.getLogger(__name__)


class Damaged(Exception):
    """The data that was read is not what was written."""


class RunStore:
    """The place of one run: a folder, or gs://bucket/path."""

    def __init__(self, url: str | Path, copy: Path | None = None) -> None:
        """Opens nothing. `copy` is a folder with a bucket's files, to be read; by default the folder of a writer."""
        self.in_bucket = is_bucket(url)
        self.url = str(url).rstrip("/") if self.in_bucket else str(Path(url))
        self.folder = copy or (local_place(self.url, MIRRORS) if self.in_bucket else Path(url))
        """The folder of this machine with the run's files."""
        self.check: Callable[[], None] = lambda: None
        """Raises UserError where this process may not write any more."""
        self.logs: dict[str, Log] = {}
        self.sent: dict[str, tuple[int, int]] = {}
        """Size and time of each file that the bucket has."""

    def __str__(self) -> str:
        return self.url

    @cached_property
    def place(self) -> epath.Path:
        """Where the run is for everybody; absolute."""
        return bucket_path(self.url) if self.in_bucket else epath.Path(self.folder.absolute())

    @property
    def checkpoints(self) -> epath.Path:
        return self.place / CHECKPOINTS

    # Files

    def local(self, name: str) -> Path:
        """A file on this machine, fetched if the run is in a bucket, where the file must be."""
        return fetch(self.url, [name], "run_dir")[0] if self.in_bucket else self.folder / name

    def is_run(self) -> bool:
        """Whether a run has begun there."""
        return CONFIG in self.entries()

    def entries(self) -> list[str]:
        """The names of the files and folders just below the run's folder, in order; none where there is no folder."""
        with self.failing("", "read"):
            return sorted(path.name for path in below(self.place))

    def read(self, name: str) -> bytes | None:
        """A file's content; None where there is no such file.

        UserError is raised for what is no regular file, or a huge one: the run may be a stranger's.
        """
        path = self.folder / name
        with self.failing(name, "read"):
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
        self.check()
        with self.failing(name, "written"):
            path = self.folder / name
            if path.parent != self.folder:
                path.parent.mkdir(exist_ok=True)
            write_file(path, data)
        if self.in_bucket:
            self.send_files()

    @contextmanager
    def failing(self, name: str, use: str) -> Iterator[None]:
        """Turn errors of a disk or bucket into a UserError: `name` can't be `use`, `read` or `written`.

        Where a disk does not take what is written it says from which checkpoint the same command goes on.
        """
        resumption = self.resumption if use == "written" else str
        with naming("run_dir") if self.in_bucket else failing(self.folder / name, use, resumption):
            yield

    def resumption(self) -> str:
        """What the same command does next, where something could not be written: the end of the error's line."""
        try:
            steps = self.steps()
        except UserError:
            return ", and the same command resumes"
        next_ = f"goes on from checkpoint {steps[-1]}" if steps else "begins again: there is no checkpoint yet"
        return f", and the same command {next_}"

    # Logs

    def read_log(self, name: str) -> bytes:
        """A log's content; empty where there is none."""
        return self.read(name) or b""

    def keep_log(self, name: str, suffix: str) -> None:
        """Copy a log, as it is, to a name that ends so and that nothing has yet."""
        content, aside = self.read_log(name), f"{name}{suffix}"
        while (self.folder / aside).exists():
            aside += "_again"
        self.write(aside, content)

    def open_log(self, name: str, size: int = 0) -> Log:
        """A log to append to, of which `size` bytes stay."""
        self.logs[name] = log = Log(self.folder / name, size, self.check, lambda: self.failing(name, "written"))
        return log

    def compare_logs(self, marks: Mapping[str, Any]) -> dict[str, str]:
        """How logs differ from their marks, in words; logs that don't are left out."""
        faults = {name: compare(self.read_log(name), mark) for name, mark in marks.items()}
        return {name: fault for name, fault in faults.items() if fault}

    def sync(self) -> dict[str, Mark]:
        """Wait until the logs survive a crash of the machine, in a bucket until it has them; returns their marks."""
        self.check()
        marks = {name: log.sync() for name, log in self.logs.items()}
        if self.in_bucket:
            self.send_files()
        return marks

    # A bucket's copy

    def fetch_files(self) -> None:
        """Make this machine's folder a copy of the bucket's files but the checkpoints."""
        with self.failing("", "read"):
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            prune((cache_folder() / MIRRORS).iterdir())
            for source in files_below(self.place, (CHECKPOINTS, LOCK)):
                if not is_plain(str(source.relative_to(self.place))):
                    continue
                path = self.folder / (name := str(source.relative_to(self.place)))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(source.read_bytes())
                self.sent[name] = stamp(path)

    def send_files(self) -> None:
        """Send the files that have changed since the last time; the configuration, which makes a run, comes last."""
        changed = dict[str, tuple[int, int]]()
        for path in self.folder.rglob("*"):
            name = str(path.relative_to(self.folder))
            if name.startswith("wandb/") and name != "wandb/id":  # W&B makes and removes files at any time
                continue
            if path.is_file() and not name.endswith(UNFINISHED) and self.sent.get(name) != (now := stamp(path)):
                changed[name] = now
        names = sorted(changed, key=lambda name: (name == CONFIG, name))
        self.check()
        with self.failing("", "written"):
            send(self.folder, self.url, names)
        self.sent |= {name: changed[name] for name in names}

    # Checkpoints

    def steps(self) -> list[int]:
        """The steps of the checkpoints, ascending."""
        with self.failing(CHECKPOINTS, "read"):
            paths = [path for path in below(self.checkpoints) if STEP.fullmatch(path.name)]
            return sorted(int(path.name) for path in paths if not self.in_bucket or (path / PUBLISHED).exists())

    def document(self, step: int | str) -> dict[str, Any]:
        """The document of a checkpoint.

        Raises Damaged where it is missing or has changed, UserError where the disk or the bucket fails.
        """
        name = f"{CHECKPOINTS}/{step}/document/metadata"
        with self.failing(f"{CHECKPOINTS}/{step}", "read"):
            if self.in_bucket:
                path = self.place / name
                readable = path.exists() and path.stat().length < LARGEST_DOCUMENT
                content = path.read_bytes() if readable else None
            else:
                content = self.read(name)
        if content is None:
            raise Damaged("it has no document, or an earlier version of this program wrote it")
        try:
            document = unseal(json.loads(content))
        except (ValueError, RecursionError) as error:
            raise Damaged(f"{type(error).__name__}: {error}"[:200]) from None
        if not all(isinstance(document.get(name), dict) for name in RECORDED):
            raise Damaged("another version of this program wrote its document")
        return document

    def score(self, step: int) -> float | None:
        """The score of a checkpoint, by which it may be the best; None where it has none, or is damaged."""
        with suppress(Damaged):
            score = self.document(step).get("score")
            return score if isinstance(score, float) and math.isfinite(score) else None
        return None

    def best_step(self, steps: list[int]) -> int | None:
        """The step of the best of these checkpoints, of the newest one among equals; None if none has a score."""
        scores = {step: score for step in steps if (score := self.score(step)) is not None}
        return max(scores, key=lambda step: (scores[step], step), default=None)

    def put_aside(self, step: int, reason: str) -> None:
        """Rename a damaged checkpoint, so that nothing takes it for one again; nothing is deleted."""
        aside = f"damaged_{step}"
        try:
            names = {path.name for path in self.checkpoints.iterdir()}
            while aside in names:
                aside += "_again"
            self.check()
            (self.checkpoints / str(step)).rename(self.checkpoints / aside)
        except Exception as error:
            if isinstance(error, UserError) or not is_of_storage(error):
                raise
            why = getattr(error, "strerror", None) or brief(error)
            fault = f"can't be read ({reason}), nor put aside as {aside} ({why})"
            raise UserError(f"{self.url}/{CHECKPOINTS}/{step}: {fault}; rename or remove it") from None
        logger.warning("checkpoint %d can't be read (%s); put aside as %s/%s", step, reason, CHECKPOINTS, aside)


def files_below(folder: epath.Path, but: Sequence[str] = ()) -> Iterator[epath.Path]:
    """All files below a folder, none where it is missing, without the folders and files of some names just in it."""
    for path in below(folder):
        if path.name not in but:
            yield from files_below(path) if path.stat().is_directory else [path]


def stamp(path: Path) -> tuple[int, int]:
    """A file's size and time, which change when it does."""
    return path.stat().st_size, path.stat().st_mtime_ns


READ = ("*.yaml", "*.json", "*.jsonl", "*.txt", "*.jinja")
"""The files of a run in a bucket that tools read."""


def find_run(run: str, key: str) -> RunStore | None:
    """The store of a run, to be read; None where no run is there.

    UserError, which names the setting or argument `key`, is raised where a bucket can't be read.
    """
    try:
        if not is_bucket(run):
            store = RunStore(os.path.expanduser(run))
            return store if os.path.isfile(store.folder / CONFIG) else None
        if not RunStore(run).is_run():
            return None
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
    return RunStore(run, fetch_folder(run, READ, key))


def tool_run(run: str) -> RunStore:
    """The store of a tool's argument; UserError where a bucket has no run there."""
    store = find_run(run, "RUN")
    if store is None and is_bucket(run):
        raise UserError(f"{run}: no config.yaml; give a run_dir")
    return store or RunStore(os.path.expanduser(run))


def seal(document: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the document, which must be JSON, with its checksum under one more key."""
    copy = json.loads(json.dumps(document))
    return {**copy, "crc32": f"{zlib.crc32(json.dumps(copy, sort_keys=True).encode()):08x}"}


def unseal(sealed: Any) -> dict[str, Any]:
    """The document that `seal` was given; Damaged where it has changed since then."""
    if not isinstance(sealed, dict):
        raise Damaged("the document is no JSON object")
    document = {key: value for key, value in sealed.items() if key != "crc32"}
    if sealed.get("crc32") != seal(document)["crc32"]:
        raise Damaged("the document's checksum differs")
    return document
