"""A run belongs to one run of processes at a time: by a locked file on a disk, by a lease in a bucket.

A file system without locks leaves it to the user that no two runs write the same folder. A bucket has no locks at all:
its lock is an object that the holder rewrites every few seconds, and that expires. Hosts' clocks are not compared.
"""

import fcntl
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
from mllm.store.files import failing
from mllm.store.run_store import LOCK, RunStore

SECONDS = 60
"""How long a lease lasts that nobody renews; its holder does six times in that time."""
IN_USE = "run_dir: {} is in use by {}; wait for it, or give another folder"
logger = logging.getLogger(__name__)


@contextmanager
def hold(store: RunStore) -> Iterator[None]:
    """Hold a run for these processes, all of which must enter this; UserError if others do, or it can't be written."""
    with ExitStack() as stack:
        with raise_everywhere():
            if is_writer():
                stack.enter_context(hold_bucket(store) if store.in_bucket else hold_folder(store))
        yield


# A folder


@contextmanager
def hold_folder(store: RunStore) -> Iterator[None]:
    """Lock a folder, which is made if it is missing; the system releases it when the process ends, however it ends."""
    folder = store.folder
    with failing(f"run_dir: {folder} can't be written"):
        file = open_locked(folder)

    def check() -> None:
        if not is_at(file, folder):
            fault = "was moved, removed or replaced while this run wrote it"
            raise UserError(f"run_dir: {folder} {fault}: nothing more is written; start again where it is now")

    store.check = check
    try:
        yield
    finally:
        with suppress(OSError, UserError):
            if is_at(file, folder) and not store.is_run():
                (folder / LOCK).unlink()
                folder.rmdir()
        file.close()


def is_at(file: TextIO, folder: Path) -> bool:
    """Whether the folder's lock file is this one."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(file.fileno()), (folder / LOCK).stat())
    return False


def open_locked(folder: Path) -> TextIO:
    """The folder's lock file, open and locked, with this process's name in it."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                holder = file.read().strip() or "another process"
            raise UserError(IN_USE.format(folder, holder)) from None
        except OSError as error:
            logger.warning("%s can't be locked (%s): let no other run write it", folder, error.strerror)
        if is_at(file, folder):
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
        store.send_logs()
    finally:
        lease.release()


class Lease:
    """An object that its holder rewrites every few seconds; who sees it unchanged for `SECONDS` may take it."""

    def __init__(self, url: str) -> None:
        """Take the lease; UserError where another process holds it, or the bucket can't be written."""
        import tensorstore

        self.url, self.ended = url, threading.Event()
        self.expires = clock() + SECONDS
        """When this process must have stopped to write; infinitely long ago once another one has the lease."""
        bucket, _, path = url.partition("://")[2].strip("/").partition("/")
        try:
            spec = {"driver": "gcs", "bucket": bucket, "path": f"{path}/" if path else ""}
            self.objects = tensorstore.KvStore.open(spec).result()
            self.generation = self.wait_for_end()
            self.write()
        except ValueError as error:
            raise UserError(f"run_dir: {url}: {brief(error)}: check the bucket and its credentials") from None
        self.check()
        threading.Thread(target=self.renew, name="lease", daemon=True).start()

    def wait_for_end(self) -> Any:
        """Wait until the lease that is there has ended; returns the generation of what may be replaced."""
        lease = self.objects.read(LOCK).result()
        if lease.state != "value":
            return lease.stamp.generation
        name = printable(lease.value.decode(errors="replace"))[:200]
        print(f"{self.url}: {name} held it; waiting {SECONDS} s for a sign of its life", file=sys.stderr)
        time.sleep(SECONDS)
        now = self.objects.read(LOCK).result()
        if now.state == "value" and now.stamp.generation != lease.stamp.generation:
            raise UserError(IN_USE.format(self.url, name))
        return now.stamp.generation

    def write(self) -> None:
        """Write the lease anew, if nobody else has; a request whose answer was lost finds its own work."""
        begun = clock()  # the answer may come late
        content = f"process {os.getpid()} on {socket.gethostname()} at {time.time()}".encode()
        stamp = self.objects.write(LOCK, content, if_equal=self.generation).result()
        if not stamp.generation:
            lease = self.objects.read(LOCK).result()
            if lease.value != content:
                self.expires = -float("inf")
                self.ended.set()
                return
            stamp = lease.stamp
        self.generation, self.expires = stamp.generation, begun + SECONDS * 0.9

    def renew(self) -> None:
        while not self.ended.wait(SECONDS / 6):
            try:
                self.write()
            except ValueError as error:  # the next attempt may succeed; if none does, `check` says so
                logger.warning("the lease is not renewed: %s", brief(error))

    def check(self) -> None:
        """Raise UserError if another process may have taken the run: nothing more may be written."""
        if clock() > self.expires:
            fault = "was taken by another process, or could not be renewed"
            raise UserError(f"run_dir: the lease of {self.url} {fault}; the same command resumes")

    def release(self) -> None:
        """Let another process take the run, if this one still holds it."""
        self.ended.set()
        with suppress(ValueError):
            self.objects.write(LOCK, None, if_equal=self.generation).result()


def clock() -> float:
    """Seconds that pass while the machine is suspended, too, where the system counts them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
