"""Writes and reads arrays in chunks, in their place on a disk or in a bucket.

Orbax writes, and each shard is written once. On reading, every chunk is read once over all processes, too: the devices
of one process or of several may need it; one of those processes reads it, in turn, and passes it on to the others over
the devices' network. The host holds the process's own shards of an array, and some chunks.
"""

import asyncio
import ctypes
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax.experimental import multihost_utils
from orbax.checkpoint.serialization import async_serialize

from mllm.store.bucket import Bucket
from mllm.store.folder import Folder

CHUNK_BYTES = 2 * 2**20
"""Arrays are saved in chunks of at most this size, so that processes can share the reading of any of them.

In a bucket each is an object. With 4 MiB a restore holds 70 MiB more: each of the requests under way is held several
times."""
AHEAD_BYTES = 16 * 2**20
"""The bytes that a process reads ahead."""
ALIGNMENT = 64
"""XLA's CPU backend uses an array of NumPy's that is aligned like this without a copy."""

Box = tuple[tuple[int, int], ...]
"""Start and stop in each dim."""


class Piece(NamedTuple):
    """A stored chunk of an array, cut at the array's end."""

    box: Box
    needed_by: tuple[int, ...]
    """The processes whose devices hold a part of it, ascending."""
    reader: int


def write_arrays(
    place: Bucket | Folder,
    folder: str,
    arrays: Mapping[str, jax.Array],
    copied: Callable[[], object],
    done: Callable[[int], object],
) -> None:
    """Write what this process holds of arrays, by name, each in a folder of its own below `folder`.

    `copied` is called as soon as the arrays may be overwritten: their values are on the host. `done` is told the bytes
    of each array that this process has written. All processes must call this with the same arrays.
    """

    async def write(name: str, leaf: jax.Array, turn: int) -> None:
        replicas = 1 + max(shard.replica_id for shard in leaf.global_shards)
        spec = {
            "driver": "zarr",
            "kvstore": place.array_spec(f"{folder}/{name}"),
            "dtype": jnp.dtype(leaf.dtype).name,
            # zstd would take a tenth off the size, and every core for several steps, which then wait for theirs.
            "metadata": {"shape": leaf.shape, "chunks": chunk_shape(leaf), "compressor": None},
            "store_data_equal_to_fill_value": True,
        }
        # Processes with the same shards take turns, an array each.
        await async_serialize(leaf, spec, context=place.context, replica_id=turn % replicas, use_replica_parallel=False)
        done(leaf.nbytes)

    async def write_all() -> None:
        tasks = [asyncio.create_task(write(*item, turn)) for turn, item in enumerate(arrays.items())]
        await asyncio.sleep(0)  # meanwhile each of them takes its first step, in which it copies its array to the host
        copied()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        for error in found:
            if error is not None:
                raise error

    asyncio.run(write_all())


def chunk_shape(leaf: jax.Array | jax.ShapeDtypeStruct) -> list[int]:
    """The shape of an array's chunks: a shard's, divided by small numbers until it has at most `CHUNK_BYTES`.

    No chunk is a part of two shards, which two processes may write.
    """
    shape = [*leaf.sharding.shard_shape(leaf.shape)]
    while math.prod(shape) * leaf.dtype.itemsize > CHUNK_BYTES:
        factors = {dim: smallest_factor(size) for dim, size in enumerate(shape) if size > 1}
        dim = min(factors, key=lambda dim: (factors[dim], -shape[dim]))
        shape[dim] //= factors[dim]
    return shape


def smallest_factor(number: int) -> int:
    """The smallest prime that divides a number."""
    return next((factor for factor in range(2, math.isqrt(number) + 1) if number % factor == 0), number)


def open_arrays(
    place: Bucket | Folder, folder: str, like: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, tensorstore.TensorStore]:
    """The stored arrays, by name; only metadata is read. ValueError where one is missing, or unlike `like`."""
    specs = {name: {"driver": "zarr", "kvstore": place.array_spec(f"{folder}/{name}")} for name in like}
    opened = {name: tensorstore.open(spec, read=True, open=True, context=place.context) for name, spec in specs.items()}
    stores = {name: store.result() for name, store in opened.items()}
    for name, store in stores.items():
        stored, wanted = (store.shape, store.dtype.numpy_dtype), (like[name].shape, like[name].dtype)
        if stored != wanted:
            raise ValueError(f"{name} is {stored[1]}{list(stored[0])}, not {wanted[1]}{list(wanted[0])}")
    return stores


def read_arrays(
    stores: Mapping[str, tensorstore.TensorStore],
    like: Mapping[str, jax.ShapeDtypeStruct],
    done: Callable[[int], object],
) -> dict[str, jax.Array]:
    """The arrays with the shardings of `like`; `done` is told the bytes of each one that is complete.

    All processes must call this with the same arrays. An error of reading is raised when all have passed on what they
    could read; it may be raised in one process only, which reads nothing after it.
    """
    me, arrays, error = jax.process_index(), dict[str, jax.Array](), None
    turns = itertools.count()
    pieces = {name: list(plan_reads(stores[name], leaf, turns)) for name, leaf in like.items()}
    reads = read_ahead((stores[name], piece) for name in like for piece in pieces[name] if piece.reader == me)
    for name, leaf in like.items():
        assert leaf.sharding is not None
        held = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        parts = {box: aligned_empty(box, leaf.dtype) for box in {box_of(index, leaf.shape) for index in held}}
        for batch in batches(pieces[name]):
            own = None
            if me in batch:
                try:
                    if error is None:
                        own = next(reads).result()
                except Exception as raised:  # tensorstore raises many kinds; the others wait for this chunk
                    error = raised
                if error is not None:
                    own = np.zeros([stop - start for start, stop in batch[me].box], leaf.dtype)
            for piece, chunk in pass_on(batch, own, leaf.dtype):
                for box, part in parts.items():
                    copy_overlap(part, box, chunk, piece.box)
            release_freed_memory()
        arrays[name] = on_devices(leaf, parts)
        done(arrays[name].nbytes)
    if error is not None:
        raise error
    return arrays


def on_devices(leaf: jax.ShapeDtypeStruct, parts: Mapping[Box, np.ndarray]) -> jax.Array:
    """The array on its devices, of the parts that this process's devices hold."""

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        return parts[box_of(index, leaf.shape)]

    return jax.block_until_ready(jax.make_array_from_callback(leaf.shape, leaf.sharding, part))


def plan_reads(store: tensorstore.TensorStore, leaf: jax.ShapeDtypeStruct, turns: Iterator[int]) -> Iterator[Piece]:
    """All chunks of an array, each with its reader; the same in all processes. Those that share chunks take turns."""
    assert leaf.sharding is not None
    holders: dict[Box, set[int]] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        holders.setdefault(box_of(index, leaf.shape), set()).add(device.process_index)
    chunk = [size or 1 for size in store.chunk_layout.read_chunk.shape or ()]
    for corner in itertools.product(*map(range, [0] * len(chunk), leaf.shape, chunk)):
        box = tuple((low, min(low + step, size)) for low, step, size in zip(corner, chunk, leaf.shape, strict=True))
        needed = sorted(set().union(*(held for part, held in holders.items() if overlap(part, box) is not None)))
        yield Piece(box, tuple(needed), needed[next(turns) % len(needed)] if needed[1:] else needed[0])


def batches(pieces: list[Piece]) -> Iterator[dict[int, Piece]]:
    """The pieces in their order, at most one for each process that reads, by its number."""
    batch: dict[int, Piece] = {}
    for piece in pieces:
        if piece.reader in batch:
            yield batch
            batch = {}
        batch[piece.reader] = piece
    yield batch


def read_ahead(pieces: Iterable[tuple[tensorstore.TensorStore, Piece]]) -> Iterator[tensorstore.Future[np.ndarray]]:
    """A future of each piece's values, in order; those that follow are read meanwhile, `AHEAD_BYTES` of them."""
    begun: deque[tuple[tensorstore.Future[np.ndarray], int]] = deque()
    for store, piece in pieces:
        values = store[tuple(itertools.starmap(slice, piece.box))]
        begun.append((values.read(), values.size * values.dtype.numpy_dtype.itemsize))
        while sum(nbytes for _, nbytes in begun) > AHEAD_BYTES:
            yield begun.popleft()[0]
    while begun:
        yield begun.popleft()[0]


def pass_on(batch: Mapping[int, Piece], own: np.ndarray | None, dtype: np.dtype) -> Iterator[tuple[Piece, np.ndarray]]:
    """The chunks that this process needs: what it has read for itself, and what any process has read for several."""
    me = jax.process_index()
    if own is not None:
        yield batch[me], own
    shared = {reader: piece for reader, piece in batch.items() if len(piece.needed_by) > 1}
    if not shared:
        return
    sizes = {reader: math.prod(stop - start for start, stop in piece.box) for reader, piece in shared.items()}
    length = 1 << (max(sizes.values()) * dtype.itemsize - 1).bit_length()  # JAX compiles a program for each length
    message = own.tobytes() if own is not None and me in shared else b""
    received = multihost_utils.process_allgather(np.frombuffer(message.ljust(length, b"\0"), np.uint8))
    for reader, piece in shared.items():
        if reader != me and me in piece.needed_by:
            values = received[reader, : sizes[reader] * dtype.itemsize].view(dtype)
            yield piece, values.reshape([stop - start for start, stop in piece.box])


def box_of(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
    assert index is not None
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def overlap(one: Box, other: Box) -> Box | None:
    """The box that two of them have in common, if there is one."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def copy_overlap(target: np.ndarray, target_box: Box, source: np.ndarray, source_box: Box) -> None:
    """Copy what two arrays have in common, which are those parts of a larger one."""
    if (common := overlap(target_box, source_box)) is not None:
        inside, outside = (
            tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(common, box, strict=True))
            for box in (target_box, source_box)
        )
        target[inside] = source[outside]


def aligned_empty(box: Box, dtype: np.dtype) -> np.ndarray:
    """An array for the values of a box, which the CPU backend need not copy."""
    shape = [stop - start for start, stop in box]
    memory = np.empty(math.prod(shape) * dtype.itemsize + ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT
    return memory[offset : offset + memory.size - ALIGNMENT].view(dtype).reshape(shape)


def release_freed_memory() -> None:
    """Give back to the system what saving or reading has freed, where the C library is glibc.

    Tensorstore's threads leave holes of many megabytes in glibc's heaps, which keep them: more after every save.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
