"""Gradients by a chunk of the vocabulary on Hopper: derivatives by its logits, and the two products with them.

`logit_gradient` computes the chunk's logits again and makes dy = dloss/dy of them in the products' dtype.
`hidden_gradient` adds dy W to the sum of dh in memory, in float32. `weight_gradient` writes the chunk's rows of dW.

Suffixes: M all rows, B of a block of rows, R of a warpgroup; V vocabulary, C columns of the chunk, P of a piece of a
tile; D features; W warpgroups' groups of rows, I integers with a bit for each of 32 tiles.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..contract import Options
from ..shapes import Array, Float, Int
from ..softmax import RowFactors
from . import products
from .forward import LOG2E, Chunk, KernelRows, capped, hits_of_strip, is_hit, logit_work
from .products import PIECE, Operand, Place, Product, Ref, Scalar, Strip, Work
from .tiles import Sizes, Tiles


class Block(NamedTuple):
    """Consecutive rows."""

    first: Scalar  # a multiple of a cluster's rows
    number: Scalar  # how many of the block's rows count; they are its first


def logit_gradient(
    rows: KernelRows,
    weight: Float[Array, "V D"],
    factors: RowFactors,
    block: Block,
    chunk: Chunk,
    options: Options,
    *,
    size: tuple[int, int],
    sizes: Sizes,
) -> Float[Array, "B C"]:
    """dy of a block of rows and a chunk, in all tiles with a row and a column that count.

    dy has the rows and columns `size`, whole tiles. It is 0 at columns that don't count.
    """
    tiles, softcap = sizes.tiles, options.softcap

    def body(counts: Ref, scale: Ref, h: Ref, w: Ref, labels: Ref, in_tile: Ref, by_row: Ref, dy: Ref) -> None:
        number, columns, strip = counts[1], counts[4], counts[5]
        token, first, first_row = _aligned(tiles, counts, 0, 2, 3)
        work = logit_work(tiles, strip, number, columns, h.shape[1])

        def multiplier(stages: Ref) -> Strip:
            own_scale = scale[0]

            def strip_of_rows(place: Place, product: Product, step: Scalar) -> Scalar:
                in_all = place._replace(row=token + place.row)
                row = RowFactors(*(products.load_vector(by_row, in_all, i) for i in range(by_row.shape[0])))
                label = products.load_vector(labels, in_all) - first
                log_sum_e, at_p_log2_p = row.log_sum_e * LOG2E, row.at_p_log_p / LOG2E
                hits = hits_of_strip(in_tile, first, in_all, tiles)

                def tile(t: Scalar, step: Scalar) -> Scalar:
                    hit = is_hit(hits, t - place.tile)
                    y, step = product(t, step)
                    start = t * tiles.columns
                    left = columns - start
                    for i, piece in enumerate(products.pieces_of(y)):
                        wide = functools.partial(lax.broadcast_in_dim, shape=piece.shape, broadcast_dimensions=(0,))
                        own_y = capped(piece, softcap)
                        log2_p = (own_y - wide(row.top)) * (own_scale * LOG2E) - wide(log_sum_e)
                        by_p = wide(row.at_p)
                        if options.entropy_slopes:
                            by_p += wide(at_p_log2_p) * log2_p
                        by_y = jnp.exp2(log2_p) * by_p
                        if options.mean_over is not None:
                            by_y += wide(row.at_all)
                        if softcap is not None:
                            by_y *= (1 + own_y) * (1 - own_y)
                        corrected = functools.partial(_corrected, i, label - start, row.at_label, left)
                        by_y = lax.cond(hit | (left < tiles.columns), corrected, lambda x: x, by_y)
                        to = dy.at[pl.ds(place.row, tiles.rows_each), pl.ds(start + i * PIECE, PIECE)]
                        products.store_piece(stages, place, i, by_y, to)
                    return step

                return lax.fori_loop(place.tile, place.tile + place.tiles, tile, step)

            return strip_of_rows

        operands = Operand(h, False, token), Operand(w, False, first_row)
        products.run(tiles, work, *operands, multiplier, [products.piece_stages(h.dtype)])

    out = jax.ShapeDtypeStruct(size, rows.hidden.dtype, manual_axis_type=jax.typeof(rows.hidden).manual_axis_type)
    # By the rows that count: strips for all rows would leave most clusters idle where few do.
    counts = jnp.stack([*block, *chunk, sizes.strip(block.number, size[1])]).astype(jnp.int32)
    by_row = jnp.stack(jax.tree.leaves(factors))
    arguments = counts, rows.scale[None], rows.hidden, weight, rows.labels, rows.in_tile, by_row
    return products.kernel(body, tiles, "lm_head_slopes", [out])(*arguments)[0]


def _corrected(
    number: int, own_column: Int[Array, "R"], at_label: Float[Array, "R"], left: Scalar, by_y: Float[Array, "R P"]
) -> Float[Array, "R P"]:
    """A piece of dy with `at_label` in each row's label column, and 0 past the tile's first `left` columns."""
    wide = functools.partial(lax.broadcast_in_dim, shape=by_y.shape, broadcast_dimensions=(0,))
    by_y = jnp.where(products.column_index(by_y, number) == wide(own_column), wide(at_label), by_y)
    return jnp.where(products.column_index(by_y, number) < left, by_y, 0)


def hidden_gradient(
    sums: Ref, dy: Float[Array, "B C"], weight: Float[Array, "V D"], block: Block, chunk: Chunk, *, tiles: Tiles
) -> None:
    """Adds dy @ weight[chunk] to the block's rows of `sums`, float32 [M, D], in place."""
    ranges = block.first, block.number, chunk.first_row, chunk.columns
    _product("lm_head_hidden", tiles, Operand(dy, False), weight, sums, ranges, add=True)


def weight_gradient(
    out: Ref,
    dy: Float[Array, "B C"],
    hidden: Float[Array, "M D"],
    block: Block,
    chunk: Chunk,
    *,
    tiles: Tiles,
    add: bool = False,
    before: Float[Array, "C _"] | None = None,
) -> None:
    """Writes dy.T @ hidden[block] to the chunk's rows of `out`, [V, D], in place, or adds it to them.

    The chunk's columns that count must reach to its end, or to the end of `out`. `before` is added before writing.
    """
    ranges = chunk.first, chunk.columns, block.first, block.number
    _product("lm_head_weight", tiles, Operand(dy, True), hidden, out, ranges, add, before)


def _product(
    name: str,
    tiles: Tiles,
    left: Operand,
    right: Float[Array, "_ D"],
    out: Ref,
    ranges: tuple[Scalar | int, ...],
    add: bool,
    before: Float[Array, "C _"] | None = None,
) -> None:
    """Writes `left` @ `right` to rows of `out`, or adds it to them; `before` is added first.

    `ranges` are the first of the result's rows and their number, then the first of the right factor's rows and theirs.
    """

    def body(counts: Ref, dy: Ref, right: Ref, *refs: Ref) -> None:
        *earlier, out = refs
        rows, depth = counts[1], counts[3]
        first, first_depth = _aligned(tiles, counts, 0, 2)
        across = jnp.int32(-(-right.shape[1] // tiles.columns))
        slabs = lax.div(depth + (tiles.depth - 1), jnp.int32(tiles.depth))
        work = Work(*products.strips_of(products.blocks_of(tiles, rows), across, 1), slabs)

        def strip(stages: Ref, place: Place, product: Product, step: Scalar) -> Scalar:
            y, step = product(place.tile, step)
            row_slice, width = pl.ds(place.row, tiles.rows_each), stages.shape[-1]
            for i, piece in enumerate(products.pieces_of(y, width)):
                columns = pl.ds(place.tile * tiles.columns + i * width, width)
                if earlier:
                    piece += products.load(earlier[0].at[row_slice, columns])
                to = out.at[pl.ds(first + place.row, tiles.rows_each), columns]
                products.store_piece(stages, place, i, piece, to, add)
            return step

        multiplier = functools.partial(functools.partial, strip)
        operands = left._replace(ref=dy), Operand(right, True, 0, first_depth)
        products.run(tiles, work, *operands, multiplier, [products.piece_stages(out.dtype)])

    counts = jnp.stack(ranges).astype(jnp.int32)
    products.kernel(body, tiles, name)(counts, left.ref, right, *([] if before is None else [before]), out)


def _aligned(tiles: Tiles, counts: Ref, *indices: int) -> tuple[Scalar, ...]:
    """Numbers from `counts` that are known to be multiples of a cluster's rows."""
    return tuple(pl.multiple_of(counts[i], tiles.cluster_rows) for i in indices)
