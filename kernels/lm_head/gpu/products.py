"""The skeleton of every kernel for Hopper: C = A B, tile after tile, and what is done with a tile that is complete.

As many thread blocks as there are multiprocessors stay to the end: they are persistent. One warpgroup of a block loads:
TMA brings slabs of A and of B into a ring of slots in shared memory, ahead of those who need them and across the ends
of tiles. Two warpgroups multiply, each one half of the rows of a tile, by WGMMA with float32 sums in registers, and
then do with the sums what the kernel is for, while the next tile's slabs arrive. Two blocks form a cluster: their tiles
lie below each other, and a slab of B, which is then the same, is read once and multicast to both.

A slab that reaches beyond its array is filled with zeros by TMA, and what is stored beyond one is dropped: sizes need
not be multiples of tiles, but Pallas wants those of arrays to be multiples of 8 and 64.

Left out: what is multiplied (`gpu_forward.py`, `gpu_backward.py`), and how large the tiles are (`gpu_tiles.py`).

The design is that of CUTLASS's persistent warp-specialised kernels, in the cooperative variant. What the hardware does:
PTX ISA, `wgmma.mma_async`, `cp.async.bulk.tensor`, `mbarrier`.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels.lm_head import target
from kernels.lm_head.gpu.tiles import MULTIPLIERS, STAGES, Tiles

_NO_INDEX = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()  # jax 0.12 has none
_LOADER_REGISTERS, _MULTIPLIER_REGISTERS = 24, 240  # 128 threads of one, 256 of the other: within 65536

Scalar = Int[Array, ""]
Ref = Any


class Operand(NamedTuple):
    """A matrix in GPU memory: rows or columns of the result by the depth over which products are summed."""

    ref: Ref
    depth_first: bool
    """The array is [depth, rows or columns]."""
    first: Scalar | int = 0
    """Where rows or columns begin in the array."""
    first_depth: Scalar | int = 0


class Work(NamedTuple):
    """What there is to do; known on the device alone, all or in part. A strip is what a cluster does at a time: tiles
    side by side, with something to carry from each to the next."""

    strips: Scalar
    place: Callable[[Scalar], tuple[Scalar, Scalar, Scalar]]
    """Of a strip: its block of a cluster's rows, its first tile of columns, how many tiles."""
    depth: Callable[[Scalar, Scalar], Scalar]
    """Of a block of rows and a tile of columns: slabs to sum."""
    slab: Callable[[Scalar, Scalar, Scalar], Scalar] = lambda block, tile, k: k
    """Of these two and a number below that depth: the slab's place."""


class Place(NamedTuple):
    """Where a warpgroup is."""

    row: Scalar
    """First row of its tiles."""
    tile: Scalar
    """First tile of columns of its strip."""
    tiles: Scalar
    warpgroup: Scalar


Product = Callable[[Scalar, Scalar], tuple[Float[Array, "R C"], Scalar]]
"""(tile of columns, step) -> its sums, step. Steps count slabs, and are handed from one product to the next."""
Strip = Callable[[Place, Product, Scalar], Scalar]
"""(place, product, step) -> step: does a strip's tiles in order."""


def kernel(body: Callable[..., None], tiles: Tiles, name: str, out: Any = ()) -> Any:
    """A Pallas kernel of persistent blocks. `body` gets a ref of each argument, and of each of `out`; arguments that
    are refs themselves are changed in place."""
    mesh = plgpu.Mesh(
        grid=(target.multiprocessors() // tiles.cluster,),
        grid_names=("cluster",),
        cluster=(tiles.cluster,),
        cluster_names=("rank",),
        num_threads=MULTIPLIERS + 1,
        thread_name="warpgroup",
    )
    params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True, reduction_scratch_bytes=0
    )
    return pl.kernel(body, out, mesh=mesh, name=name, compiler_params=params)


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for matrices, laid out as WGMMA and TMA like them: in columns of 128 bytes."""
    width = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128)))


def strips_of(
    blocks: Scalar, tiles: Scalar, length: int, together: int | None = None
) -> tuple[Scalar, Callable[..., Any]]:
    """Strips of `length` tiles that cover blocks x tiles, and where each lies.

    Args:
        together: blocks that are gone through strip by strip, before the next ones; None: one block after the other.
    """
    across = lax.div(tiles + (length - 1), jnp.int32(length))

    def place(strip: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        if together is None:
            block, number = lax.div(strip, across), lax.rem(strip, across)
        else:
            before = lax.div(strip, across * together) * together
            here = jnp.minimum(together, blocks - before)
            strip -= before * across
            block, number = before + lax.rem(strip, here), lax.div(strip, here)
        first = number * length
        return block, first, jnp.minimum(length, tiles - first)

    return blocks * across, place


def run(tiles: Tiles, work: Work, a: Operand, b: Operand, strip: Callable[..., Strip], scratch: Sequence[Any]) -> None:
    """Does all the work, from inside a kernel. `strip`, given the refs of `scratch`, is what a multiplier does."""
    freed = functools.partial(plgpu.ClusterBarrier, collective_axes=("rank",)) if tiles.cluster > 1 else plgpu.Barrier

    def roles(a_slots: Ref, b_slots: Ref, *others: Ref) -> None:
        *refs, full, free = others
        ring = _Ring(tiles, a, b, a_slots, b_slots, full, free)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == MULTIPLIERS)
        def _() -> None:
            plgpu.set_max_registers(_LOADER_REGISTERS, action="decrease")
            _load(ring, work)

        @pl.when(warpgroup < MULTIPLIERS)
        def _() -> None:
            plgpu.set_max_registers(_MULTIPLIER_REGISTERS, action="increase")
            _multiply(ring, work, warpgroup, strip(*refs))

    pl.run_scoped(
        roles,
        swizzled(_slots(tiles, tiles.rows, a), a.ref.dtype),
        swizzled(_slots(tiles, tiles.columns, b), b.ref.dtype),
        *scratch,
        plgpu.Barrier(num_arrivals=2, num_barriers=tiles.slots),
        freed(num_arrivals=MULTIPLIERS, num_barriers=tiles.slots),
        collective_axes="warpgroup",
    )


class _Ring(NamedTuple):
    """Slots in shared memory, that are filled and freed in turn."""

    tiles: Tiles
    a: Operand
    b: Operand
    a_slots: Ref
    b_slots: Ref
    full: Ref
    """Barriers: both slabs have arrived."""
    free: Ref
    """Barriers: all who read them, in both blocks, are done."""


def _slots(tiles: Tiles, size: int, operand: Operand) -> tuple[int, int, int]:
    return (tiles.slots, tiles.depth, size) if operand.depth_first else (tiles.slots, size, tiles.depth)


def _over_strips(work: Work, body: Callable[..., Scalar]) -> Scalar:
    """`step = body(block, tile, tiles, step)` for each of this cluster's strips."""
    cluster, clusters = lax.axis_index("cluster"), lax.axis_size("cluster")
    mine = lax.div(work.strips - cluster + (clusters - 1), jnp.int32(clusters))

    def one(i: Scalar, step: Scalar) -> Scalar:
        return body(*work.place(cluster + i * clusters), step)

    return lax.fori_loop(0, mine, one, jnp.int32(0))


def _load(ring: _Ring, work: Work) -> None:
    tiles, rank = ring.tiles, lax.axis_index("rank")

    def strip(block: Scalar, first: Scalar, number: Scalar, step: Scalar) -> Scalar:
        row = (block * tiles.cluster + rank) * tiles.rows

        def tile(t: Scalar, step: Scalar) -> Scalar:
            depth = work.depth(block, first + t)

            def slab(k: Scalar, step: Scalar) -> Scalar:
                at, slot = work.slab(block, first + t, k) * tiles.depth, lax.rem(step, jnp.int32(tiles.slots))
                column = (first + t) * tiles.columns
                plgpu.barrier_wait(ring.free.at[slot])
                a = _slab(ring.a, row, tiles.rows, at, tiles.depth)
                plgpu.copy_gmem_to_smem(a, ring.a_slots.at[slot], ring.full.at[slot])
                b = _slab(ring.b, column, tiles.columns, at, tiles.depth)
                shared = "rank" if tiles.cluster > 1 else None
                plgpu.copy_gmem_to_smem(b, ring.b_slots.at[slot], ring.full.at[slot], collective_axes=shared)
                return step + 1

            return lax.fori_loop(0, depth, slab, step)

        return lax.fori_loop(0, number, tile, step)

    step = _over_strips(work, strip)
    for i in range(tiles.slots):  # the other block of the cluster frees slots in this one: not after its end
        plgpu.barrier_wait(ring.free.at[lax.rem(step + i, jnp.int32(tiles.slots))])


def _slab(operand: Operand, start: Scalar, size: int, at: Scalar, depth: int) -> Ref:
    own, along = pl.ds(operand.first + start, size), pl.ds(operand.first_depth + at, depth)
    return operand.ref.at[along, own] if operand.depth_first else operand.ref.at[own, along]


def _multiply(ring: _Ring, work: Work, warpgroup: Scalar, strip: Strip) -> None:
    tiles, rank = ring.tiles, lax.axis_index("rank")
    slots = jnp.int32(tiles.slots)
    for slot in range(tiles.slots):
        plgpu.barrier_arrive(ring.free.at[slot])

    def one(block: Scalar, first: Scalar, number: Scalar, step: Scalar) -> Scalar:
        def product(t: Scalar, step: Scalar) -> tuple[Float[Array, "R C"], Scalar]:
            depth = work.depth(block, t)

            def accumulate(sums: Ref) -> Float[Array, "R C"]:
                def slab(k: Scalar, step: Scalar) -> Scalar:
                    slot = lax.rem(step, slots)
                    plgpu.barrier_wait(ring.full.at[slot])
                    plgpu.wgmma(sums, *_slabs(ring, slot, warpgroup))
                    plgpu.wgmma_wait(1)  # the one before is done

                    @pl.when(k > 0)
                    def _() -> None:
                        plgpu.barrier_arrive(ring.free.at[lax.rem(step + (slots - 1), slots)])

                    return step + 1

                lax.fori_loop(0, depth, slab, step)
                return sums[...]

            sums = pl.run_scoped(accumulate, plgpu.ACC((tiles.rows_each, tiles.columns), jnp.float32))
            step += depth

            @pl.when(depth > 0)
            def _() -> None:
                plgpu.barrier_arrive(ring.free.at[lax.rem(step + (slots - 1), slots)])

            return sums, step

        row = (block * tiles.cluster + rank) * tiles.rows + warpgroup * tiles.rows_each
        return strip(Place(row, first, number, warpgroup), product, step)

    _over_strips(work, one)
    plgpu.wait_smem_to_gmem(0)


def _slabs(ring: _Ring, slot: Scalar, warpgroup: Scalar) -> tuple[Ref, Ref]:
    """This warpgroup's rows of A's slab, and B's."""
    rows = pl.ds(warpgroup * ring.tiles.rows_each, ring.tiles.rows_each)
    a = ring.a_slots.at[slot, :, rows] if ring.a.depth_first else ring.a_slots.at[slot, rows]
    b = ring.b_slots.at[slot]
    return a.transpose((1, 0)) if ring.a.depth_first else a, b if ring.b.depth_first else b.transpose((1, 0))


# --- results ------------------------------------------------------------------------------------------------------


PIECE = 64
"""Columns of a tile that are worked on at a time."""


def pieces_of(y: Float[Array, "R C"], width: int = PIECE) -> list[Float[Array, "R P"]]:
    return [y[:, start : start + width] for start in range(0, y.shape[1], width)]


def column(piece: Array, number: int) -> Int[Array, "R P"]:
    """Of each element of a tile's piece, its column in the tile."""
    return lax.broadcasted_iota(jnp.int32, piece.shape, 1) + number * PIECE


def stage(dtype: Any) -> Any:
    """Scratch of `send`: pieces of tiles on their way out."""
    return swizzled((MULTIPLIERS, STAGES, 64, 128 // jnp.dtype(dtype).itemsize), dtype)


def send(stages: Ref, place: Place, number: int, piece: Array, to: Ref, add: bool = False) -> None:
    """Stores a tile's piece of that number, as wide as a stage, or adds it to what is there."""
    buffer = stages.at[place.warpgroup, number % STAGES]
    plgpu.wait_smem_to_gmem(STAGES - 1, wait_read_only=True)
    buffer[...] = piece.astype(stages.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, to, reduction_op="add" if add else None)


def vectors(number: int) -> Any:
    """Scratch of `send_vectors`."""
    return plgpu.SMEM((MULTIPLIERS, number, 64), jnp.float32)


def send_vectors(buffers: Ref, place: Place, values: Sequence[Array], to: Callable[[int], Ref]) -> None:
    """Stores a number for each of a warpgroup's rows where `to` says, of each of `values`."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i, value in enumerate(values):
        buffers[place.warpgroup, i] = value
    plgpu.commit_smem()
    for i in range(len(values)):
        plgpu.copy_smem_to_gmem(buffers.at[place.warpgroup, i], to(i), commit_group=i + 1 == len(values))


def vector(ref: Ref, place: Place, *index: Any) -> Array:
    """What `ref` has for a warpgroup's rows."""
    return load(ref.at[(*index, pl.ds(place.row, 64))])


def load(ref: Ref) -> Array:
    """What is in GPU memory, in registers."""
    return plgpu.load(ref, *_NO_INDEX, optimized=False)
