"""Softmax statistics of `hidden @ weight.T` on Hopper, in one pass that keeps no logits, or some of them.

A cluster takes rows of hidden states and a strip of the vocabulary, tile by tile, with the sums of an online softmax
in registers (`online_softmax.py` has their meaning); strips are merged by XLA. It can keep what backward would
otherwise compute again: exp(z - m), with m the row's maximum in the tile, in float16, whose 11 bits lose little beside
the 8 of the products' operands.

Left out: when that pays (`mosaic_gpu.py`), the products (`gpu_products.py`).

Suffixes: M rows; V vocabulary; S strips; K columns that are kept, U tiles of them.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kernels.lm_head.gpu_products import (
    PIECE,
    Operand,
    Place,
    Product,
    Ref,
    Scalar,
    Strip,
    Work,
    column,
    kernel,
    pieces_of,
    run,
    send,
    send_vectors,
    stage,
    strips_of,
    vector,
    vectors,
)
from kernels.lm_head.gpu_tiles import Tiles
from kernels.lm_head.online_softmax import FLOOR, MASKED, Running, joined, merged

KEPT = jnp.dtype(jnp.float16)
LOG2E = math.log2(math.e)


class Logits(NamedTuple):
    """From products y to logits z = cap(y) / temperature."""

    softcap: float | None
    scale: Scalar
    """1 / temperature."""

    def of(self, y: Float[Array, "R C"]) -> Float[Array, "R C"]:
        # The hardware's own tanh has 11 bits.
        cap = self.softcap
        return (y if cap is None else cap - 2 * cap / (1 + jnp.exp(y * (2 / cap)))) * self.scale

    def slope(self, z: Float[Array, "R C"]) -> Float[Array, "R C"] | Scalar:
        """dz / dy."""
        if self.softcap is None:
            return self.scale
        tanh = z / (self.scale * self.softcap)
        return (1 - tanh * tanh) * self.scale


def forward(
    hidden: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    labels: Int[Array, "M"],
    number: Scalar,
    columns: Scalar,
    temperature: Float[Array, ""],
    *,
    span: tuple[int, int],
    tiles: Tiles,
    strip: int,
    softcap: float | None,
    keep: bool = False,
    tops: bool = False,
) -> tuple[Running, Float[Array, "U M"] | None, Float[Array, "M K"] | None]:
    """Of the first `number` rows over a span of columns: running statistics; with `tops` the maxima of each tile; with
    `keep` exp(z - the tile's maximum), too, 0 where there is no column, for all blocks with a row that counts.

    Args:
        hidden, weight: of one dtype of 2 bytes; M a multiple of a cluster's rows.
        columns: how many rows of `weight` count.
        span: first column, and the one past the last; whole tiles, but where the vocabulary ends.
        strip: tiles of a strip.
    """
    rows, width = len(hidden), tiles.columns
    first, last = span
    column_tiles = -(-(last - first) // width)
    strips = -(-column_tiles // strip)
    out = [jax.ShapeDtypeStruct((strips, 4, rows), jnp.float32)]
    if keep or tops:
        out.append(jax.ShapeDtypeStruct((column_tiles, rows), jnp.float32))
    if keep:
        out.append(jax.ShapeDtypeStruct((rows, column_tiles * width), KEPT))

    def body(counts: Ref, scale: Ref, h: Ref, w: Ref, labels: Ref, sums: Ref, *kept: Ref) -> None:
        blocks = lax.div(counts[0] + (tiles.cluster_rows - 1), jnp.int32(tiles.cluster_rows))
        columns = jnp.minimum(counts[1], last)
        used = lax.div(jnp.maximum(columns - first, 0) + (width - 1), jnp.int32(width))
        slabs = jnp.int32(-(-h.shape[1] // tiles.depth))
        work = Work(*strips_of(blocks, used, strip, rows_first=True), depth=lambda block, tile: slabs)
        logits = Logits(softcap, scale[0])

        def multiplier(*scratch: Ref) -> Strip:
            *stages, buffers = scratch
            out = _Out(sums, buffers, *kept[:1], *stages, *kept[1:])
            return functools.partial(_strip, tiles, strip, logits, first, columns, labels, out)

        scratch = [stage(KEPT)] * keep + [vectors(4)]
        run(tiles, work, Operand(h, False), Operand(w, False, first), multiplier, scratch)

    call = kernel(body, tiles, "lm_head_keep" if keep else "lm_head_forward", out)
    counts = jnp.stack([number, columns]).astype(jnp.int32)
    sums, *kept = call(counts, 1 / temperature[None], hidden, weight, labels)
    # Of strips beyond the columns that count, nothing was written.
    used = (first + jnp.arange(strips) * strip * width < columns)[:, None]
    top, total, tilt, label = (jnp.where(used, sums[:, i], 0) for i in range(4))
    return merged(Running(jnp.where(used, top, FLOOR), total, tilt, label)), *kept, *[None] * (2 - len(kept))


class _Out(NamedTuple):
    """Where results go, and what they go through."""

    sums: Ref
    buffers: Ref
    tops: Ref = None
    stages: Ref = None
    exponentials: Ref = None


def _strip(
    tiles: Tiles,
    length: int,
    logits: Logits,
    first: int,
    columns: Scalar,
    labels: Ref,
    out: _Out,
    place: Place,
    product: Product,
    step: Scalar,
) -> Scalar:
    rows = pl.ds(place.row, tiles.rows_each)
    label = vector(labels, place)

    def tile(t: Scalar, carry: Any) -> Any:
        step, running = carry
        y, step = product(t, step)
        start = t * tiles.columns
        left, own = columns - (first + start), label - (first + start)
        pieces = [logits.of(piece) for piece in pieces_of(y)]  # few registers are left beside a tile's sums
        pieces = lax.cond(
            left < tiles.columns,
            lambda *pieces: tuple(jnp.where(column(z, i) < left, z, MASKED) for i, z in enumerate(pieces)),
            lambda *pieces: pieces,
            *pieces,
        )
        top = functools.reduce(jnp.maximum, (z.max(axis=1) for z in pieces))
        if out.tops is not None:
            send_vectors(out.buffers, place, [top], lambda _: out.tops.at[t, rows])
        seen = Running(top, *(jnp.zeros_like(top) for _ in range(3)))
        for i, z in enumerate(pieces):
            below = z - lax.broadcast_in_dim(top, z.shape, (0,))
            e = jnp.exp2(below * LOG2E)
            hit = column(z, i) == lax.broadcast_in_dim(own, z.shape, (0,))
            sums = (x.sum(axis=1) for x in (e, e * below, jnp.where(hit, z, 0)))
            seen = Running(top, *(a + b for a, b in zip(seen[1:], sums, strict=True)))
            if out.exponentials is not None:
                send(out.stages, place, i, e, out.exponentials.at[rows, pl.ds(start + i * PIECE, PIECE)])
        return step, joined(running, seen)

    zero = jnp.zeros((tiles.rows_each,), jnp.float32)
    nothing = Running(zero + FLOOR, zero, zero, zero)
    step, running = lax.fori_loop(place.tile, place.tile + place.tiles, tile, (step, nothing))
    number = lax.div(place.tile, jnp.int32(length))
    send_vectors(out.buffers, place, running, lambda i: out.sums.at[number, i, rows])
    return step
