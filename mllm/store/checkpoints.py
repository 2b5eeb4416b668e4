"""Saves arrays and a document as a checkpoint while training goes on, and loads them; all processes take part.

Each process writes and reads what lies on its devices; any mesh of any number of processes can load a checkpoint.
"""

import itertools
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore

from mllm.errors import UserError, brief
from mllm.parallel.processes import gather_objects, is_writer, raise_everywhere
from mllm.progress import transfer_bar
from mllm.store.arrays import open_arrays, read_arrays, release_freed_memory, write_arrays
from mllm.store.bucket import CONTENT, status
from mllm.store.checksum import checksums
from mllm.store.folder import MISSING, find_fault
from mllm.store.run_store import CHECKPOINTS, Damaged, RunStore

PATIENCE = 600
"""Seconds that a process waits for the others to write their parts; one that fails ends the others long before."""
VISIBLE, POLLING = 90, 1
"""Seconds in which all processes must see what process 0 sees, and between two looks; NFS caches for at most 60."""
Opened = tuple[dict[str, Any], dict[str, tensorstore.TensorStore]]
"""A checkpoint's document and its arrays, of which nothing is read yet."""
NUMBERS = itertools.count()
"""The saves of this process are numbered, so that none writes into the folder of a checkpoint that was put aside."""


class Saving:
    """A checkpoint that is being saved by a thread of each process."""

    def __init__(
        self,
        store: RunStore,
        step: int,
        arrays: Mapping[str, jax.Array],
        document: Mapping[str, Any],
        *,
        keep: int,
        keep_best: bool,
    ) -> None:
        """Begin to save; returns as soon as the arrays may be overwritten.

        The checkpoint is that of `step`, with the arrays and a JSON document. When it is published all others but the
        newest `keep` ones are removed; with `keep_best` that whose document has the highest `best` stays, too.
        """
        self.store, self.step = store, step
        self.nbytes, self.written = nbytes(arrays), 0
        self.seconds = 0.0
        self.error: BaseException | None = None
        folder = f"{step}-{store.token}.{next(NUMBERS)}"
        sealed = {**document, "arrays": checksums(arrays), "folder": folder}
        copied = threading.Event()

        def save() -> None:
            begun = time.monotonic()
            try:
                write_arrays(store.place, f"{CHECKPOINTS}/{folder}", arrays, copied.set, self.count)
                wait_for_processes(store, folder)
                if is_writer():
                    store.publish(step, sealed, keep, keep_best)
            except BaseException as error:  # raised by `wait`
                self.error = error
                with suppress(UserError):  # there may be no room for anything else
                    if store.folder and is_writer() and step not in store.steps():
                        store.place.delete_folder(f"{CHECKPOINTS}/{folder}")
            finally:
                copied.set()
                self.seconds = time.monotonic() - begun

        self.thread = threading.Thread(target=save, name=f"saving {step}", daemon=True)
        self.thread.start()
        copied.wait()

    def count(self, nbytes: int) -> None:
        self.written += nbytes

    @property
    def done(self) -> bool:
        return not self.thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is published; UserError where it can't be written."""
        self.thread.join()
        release_freed_memory()
        if self.error is not None:
            with self.store.failing(f"{CHECKPOINTS}/{self.step}", "written"):
                raise self.error


def wait_for_processes(store: RunStore, folder: str) -> None:
    """Wait until all processes have written their parts of a checkpoint."""
    if jax.process_count() > 1:
        try:
            ocp.multihost.get_barrier_sync_fn()(key=folder, timeout_ms=PATIENCE * 1000)
        except jax.errors.JaxRuntimeError:
            fault = f"not all processes have written their parts within {PATIENCE} s"
            way_out = "the same command goes on from the checkpoint before"
            raise UserError(f"{store.url}/{CHECKPOINTS}/{folder}: {fault}; {way_out}") from None


def load(
    store: RunStore, step: int, like: Mapping[str, jax.ShapeDtypeStruct]
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Some arrays of a checkpoint, by name, with the shardings of `like`, and its document.

    All processes must call this. Damaged is raised in all of them alike, and UserError where a disk or bucket fails.
    """

    def opened() -> Opened:
        document = store.manifest(step)
        return document, open_arrays(store.place, f"{CHECKPOINTS}/{document['folder']}", like)

    with transfer_bar(f"checkpoint {step}", nbytes(like)) as bar:
        found = None
        with damaged_everywhere(store, step):
            if is_writer():
                found = opened()
        folder = gather_objects(found[0]["folder"] if found else "")[0]
        with damaged_everywhere(store, step):
            document, stores = found or opened_as_seen(opened, folder, f"{store}/{CHECKPOINTS}/{step}")
        with damaged_everywhere(store, step):
            arrays = read_arrays(stores, like, bar.update)
    sums, stored = checksums(arrays), document["arrays"]
    if wrong := [name for name in sums if sums[name] != stored.get(name)]:
        more = f" and of {len(wrong) - 1} others" if wrong[1:] else ""
        raise Damaged(f"the checksum of {wrong[0]}{more} differs")
    return arrays, document


def opened_as_seen(opened: Callable[[], Opened], folder: str, place: str) -> Opened:
    """What `opened` returns once it finds the arrays in `folder`, as process 0 does; UserError where it never does.

    NFS shows other machines for up to a minute what a folder held before.
    """
    deadline, waiting = time.monotonic() + VISIBLE, False
    while True:
        try:
            if (found := opened())[0]["folder"] == folder:
                return found
        except Exception as error:
            if damage(error) is None:
                raise
        if time.monotonic() > deadline:
            fault = f"process {jax.process_index()} has not seen for {VISIBLE} s what process 0 sees there"
            raise UserError(f"{place}: {fault}; let run_dir be one folder that all processes share")
        if not waiting:
            print(f"waiting up to {VISIBLE} s until {place} is seen here as process 0 sees it", file=sys.stderr)
        waiting = True
        time.sleep(POLLING)


def damage(error: Exception) -> str | None:
    """How data that raise this when they are read differ from those that were written; None where other things fail.

    What a file or object holds, or lacks, is damage. An error of the machine is not: too many open files, a disk or
    bucket that does not answer, no memory. The checkpoint may be sound.
    """
    if (fault := find_fault(error)) is not None:
        return fault.strerror if fault.errno in MISSING else None
    if isinstance(error, ValueError) and re.fullmatch("[A-Z_]+", status(error)) and status(error) not in CONTENT:
        return None  # tensorstore's, of requests or of memory
    found = isinstance(error, Damaged | ValueError | LookupError | TypeError)
    return f"{type(error).__name__}: {brief(error)[:200]}" if found else None


@contextmanager
def damaged_everywhere(store: RunStore, step: int) -> Iterator[None]:
    """What is `damage` in one process is Damaged in all; an error of the disk or bucket is a UserError."""
    reason = None
    with raise_everywhere():
        try:
            yield
        except UserError:
            raise
        except Damaged as error:
            reason = str(error)
        except Exception as error:
            if (reason := damage(error)) is None:
                with store.failing(f"{CHECKPOINTS}/{step}", "read"):
                    raise
    if reasons := [reason for reason in gather_objects(reason) if reason is not None]:
        raise Damaged(reasons[0])


def nbytes(arrays: Mapping[str, Any]) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in arrays.values())
