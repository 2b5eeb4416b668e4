"""Softmax statistics of `hidden @ weight.T` on Hopper, in one pass that keeps no logits, or some of them.

A cluster takes a block of rows and a strip of the vocabulary, tile by tile, with the running sums of `softmax.py` in
registers. XLA combines the strips. On request the kernel stores, for backward, how far each logit is below its row's
maximum in the tile, in float16. The relative error of a probability is then 2^-12 next to the maximum. The error grows
to 2^-9, as in bfloat16, at a distance of 8, and to 2^-8 at 16. No probability underflows.

Suffixes: M all rows, R rows of a warpgroup; V vocabulary, C columns of a tile, P of a piece of it; W warpgroups' groups
of rows, U tiles of the vocabulary, I integers with a bit for each of 32 of them; S strips; K columns that are kept of
each of P parts.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..contract import Options, no_columns
from ..shapes import Array, Bool, Float, Int
from ..softmax import FLOOR, Running, combine, combine_all
from . import products
from .products import PIECE, Operand, Place, Product, Ref, Scalar, Strip, Work
from .tiles import KEPT_DTYPE, Sizes, Tiles

LOG2E = math.log2(math.e)
_SHARED_ROWS = 16 * 2**20  # bytes of hidden states of interleaved blocks: the L2 cache holds them


class KernelRows(NamedTuple):
    """Rows in the kernels' order; the first `number` rows count."""

    hidden: Float[Array, "M D"]
    labels: Int[Array, "M"]
    in_tile: Int[Array, "W I"]  # `labels_in_tiles(labels)`
    live: Bool[Array, "M"]
    number: Int[Array, ""]
    scale: Float[Array, ""]  # the logits over y


class Chunk(NamedTuple):
    """Consecutive columns of the vocabulary."""

    first: Scalar | int  # the first one's number in the vocabulary, as labels count; a multiple of a tile's columns
    first_row: Scalar | int  # the first one's row in the array of weights; a multiple of a tile's columns
    columns: Scalar  # number of its columns that belong to the vocabulary; the rest is padding


class KeptLogits(NamedTuple):
    """Logits that forward keeps for backward."""

    tops: Float[Array, "*P U M"]  # maxima of tiles
    below: Float[Array, "*P M K"]  # y less these maxima, in float16


def capped(y: Float[Array, "R C"], softcap: float | None) -> Float[Array, "R C"]:
    """y of products (see softmax.py). The hardware's own tanh has 11 bits."""
    return y if softcap is None else 1 - 2 / (1 + jnp.exp(y * (2 / softcap)))


def logit_work(tiles: Tiles, strip: int | Scalar, number: Scalar, columns: Scalar, depth: int) -> Work:
    """The products of so many rows with so many columns, in strips of `strip` tiles; `depth` is D."""
    blocks, used = products.blocks_of(tiles, number), lax.div(columns + (tiles.columns - 1), jnp.int32(tiles.columns))
    slabs = jnp.int32(-(-depth // tiles.depth))
    together = max(1, _SHARED_ROWS // (2 * depth * tiles.cluster_rows))
    return Work(*products.strips_of(blocks, used, strip, together), slabs)


def hits_of_strip(in_tile: Ref, first: Scalar, place: Place, tiles: Tiles) -> Scalar:
    """A bit for each tile of a strip, of at most 32: 1 if a label of a warpgroup's rows is in the tile.

    `in_tile` is the result of `labels_in_tiles`, `first` the chunk's first column.
    """
    tile = lax.div(first, jnp.int32(tiles.columns)) + place.tile
    group, word, shift = lax.div(place.row, jnp.int32(tiles.rows_each)), tile >> 5, tile & 31
    low, high = in_tile[group, word], in_tile[group, word + 1]
    # A shift by 32 is undefined: it is made in two.
    return lax.shift_right_logical(low, shift) | ((high << (31 - shift)) << 1)


def is_hit(hits: Scalar, tile: Scalar) -> Array:
    """Whether the bit of tile `tile` is set in the strip's `hits`."""
    return (lax.shift_right_logical(hits, tile) & 1) > 0


def labels_in_tiles(labels: Int[Array, "M"], vocabulary: int, tiles: Tiles) -> Int[Array, "W I"]:
    """A bit for each warpgroup's group of rows and tile of the vocabulary: 1 if it has a label, 32 in a number.

    A number more than these take is 0, so that any 32 bits are found in two.
    """
    tile = jnp.where(labels >= 0, labels // tiles.columns, -1).reshape(-1, tiles.rows_each, 1, 1)
    words = -(-vocabulary // (32 * tiles.columns)) + 1
    hits = (tile == jnp.arange(32 * words).reshape(words, 32)).any(axis=1)
    return (hits.astype(jnp.int32) << jnp.arange(32)).sum(axis=2, dtype=jnp.int32)


def forward(
    rows: KernelRows,
    weight: Float[Array, "V D"],
    chunk: Chunk,
    options: Options,
    *,
    size: int,
    sizes: Sizes,
    keep: int = 0,
) -> tuple[Running, KeptLogits | None]:
    """Running statistics of the rows that count over a chunk, and the logits of its first `keep` columns.

    Logits are kept of all blocks with a row that counts. Hidden states and `weight` have one dtype of 2 bytes, and M is
    a multiple of a cluster's rows. `size` is the columns that the chunk may have.
    """
    tiles, count = sizes.tiles, len(rows.labels)
    width, strip = tiles.columns, int(sizes.strip(count, size))
    column_tiles = -(-size // width)
    strips = -(-column_tiles // strip)
    typed = functools.partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(rows.hidden).manual_axis_type)
    softcap, nothing = options.softcap, no_columns(jnp.zeros((tiles.rows_each,), jnp.float32), options)
    number_of_sums = len(jax.tree.leaves(nothing))
    out = [typed((strips, number_of_sums, count), jnp.float32)]
    if keep:
        out.append(typed((column_tiles, count), jnp.float32))
        out.append(typed((count, keep), KEPT_DTYPE))  # a tile's columns beyond are not stored

    def body(counts: Ref, scale: Ref, h: Ref, w: Ref, labels: Ref, in_tile: Ref, sums: Ref, *kept: Ref) -> None:
        number, columns = counts[0], counts[3]
        first, first_row = (pl.multiple_of(counts[i], tiles.columns) for i in (1, 2))
        work = logit_work(tiles, strip, number, columns, h.shape[1])

        def multiplier(*scratch: Ref) -> Strip:
            (*stages, vectors), own_scale = scratch, scale[0]

            def strip_of_rows(place: Place, product: Product, step: Scalar) -> Scalar:
                own_rows = pl.ds(place.row, tiles.rows_each)
                label = products.load_vector(labels, place) - first
                hits = hits_of_strip(in_tile, first, place, tiles)

                def tile(t: Scalar, carry: Any) -> Any:
                    step, running = carry
                    hit = is_hit(hits, t - place.tile)
                    y, step = product(t, step)
                    start = t * width
                    left, own_column = columns - start, label - start
                    # In pieces: few registers are left beside a tile's sums. The scale is applied to the sums.
                    pieces = [capped(piece, softcap) for piece in products.pieces_of(y)]
                    pieces = lax.cond(left < width, functools.partial(_masked, left), lambda *x: x, *pieces)
                    top = functools.reduce(jnp.maximum, pieces).max(axis=1)
                    if kept:
                        products.store_vectors(vectors, place, [top], lambda _: kept[0].at[t, own_rows])
                    sum_e = sum_e_y = sum_y = sum_e_e = jnp.zeros_like(top)
                    for i, piece in enumerate(pieces):
                        below = piece - lax.broadcast_in_dim(top, piece.shape, (0,))
                        e = jnp.exp2(below * (own_scale * LOG2E))
                        sum_e, sum_e_y = sum_e + e.sum(axis=1), sum_e_y + (e * below).sum(axis=1)
                        if options.mean_over is not None:
                            sum_y += jnp.where(piece == FLOOR, 0, piece).sum(axis=1)
                        if options.collision:
                            sum_e_e += (e * e).sum(axis=1)
                        if kept:
                            to = kept[1].at[pl.ds(place.row, 64), pl.ds(start + i * PIECE, PIECE)]
                            products.store_piece(stages[0], place, i, below, to)
                    at_label = lax.cond(
                        hit, functools.partial(_at, own_column), lambda *x: jnp.zeros_like(top), *pieces
                    )
                    tile_sums = Running(
                        *(top, sum_e, sum_e_y, at_label),
                        None if options.mean_over is None else sum_y,
                        sum_e_e if options.collision else None,
                    )
                    return step, combine(running, tile_sums, own_scale)

                nothing = no_columns(jnp.zeros((tiles.rows_each,), jnp.float32), options)
                step, running = lax.fori_loop(place.tile, place.tile + place.tiles, tile, (step, nothing))
                number = lax.div(place.tile, jnp.int32(strip))
                leaves = jax.tree.leaves(running)
                products.store_vectors(vectors, place, leaves, lambda i: sums.at[number, i, own_rows])
                return step

            return strip_of_rows

        scratch = [products.piece_stages(KEPT_DTYPE)] * bool(kept) + [products.vector_stages(number_of_sums)]
        products.run(tiles, work, Operand(h, False), Operand(w, False, first_row), multiplier, scratch)

    call = products.kernel(body, tiles, "lm_head_keep" if keep else "lm_head_forward", out)
    counts = jnp.stack([rows.number, *chunk]).astype(jnp.int32)
    sums, *kept = call(counts, rows.scale[None], rows.hidden, weight, rows.labels, rows.in_tile)
    # Nothing was written for strips beyond the columns that count.
    used = (jnp.arange(strips) * strip * width < chunk.columns)[:, None]
    leaves = [jnp.where(used, sums[:, i], 0 if i else FLOOR) for i in range(number_of_sums)]
    running = combine_all(jax.tree.unflatten(jax.tree.structure(nothing), leaves), rows.scale)
    return running, KeptLogits(*kept) if keep else None


def _masked(left: Scalar, *pieces: Float[Array, "R P"]) -> tuple[Float[Array, "R P"], ...]:
    """Pieces of a tile, with a floor in columns past the first `left` columns."""
    return tuple(jnp.where(products.column_index(piece, i) < left, piece, FLOOR) for i, piece in enumerate(pieces))


def _at(own_column: Int[Array, "R"], *pieces: Float[Array, "R P"]) -> Float[Array, "R"]:
    """Each row's element of a tile, given in pieces, in the row's own column; 0 where that isn't in the tile."""
    parts = []
    for i, piece in enumerate(pieces):
        hit = products.column_index(piece, i) == lax.broadcast_in_dim(own_column, piece.shape, (0,))
        parts.append(jnp.where(hit, piece, 0).sum(axis=1))
    return functools.reduce(jnp.add, parts)
