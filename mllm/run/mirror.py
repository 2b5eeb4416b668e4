"""A run whose run_dir is in a bucket: it works in a folder of this machine, and a thread keeps the bucket up to date.

The bucket is the truth: a start takes the configuration, the logs and the lists of checkpoints from there, and
forgets what the folder held. In the bucket,

    lock                          the lease of the processes that write
    config.yaml, skipped/...      files as they are
    metrics.jsonl.000000000000000 a log is a row of parts, named by their offsets
    checkpoints/7.json            the list of a checkpoint's files and parts with checksums, written last:
    checkpoints/7-TOKEN/...       only with it these parts are a checkpoint

Each of several processes sends what it has written, and the first one the list. A restore fetches the parts that it
needs by `mllm.run.remote`. When one of them is missing or has changed the next older checkpoint is taken, and the list
becomes checkpoints/damaged_7.json.
"""

import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from mllm.bucket import RUNS, Bucket, Part, is_bucket, local_place, part_name, parts_of
from mllm.config.schema import CheckpointConfig, Config
from mllm.errors import UserError
from mllm.parallel.processes import gather_objects, is_writer, raise_everywhere
from mllm.run.checksum import Damaged, seal, unseal
from mllm.run.folder import check
from mllm.run.lease import NAME as LOCK
from mllm.run.lease import Lease
from mllm.run.metrics import EVENTS, RECORDS
from mllm.run.remote import SENDING, stand_in
from mllm.run.storage import saved_steps

SECONDS = 30
"""The time after which new lines of logs are sent; a checkpoint sends them at once."""
PATIENCE = 600
"""Seconds that the first process waits for another's part of a checkpoint."""
CHECKPOINTS = "checkpoints"
logger = logging.getLogger(__name__)


@contextmanager
def working_folder(config: Config, change: bool) -> Iterator[Path]:
    """The folder in which the run works: run_dir itself, or one of this machine that stands for run_dir in a bucket.

    At the end everything is in the bucket, or UserError is raised. It is also raised if another run writes there, or
    the bucket holds something else than this run. All processes must call this.
    """
    if not is_bucket(config.run_dir):
        yield Path(config.run_dir)
        return
    folder = local_place(config.run_dir, RUNS) / f"process_{jax.process_index()}"
    lease = None
    with raise_everywhere():
        bucket = Bucket(config.run_dir)
        if is_writer():
            lease = Lease(bucket)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    mirror = Mirror(bucket, folder, config.checkpoint, lease, gather_objects(lease and lease.token)[0] or "")
    try:
        with raise_everywhere():
            mirror.fetch_run()
            check(folder, config, change)
            mirror.find_checkpoints()
        mirror.thread.start()
        yield folder
    finally:
        mirror.close()


class Mirror:
    """Copies what a run writes in its folder to the bucket."""

    def __init__(self, bucket: Bucket, folder: Path, config: CheckpointConfig, lease: Lease | None, token: str) -> None:
        self.bucket, self.folder, self.config, self.lease, self.token = bucket, folder, config, lease, token
        self.logs: dict[str, list[Part]] = {}
        """The parts of each log that the bucket has."""
        self.files: dict[str, int] = {}
        """The time of writing of the other files that the bucket has."""
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self.run, name="bucket", daemon=True)

    def fetch_run(self) -> None:
        """Read the configuration and the logs; UserError where the bucket holds something else than a run."""
        names = self.bucket.names()
        config = self.bucket.read("config.yaml")
        if config is None:
            if {*names} - {LOCK}:
                raise UserError(
                    f"run_dir: {self.bucket.url} holds other files and no config.yaml; give an empty or new folder"
                )
            return
        (self.folder / "config.yaml").write_bytes(config)
        for name in RECORDS if is_writer() else ():
            end, whole = 0, bytearray()
            for offset in parts_of(names, name):
                found = self.bucket.read(part_name(name, offset)) if offset == end else None
                if found is None:  # after what a process left when it was killed: it is written again
                    self.bucket.delete([part_name(name, offset)])
                    continue
                whole += found
                self.logs.setdefault(name, []).append(Part.of(offset, found))
                end = len(whole)
            (self.folder / name).write_bytes(whole)

    def find_checkpoints(self) -> None:
        """Let a folder stand for each checkpoint; what a restore needs of it is read then."""
        for step, manifest in self.manifests().items():
            stand_in(self.folder / CHECKPOINTS / str(step), self.bucket.url, manifest)
        if is_writer():
            self.remove_unlisted()

    def put_aside(self, damaged: Path) -> None:
        """Rename the list of a checkpoint that a restore has put aside, since it is damaged."""
        step = damaged.name.removeprefix("damaged_")
        if is_writer():
            name = f"{CHECKPOINTS}/{step}.json"
            if content := self.bucket.read(name):
                self.bucket.write(f"{CHECKPOINTS}/{damaged.name}.json", content)
            self.bucket.delete([name])
            logger.warning("%s/%s is put aside as %s.json", self.bucket.url, name, damaged.name)
        shutil.rmtree(damaged)

    def manifests(self) -> dict[int, dict[str, Any]]:
        """The list of each whole checkpoint, by its step; an empty one where it has changed."""
        found = {}
        for name in self.bucket.names(f"{CHECKPOINTS}/"):
            step = name.removeprefix(f"{CHECKPOINTS}/").removesuffix(".json")
            if step.isdecimal() and (content := self.bucket.read(name)) is not None:
                found[int(step)] = read_list(content)
        return found

    def remove_unlisted(self) -> None:
        """Remove the parts of checkpoints that were never finished."""
        names = self.bucket.names(f"{CHECKPOINTS}/")
        contents = [self.bucket.read(name) for name in names if name.endswith(".json")]
        lists = [read_list(content) for content in contents if content]
        if all(lists):  # else nobody knows whose they are
            listed = tuple(f"{manifest['prefix']}/" for manifest in lists)
            self.bucket.delete(name for name in names if not name.endswith(".json") and not name.startswith(listed))

    def run(self) -> None:
        """Send what is new until the run ends. After an error the run is told to save and stop, as by a signal."""
        sent = time.monotonic()
        while not self.closing.wait(0.2):
            if not saved_steps(self.folder / SENDING) and time.monotonic() - sent < SECONDS:
                continue
            sent = time.monotonic()
            try:
                self.send()
            except UserError as error:
                logger.warning("%s; saving and stopping", error)
                if not self.closing.is_set():
                    os.kill(os.getpid(), signal.SIGTERM)
                return

    def send(self) -> None:
        """Send everything that is new: logs first, so that no checkpoint is newer than they are."""
        for path in (self.folder / CHECKPOINTS).glob("damaged_*"):
            self.put_aside(path)
        steps = saved_steps(self.folder / SENDING)
        for path in (path for path in [*self.folder.glob("*"), *self.folder.glob("[!cw]*/*")] if path.is_file()):
            name = path.relative_to(self.folder).as_posix()
            if name == LOCK or name.endswith(".tmp"):
                continue
            if name in RECORDS or name.startswith(f"{EVENTS}/"):
                self.send_log(name, path)
                continue
            with suppress(FileNotFoundError):  # a file that is replaced all the time
                written = path.stat().st_mtime_ns
                if self.files.get(name) != written:
                    self.bucket.write(name, path.read_bytes())
                    self.files[name] = written
        for step in steps:
            self.send_checkpoint(step)

    def send_log(self, name: str, path: Path) -> None:
        """Send the end of a log, and again what has changed since the run was resumed, which cuts its logs."""
        parts = self.logs.setdefault(name, [])
        with path.open("rb") as file:
            while parts:
                file.seek(parts[-1].offset)
                if Part.of(parts[-1].offset, file.read(parts[-1].size)) == parts[-1]:
                    break
                self.bucket.delete([part_name(name, parts.pop().offset)])
        parts += self.bucket.send_file(path, name, parts[-1].offset + parts[-1].size if parts else 0)

    def send_checkpoint(self, step: int) -> None:
        """Send a checkpoint's files, and then their list; remove the checkpoints that are no longer kept.

        One that the run itself does not keep any more, because newer ones are there, is left out.
        """
        source, prefix = self.folder / SENDING / str(step), f"{CHECKPOINTS}/{step}-{self.token}"
        process = jax.process_index()
        kept = saved_steps(self.folder / CHECKPOINTS)
        if step in kept or not is_writer():
            files = {path.relative_to(source).as_posix(): path for path in source.rglob("*") if path.is_file()}
            sent = self.bucket.send_files({f"{prefix}/{process}/{name}": path for name, path in files.items()})
            own = {name: [process, [asdict(part) for part in sent[f"{prefix}/{process}/{name}"]]] for name in files}
            if is_writer():
                best = json.loads((source / "document" / "metadata").read_text()).get("best")
                self.publish(step, prefix, self.files_of_others(prefix) | own, best)
            else:
                self.bucket.write(f"{prefix}/{process}.json", json.dumps(own).encode())
                for old in kept:
                    if old < step:
                        shutil.rmtree(self.folder / CHECKPOINTS / str(old), ignore_errors=True)
        shutil.rmtree(source)

    def files_of_others(self, prefix: str) -> dict[str, Any]:
        """The files of a checkpoint that the other processes have sent, once all of them have."""
        found: dict[str, Any] = {}
        for process in range(1, jax.process_count()):
            deadline = time.monotonic() + PATIENCE
            while (content := self.bucket.read(f"{prefix}/{process}.json")) is None:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{self.bucket.url}/{prefix}: process {process} has not sent its part within {PATIENCE} s; "
                        "the same command goes on from the checkpoint before"
                    )
                time.sleep(0.5)
            found = json.loads(content) | found
        return found

    def publish(self, step: int, prefix: str, files: dict[str, Any], best: float | None) -> None:
        """Write the list that makes a checkpoint whole, and remove what is no longer kept."""
        assert self.lease is not None
        self.lease.check()
        manifest = seal({"prefix": prefix, "files": files, "best": best})
        self.bucket.write(f"{CHECKPOINTS}/{step}.json", json.dumps(manifest).encode())
        manifests = self.manifests()
        kept = {*sorted(manifests)[-self.config.keep :]}
        scores = {step: best for step, manifest in manifests.items() if (best := manifest.get("best")) is not None}
        if self.config.keep_best and scores:
            kept.add(max(scores, key=lambda step: (scores[step], step)))
        for old in {*manifests} - kept:
            self.bucket.delete([f"{CHECKPOINTS}/{old}.json"])
            if manifests[old]:
                self.bucket.delete(self.bucket.names(f"{manifests[old]['prefix']}/"))

    def close(self) -> None:
        """Send the rest, where the run has begun, and let it go."""
        self.closing.set()
        try:
            if self.thread.ident is not None:
                self.thread.join()
                if self.lease:
                    self.lease.check()
                self.send()
        except UserError:
            if self.lease:
                self.lease.ended.set()  # it expires
            raise
        if self.lease:
            self.lease.end()


def read_list(content: bytes) -> dict[str, Any]:
    """A checkpoint's list, which is empty if it has changed since it was written."""
    with suppress(ValueError, Damaged):
        return unseal(json.loads(content))
    return {}
