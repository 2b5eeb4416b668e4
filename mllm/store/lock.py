"""A run belongs to one run of processes at a time: a file's lock on a disk, a lease in a bucket.

A file system without locks leaves it to the user that no two runs write the same folder. A bucket has no locks at all:
its lock is an object that the holder rewrites every few seconds, and expires.
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
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from mllm.errors import UserError, brief, printable
from mllm.parallel.processes import gather_objects, is_writer, raise_everywhere
from mllm.store.bucket import Bucket, LeaseLost
from mllm.store.folder import sync
from mllm.store.run_store import LOCK, RunStore

SECONDS = 60
"""How long a lease lasts that nobody renews; hosts' clocks are not compared."""
RENEWALS = 6
"""Renewals in that time."""
SENDING_SECONDS = 30
"""The time after which a bucket gets the new lines of logs; a checkpoint sends them at once."""
logger = logging.getLogger(__name__)


@contextmanager
def hold(store: RunStore) -> Iterator[None]:
    """Hold a run for this run of processes, all of which must enter this: no other one writes it meanwhile.

    At the end a bucket has everything, or UserError is raised. It is also raised if another run holds it, or it can't
    be written.
    """
    with ExitStack() as stack:
        with raise_everywhere():
            if is_writer():
                stack.enter_context(lock(store))
        store.token = gather_objects(store.token)[0]
        yield


def lock(store: RunStore) -> AbstractContextManager[None]:
    """Hold a run for this process alone; UserError as `hold`."""
    if isinstance(store.place, Bucket):
        return hold_bucket(store, store.place)
    return hold_folder(store, store.place.path)


# A folder


@contextmanager
def hold_folder(store: RunStore, folder: Path) -> Iterator[None]:
    """Lock a folder, which is made if it is missing; one in which no run has begun is left as it was found.

    The operating system releases the lock when the process ends, however it ends.
    """
    with store.failing("", "written"):
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        file = open_locked(folder)
        for path in made:
            sync(path.parent)
    try:
        yield
    finally:
        # Not the file itself: a process that has opened it already would lock a file that is no longer there.
        with suppress(OSError):
            file.truncate(0)
        with suppress(OSError, UserError):
            if not store.is_run():
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
def hold_bucket(store: RunStore, bucket: Bucket) -> Iterator[None]:
    """Hold a lease, and send the logs every `SENDING_SECONDS`; when that fails, the store's next use says so."""
    lease = Lease(bucket, store.token)
    store.check = lease.check

    def send() -> None:
        while not lease.ended.wait(SENDING_SECONDS):
            try:
                store.sync()
            except UserError as error:
                lease.failure = error
            except BaseException as error:  # such as no free file handle or memory: what is trained can be saved
                store.failure = f"{store.url}: the logs can't be sent ({brief(error)}); check this machine"

    sender = threading.Thread(target=send, name="sender", daemon=True)
    sender.start()
    try:
        yield
    finally:
        lease.ended.set()
        sender.join()
        store.sync()  # after an error the lease expires
        lease.release()


class Lease:
    """An object that its holder rewrites every few seconds; who sees it unchanged for `SECONDS` may take it."""

    def __init__(self, bucket: Bucket, token: str) -> None:
        """Take the lease; UserError where another process holds it, or the bucket can't be written.

        The lease of a process that is known to be dead is taken at once. Any other is waited for.
        """
        self.bucket, self.token = bucket, token
        self.renewed = clock()
        self.failure: UserError | None = None
        self.ended = threading.Event()
        self.generation = self.write(self.wait_for_end())
        self.thread = threading.Thread(target=self.renew, name="lease", daemon=True)
        self.thread.start()

    def wait_for_end(self) -> bytes:
        """Wait until the lease that is there has ended; returns the generation of what may be replaced."""
        content, generation = self.bucket.read_generation(LOCK)
        holder: dict[str, Any] = {}
        with suppress(ValueError, TypeError):  # another one's object
            holder.update(json.loads(content or b"{}"))
        if content is None or is_dead(holder):
            return generation
        name = printable(f"process {holder.get('process')} on {holder.get('host')}")
        print(f"{self.bucket.url}: {name} held it; waiting {SECONDS} s for a sign of its life", file=sys.stderr)
        deadline = clock() + SECONDS
        while clock() < deadline:
            time.sleep(SECONDS / RENEWALS)
            content, now = self.bucket.read_generation(LOCK)
            if content is None:
                return now
            if now != generation:
                raise UserError(f"run_dir: {self.bucket.url} is in use by {name}; wait for it, or give another folder")
        return generation

    def write(self, generation: bytes) -> bytes:
        """Write the lease in place of the one of this generation, and return the new one's."""
        holder = {"token": self.token, **identity(os.getpid()), "time": time.time()}
        begun = clock()  # the answer may come late
        new = self.bucket.replace(LOCK, json.dumps(holder).encode(), generation)
        self.renewed = begun
        return new

    def renew(self) -> None:
        while not self.ended.wait(SECONDS / RENEWALS):
            try:
                self.generation = self.write(self.generation)
            except LeaseLost as error:
                self.failure = error
                return
            except Exception as error:  # the next attempt may succeed; if none does, `check` says so
                logger.warning("the lease is not renewed: %s", brief(error))

    def check(self) -> None:
        """Raise UserError if another process may have taken the run: nothing more may be written."""
        if self.failure:
            raise self.failure
        if clock() - self.renewed > SECONDS * 0.9:
            raise UserError(f"run_dir: the lease of {self.bucket.url} could not be renewed; the same command resumes")

    def release(self) -> None:
        """Let another process take the run, if this one still holds it."""
        self.ended.set()
        self.thread.join()
        self.check()
        self.bucket.remove(LOCK, self.generation)


def clock() -> float:
    """Seconds that pass while the machine is suspended, too, where the system counts them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def identity(process: int) -> dict[str, Any]:
    """What tells a living process from all others, of other machines and containers too, as far as Linux says it."""
    found: dict[str, Any] = {"process": process, "host": socket.gethostname()}
    with suppress(OSError):  # another system
        found["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found["namespace"] = os.readlink("/proc/self/ns/pid")
        state, *others = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        found["started"] = None if state in "ZX" else others[18]
    return found


def is_dead(holder: dict[str, Any]) -> bool:
    """Whether a holder was a process that is no more: only of those in this namespace of process ids it is known."""
    process = holder.get("process")
    if not isinstance(process, int) or not {"boot", "namespace", "started"} <= holder.keys():
        return False
    now = identity(process)
    if any(now.get(name) != holder[name] for name in ("boot", "namespace")):
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's
        pass
    return now.get("started", holder["started"]) != holder["started"]
