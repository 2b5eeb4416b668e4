"""Softmax statistics of `hidden @ weight.T` on Hopper, in one pass that keeps no logits, or some of them.

A cluster takes rows of hidden states and a strip of the vocabulary, tile by tile, with the sums of an online softmax
in registers (`online_softmax.py` has their meaning); strips are merged by XLA. It can keep what backward would
otherwise compute again: how far below the row's maximum in the tile a logit is, in float16. A probability then is off
by 2^-12 next to the maximum, by a bfloat16's 2^-9 at 4 to 8 below, by 2^-8 up to 16; none underflows.

Left out: when that pays (`mosaic_gpu.py`), the products (`gpu_products.py`).

Suffixes: M rows; V vocabulary; S strips; K columns that are kept, U tiles of them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kernels.lm_head.gpu.kept_logits import Lent
from kernels.lm_head.gpu.products import (
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
from kernels.lm_head.gpu.tiles import KEPT, Tiles, shared_blocks
from kernels.lm_head.softmax import FLOOR, Running, joined, merged

LOG2E = math.log2(math.e)
_MASKED = -1e30  # below any product, and finite however it is scaled


class Chunk(NamedTuple):
    """Columns of the vocabulary."""

    first: Scalar | int
    """Where it begins in the vocabulary, in labels' numbers; a multiple of a tile's columns."""
    first_row: Scalar | int
    """Where it begins in the array of weights; likewise."""
    columns: Scalar
    """Of it, those that count."""


class Logits(NamedTuple):
    """From products y to logits z = cap(y) scale. They are scaled late: a multiplication by element costs as much as
    all else that a tile's epilogue does with it."""

    softcap: float | None
    scale: Scalar
    """1 / temperature."""

    def capped(self, y: Float[Array, "R C"]) -> Float[Array, "R C"]:
        # The hardware's own tanh has 11 bits.
        cap = self.softcap
        return y if cap is None else cap - 2 * cap / (1 + jnp.exp(y * (2 / cap)))

    def slope(self, capped: Float[Array, "R C"]) -> Float[Array, "R C"]:
        """dcap / dy."""
        return 1 - (capped * (1 / self.softcap)) ** 2 if self.softcap else jnp.ones_like(capped)


def labelled(labels: Int[Array, "M"], vocabulary: int, tiles: Tiles) -> Int[Array, "W U"]:
    """Of each warpgroup's rows and each tile of the vocabulary: 1 where one of their labels is in it, else 0."""
    tile = jnp.where(labels >= 0, labels // tiles.columns, -1).reshape(-1, tiles.rows_each, 1)
    return (tile == jnp.arange(-(-vocabulary // tiles.columns))).any(axis=1).astype(jnp.int32)


def forward(
    hidden: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    labels: Int[Array, "M"],
    found: Int[Array, "W U"],
    number: Scalar,
    chunk: Chunk,
    temperature: Float[Array, ""],
    *,
    size: int,
    tiles: Tiles,
    strip: int,
    softcap: float | None,
    keep: bool = False,
    lent: Lent | None = None,
    tops: bool = False,
) -> tuple[Running, Float[Array, "P M"] | None, Float[Array, "M K"] | None]:
    """Of the first `number` rows over a chunk: running statistics; with `tops` the maxima of each tile; with `keep`
    logits less the tile's maximum, too, before the temperature, for all blocks with a row that counts; with `lent` the
    same, stored there.

    Args:
        hidden, weight: of one dtype of 2 bytes; M a multiple of a cluster's rows.
        found: `labelled(labels)`.
        size: columns that a chunk may have.
        strip: tiles of a strip.
    """
    rows, width = len(hidden), tiles.columns
    column_tiles = -(-size // width)
    strips = -(-column_tiles // strip)
    typed = functools.partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(hidden).manual_axis_type)
    out = [typed((strips, 4, rows), jnp.float32)]
    if keep or lent or tops:
        out.append(typed((column_tiles, rows), jnp.float32))
    if keep:
        out.append(typed((rows, column_tiles * width), KEPT))

    def body(counts: Ref, scale: Ref, h: Ref, w: Ref, labels: Ref, found: Ref, *refs: Ref) -> None:
        into = lent and lent._replace(ref=refs[0])
        sums, *kept = refs[1:] if lent else refs
        number, columns = counts[0], counts[3]
        first, first_row = (pl.multiple_of(counts[i], tiles.columns) for i in (1, 2))
        blocks = lax.div(number + (tiles.cluster_rows - 1), jnp.int32(tiles.cluster_rows))
        slabs = jnp.int32(-(-h.shape[1] // tiles.depth))
        used = lax.div(columns + (width - 1), jnp.int32(width))
        work = Work(*strips_of(blocks, used, strip, shared_blocks(tiles, h.shape[1])), depth=lambda block, tile: slabs)
        own = Labels(labels, found, first, columns)

        def multiplier(*scratch: Ref) -> Strip:
            *stages, buffers = scratch
            places = _places(own, into, *kept[1:])
            out = _Out(sums, buffers, next(iter(kept), None), next(iter(stages), None), places)
            return functools.partial(_strip, tiles, strip, Logits(softcap, scale[0]), own, out)

        scratch = [stage(KEPT)] * (keep or lent is not None) + [vectors(4)]
        run(tiles, work, Operand(h, False), Operand(w, False, first_row), multiplier, scratch)

    call = kernel(body, tiles, "lm_head_keep" if keep or lent else "lm_head_forward", out)
    counts = jnp.stack([number, *chunk]).astype(jnp.int32)
    into = [lent.ref] if lent else []
    sums, *kept = call(counts, 1 / temperature[None], hidden, weight, labels, found, *into)
    # Of strips beyond the columns that count, nothing was written.
    used = (jnp.arange(strips) * strip * width < chunk.columns)[:, None]
    top, total, tilt, label = (jnp.where(used, sums[:, i], 0) for i in range(4))
    return merged(Running(jnp.where(used, top, FLOOR), total, tilt, label)), *kept, *[None] * (2 - len(kept))


class _Out(NamedTuple):
    """Where results go, and what they go through."""

    sums: Ref
    buffers: Ref
    tops: Ref = None
    stages: Ref = None
    logits: Callable[[Scalar, Scalar], Ref] | None = None
    """(row, column of the chunk) -> the place of 64 rows of 64 columns."""


def _places(own: "Labels", lent: Lent | None, kept: Ref = None) -> Callable[[Scalar, Scalar], Ref] | None:
    if lent is not None:
        return lambda row, column: lent.place(own.first + column, row)
    return None if kept is None else lambda row, column: kept.at[pl.ds(row, 64), pl.ds(column, PIECE)]


class Labels(NamedTuple):
    """Where labels are, and where columns end."""

    of_row: Ref
    found: Ref
    first: Scalar
    columns: Scalar

    def hit(self, place: Place, t: Scalar, tiles: Tiles) -> Array:
        """Whether one of the labels of a warpgroup's rows is in a tile."""
        tile = lax.div(self.first, jnp.int32(tiles.columns)) + t
        return self.found[lax.div(place.row, jnp.int32(tiles.rows_each)), tile] > 0


def _strip(
    tiles: Tiles, length: int, logits: Logits, labels: Labels, out: _Out, place: Place, product: Product, step: Scalar
) -> Scalar:
    rows = pl.ds(place.row, tiles.rows_each)
    label = vector(labels.of_row, place) - labels.first

    def tile(t: Scalar, carry: Any) -> Any:
        step, running = carry
        hit = labels.hit(place, t, tiles)
        y, step = product(t, step)
        start = t * tiles.columns
        left, own = labels.columns - start, label - start
        capped = [logits.capped(piece) for piece in pieces_of(y)]  # few registers are left beside a tile's sums
        capped = lax.cond(left < tiles.columns, functools.partial(_masked, left), lambda *x: x, *capped)
        top = functools.reduce(jnp.maximum, capped).max(axis=1)
        if out.tops is not None:
            send_vectors(out.buffers, place, [top * logits.scale], lambda _: out.tops.at[t, rows])
        total = tilt = jnp.zeros_like(top)
        for i, c in enumerate(capped):
            below = c - lax.broadcast_in_dim(top, c.shape, (0,))
            e = jnp.exp2(below * (logits.scale * LOG2E))
            total, tilt = total + e.sum(axis=1), tilt + (e * below).sum(axis=1)
            if out.logits is not None:
                send(out.stages, place, i, below, out.logits(place.row, start + i * PIECE))
        at_label = lax.cond(hit, functools.partial(_at, own), lambda *x: jnp.zeros_like(top), *capped)
        here = Running(top * logits.scale, total, tilt * logits.scale, at_label * logits.scale)
        return step, joined(running, here)

    zero = jnp.zeros((tiles.rows_each,), jnp.float32)
    nothing = Running(zero + FLOOR, zero, zero, zero)
    step, running = lax.fori_loop(place.tile, place.tile + place.tiles, tile, (step, nothing))
    number = lax.div(place.tile, jnp.int32(length))
    send_vectors(out.buffers, place, running, lambda i: out.sums.at[number, i, rows])
    return step


def _masked(left: Scalar, *pieces: Float[Array, "R P"]) -> tuple[Float[Array, "R P"], ...]:
    return tuple(jnp.where(column(piece, i) < left, piece, _MASKED) for i, piece in enumerate(pieces))


def _at(own: Int[Array, "R"], *pieces: Float[Array, "R P"]) -> Float[Array, "R"]:
    """What pieces of a tile have in one column of each row, 0 where that isn't in the tile."""
    hits = (column(piece, i) == lax.broadcast_in_dim(own, piece.shape, (0,)) for i, piece in enumerate(pieces))
    found = [jnp.where(hit, piece, 0).sum(axis=1) for hit, piece in zip(hits, pieces, strict=True)]
    return functools.reduce(jnp.add, found)
