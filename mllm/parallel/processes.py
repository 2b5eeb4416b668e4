"""Several processes that train one model: the rows of each process, and the exchange of values.

Values are exchanged as JSON (`gather_objects`): nothing from another process is unpickled. Process 0 writes the run's
files.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from mllm.errors import CommonError, TemporaryError, UserError

T = TypeVar("T")
FRAME = 4096
"""Bytes of the first message in `gather_objects`; longer values take a second message."""


def is_writer() -> bool:
    """Whether this process writes the run's files and prints for the user: process 0 does."""
    return jax.process_index() == 0


def gather_objects(value: T) -> list[T]:
    """The values of all processes, in order; all processes must call this at the same place.

    Values are JSON, NaN and infinities among the numbers. A tuple becomes a list, unless the process is alone.
    """
    if jax.process_count() == 1:
        return [value]
    message, size = np.frombuffer(json.dumps([jax.process_index(), value]).encode(), np.uint8), FRAME
    while True:
        padded = np.pad(message[:size], (0, max(0, size - message.size)))
        lengths, frames = multihost_utils.process_allgather((np.int32(message.size), padded))
        if max(lengths) <= size:
            values = dict(json.loads(frame[:length].tobytes()) for frame, length in zip(frames, lengths, strict=True))
            return [values[process] for process in range(jax.process_count())]
        size = 1 << (int(max(lengths)) - 1).bit_length()  # a power of two: JAX compiles a program for each size


@contextmanager
def raise_everywhere() -> Iterator[None]:
    """A UserError of one process is raised in all processes as a CommonError, so that they can save.

    The code inside must not wait for other processes. A TemporaryError ends this process alone.
    """
    fault = None
    try:
        yield
    except TemporaryError:
        raise
    except UserError as error:
        fault = str(error)
    faults = gather_objects(fault)
    for process, fault in enumerate(faults):
        if fault is not None:
            raise CommonError(fault if {*faults} == {fault} else f"process {process}: {fault}")


def from_writer(action: Callable[[], T]) -> T:
    """The result, as JSON in all processes, of an action that process 0 alone takes."""
    return cast(T, gather_objects(action() if is_writer() else None)[0])


@dataclass(frozen=True)
class RowShare:
    """This process's share of the rows of every batch: the rows on its devices."""

    index: int
    count: int
    """The number of shares; processes that differ only along tp hold the same share."""

    @classmethod
    def of_mesh(cls, mesh: Mesh) -> "RowShare":
        """The share that the mesh gives to this process; UserError where two processes' shares overlap in part."""
        owners = np.array([device.process_index for device in mesh.devices.flat]).reshape(-1, mesh.shape["tp"])
        parts = {process: tuple(np.flatnonzero((owners == process).any(axis=1)).tolist()) for process in {*owners.flat}}
        shares = sorted({*parts.values()})
        if [row for share in shares for row in share] != list(range(len(owners))) or len({*map(len, shares)}) > 1:
            part = f"a part of a tp group (mesh.tp {mesh.shape['tp']}): let one of the two divide the other"
            raise UserError(f"mesh: the {jax.local_device_count()} devices of a process hold {part}")
        return cls(shares.index(parts[jax.process_index()]), len(shares))

    def part_of(self, total: int, group: int = 1) -> slice:
        """This process's rows of a batch, whole groups; the last shares may be smaller."""
        share = -(-total // (self.count * group)) * group
        return slice(self.index * share, (self.index + 1) * share)

    def gather(self, value: T) -> list[T]:
        """The value that the first process of each share passes, in the order of the rows."""
        values = dict(reversed(gather_objects((self.index, value))))
        return [values[share] for share in range(self.count)]


ALL_ROWS = RowShare(0, 1)
"""The share of a process that trains alone."""


def local_rows(tree: Any) -> Any:
    """The rows of JAX arrays [B, ...] that this process's devices hold, as NumPy arrays; other arrays are unchanged."""

    def rows(array: Any) -> np.ndarray:
        if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
            return np.asarray(array)
        blocks = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
        return np.concatenate([blocks[start] for start in sorted(blocks)])

    return jax.tree.map(rows, tree)
