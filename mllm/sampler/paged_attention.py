"""Attention of a decode step as one kernel on Hopper GPUs, over each row's pages and tail.

A thread block takes the queries of one row that share a key head. It reads the row's keys and values, 64 places at a
time, and keeps the running maximum, sum and output of the softmax in registers (FlashAttention, arXiv:2205.14135,
section 3.1). Meanwhile TMA reads the next places. WGMMA multiplies 64 rows at a time, so the queries are padded with
zeros. The zeros add no bytes, and bytes bound a decode step.

`View.attend` computes the same with eleven of XLA's kernels. No GPU has run this kernel. Tests compare it with float64
under JAX's interpreter, and compile it for an H100.

Letters: B rows, K key heads, G queries that share a key head, N = K G query heads, H size of a head; P pages, M pages
that a row may have, T places of a page, C places of the tail; R rows of a product.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int

from lm_head import target
from lm_head.softmax import FLOOR
from mllm.model.decoder import Decoder
from mllm.model.layout import CACHED_KEYS, Layout, on_each_device

ROWS = 64
"""Rows of a product: WGMMA's."""
BLOCK = 64
"""Places that are read at a time."""
SLOTS = {64: 3, 128: 2, 256: 2}
"""Blocks of keys and values in shared memory, by H; so 3, 2 and 1 thread blocks fit on a multiprocessor."""
COLUMNS = 64
"""Columns of the output in a product: all sums of a head of 256 would not fit in registers beside the output."""
LONGEST = 4096
"""The most places of a row. One thread block reads all places of a row in turn, and XLA's kernels read pages side by
side. By arithmetic both ways take as long for a row of this length, if few rows are left at the end of a rollout."""


def can_run(model: Decoder, places: int) -> bool:
    """Whether the kernel may compute the model's decode steps for rows of so many places."""
    config, mesh = model.config, None if model.layout is None else model.layout.mesh
    fits = config.head_dim in SLOTS and config.num_attention_heads <= ROWS * config.num_key_value_heads
    allowed = model.own_kernels and model.dtype == jnp.bfloat16 and places <= LONGEST
    return allowed and fits and target.why_not_hopper(mesh) is None


class RowView(NamedTuple):
    """The parts of its pages and of its tail that each row's next token attends to."""

    of_row: Int[jax.Array, "B M"]
    """Each row's pages in order; unused entries are the number of pages."""
    seen: Int[jax.Array, "B 4"]
    """Begin and end of the places that the row sees in its pages, and begin and end of the places in its tail."""

    @classmethod
    def of(
        cls,
        window: int | None,
        of_row: Int[jax.Array, "B M"],
        starts: Int[jax.Array, " P"],
        lengths: Int[jax.Array, "B"],
        done: Int[Any, ""],
        shards: int,
    ) -> "RowView":
        """The view of the token at place `done` of the tail, after `lengths` tokens of its row in pages.

        `starts` are the positions of the pages' first tokens. Rows and pages are those of all shards.
        """
        first, starts = of_row[:, 0].reshape(shards, -1), starts.reshape(shards, -1)
        paged = (first < starts.shape[1]).reshape(-1)
        start = jnp.take_along_axis(starts, jnp.minimum(first, starts.shape[1] - 1), axis=1).reshape(-1)
        end = jnp.where(paged, lengths - start, 0)
        begin = jnp.zeros_like(end) if window is None else jnp.maximum(0, lengths + done + 1 - window - start)
        begin_tail = 0 if window is None else jnp.maximum(0, done + 1 - window)
        tail = [jnp.broadcast_to(jnp.int32(place), lengths.shape) for place in (begin_tail, done + 1)]
        return cls(of_row, jnp.stack([begin, end, *tail], axis=1))

    def attend(
        self,
        queries: Float[jax.Array, "B 1 N H"],
        cache: tuple[Float[jax.Array, "P K T H"], Float[jax.Array, "P K T H"]],
        tail: tuple[Float[jax.Array, "B K C H"], Float[jax.Array, "B K C H"]],
        layout: Layout | None,
    ) -> Float[jax.Array, "B 1 N H"]:
        """softmax(q k^T / sqrt(H)) v over what is visible, by the kernel on each device."""
        rows, _, heads, size = queries.shape
        kv_heads = tail[0].shape[1]
        local = on_each_device(layout, attend, (*[CACHED_KEYS] * 5, ("batch",), ("batch",)))
        grouped = queries.reshape(rows, kv_heads, heads // kv_heads, size)
        return local(grouped, *cache, *tail, self.of_row, self.seen).reshape(queries.shape)


def attend(
    queries: Float[jax.Array, "B K G H"],
    keys: Float[jax.Array, "P K T H"],
    values: Float[jax.Array, "P K T H"],
    new_keys: Float[jax.Array, "B K C H"],
    new_values: Float[jax.Array, "B K C H"],
    of_row: Int[jax.Array, "B M"],
    seen: Int[jax.Array, "B 4"],
) -> Float[jax.Array, "B K G H"]:
    """softmax(q k^T / sqrt(H)) v over what each row sees; arrays are bfloat16, scores, softmax and sums float32.

    `of_row` and `seen` are as in `RowView`. A row sees at least one place of its tail.
    """
    from jax.experimental import pallas as pl  # Mosaic takes 0.3 s to import, and few runs have a Hopper GPU
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from lm_head.gpu.forward import LOG2E
    from lm_head.gpu.products import COMPILER_PARAMS, swizzled

    rows, kv_heads, group, size = queries.shape
    slots = SLOTS[size]
    stride = min(BLOCK, keys.shape[2])
    assert keys.shape[2] % stride == 0, "a page has at most 64 places, or a multiple of 64"

    def body(q: Any, k: Any, v: Any, tail_k: Any, tail_v: Any, of_row: Any, seen: Any, out: Any) -> None:
        row, head = lax.axis_index("row"), lax.axis_index("head")
        blocks_of_page, whole = jnp.int32(keys.shape[2] // stride), jnp.int32(slots)
        begin, end = seen[row, 0], seen[row, 1]
        first = lax.div(begin, jnp.int32(stride))
        blocks = 1 + jnp.where(end > begin, lax.div(end + (stride - 1), jnp.int32(stride)) - first, 0)
        at_zero = pl.ds(row * 0, BLOCK)  # beyond an array TMA reads zeros; Pallas checks indices that it knows

        def compute(q_tile: Any, k_slots: Any, v_slots: Any, p_tile: Any, o_tiles: Any, *barriers: Any) -> None:
            arrived, full = barriers

            def load(block: Int[jax.Array, ""], source: tuple[Any, Any]) -> None:
                slot = lax.rem(block, whole)
                for ref, slots_of in zip(source, (k_slots, v_slots), strict=True):
                    plgpu.copy_gmem_to_smem(ref, slots_of.at[slot], full.at[slot])

            def load_page(block: Int[jax.Array, ""]) -> None:
                @pl.when(block < blocks)
                def _() -> None:
                    number = first + block - 1
                    page = of_row[row, lax.div(number, blocks_of_page)]
                    places = pl.ds(pl.multiple_of(lax.rem(number, blocks_of_page) * stride, stride), BLOCK)
                    load(block, (k.at[page, head, places], v.at[page, head, places]))

            def product(columns: int, a: Any, b: Any) -> Float[jax.Array, "R _"]:
                def run(sums: Any) -> Float[jax.Array, "R _"]:
                    plgpu.wgmma(sums, a, b)
                    plgpu.wgmma_wait(0)
                    return sums[...]

                return pl.run_scoped(run, plgpu.ACC((ROWS, columns), jnp.float32))

            def add(block: Int[jax.Array, ""], softmax: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
                top, mass, read = softmax
                slot = lax.rem(block, whole)
                plgpu.barrier_wait(full.at[slot])
                scores = product(BLOCK, q_tile, k_slots.at[slot].transpose((1, 0))) * (size**-0.5 * LOG2E)
                # The tail is the first block. There each row sees its own token, so no maximum stays at the floor.
                start, is_tail = (first + block - 1) * stride, block == 0
                low = jnp.where(is_tail, seen[row, 2], begin - start)
                high = jnp.where(is_tail, seen[row, 3], jnp.minimum(end - start, stride))
                column = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
                scores = jnp.where((column >= low) & (column < high), scores, FLOOR)
                new_top = jnp.maximum(top, scores.max(axis=1))
                fade = jnp.exp2(top - new_top)
                p = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, (0,)))
                p_tile[...] = p.astype(p_tile.dtype)
                plgpu.commit_smem()
                added = []
                for i, part in enumerate(read):
                    new = product(COLUMNS, p_tile, v_slots.at[slot, :, pl.ds(i * COLUMNS, COLUMNS)])
                    added.append(part * lax.broadcast_in_dim(fade, part.shape, (0,)) + new)
                load_page(block + slots)  # into the slot that was read
                return new_top, mass * fade + p.sum(axis=1), tuple(added)

            plgpu.copy_gmem_to_smem(q.at[row, head, at_zero], q_tile, arrived)
            load(jnp.int32(0), (tail_k.at[row, head, at_zero], tail_v.at[row, head, at_zero]))
            for block in range(1, slots):
                load_page(jnp.int32(block))
            plgpu.barrier_wait(arrived)
            nothing = tuple(jnp.zeros((ROWS, COLUMNS), jnp.float32) for _ in range(size // COLUMNS))
            softmax = jnp.full((ROWS,), FLOOR, jnp.float32), jnp.zeros((ROWS,), jnp.float32), nothing
            _, mass, read = lax.fori_loop(0, blocks, add, softmax)
            for i, part in enumerate(read):
                o_tiles[i] = (part / lax.broadcast_in_dim(mass, part.shape, (0,))).astype(o_tiles.dtype)
            plgpu.commit_smem()
            for i in range(len(read)):
                to = out.at[row, head, :, pl.ds(i * COLUMNS, COLUMNS)]
                plgpu.copy_smem_to_gmem(o_tiles.at[i, pl.ds(0, group)], to)
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(
            compute,
            swizzled((ROWS, size), q.dtype),
            *[swizzled((slots, BLOCK, size), q.dtype)] * 2,
            swizzled((ROWS, BLOCK), q.dtype),
            plgpu.SMEM((size // COLUMNS, ROWS, COLUMNS), q.dtype),  # tiles of 8 rows would not divide every group
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        )

    call = pl.kernel(
        body,
        jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        mesh=plgpu.Mesh(grid=(kv_heads, rows), grid_names=("head", "row")),
        name="paged_attention",
        compiler_params=COMPILER_PARAMS,
    )
    whole_tiles = jnp.pad(queries, ((0, 0), (0, 0), (0, -group % 8), (0, 0)))  # TMA reads tiles of 8 rows
    return call(whole_tiles, keys, values, new_keys, new_values, of_row, seen)
