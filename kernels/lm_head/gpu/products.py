"""The skeleton of every Hopper kernel: computes C = A B tile by tile, and hands each finished tile to an epilogue.

The kernels are persistent: as many thread blocks as there are multiprocessors run to the end. One warpgroup of a block
loads: TMA brings slabs of A and B into a ring of slots in shared memory. The warpgroup works ahead of the slabs' use
and across the ends of tiles. Two warpgroups multiply, each one half of a tile's rows, by WGMMA with float32 sums in
registers, and then run the epilogue on the sums. Two blocks form a cluster. Their tiles are neighbours along the rows,
and a slab of B is read once and multicast to both. TMA reads zeros beyond an array, and drops stores beyond it. Pallas
requires sizes that are multiples of 8 and 64.

The design is CUTLASS's cooperative persistent kernel. The hardware's part: PTX ISA, `wgmma.mma_async`,
`cp.async.bulk.tensor`, `mbarrier`.

Suffixes: R rows of a warpgroup's half of a tile, C columns of a tile, P columns of a piece of it.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import target
from ..shapes import Array, Float, Int
from .tiles import MULTIPLIERS, STAGES, Tiles

# jax 0.10 requires an index beside the reference, 0.11 deprecates it, 0.12 has none.
_INDEX = inspect.signature(plgpu.load).parameters.get("idx")
_NO_INDEX = ((),) if _INDEX is not None and _INDEX.default is inspect.Parameter.empty else ()
COMPILER_PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True, reduction_scratch_bytes=0
)
_LOADER_REGISTERS, _MULTIPLIER_REGISTERS = 24, 240  # for 128 loading and 256 multiplying threads: within 65536

Scalar = Int[Array, ""]
Ref = Any


class Operand(NamedTuple):
    """A factor of the product in GPU memory: the result's rows (or columns) by the depth over which it is summed."""

    ref: Ref
    depth_first: bool  # whether the array is [depth, rows or columns] instead of [rows or columns, depth]
    first: Scalar | int = 0  # the array's index of the first row (or column)
    first_depth: Scalar | int = 0


class Work(NamedTuple):
    """The strips that a kernel computes: neighbouring tiles that one cluster computes in order."""

    strips: Scalar
    place: Callable[[Scalar], tuple[Scalar, Scalar, Scalar]]
    """strip -> (block of a cluster's rows, first tile of columns, number of tiles)."""
    slabs: Scalar  # number of slabs over which each tile is summed


class Place(NamedTuple):
    """The part of a strip that one warpgroup computes."""

    row: Scalar  # first row of its tiles
    tile: Scalar  # first tile of columns of the strip
    tiles: Scalar  # number of tiles of the strip
    warpgroup: Scalar


Product = Callable[[Scalar, Scalar], tuple[Float[Array, "R C"], Scalar]]
"""(tile of columns, step) -> (the tile's sums, step). The step counts the slabs that were consumed so far."""
Strip = Callable[[Place, Product, Scalar], Scalar]
"""(place, product, step) -> step: computes the tiles of a strip in order, and stores what the kernel is for."""


def kernel(body: Callable[..., None], tiles: Tiles, name: str, out: Any = ()) -> Any:
    """A Pallas kernel of persistent blocks.

    `body` takes a ref of each argument (refs themselves are changed in place), then a ref of each array of `out`.
    """
    mesh = plgpu.Mesh(
        grid=(target.multiprocessors() // tiles.cluster,),
        grid_names=("cluster",),
        cluster=(tiles.cluster,),
        cluster_names=("rank",),
        num_threads=MULTIPLIERS + 1,
        thread_name="warpgroup",
    )
    return pl.kernel(body, out, mesh=mesh, name=name, compiler_params=COMPILER_PARAMS)


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for matrices in the layout that WGMMA and TMA need: swizzled columns of 128 bytes."""
    width = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128)))


def blocks_of(tiles: Tiles, rows: Scalar) -> Scalar:
    """Number of blocks of a cluster's rows that hold so many rows."""
    return lax.div(rows + (tiles.cluster_rows - 1), jnp.int32(tiles.cluster_rows))


def strips_of(
    blocks: Scalar, tiles: Scalar, length: int | Scalar, together: int | None = None
) -> tuple[Scalar, Callable[..., Any]]:
    """The number of strips of `length` tiles that cover blocks x tiles, and `Work.place` for them.

    The strips of `together` blocks are interleaved, to share what they load of the columns; None: of one block.
    """
    across = lax.div(tiles + (length - 1), jnp.int32(length))

    def place(strip: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        if together is None:
            block, number = lax.div(strip, across), lax.rem(strip, across)
        else:
            before = lax.div(strip, across * together) * together
            count = jnp.minimum(together, blocks - before)
            strip -= before * across
            block, number = before + lax.rem(strip, count), lax.div(strip, count)
        first = number * length
        return block, first, jnp.minimum(length, tiles - first)

    return blocks * across, place


def run(tiles: Tiles, work: Work, a: Operand, b: Operand, strip: Callable[..., Strip], scratch: Sequence[Any]) -> None:
    """Does a kernel's work, called in its body. `strip(*refs of scratch)` makes a multiplier's function of a strip."""
    freed = functools.partial(plgpu.ClusterBarrier, collective_axes=("rank",)) if tiles.cluster > 1 else plgpu.Barrier

    def roles(a_slots: Ref, b_slots: Ref, *remaining: Ref) -> None:
        *refs, full, free = remaining
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
        swizzled(_slots_shape(tiles, tiles.rows, a), b.ref.dtype),
        swizzled(_slots_shape(tiles, tiles.columns, b), b.ref.dtype),
        *scratch,
        plgpu.Barrier(num_arrivals=2, num_barriers=tiles.slots),
        freed(num_arrivals=MULTIPLIERS, num_barriers=tiles.slots),
        collective_axes="warpgroup",
    )


class _Ring(NamedTuple):
    """Slots in shared memory that are filled and freed in turn."""

    tiles: Tiles
    a: Operand
    b: Operand
    a_slots: Ref
    b_slots: Ref
    full: Ref  # one barrier a slot: both slabs have arrived
    free: Ref  # one barrier a slot: all readers, in both blocks of the cluster, are done


def _slots_shape(tiles: Tiles, size: int, operand: Operand) -> tuple[int, int, int]:
    return (tiles.slots, tiles.depth, size) if operand.depth_first else (tiles.slots, size, tiles.depth)


def _over_strips(work: Work, body: Callable[..., Scalar]) -> Scalar:
    """`step = body(block, tile, tiles, step)` for each of this cluster's strips."""
    cluster, clusters = lax.axis_index("cluster"), lax.axis_size("cluster")
    strips = lax.div(work.strips - cluster + (clusters - 1), jnp.int32(clusters))

    def strip(i: Scalar, step: Scalar) -> Scalar:
        return body(*work.place(cluster + i * clusters), step)

    return lax.fori_loop(0, strips, strip, jnp.int32(0))


def _load(ring: _Ring, work: Work) -> None:
    tiles, rank = ring.tiles, lax.axis_index("rank")

    def strip(block: Scalar, first: Scalar, number: Scalar, step: Scalar) -> Scalar:
        row = (block * tiles.cluster + rank) * tiles.rows

        def tile(t: Scalar, step: Scalar) -> Scalar:
            def slab(k: Scalar, step: Scalar) -> Scalar:
                at, slot = k * tiles.depth, lax.rem(step, jnp.int32(tiles.slots))
                column = (first + t) * tiles.columns
                plgpu.barrier_wait(ring.free.at[slot])
                a = _slab_ref(ring.a, row, tiles.rows, at, tiles.depth)
                plgpu.copy_gmem_to_smem(a, ring.a_slots.at[slot], ring.full.at[slot])
                b = _slab_ref(ring.b, column, tiles.columns, at, tiles.depth)
                shared = "rank" if tiles.cluster > 1 else None
                plgpu.copy_gmem_to_smem(b, ring.b_slots.at[slot], ring.full.at[slot], collective_axes=shared)
                return step + 1

            return lax.fori_loop(0, work.slabs, slab, step)

        return lax.fori_loop(0, number, tile, step)

    step = _over_strips(work, strip)
    for i in range(tiles.slots):  # the other block of the cluster frees slots in this one: it must not end before
        plgpu.barrier_wait(ring.free.at[lax.rem(step + i, jnp.int32(tiles.slots))])


def _slab_ref(operand: Operand, start: Scalar, size: int, at: Scalar, depth: int) -> Ref:
    across, along = pl.ds(operand.first + start, size), pl.ds(operand.first_depth + at, depth)
    return operand.ref.at[along, across] if operand.depth_first else operand.ref.at[across, along]


def _multiply(ring: _Ring, work: Work, warpgroup: Scalar, strip: Strip) -> None:
    tiles, rank = ring.tiles, lax.axis_index("rank")
    slots = jnp.int32(tiles.slots)
    for slot in range(tiles.slots):
        plgpu.barrier_arrive(ring.free.at[slot])

    def strip_of_block(block: Scalar, first: Scalar, number: Scalar, step: Scalar) -> Scalar:
        def product(t: Scalar, step: Scalar) -> tuple[Float[Array, "R C"], Scalar]:
            def accumulate(sums: Ref) -> Float[Array, "R C"]:
                def slab(k: Scalar, step: Scalar) -> Scalar:
                    slot = lax.rem(step, slots)
                    plgpu.barrier_wait(ring.full.at[slot])
                    plgpu.wgmma(sums, *_slab_refs(ring, slot, warpgroup))
                    plgpu.wgmma_wait(1)  # the previous product is done

                    @pl.when(k > 0)
                    def _() -> None:
                        plgpu.barrier_arrive(ring.free.at[lax.rem(step + (slots - 1), slots)])

                    return step + 1

                lax.fori_loop(0, work.slabs, slab, step)
                return sums[...]

            sums = pl.run_scoped(accumulate, plgpu.ACC((tiles.rows_each, tiles.columns), jnp.float32))
            step += work.slabs

            @pl.when(work.slabs > 0)
            def _() -> None:
                plgpu.barrier_arrive(ring.free.at[lax.rem(step + (slots - 1), slots)])

            return sums, step

        row = (block * tiles.cluster + rank) * tiles.rows + warpgroup * tiles.rows_each
        return strip(Place(row, first, number, warpgroup), product, step)

    _over_strips(work, strip_of_block)
    plgpu.wait_smem_to_gmem(0)


def _slab_refs(ring: _Ring, slot: Scalar, warpgroup: Scalar) -> tuple[Ref, Ref]:
    """A's slab, this warpgroup's rows of it, and B's."""
    rows = pl.ds(warpgroup * ring.tiles.rows_each, ring.tiles.rows_each)
    a = ring.a_slots.at[slot, :, rows] if ring.a.depth_first else ring.a_slots.at[slot, rows]
    b = ring.b_slots.at[slot]
    return a.transpose((1, 0)) if ring.a.depth_first else a, b if ring.b.depth_first else b.transpose((1, 0))


# --- epilogues ----------------------------------------------------------------------------------------------------


PIECE = 64  # columns of a tile that an epilogue works on at a time


def pieces_of(y: Float[Array, "R C"], width: int = PIECE) -> list[Float[Array, "R P"]]:
    return [y[:, start : start + width] for start in range(0, y.shape[1], width)]


def column_index(piece: Array, number: int) -> Int[Array, "R P"]:
    """The tile's column at each element of piece `number`."""
    return lax.broadcasted_iota(jnp.int32, piece.shape, 1) + number * PIECE


def piece_stages(dtype: Any) -> Any:
    """Scratch of `store_piece`."""
    return swizzled((MULTIPLIERS, STAGES, 64, 128 // jnp.dtype(dtype).itemsize), dtype)


def store_piece(stages: Ref, place: Place, number: int, piece: Array, to: Ref, add: bool = False) -> None:
    """Stores piece `number` of a tile, as wide as a stage, in GPU memory, or adds it to the memory."""
    buffer = stages.at[place.warpgroup, number % STAGES]
    plgpu.wait_smem_to_gmem(STAGES - 1, wait_read_only=True)
    buffer[...] = piece.astype(stages.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, to, reduction_op="add" if add else None)


def vector_stages(number: int) -> Any:
    """Scratch of `store_vectors`, for up to `number` vectors."""
    return plgpu.SMEM((MULTIPLIERS, number, 64), jnp.float32)


def store_vectors(stages: Ref, place: Place, values: Sequence[Array], to: Callable[[int], Ref]) -> None:
    """Stores `values[i]`, one float32 for each of a warpgroup's rows, at `to(i)` in GPU memory."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i, value in enumerate(values):
        stages[place.warpgroup, i] = value
    plgpu.commit_smem()
    for i in range(len(values)):
        plgpu.copy_smem_to_gmem(stages.at[place.warpgroup, i], to(i), commit_group=i + 1 == len(values))


def load_vector(ref: Ref, place: Place, *index: Any) -> Array:
    """The numbers of a warpgroup's rows from `ref[*index]` in GPU memory."""
    return load(ref.at[(*index, pl.ds(place.row, 64))])


def load(ref: Ref) -> Array:
    """Loads from GPU memory into registers."""
    return plgpu.load(ref, *_NO_INDEX, optimized=False)
