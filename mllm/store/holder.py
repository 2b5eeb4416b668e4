"""A run belongs to one run of processes at a time: by a locked file on a disk, by a lease in a bucket.

A file system without locks leaves it to the user that no two runs write the same folder. A bucket has no locks at all:
its lock is an object that the holder rewrites every few seconds, and that expires. Hosts' clocks are not compared.
"""

import fcntl
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from mllm.errors import UserError, brief, printable
from mllm.parallel.processes import is_writer, raise_everywhere
from mllm.store.folder import failing, sync
from mllm.store.run_store import LOCK, RunStore

SECONDS = 60
"""How long a lease lasts that nobody renews."""
RENEWALS = 6
"""Renewals in that time."""
logger = logging.getLogger(__name__)


@contextmanager
def hold(store: RunStore) -> Iterator[None]:
    """Hold a run for this run of processes, all of which must enter this: no other one writes it meanwhile.

    At the end a bucket has everything. UserError is raised if another run holds it, or it can't be written.
    """
    with ExitStack() as stack:
        with raise_everywhere():
            if is_writer():
                stack.enter_context(hold_bucket(store) if store.in_bucket else hold_folder(store))
        yield


# A folder


@contextmanager
def hold_folder(store: RunStore) -> Iterator[None]:
    """Lock a folder, which is made if it is missing; one in which no run has begun is left as it was found.

    The operating system releases the lock when the process ends, however it ends.
    """
    folder = store.folder
    with failing(folder, "written"):
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        file = open_locked(folder)
        for path in made:
            sync(path.parent)

    def is_ours() -> bool:
        with suppress(OSError):
            return os.path.samestat(os.fstat(file.fileno()), (folder / LOCK).stat())
        return False

    def check() -> None:
        if is_ours():
            return
        fault = "was moved, removed or replaced while this run wrote it"
        raise UserError(f"run_dir: {folder} {fault}: nothing more is written; start again where it is now")

    store.check = check
    try:
        yield
    finally:
        store.check = lambda: None
        # Not the file itself: a process that has opened it already would lock a file that is no longer there.
        with suppress(OSError):
            file.truncate(0)
        with suppress(OSError, UserError):
            if is_ours() and not store.is_run():
                (folder / LOCK).unlink()
                for path in made:
                    path.rmdir()
        file.close()


def open_locked(folder: Path) -> TextIO:
    """The folder's lock file, open and locked, with this process's name in it."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise UserError(f"run_dir: {folder} is in use by {holder}; wait for it, or give another folder") from None
        except OSError as error:
            logger.warning("%s can't be locked (%s): let no other run write it", folder, error.strerror)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), (folder / LOCK).stat()):
                break
        file.close()  # another process removed it before this one had locked it
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


# A bucket


@contextmanager
def hold_bucket(store: RunStore) -> Iterator[None]:
    """Hold a lease, and have a copy of the run's files on this machine, which is sent with each checkpoint."""
    lease = Lease(store.url)
    store.check = lease.check
    try:
        store.fetch_files()
        yield
        store.send_files()
    finally:
        store.check = lambda: None
        lease.release()


class Lease:
    """An object that its holder rewrites every few seconds; who sees it unchanged for `SECONDS` may take it."""

    def __init__(self, url: str) -> None:
        """Take the lease; UserError where another process holds it, or the bucket can't be written."""
        import tensorstore

        self.url, self.holder = url, f"process {os.getpid()} on {socket.gethostname()}"
        bucket, _, path = url.partition("://")[2].strip("/").partition("/")
        spec = {"driver": "gcs", "bucket": bucket, "path": f"{path}/" if path else ""}
        with self.failing():
            self.objects = tensorstore.KvStore.open(spec).result()
            self.generation = self.wait_for_end()
            self.lost, self.renewed, self.ended = False, clock(), threading.Event()
            self.write()
        if self.lost:
            raise UserError(f"run_dir: {url} was taken by another process; wait for it, or give another folder")
        threading.Thread(target=self.renew, name="lease", daemon=True).start()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Turn tensorstore's errors, which are ValueErrors, into UserErrors."""
        try:
            yield
        except ValueError as error:
            raise UserError(f"run_dir: {self.url}: {brief(error)}: check the bucket and its credentials") from None

    def wait_for_end(self) -> Any:
        """Wait until the lease that is there has ended; returns the generation of what may be replaced."""
        lease = self.objects.read(LOCK).result()
        if lease.state != "value":
            return lease.stamp.generation
        name = printable(lease.value.decode(errors="replace"))[:200]
        print(f"{self.url}: {name} held it; waiting {SECONDS} s for a sign of its life", file=sys.stderr)
        deadline, generation = clock() + SECONDS, lease.stamp.generation
        while clock() < deadline:
            time.sleep(SECONDS / RENEWALS)
            lease = self.objects.read(LOCK).result()
            if lease.state != "value":
                return lease.stamp.generation
            if lease.stamp.generation != generation:
                raise UserError(f"run_dir: {self.url} is in use by {name}; wait for it, or give another folder")
        return generation

    def write(self) -> None:
        """Write the lease anew, if nobody else has; a request whose answer was lost finds its own work."""
        begun = clock()  # the answer may come late
        content = json.dumps({"holder": self.holder, "time": time.time()}).encode()
        stamp = self.objects.write(LOCK, content, if_equal=self.generation).result()
        if not stamp.generation:
            lease = self.objects.read(LOCK).result()
            if lease.value != content:
                self.lost = True
                return
            stamp = lease.stamp
        self.generation, self.renewed = stamp.generation, begun

    def renew(self) -> None:
        while not self.ended.wait(SECONDS / RENEWALS) and not self.lost:
            try:
                self.write()
            except ValueError as error:  # the next attempt may succeed; if none does, `check` says so
                logger.warning("the lease is not renewed: %s", brief(error))

    def check(self) -> None:
        """Raise UserError if another process may have taken the run: nothing more may be written."""
        if self.lost:
            raise UserError(f"run_dir: {self.url} was taken by another process; wait for it, or give another folder")
        if clock() - self.renewed > SECONDS * 0.9:
            raise UserError(f"run_dir: the lease of {self.url} could not be renewed; the same command resumes")

    def release(self) -> None:
        """Let another process take the run, if this one still holds it."""
        self.ended.set()
        with suppress(ValueError):
            self.objects.write(LOCK, None, if_equal=self.generation).result()


def clock() -> float:
    """Seconds that pass while the machine is suspended, too, where the system counts them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
