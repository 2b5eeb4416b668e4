"""Attention over rows of several documents on Hopper GPUs, with its gradient. It skips the keys of other documents.

The forward kernel keeps the running maximum, sum and output of the softmax in registers (FlashAttention,
arXiv:2205.14135, section 3.1). The backward pass computes the probabilities again from the logarithm of each query's
sum (FlashAttention-2, arXiv:2307.08691, section 3.2): one kernel sums dq, another dk and dv. So no two thread blocks
add to the same sum, and a gradient has the same bits each time. attention_kernel.py has the kernels' skeleton.

No GPU has run these kernels. Tests compare them with float64 under JAX's interpreter, and compile them for an H100.

Letters: B rows of tokens, T places of a row, N query heads, K key heads, H size of a head; R rows and C columns of a
tile of scores.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int

from lm_head import target
from lm_head.gpu.forward import LOG2E
from lm_head.gpu.products import Ref, load
from lm_head.softmax import FLOOR, MASKED
from mllm.model.attention_kernel import SIDE, Columns, Rows, across, run

ENOUGH_BLOCKS = 4
"""Thread blocks for each multiprocessor that keep all busy to the end."""
MOST_SUMS = 128
"""Columns of sums that fit twice in a warpgroup's registers."""


def reach(segments: Int[Array, "B T"], window: Int[Any, ""] | None) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """The first key that each query attends to, and the last query that attends to each key.

    A query attends to the last `window` keys of its segment up to its own. A segment's tokens are neighbours. Padding,
    segment 0, attends to itself.
    """
    place = lax.broadcasted_iota(jnp.int32, segments.shape, 1)
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True) | (segments == 0)
    ends = jnp.pad(begins[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    first = lax.cummax(jnp.where(begins, place, 0), axis=1)
    last = lax.cummin(jnp.where(ends, place, segments.shape[1]), axis=1, reverse=True)
    if window is None:
        return first, last
    return jnp.maximum(first, place - window + 1), jnp.minimum(last, place + window - 1)


@jax.custom_vjp
def attend(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    first: Int[Array, "B T"],
    last: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
    """softmax(q k^T / sqrt(H)) v over the keys from each query's `first` to its own; see `reach`.

    The arrays are bfloat16, scores, softmax and sums float32. T is a multiple of 128, H is 64, 128 or 256.
    """
    return _forward(queries, keys, values, first)[0]


class Kept(NamedTuple):
    """What the backward pass needs of the forward pass."""

    queries: Float[Array, "B T N H"]
    keys: Float[Array, "B T K H"]
    values: Float[Array, "B T K H"]
    first: Int[Array, "B T"]
    last: Int[Array, "B T"]
    out: Float[Array, "B T N H"]
    lse: Float32[Array, "B N T"]


def _keep(queries: Array, keys: Array, values: Array, first: Array, last: Array) -> tuple[Array, Kept]:
    out, lse = _forward(queries, keys, values, first)
    return out, Kept(queries, keys, values, first, last, out, lse)


def _pull_back(kept: Kept, slopes: Float[Array, "B T N H"]) -> tuple[Array | None, ...]:
    delta = jnp.einsum("btnh,btnh->bnt", kept.out, slopes, preferred_element_type=jnp.float32)
    if kept.keys.shape[3] <= MOST_SUMS:
        dk, dv = _keys_gradient(kept, slopes, delta, ("dk", "dv"))
    else:
        dk, dv = (_keys_gradient(kept, slopes, delta, (one,))[0] for one in ("dk", "dv"))
    return _queries_gradient(kept, slopes, delta), dk, dv, None, None


attend.defvjp(_keep, _pull_back)


def _forward(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    first: Int[Array, "B T"],
) -> tuple[Float[Array, "B T N H"], Float32[Array, "B N T"]]:
    """The output, and log2 of each query's sum of exponentials of scores."""
    batch, time, heads, size = queries.shape

    def compute(rows: Rows, out: Ref, lse: Ref) -> None:
        (q,) = rows.tiles

        def add(columns: Columns, softmax: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            (top, mass, read), (k, v) = softmax, columns.tiles
            (scores,) = _products((q, _transposed(k)))
            scores = jnp.where(columns.seen, scores * (size**-0.5 * LOG2E), MASKED)
            new_top = jnp.maximum(top, scores.max(axis=1))
            fade = jnp.exp2(top - new_top)
            p = jnp.exp2(scores - across(new_top, scores))
            added = []
            for i, part in enumerate(read):
                (new,) = _products((p.astype(v.dtype), v.at[:, pl.ds(i * part.shape[1], part.shape[1])]))
                added.append(part * across(fade, part) + new)
            return new_top, mass * fade + p.sum(axis=1), tuple(added)

        width = size if size <= MOST_SUMS else SIDE
        nothing = (jnp.zeros((SIDE, width), jnp.float32),) * (size // width)
        zeros = jnp.zeros((SIDE,), jnp.float32)
        top, mass, read = rows.loop(add, (zeros + FLOOR, zeros, nothing))
        rows.store_numbers(lse, top + jnp.log(mass) * LOG2E)
        rows.store((out, [part / across(mass, part) for part in read]))

    outs = queries, jax.ShapeDtypeStruct((batch, heads, time), jnp.float32)
    return run("packed_attention", compute, outs, (queries,), (keys, values), (first, _place(first)), last_first=True)


def _queries_gradient(
    kept: Kept, slopes: Float[Array, "B T N H"], delta: Float32[Array, "B N T"]
) -> Float[Array, "B T N H"]:
    """dq, from the slopes of the output; `delta` is the sum over H of outputs times slopes."""
    size = kept.queries.shape[3]

    def compute(rows: Rows, lse: Ref, delta: Ref, dq: Ref) -> None:
        (q, slope), lse_R, delta_R = rows.tiles, load(lse.at[rows.at]), load(delta.at[rows.at])

        def summed(sums: Ref) -> Array:
            def add(columns: Columns, _: None) -> None:
                k, v = columns.tiles
                scores, dp = _products((q, _transposed(k)), (slope, _transposed(v)))
                p = jnp.exp2(scores * (size**-0.5 * LOG2E) - across(lse_R, scores))
                ds = jnp.where(columns.seen, p * (dp - across(delta_R, dp)), 0)
                plgpu.wgmma(sums, ds.astype(k.dtype), k)
                plgpu.wgmma_wait(0)

            rows.loop(add, None)
            return sums[...]

        rows.store((dq, [pl.run_scoped(summed, plgpu.ACC((SIDE, size), jnp.float32)) * size**-0.5]))

    return run(
        "packed_attention_dq",
        compute,
        (kept.queries,),
        (kept.queries, slopes),
        (kept.keys, kept.values),
        (kept.first, _place(kept.first)),
        (kept.lse, delta),
        last_first=True,
    )[0]


def _keys_gradient(
    kept: Kept, slopes: Float[Array, "B T N H"], delta: Float32[Array, "B N T"], wanted: tuple[str, ...]
) -> tuple[Float[Array, "B T K H"], ...]:
    """The gradients in `wanted`, "dk" or "dv": sums over the query heads that share a key head."""
    (batch, time, kv_heads, size), heads, dtype = kept.keys.shape, kept.queries.shape[2], kept.keys.dtype
    of_rows = (kept.keys, kept.values) if "dk" in wanted else (kept.keys,)

    def compute(rows: Rows, lse: Ref, delta: Ref, *outs: Ref) -> None:
        k, *v = rows.tiles

        def summed(*sums: Ref) -> tuple[Array, ...]:
            sums_of = dict(zip(wanted, sums, strict=True))

            def add(columns: Columns, _: None) -> None:
                (q, slope), lse_C, delta_C = columns.tiles, load(lse.at[columns.at]), load(delta.at[columns.at])
                scores, *dp = _products((k, _transposed(q)), *((tile, _transposed(slope)) for tile in v))
                p = jnp.exp2(scores * (size**-0.5 * LOG2E) - _down(lse_C, scores))
                p = jnp.where(columns.seen, p, 0)
                if "dv" in wanted:
                    plgpu.wgmma(sums_of["dv"], p.astype(q.dtype), slope)
                if "dk" in wanted:
                    ds = p * (dp[0] - _down(delta_C, p))
                    plgpu.wgmma(sums_of["dk"], ds.astype(q.dtype), q)
                plgpu.wgmma_wait(0)

            rows.loop(add, None)
            return tuple(one[...] * (size**-0.5 if name == "dk" else 1) for name, one in sums_of.items())

        results = pl.run_scoped(summed, *[plgpu.ACC((SIDE, size), jnp.float32)] * len(wanted))
        rows.store(*((out, [result]) for out, result in zip(outs, results, strict=True)))

    name, bounds = "_".join(("packed_attention", *wanted)), (_place(kept.last), kept.last)
    # Few blocks of one key head each would leave multiprocessors idle. Then a block takes one query head, and XLA sums.
    few = batch * time // (2 * SIDE) * kv_heads < ENOUGH_BLOCKS * target.multiprocessors()
    parts = jax.ShapeDtypeStruct((batch, time, heads if few else kv_heads, size), dtype)
    of_columns, more = (kept.queries, slopes), (kept.lse, delta)
    results = run(name, compute, [parts] * len(wanted), of_rows, of_columns, bounds, more)
    shape = batch, time, kv_heads, -1, size
    return tuple(jnp.sum(x.reshape(shape), axis=3, dtype=jnp.float32).astype(dtype) for x in results)


def _place(bound: Int[Array, "B T"]) -> Int[Array, "B T"]:
    return lax.broadcasted_iota(jnp.int32, bound.shape, 1)


def _transposed(ref: Ref) -> Ref:
    return ref.transpose((1, 0))


def _down(vector: Array, like: Array) -> Array:
    """A number of each column, at all rows."""
    return lax.broadcast_in_dim(vector, like.shape, (1,))


def _products(*operands: tuple[Any, Ref]) -> tuple[Float32[Array, "R _"], ...]:
    """Products of pairs of operands, after one wait for all."""

    def multiply(*sums: Ref) -> tuple[Array, ...]:
        for one, (a, b) in zip(sums, operands, strict=True):
            plgpu.wgmma(one, a, b)
        plgpu.wgmma_wait(0)
        return tuple(one[...] for one in sums)

    return pl.run_scoped(multiply, *(plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32) for a, b in operands))
