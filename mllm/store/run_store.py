"""A run's files, logs and checkpoints in one layout, whether they are on a disk or in a bucket.

    config.yaml                   a run has begun where this is
    lock                          who writes the run
    heartbeat.json, skipped/...   files as they are
    metrics.jsonl                 a log; in a bucket a row of parts: see mllm/store/log.py
    checkpoints/7.json            the sealed manifest of a checkpoint, written last: only it makes a checkpoint
    checkpoints/7-TOKEN/a/0.1     a chunk of the array `a`; TOKEN is the holder's, so that a process which has lost the
                                  run never writes into its successor's checkpoints
    checkpoints/damaged_7.json    the manifest of a checkpoint that was found damaged; its chunks stay as long

In a bucket a process may find out late that another one has taken the run. So it first looks at what it is about to
replace or remove, then checks its lease, and then does it on the condition that nothing has changed since it looked.

Here nothing knows JAX: `mllm.store.checkpoints` writes and reads the arrays, and `mllm.store.lock` holds a run.
"""

import json
import logging
import math
import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mllm.errors import UserError
from mllm.store.bucket import Bucket, is_bucket, local_place
from mllm.store.fetch import OBJECTS, fetch
from mllm.store.folder import UNFINISHED, Folder, sync
from mllm.store.log import Cut, FileLog, Log, PartsLog, read_parts

CONFIG, LOCK, CHECKPOINTS = "config.yaml", "lock", "checkpoints"
MANIFEST = re.compile(r"([0-9]{1,18})\.json")
ASIDE = re.compile(r"damaged_([0-9]{1,18})(_again)*\.json")
CHUNKS = re.compile(r"([0-9]{1,18})-[0-9a-f]{8}\.[0-9]+")
"""The folder of a checkpoint's arrays."""
logger = logging.getLogger(__name__)


class Damaged(Exception):
    """The data that was read is not what was written."""


class RunStore:
    """The place of one run: a folder, gs://bucket/path or s3://bucket/path."""

    def __init__(self, url: str | Path) -> None:
        """Opens nothing."""
        self.place: Bucket | Folder = Bucket(str(url)) if is_bucket(url) else Folder(Path(url))
        self.folder = self.place.path if isinstance(self.place, Folder) else None
        """The folder on a disk; None in a bucket."""
        self.url = self.place.url if isinstance(self.place, Bucket) else str(self.folder)
        self.token = secrets.token_hex(4)
        """The holder's, in the names of what it writes; the same in all of several processes."""
        self.check: Callable[[], None] = lambda: None
        """Raises UserError where this process may not write any more, or could not send."""
        self.failure = ""
        """Why the thread that sends the logs could not, where the fault is this machine's: the run should end."""
        self.logs: dict[str, Log] = {}
        self.replaced: dict[str, bytes] = {}
        """Files that are replaced all the time, until a bucket has them."""

    def __str__(self) -> str:
        return self.url

    @property
    def local_folder(self) -> Path:
        """The folder on a disk; for a run in a bucket one of this machine, for what does not leave it."""
        folder = self.folder or local_place(self.url, OBJECTS)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def local(self, name: str) -> Path:
        """A file as one of this machine, fetched if it is in a bucket, where it must be."""
        return self.folder / name if self.folder else fetch(self.url, [name], "run_dir")[0]

    # Files

    def is_run(self) -> bool:
        """Whether a run has begun there."""
        return CONFIG in self.entries()

    def read(self, name: str) -> bytes | None:
        """A file's content; None where there is no such file."""
        with self.failing(name, "read"):
            return self.place.read(name)

    def entries(self, folder: str = "") -> list[str]:
        """The names of the files and folders just below a folder, in order."""
        with self.failing(folder, "read"):
            return self.place.entries(folder)

    def write(self, name: str, data: bytes) -> None:
        """Write a file as a whole or not at all; it has survived a crash of the machine from then on."""
        with self.failing(name, "written"):
            seen = self.place.seen(name)
            self.check()
            self.place.replace(name, data, seen)

    def replace(self, name: str, data: bytes) -> None:
        """Write a file that is replaced all the time: in a bucket only when the logs are sent. Raises OSError."""
        if isinstance(self.place, Folder):
            self.place.write(name, data, durable=False)
        else:
            self.replaced[name] = data

    @contextmanager
    def failing(self, name: str, use: str) -> Iterator[None]:
        """Turn errors of a disk or bucket into a UserError: `name` can't be `use`, `read` or `written`.

        Where a disk does not take what is written it says from which checkpoint the same command goes on.
        """
        try:
            yield
        except (OSError, ValueError) as error:
            if (failure := self.place.failure(error, name, use)) is None:
                raise
            resumes = f", and the same command {self.resumption()}" if self.folder and use == "written" else ""
            raise UserError(f"{failure}{resumes}") from None

    def resumption(self) -> str:
        """What the same command does next."""
        try:
            steps = self.steps()
        except UserError:
            return "resumes"
        return f"goes on from checkpoint {steps[-1]}" if steps else "begins again: there is no checkpoint yet"

    # Logs

    def read_log(self, name: str) -> bytes:
        """A log's content; empty where there is none."""
        if isinstance(self.place, Bucket):
            return read_parts(self.place, name)
        return self.read(name) or b""

    def open_log(self, name: str, cut: Cut | None = None) -> Log:
        """A log to append to, after it has been cut."""
        if isinstance(self.place, Bucket):
            self.logs[name] = PartsLog(self.place, name, cut, self.check)
        else:
            self.logs[name] = FileLog(self.place.path / name, cut, lambda: self.failing(name, "written"))
        return self.logs[name]

    def sync(self) -> None:
        """Wait until the logs, and what is replaced all the time, survive a crash of the machine."""
        self.check()
        for log in list(self.logs.values()):
            log.sync()
        while self.replaced:
            self.place.write(*self.replaced.popitem())

    # Checkpoints

    def steps(self) -> list[int]:
        """The steps of the checkpoints, ascending."""
        return sorted(numbers(MANIFEST, self.entries(CHECKPOINTS)).values())

    def manifest(self, name: int | str) -> dict[str, Any]:
        """The document of a checkpoint, by its step, or by the name of one that was put aside.

        Raises Damaged where it is missing or has changed, UserError where the disk or the bucket fails.
        """
        content = self.read(f"{CHECKPOINTS}/{name}.json")
        try:
            document = unseal(json.loads(content or b"null"))
        except (ValueError, RecursionError) as error:
            raise Damaged(f"{type(error).__name__}: {error}"[:200]) from None
        if not (CHUNKS.fullmatch(str(document.get("folder"))) and isinstance(document.get("arrays"), dict)):
            raise Damaged("an earlier version of this program wrote it")
        return document

    def field(self, step: int | str, name: str) -> Any:
        """What the document of a checkpoint has under a name; None if it has nothing there, or is damaged."""
        with suppress(Damaged):
            return self.manifest(step).get(name)
        return None

    def folder_of(self, step: int | str) -> str | None:
        """The folder of a checkpoint's arrays; None if its manifest does not say it any more."""
        return (folder := self.field(step, "folder")) and f"{CHECKPOINTS}/{folder}"

    def best_step(self, steps: list[int]) -> int | None:
        """The step of the best of these checkpoints; None if none has a score."""
        found = {step: self.field(step, "best") for step in steps}
        scores = {step: score for step, score in found.items() if isinstance(score, float) and math.isfinite(score)}
        return max(scores, key=lambda step: (scores[step], step), default=None)

    def publish(self, step: int, document: Mapping[str, Any], keep: int, keep_best: bool) -> None:
        """Make a checkpoint of arrays that are written, then remove all but the newest `keep` ones and the best.

        Those that were put aside are removed like the others, when as many newer ones are there.
        No checkpoint is newer than the logs: they are sent first.
        """
        self.sync()
        with self.failing(f"{CHECKPOINTS}/{step}", "written"):
            if self.folder:
                sync(self.folder / CHECKPOINTS / document["folder"])  # tensorstore has synced what is below
        self.write(f"{CHECKPOINTS}/{step}.json", json.dumps(seal(document)).encode())
        entries = self.entries(CHECKPOINTS)
        steps = sorted(numbers(MANIFEST, entries).values())
        newest, aside = steps[-keep:], numbers(ASIDE, entries)
        kept = {*newest, *([self.best_step(steps)] if keep_best else [])}
        dropped: list[int | str] = [step for step in steps if step not in kept]
        with self.failing(CHECKPOINTS, "written"):
            for old in dropped + [name for name, step in aside.items() if step < newest[0]]:
                name = f"{CHECKPOINTS}/{old}.json"
                seen, folder = self.place.seen(name), self.folder_of(old)
                self.check()
                self.place.remove(name, seen)
                if folder:
                    self.place.delete_folder(folder)

    def put_aside(self, step: int, reason: str) -> None:
        """Rename the manifest of a damaged checkpoint, so that nothing takes it for one again; nothing is deleted."""
        aside, others = f"damaged_{step}", self.entries(CHECKPOINTS)
        while f"{aside}.json" in others:
            aside += "_again"
        try:
            self.place.rename(f"{CHECKPOINTS}/{step}.json", f"{CHECKPOINTS}/{aside}.json", self.check)
        except OSError as error:
            fault = f"can't be read ({reason}), nor put aside as {aside}.json ({error.strerror})"
            raise UserError(f"{self.url}/{CHECKPOINTS}/{step}.json: {fault}; rename or remove it") from None
        logger.warning("checkpoint %d can't be read (%s); put aside as %s/%s.json", step, reason, CHECKPOINTS, aside)

    def remove_unpublished(self) -> None:
        """Remove what is no checkpoint's: of saves that were cut off. Only the run's holder may do that."""
        entries = self.entries(CHECKPOINTS)
        listed = set[str]()
        for name in entries:
            if found := ASIDE.fullmatch(name) or MANIFEST.fullmatch(name):
                try:
                    listed.add(self.manifest(name.removesuffix(".json"))["folder"])
                except Damaged:  # any of its step's folders may be the one
                    listed |= {other for other in entries if other.startswith(f"{found[1]}-")}
        self.check()
        with self.failing(CHECKPOINTS, "written"):
            self.place.delete(f"{CHECKPOINTS}/{name}" for name in entries if name.endswith(f".json{UNFINISHED}"))
            for name in entries:
                if CHUNKS.fullmatch(name) and name not in listed:
                    self.place.delete_folder(f"{CHECKPOINTS}/{name}")


def numbers(pattern: re.Pattern[str], names: Iterable[str]) -> dict[str, int]:
    """The steps of manifests whose names match a pattern, by the names without their end."""
    return {name.removesuffix(".json"): int(found[1]) for name in names if (found := pattern.fullmatch(name))}


def find_run(run: str, key: str) -> RunStore | None:
    """The store of a run; None where no run is there.

    UserError, which names the setting or argument `key`, is raised where a bucket can't be read.
    """
    try:
        store = RunStore(run if is_bucket(run) else os.path.expanduser(run))
        there = os.path.isfile(store.folder / CONFIG) if store.folder else store.is_run()
        return store if there else None
    except UserError as error:
        raise UserError(f"{key}: {error}") from None


def tool_run(run: str) -> RunStore:
    """The store of a tool's argument; UserError where a bucket has no run there."""
    found = find_run(run, "RUN")
    if found is None and is_bucket(run):
        raise UserError(f"{run}: no config.yaml; give a run_dir")
    return found or RunStore(os.path.expanduser(run))


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
