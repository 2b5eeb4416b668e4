"""Attention over rows of several documents on Hopper GPUs, with its gradient. It skips the keys of other documents.

The forward kernel keeps the running maximum, sum and output of the softmax in registers (FlashAttention,
arXiv:2205.14135, section 3.1). The backward pass computes the probabilities again from the logarithm of each query's
sum (FlashAttention-2, arXiv:2307.08691, section 3.2): one kernel sums dq, another dk and dv. So no two thread blocks
add to the same sum, and a gradient has the same bits each time.

A thread block has 128 rows of a head: queries, or keys in the last kernel. Two warpgroups multiply 64 rows each by
WGMMA. A third warpgroup loads blocks of 64 columns into a ring of slots in shared memory by TMA: keys and values, or
queries and slopes in the last kernel. Each row has a first and a last column. Blocks outside of all rows' columns are
not loaded, and no mask is stored.

No GPU has run these kernels. Tests compare them with float64 under JAX's interpreter, and compile them for an H100.

Letters: B rows of tokens, T places of a row, N query heads, K key heads, H size of a head; X heads of the rows; R rows
and C columns of a tile of scores.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int

from lm_head.gpu.forward import LOG2E
from lm_head.gpu.products import COMPILER_PARAMS, load, swizzled
from lm_head.softmax import FLOOR

ROWS = 64
"""Rows of a warpgroup, and columns of a block."""
WARPGROUPS = 2
"""Warpgroups that multiply."""
SLOTS = 4
"""Blocks of columns in shared memory."""
LOADER_REGISTERS, MULTIPLIER_REGISTERS = 24, 240
"""Registers of a thread, for 128 threads that load and 256 that multiply: within 65,536."""

Ref = Any


def packed_attention(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    segments: Int[Array, "B T"],
    window: Int[Any, ""] | None = None,
) -> Float[Array, "B T N H"]:
    """softmax(q k^T / sqrt(H)) v over the keys of the query's segment up to the query, the last `window` of them.

    The arrays are bfloat16, scores, softmax and sums float32. T is a multiple of 128, H is 64 or 128. Tokens of a
    segment are neighbours.
    """
    return _attend(queries, keys, values, *reach(segments, window))


def reach(segments: Int[Array, "B T"], window: Int[Any, ""] | None) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """The first key that each query attends to, and the last query that attends to each key."""
    place = lax.broadcasted_iota(jnp.int32, segments.shape, 1)
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    ends = jnp.pad(begins[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    first = lax.cummax(jnp.where(begins, place, 0), axis=1)
    last = lax.cummin(jnp.where(ends, place, segments.shape[1]), axis=1, reverse=True)
    if window is None:
        return first, last
    return jnp.maximum(first, place - window + 1), jnp.minimum(last, place + window - 1)


@jax.custom_vjp
def _attend(queries: Array, keys: Array, values: Array, first: Array, last: Array) -> Array:
    return _forward(queries, keys, values, first)[0]


def _keep(queries: Array, keys: Array, values: Array, first: Array, last: Array) -> tuple[Array, tuple[Array, ...]]:
    out, lse = _forward(queries, keys, values, first)
    return out, (queries, keys, values, first, last, out, lse)


def _pull_back(kept: tuple[Array, ...], slopes: Array) -> tuple[Array | None, ...]:
    queries, keys, values, first, last, out, lse = kept
    delta = jnp.einsum("btnh,btnh->bnt", out, slopes, preferred_element_type=jnp.float32)
    dq = _queries_gradient(queries, slopes, lse, delta, keys, values, first)
    return dq, *_keys_gradient(keys, values, queries, slopes, lse, delta, last), None, None


_attend.defvjp(_keep, _pull_back)


def _forward(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    first: Int[Array, "B T"],
) -> tuple[Float[Array, "B T N H"], Float32[Array, "B N T"]]:
    """The output, and log2 of each query's sum of exponentials of scores."""
    batch, time, heads, size = queries.shape

    def compute(rows: "_Rows", out: Ref, lse: Ref) -> None:
        (q,) = rows.tiles

        def add(columns: _Columns, softmax: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            (top, mass, read), (k, v) = softmax, columns.tiles
            (scores,) = _products((q, _transposed(k)))
            # A block without a key of a row's document may leave the maximum at the floor. The row's own token comes
            # last, and then fades to zero what the block added.
            scores = jnp.where(columns.seen, scores * (size**-0.5 * LOG2E), FLOOR)
            new_top = jnp.maximum(top, scores.max(axis=1))
            fade = jnp.exp2(top - new_top)
            p = jnp.exp2(scores - _across(new_top, scores))
            (added,) = _products((p.astype(v.dtype), v))
            return new_top, mass * fade + p.sum(axis=1), read * _across(fade, read) + added

        nothing = jnp.full((ROWS,), FLOOR, jnp.float32), jnp.zeros((ROWS,), jnp.float32)
        top, mass, read = rows.loop(add, (*nothing, jnp.zeros((ROWS, size), jnp.float32)))
        rows.store_numbers(lse, top + jnp.log(mass) * LOG2E)
        rows.store((out, read / _across(mass, read)))

    outs = queries, jax.ShapeDtypeStruct((batch, heads, time), jnp.float32)
    return _run("packed_attention", compute, outs, (queries,), (keys, values), (first, _place(first)))


def _queries_gradient(
    queries: Float[Array, "B T N H"],
    slopes: Float[Array, "B T N H"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    first: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
    """dq of the slopes of the output; `delta` is the sum over H of outputs times slopes."""
    size = queries.shape[3]

    def compute(rows: "_Rows", lse: Ref, delta: Ref, dq: Ref) -> None:
        (q, slope), lse_R, delta_R = rows.tiles, load(lse.at[rows.at]), load(delta.at[rows.at])

        def run(sums: Ref) -> Array:
            def add(columns: _Columns, _: None) -> None:
                k, v = columns.tiles
                scores, dp = _products((q, _transposed(k)), (slope, _transposed(v)))
                p = jnp.exp2(scores * (size**-0.5 * LOG2E) - _across(lse_R, scores))
                ds = jnp.where(columns.seen, p * (dp - _across(delta_R, dp)), 0)
                plgpu.wgmma(sums, ds.astype(k.dtype), k)
                plgpu.wgmma_wait(0)

            rows.loop(add, None)
            return sums[...]

        rows.store((dq, pl.run_scoped(run, plgpu.ACC((ROWS, size), jnp.float32)) * size**-0.5))

    bounds = first, _place(first)
    return _run("packed_attention_dq", compute, (queries,), (queries, slopes), (keys, values), bounds, lse, delta)[0]


def _keys_gradient(
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    queries: Float[Array, "B T N H"],
    slopes: Float[Array, "B T N H"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    last: Int[Array, "B T"],
) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """dk and dv, summed over the query heads that share a key head."""
    size = keys.shape[3]

    def compute(rows: "_Rows", lse: Ref, delta: Ref, dk: Ref, dv: Ref) -> None:
        k, v = rows.tiles

        def run(dk_sums: Ref, dv_sums: Ref) -> tuple[Array, Array]:
            def add(columns: _Columns, _: None) -> None:
                (q, slope), lse_C, delta_C = columns.tiles, load(lse.at[columns.at]), load(delta.at[columns.at])
                scores, dp = _products((k, _transposed(q)), (v, _transposed(slope)))
                p = jnp.exp2(scores * (size**-0.5 * LOG2E) - _down(lse_C, scores))
                p = jnp.where(columns.seen, p, 0)
                plgpu.wgmma(dv_sums, p.astype(q.dtype), slope)
                ds = p * (dp - _down(delta_C, dp))
                plgpu.wgmma(dk_sums, ds.astype(q.dtype), q)
                plgpu.wgmma_wait(0)

            rows.loop(add, None)
            return dk_sums[...] * size**-0.5, dv_sums[...]

        dk_R, dv_R = pl.run_scoped(run, *[plgpu.ACC((ROWS, size), jnp.float32)] * 2)
        rows.store((dk, dk_R), (dv, dv_R))

    bounds = _place(last), last
    return _run("packed_attention_dkv", compute, (keys, values), (keys, values), (queries, slopes), bounds, lse, delta)


# --- the kernels' skeleton ----------------------------------------------------------------------------------------


class _Columns(NamedTuple):
    """A block of columns."""

    tiles: list[Ref]
    at: tuple[Any, Any, Any]
    """Their index in an array [B, _, T]."""
    seen: Bool[Array, "R C"]
    """Which of them each row meets."""


class _Rows(NamedTuple):
    """A warpgroup's rows."""

    tiles: list[Ref]
    scratch: Ref
    at: tuple[Any, Any, Any]
    """Their index in an array [B, X, T]."""
    loop: Callable[[Callable[[_Columns, Any], Any], Any], Any]
    """`carry = add(columns, carry)` for each block of columns, from a first carry to the last."""

    def store_numbers(self, ref: Ref, numbers: Float32[Array, "R"]) -> None:
        self.scratch[...] = numbers
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.scratch, ref.at[self.at])

    def store(self, *results: tuple[Ref, Float32[Array, "R H"]]) -> None:
        """Stores the results in GPU memory, by way of the tiles of the rows; waits for all stores."""
        row, head, places = self.at
        for tile, (_, result) in zip(self.tiles, results, strict=False):
            tile[...] = result.astype(tile.dtype)
        plgpu.commit_smem()
        for tile, (ref, _) in zip(self.tiles, results, strict=False):
            plgpu.copy_smem_to_gmem(tile, ref.at[row, places, head])
        plgpu.wait_smem_to_gmem(0)


def _run(
    name: str,
    compute: Callable[..., None],
    outs: Sequence[Any],
    of_rows: Sequence[Float[Array, "B T X H"]],
    of_columns: Sequence[Float[Array, "B T _ H"]],
    bounds: tuple[Int[Array, "B T"], Int[Array, "B T"]],
    *more: Array,
) -> Any:
    """Runs `compute(rows, *refs of more, *refs of outs)` for all rows of all heads of `of_rows`.

    `bounds` are the first and the last column of each row. They grow along a row of tokens.
    """
    batch, time, heads, size = of_rows[0].shape
    column_heads, dtype, together = of_columns[0].shape[2], of_rows[0].dtype, WARPGROUPS * ROWS
    heads_each = max(1, column_heads // heads)

    def body(*refs: Ref) -> None:
        row_refs, column_refs, (low, high), others = _split(refs, len(of_rows), len(of_columns), 2)
        row, head = lax.axis_index("row"), lax.axis_index("head")
        start = lax.axis_index("block") * together
        begin = lax.div(low[row, start], jnp.int32(ROWS))
        blocks = lax.div(high[row, start + (together - 1)], jnp.int32(ROWS)) + 1 - begin
        steps = blocks * heads_each

        def columns_of(step: Int[Array, ""]) -> tuple[Any, Any, Any]:
            column_head = lax.div(head * column_heads, jnp.int32(heads)) + lax.div(step, blocks)
            return row, column_head, pl.ds(pl.multiple_of((begin + lax.rem(step, blocks)) * ROWS, ROWS), ROWS)

        def roles(*scratch: Ref) -> None:
            tiles, slots, (numbers, arrived, full, free) = _split(scratch, len(of_rows), len(of_columns))
            warpgroup = lax.axis_index("warpgroup")

            def load_columns(step: Int[Array, ""], _: None) -> None:
                slot, (_, column_head, places) = lax.rem(step, jnp.int32(SLOTS)), columns_of(step)

                @pl.when(step >= SLOTS)
                def _() -> None:
                    plgpu.barrier_wait(free.at[slot])

                for ref, ring in zip(column_refs, slots, strict=True):
                    plgpu.copy_gmem_to_smem(ref.at[row, places, column_head], ring.at[slot], full.at[slot])

            @pl.when(warpgroup == WARPGROUPS)
            def _() -> None:
                plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
                lax.fori_loop(0, steps, load_columns, None)

            @pl.when(warpgroup < WARPGROUPS)
            def _() -> None:
                plgpu.set_max_registers(MULTIPLIER_REGISTERS, action="increase")
                places = pl.ds(pl.multiple_of(start + warpgroup * ROWS, ROWS), ROWS)
                for ref, tile in zip(row_refs, tiles, strict=True):
                    plgpu.copy_gmem_to_smem(ref.at[row, places, head], tile.at[warpgroup], arrived.at[warpgroup])
                lowest, highest = (load(ref.at[row, places]) for ref in (low, high))

                def loop(add: Callable[[_Columns, Any], Any], carry: Any) -> Any:
                    def step_of(step: Int[Array, ""], carry: Any) -> Any:
                        slot, at = lax.rem(step, jnp.int32(SLOTS)), columns_of(step)
                        column = lax.broadcasted_iota(jnp.int32, (ROWS, ROWS), 1)
                        below, above = (_across(bound - at[2].start, column) for bound in (lowest, highest))
                        plgpu.barrier_wait(full.at[slot])
                        seen = (column >= below) & (column <= above)
                        carry = add(_Columns([ring.at[slot] for ring in slots], at, seen), carry)
                        plgpu.barrier_arrive(free.at[slot])
                        return carry

                    return lax.fori_loop(0, steps, step_of, carry)

                own = [tile.at[warpgroup] for tile in tiles]
                plgpu.barrier_wait(arrived.at[warpgroup])
                compute(_Rows(own, numbers.at[warpgroup], (row, head, places), loop), *others)

        pl.run_scoped(
            roles,
            *[swizzled((WARPGROUPS, ROWS, size), dtype)] * len(of_rows),
            *[swizzled((SLOTS, ROWS, size), dtype)] * len(of_columns),
            plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=len(of_rows), num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=len(of_columns), num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=SLOTS),
            collective_axes="warpgroup",
        )

    call = pl.kernel(
        body,
        tuple(jax.ShapeDtypeStruct(out.shape, out.dtype) for out in outs),
        mesh=plgpu.Mesh(
            grid=(heads, time // together, batch),
            grid_names=("head", "block", "row"),
            num_threads=WARPGROUPS + 1,
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


def _place(bound: Int[Array, "B T"]) -> Int[Array, "B T"]:
    return lax.broadcasted_iota(jnp.int32, bound.shape, 1)


def _transposed(ref: Ref) -> Ref:
    return ref.transpose((1, 0))


def _across(vector: Array, like: Array) -> Array:
    """A number of each row, at all columns."""
    return lax.broadcast_in_dim(vector, like.shape, (0,))


def _down(vector: Array, like: Array) -> Array:
    """A number of each column, at all rows."""
    return lax.broadcast_in_dim(vector, like.shape, (1,))


def _products(*operands: tuple[Any, Ref]) -> tuple[Float32[Array, "R _"], ...]:
    """Products of pairs of operands, after one wait for all."""

    def run(*sums: Ref) -> tuple[Array, ...]:
        for one, (a, b) in zip(sums, operands, strict=True):
            plgpu.wgmma(one, a, b)
        plgpu.wgmma_wait(0)
        return tuple(one[...] for one in sums)

    return pl.run_scoped(run, *(plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32) for a, b in operands))
