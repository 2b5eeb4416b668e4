"""Gradients by a chunk of the vocabulary on Hopper: the slopes of its logits, and the two products with them.

Of a chunk, `slopes` computes the logits again and makes of them, before they leave the registers, dy = dloss/dy in the
products' dtype: a buffer of rows x chunk that is read twice and then used for the next chunk. `hidden_gradient` adds
dy W to the sum of dh in memory, by TMA, in float32; `weight_gradient` writes the chunk's rows of dW, once, its sum over
all rows having stayed in registers.

Where tiles don't count (`Wanted`), none of the three does anything for them.

Left out: the order of chunks, and what backward keeps from forward (`mosaic_gpu.py`).

Suffixes: M rows, R of a block; C columns of the chunk; G blocks of a cluster's rows, U tiles of the chunk's columns.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kernels.lm_head.gpu.forward import LOG2E, Chunk, Labels, Logits
from kernels.lm_head.gpu.products import (
    Operand,
    Place,
    Product,
    Ref,
    Scalar,
    Strip,
    Work,
    column,
    kernel,
    load,
    pieces_of,
    run,
    send,
    stage,
    strips_of,
    vector,
)
from kernels.lm_head.gpu.tiles import Tiles, shared_blocks


class Block(NamedTuple):
    """Rows."""

    first: Scalar
    """A multiple of a cluster's rows."""
    number: Scalar
    """Of them, those that count."""


class RowSlopes(NamedTuple):
    """What makes dy of a row's logits, float32: at the label's column `label`, else p (by_p - entropy log p) dcap/dy;
    these with 1 / temperature."""

    top: Float[Array, "M"]
    log_total: Float[Array, "M"]
    by_p: Float[Array, "M"]
    entropy: Float[Array, "M"]
    label: Float[Array, "M"]


class Wanted(NamedTuple):
    """Which tiles of a chunk count, in the three orders in which they are visited."""

    tiles: Int[Array, "G*U"]
    """Numbers of blocks times U plus those of tiles, `number` of them."""
    number: Scalar
    of_block: Int[Array, "G U"]
    in_block: Int[Array, "G"]
    of_column: Int[Array, "U G"]
    in_column: Int[Array, "U"]


def slopes(
    hidden: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    labels: Int[Array, "M"],
    found: Int[Array, "W U"],
    rows: RowSlopes,
    block: Block,
    chunk: Chunk,
    temperature: Float[Array, ""],
    *,
    size: tuple[int, int],
    tiles: Tiles,
    strip: int,
    softcap: float | None,
    entropy: bool,
    wanted: Wanted | None = None,
) -> Float[Array, "R C"]:
    """dy of a block of rows and a chunk, in all tiles with a row and a column that count; 0 at columns that don't.

    Args:
        found: `gpu_forward.labelled(labels)`.
        size: rows and columns of dy, whole tiles.
        entropy: whether there is a slope by the entropy.
    """

    def body(counts: Ref, scale: Ref, h: Ref, w: Ref, labels: Ref, found: Ref, by_row: Ref, *refs: Ref) -> None:
        *listed, dy = refs
        number, columns = counts[1], counts[4]
        token, first, first_row = _aligned(tiles, counts, 0, 2, 3)
        blocks, used = _blocks(tiles, number), _tiles(tiles, columns)
        slabs = jnp.int32(-(-h.shape[1] // tiles.depth))
        where = strips_of(blocks, used, strip, shared_blocks(tiles, h.shape[1]))
        if listed:
            where = listed[1][0], functools.partial(_listed, listed[0], size[1] // tiles.columns)
        work = Work(*where, depth=lambda block, tile: slabs)

        def multiplier(stages: Ref) -> Strip:
            logits = Logits(softcap, scale[0])
            own = Labels(labels, found, first, columns)
            return functools.partial(_slopes, tiles, logits, own, by_row, entropy, token, stages, dy)

        run(tiles, work, Operand(h, False, token), Operand(w, False, first_row), multiplier, [stage(dy.dtype)])

    dy = jax.ShapeDtypeStruct(size, hidden.dtype, manual_axis_type=jax.typeof(hidden).manual_axis_type)
    call = kernel(body, tiles, "lm_head_slopes", [dy])
    listed = () if wanted is None else (wanted.tiles, wanted.number[None])
    counts = jnp.stack([*block, *chunk]).astype(jnp.int32)
    (result,) = call(counts, 1 / temperature[None], hidden, weight, labels, found, jnp.stack(rows), *listed)
    return result


def _listed(tiles: Ref, across: int, strip: Scalar) -> tuple[Scalar, Scalar, Scalar]:
    found = tiles[strip]
    return lax.div(found, jnp.int32(across)), lax.rem(found, jnp.int32(across)), jnp.int32(1)


def _slopes(
    tiles: Tiles,
    logits: Logits,
    labels: Labels,
    by_row: Ref,
    entropy: bool,
    token: Scalar,
    stages: Ref,
    dy: Ref,
    place: Place,
    product: Product,
    step: Scalar,
) -> Scalar:
    in_all = place._replace(row=token + place.row)
    row = RowSlopes(*(vector(by_row, in_all, i) for i in range(len(RowSlopes._fields))))
    label = vector(labels.of_row, in_all) - labels.first
    top, log_total = row.top * LOG2E, row.log_total * LOG2E

    def tile(t: Scalar, step: Scalar) -> Scalar:
        hit = labels.hit(in_all, t, tiles)
        y, step = product(t, step)
        start = t * tiles.columns
        left = labels.columns - start
        for i, piece in enumerate(pieces_of(y)):
            wide = functools.partial(lax.broadcast_in_dim, shape=piece.shape, broadcast_dimensions=(0,))
            capped = logits.capped(piece)
            log2_p = (capped * (logits.scale * LOG2E) - wide(top)) - wide(log_total)
            by_z = wide(row.by_p) - wide(row.entropy / LOG2E) * log2_p if entropy else wide(row.by_p)
            by_y = jnp.exp2(log2_p) * by_z
            if logits.softcap is not None:
                by_y *= logits.slope(capped)
            fixed = functools.partial(_fixed, i, label - start, row.label, left)
            by_y = lax.cond(hit | (left < tiles.columns), fixed, lambda x: x, by_y)
            to = dy.at[pl.ds(place.row, tiles.rows_each), pl.ds(start + i * piece.shape[1], piece.shape[1])]
            send(stages, place, i, by_y, to)
        return step

    return lax.fori_loop(place.tile, place.tile + place.tiles, tile, step)


def _fixed(
    number: int, own: Int[Array, "R"], at_label: Float[Array, "R"], left: Scalar, by_y: Float[Array, "R P"]
) -> Float[Array, "R P"]:
    """With the slopes by labels, and without those by columns that don't count."""
    wide = functools.partial(lax.broadcast_in_dim, shape=by_y.shape, broadcast_dimensions=(0,))
    by_y = jnp.where(column(by_y, number) == wide(own), wide(at_label), by_y)
    return jnp.where(column(by_y, number) < left, by_y, 0)


def hidden_gradient(
    sums: Ref,
    dy: Float[Array, "R C"],
    weight: Float[Array, "V D"],
    block: Block,
    chunk: Chunk,
    *,
    tiles: Tiles,
    wanted: Wanted | None = None,
) -> None:
    """Adds dy @ weight[chunk] to the block's rows of `sums`, float32 [M, D], in place."""

    def body(counts: Ref, dy: Ref, w: Ref, *refs: Ref) -> None:
        *listed, sums = refs
        number, columns = counts[1], counts[4]
        token, first_row = _aligned(tiles, counts, 0, 3)
        across = jnp.int32(-(-w.shape[1] // tiles.columns))
        slabs, a_tile = lax.div(columns + (tiles.depth - 1), jnp.int32(tiles.depth)), tiles.columns // tiles.depth
        work = Work(*strips_of(_blocks(tiles, number), across, 1), depth=lambda block, tile: slabs)
        if listed:
            work = work._replace(
                depth=lambda block, tile: listed[1][block] * a_tile,
                slab=lambda block, tile, k: _within(listed[0][block, lax.div(k, jnp.int32(a_tile))], k, a_tile),
            )
        multiplier = functools.partial(_store, tiles, sums, token, None, True)
        run(tiles, work, Operand(dy, False), Operand(w, True, 0, first_row), multiplier, [stage(jnp.float32)])

    listed = () if wanted is None else (wanted.of_block, wanted.in_block)
    counts = jnp.stack([*block, *chunk]).astype(jnp.int32)
    kernel(body, tiles, "lm_head_hidden")(counts, dy, weight, *listed, sums)


def weight_gradient(
    out: Ref,
    dy: Float[Array, "R C"],
    hidden: Float[Array, "M D"],
    block: Block,
    chunk: Chunk,
    *,
    tiles: Tiles,
    add: bool = False,
    before: Float[Array, "C D"] | None = None,
    wanted: Wanted | None = None,
) -> None:
    """Writes dy.T @ hidden[block] to the chunk's rows of `out`, [V, D], in place; or adds it to what is there.

    Args:
        chunk: what counts of it must reach to its end, or to that of `out`.
        before: sums of other blocks, float32, to write with these.
    """

    def body(counts: Ref, dy: Ref, h: Ref, *refs: Ref) -> None:
        *others, out = refs
        number, columns = counts[1], counts[4]
        token, first = _aligned(tiles, counts, 0, 2)
        across = jnp.int32(-(-h.shape[1] // tiles.columns))
        slabs, a_block = lax.div(number + (tiles.depth - 1), jnp.int32(tiles.depth)), tiles.cluster_rows // tiles.depth
        work = Work(*strips_of(_blocks(tiles, columns), across, 1), depth=lambda block, tile: slabs)
        if wanted is not None:

            def of(block: Scalar) -> Scalar:
                return lax.div(block * tiles.cluster_rows, jnp.int32(tiles.columns))

            work = work._replace(
                depth=lambda block, tile: others[1][of(block)] * a_block,
                slab=lambda block, tile, k: _within(others[0][of(block), lax.div(k, jnp.int32(a_block))], k, a_block),
            )
        multiplier = functools.partial(_store, tiles, out, first, None if before is None else others[-1], add)
        run(tiles, work, Operand(dy, True), Operand(h, True, 0, token), multiplier, [stage(out.dtype)])

    others = () if wanted is None else (wanted.of_column, wanted.in_column)
    others = others if before is None else (*others, before)
    counts = jnp.stack([*block, *chunk]).astype(jnp.int32)
    kernel(body, tiles, "lm_head_weight")(counts, dy, hidden, *others, out)


def _within(listed: Scalar, k: Scalar, slabs: int) -> Scalar:
    return listed * slabs + lax.rem(k, jnp.int32(slabs))


def _store(tiles: Tiles, out: Ref, first: Scalar, before: Ref | None, add: bool, stages: Ref) -> Strip:
    width = stages.shape[-1]

    def strip(place: Place, product: Product, step: Scalar) -> Scalar:
        y, step = product(place.tile, step)
        own = pl.ds(place.row, tiles.rows_each)
        for i, piece in enumerate(pieces_of(y, width)):
            columns = pl.ds(place.tile * tiles.columns + i * width, width)
            if before is not None:
                piece += load(before.at[own, columns])
            send(stages, place, i, piece, out.at[pl.ds(first + place.row, tiles.rows_each), columns], add)
        return step

    return strip


def _aligned(tiles: Tiles, counts: Ref, *places: int) -> tuple[Scalar, ...]:
    """Numbers that are whole tiles."""
    return tuple(pl.multiple_of(counts[i], tiles.cluster_rows) for i in places)


def _blocks(tiles: Tiles, rows: Scalar) -> Scalar:
    return lax.div(rows + (tiles.cluster_rows - 1), jnp.int32(tiles.cluster_rows))


def _tiles(tiles: Tiles, columns: Scalar) -> Scalar:
    return lax.div(columns + (tiles.columns - 1), jnp.int32(tiles.columns))
