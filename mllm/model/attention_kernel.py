"""The skeleton of the kernels of packed_attention.py: blocks of columns stream past the rows of a thread block.

Rows are queries, and columns are keys, or the other way round. Two warpgroups multiply 64 rows each by WGMMA. A third
warpgroup loads blocks of 64 columns into a ring of slots in shared memory by TMA. Each row has a first and a last
column. Blocks outside of all rows' columns are not loaded, and no mask is stored.

Letters: B rows of tokens, T places of a row, H size of a head, X heads of the rows; R rows and C columns of a tile of
scores.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int

from lm_head.gpu.products import COMPILER_PARAMS, Ref, load, swizzled
from lm_head.gpu.tiles import SHARED_MEMORY

SIDE = 64
"""Rows of a warpgroup, and columns of a block."""
WARPGROUPS, SLOTS = 2, 4
"""Warpgroups that multiply, and blocks of columns in shared memory; fewer where they do not fit."""
LOADER_REGISTERS, MULTIPLIER_REGISTERS = 24, 240
"""Registers of a thread, for 128 threads that load and 256 that multiply: within 65,536. One warpgroup that multiplies
has more without a limit."""


class Columns(NamedTuple):
    """A block of columns."""

    tiles: list[Ref]
    at: tuple[Any, Any, Any]
    """The index of the columns in an array [B, _, T]."""
    seen: Bool[Array, "R C"]
    """Whether a row meets a column."""


class Rows(NamedTuple):
    """A warpgroup's rows."""

    tiles: list[Ref]
    scratch: Ref
    at: tuple[Any, Any, Any]
    """The index of the rows in an array [B, X, T]."""
    loop: Callable[[Callable[[Columns, Any], Any], Any], Any]
    """`carry = add(columns, carry)` for each block of columns, from a first carry to the last."""

    def store_numbers(self, ref: Ref, numbers: Float32[Array, "R"]) -> None:
        self.scratch[...] = numbers
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.scratch, ref.at[self.at])

    def store(self, *results: tuple[Ref, list[Float32[Array, "R _"]]]) -> None:
        """Stores results, in parts of their columns, by way of the tiles of the rows; waits for all stores."""
        row, head, places = self.at
        for tile, (_, parts) in zip(self.tiles, results, strict=False):
            for i, part in enumerate(parts):
                tile[:, pl.ds(i * part.shape[1], part.shape[1])] = part.astype(tile.dtype)
        plgpu.commit_smem()
        for tile, (ref, _) in zip(self.tiles, results, strict=False):
            plgpu.copy_smem_to_gmem(tile, ref.at[row, places, head])
        plgpu.wait_smem_to_gmem(0)


def run(
    name: str,
    compute: Callable[..., None],
    outs: Sequence[Any],
    of_rows: Sequence[Float[Array, "B T X H"]],
    of_columns: Sequence[Float[Array, "B T _ H"]],
    bounds: tuple[Int[Array, "B T"], Int[Array, "B T"]],
    more: Sequence[Array] = (),
    last_first: bool = False,
) -> Any:
    """Runs `compute(rows, *refs of more, *refs of outs)` for all rows of all heads of `of_rows`.

    `bounds` are the first and the last column of each row; bounds grow along a row of tokens. `outs` give the number of
    heads: several heads may share a head of rows or of columns, and a head of rows may have several heads of columns.
    Blocks begin in order, or with `last_first` from the last block. The blocks with most work should come first.
    """
    (batch, time, row_heads, size), dtype = of_rows[0].shape, of_rows[0].dtype
    heads, column_heads = outs[0].shape[2], of_columns[0].shape[2]
    fitting = SHARED_MEMORY // (SIDE * size * 2)  # tiles
    warpgroups = WARPGROUPS if fitting >= WARPGROUPS * len(of_rows) + 2 * len(of_columns) else 1
    slots = min(SLOTS, (fitting - warpgroups * len(of_rows)) // len(of_columns))
    together, heads_each = warpgroups * SIDE, max(1, column_heads // heads)

    def body(*refs: Ref) -> None:
        row_refs, column_refs, (low, high), others = _split(refs, len(of_rows), len(of_columns), 2)
        row, head = lax.axis_index("row"), lax.axis_index("head")
        block = lax.axis_index("block")
        start = (time // together - 1 - block if last_first else block) * together
        row_head = lax.div(head * row_heads, jnp.int32(heads))
        begin = lax.div(low[row, start], jnp.int32(SIDE))
        blocks = lax.div(high[row, start + (together - 1)], jnp.int32(SIDE)) + 1 - begin
        steps = blocks * heads_each

        def columns_of(step: Int[Array, ""]) -> tuple[Any, Any, Any]:
            column_head = lax.div(head * column_heads, jnp.int32(heads)) + lax.div(step, blocks)
            return row, column_head, pl.ds(pl.multiple_of((begin + lax.rem(step, blocks)) * SIDE, SIDE), SIDE)

        def roles(*scratch: Ref) -> None:
            tiles, rings, (numbers, arrived, full, free) = _split(scratch, len(of_rows), len(of_columns))
            warpgroup = lax.axis_index("warpgroup")

            def load_columns(step: Int[Array, ""], carry: None) -> None:
                slot, (_row, column_head, places) = lax.rem(step, jnp.int32(slots)), columns_of(step)

                @pl.when(step >= slots)
                def _() -> None:
                    plgpu.barrier_wait(free.at[slot])

                for ref, ring in zip(column_refs, rings, strict=True):
                    plgpu.copy_gmem_to_smem(ref.at[row, places, column_head], ring.at[slot], full.at[slot])

            @pl.when(warpgroup == warpgroups)
            def _() -> None:
                if warpgroups == WARPGROUPS:
                    plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
                lax.fori_loop(0, steps, load_columns, None)

            @pl.when(warpgroup < warpgroups)
            def _() -> None:
                if warpgroups == WARPGROUPS:
                    plgpu.set_max_registers(MULTIPLIER_REGISTERS, action="increase")
                places = pl.ds(pl.multiple_of(start + warpgroup * SIDE, SIDE), SIDE)
                for ref, tile in zip(row_refs, tiles, strict=True):
                    plgpu.copy_gmem_to_smem(ref.at[row, places, row_head], tile.at[warpgroup], arrived.at[warpgroup])
                lowest, highest = (load(ref.at[row, places]) for ref in (low, high))

                def loop(add: Callable[[Columns, Any], Any], carry: Any) -> Any:
                    def step_of(step: Int[Array, ""], carry: Any) -> Any:
                        slot, at = lax.rem(step, jnp.int32(slots)), columns_of(step)
                        column = lax.broadcasted_iota(jnp.int32, (SIDE, SIDE), 1)
                        below, above = (across(bound - at[2].start, column) for bound in (lowest, highest))
                        plgpu.barrier_wait(full.at[slot])
                        seen = (column - below).astype(jnp.uint32) <= (above - below).astype(jnp.uint32)
                        carry = add(Columns([ring.at[slot] for ring in rings], at, seen), carry)
                        plgpu.barrier_arrive(free.at[slot])
                        return carry

                    return lax.fori_loop(0, steps, step_of, carry)

                own = [tile.at[warpgroup] for tile in tiles]
                plgpu.barrier_wait(arrived.at[warpgroup])
                compute(Rows(own, numbers.at[warpgroup], (row, head, places), loop), *others)

        pl.run_scoped(
            roles,
            *[swizzled((warpgroups, SIDE, size), dtype)] * len(of_rows),
            *[swizzled((slots, SIDE, size), dtype)] * len(of_columns),
            plgpu.SMEM((warpgroups, SIDE), jnp.float32),
            plgpu.Barrier(num_arrivals=len(of_rows), num_barriers=warpgroups),
            plgpu.Barrier(num_arrivals=len(of_columns), num_barriers=slots),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=slots),
            collective_axes="warpgroup",
        )

    call = pl.kernel(
        body,
        tuple(jax.ShapeDtypeStruct(out.shape, out.dtype) for out in outs),
        mesh=plgpu.Mesh(
            grid=(time // together, heads, batch),
            grid_names=("block", "head", "row"),
            num_threads=warpgroups + 1,
            thread_name="warpgroup",
        ),
        name=name,
        compiler_params=COMPILER_PARAMS,
    )
    return call(*of_rows, *of_columns, *bounds, *more)


def _split(refs: Sequence[Ref], *counts: int) -> list[Sequence[Ref]]:
    """The first refs by their counts, and the rest."""
    parts = []
    for count in counts:
        parts.append(refs[:count])
        refs = refs[count:]
    return [*parts, refs]


def across(vector: Array, like: Array) -> Array:
    """A number of each row, at all columns."""
    return lax.broadcast_in_dim(vector, like.shape, (0,))
