"""Statistics of logits and their gradient on TPUs: two Pallas kernels; each reads the logits once.

The grid is (blocks of rows, tiles of columns), tiles innermost. Within a tile a few rows are taken at a time, in pieces
of 128 columns. Every lane has its own sums, which XLA adds up. A block without a row that counts fetches one tile and
reads no tile. Columns past the last are masked.

Suffixes: R rows, L the 128 lanes, C pieces of a tile. `y` is a logit; z = scale * y.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import target
from .contract import GivenLogits
from .live_rows import round_up
from .shapes import Array, Float
from .softmax import FLOOR, MASKED, Columns, Running, Slopes, Softmax, combine_all, include_tile, logit_slopes

_LANES, _ROWS, _COLUMNS = 128, 16, 2048  # bfloat16 has 16 sublanes


def sums(given: GivenLogits, *, block: int) -> Running:
    """The softmax's sums over this device's columns."""
    sums_4NL = _call(_sums_kernel, given, "logits_sums", block)
    return combine_all(Running(*jnp.moveaxis(sums_4NL, 2, 1)), given.scale)


def gradient(given: GivenLogits, softmax: Softmax, slopes: Slopes, *, block: int) -> Float[Array, "N V"]:
    """The derivatives by logits of a scalar with derivatives `slopes` by the statistics, in the logits' memory."""
    numbers = (*softmax[:4], *(given.scale * x for x in slopes[:3]), given.live.astype(jnp.float32))
    return _call(_gradient_kernel, given, "logits_gradient", block, jnp.stack(numbers, axis=1))


def _call(kernel: Callable[..., None], given: GivenLogits, name: str, block: int, by_row: Any = None) -> Array:
    """A kernel's result: sums [4, N, L], or with numbers `by_row` an array like the logits in their memory."""
    y_NV, in_place = given.logits, by_row is not None
    count, vocabulary = y_NV.shape
    rows, columns = min(block, round_up(count, _ROWS)), min(_COLUMNS, round_up(vocabulary, _LANES))
    blocks = pl.cdiv(count, rows)
    live_G = jnp.pad(given.live, (0, blocks * rows - count)).reshape(blocks, rows).any(axis=1).astype(jnp.int32)
    tile = pl.BlockSpec((rows, columns), lambda i, j, live, _: (i, jnp.where(live[i] > 0, j, 0)))
    given_by_row = [given.labels[:, None], *([by_row] if in_place else [])]
    out: Any = pl.BlockSpec((4, rows, _LANES), lambda i, *_: (0, i, 0))
    shape, dtype = [4, count, _LANES], jnp.float32
    if in_place:
        out, shape, dtype = pl.BlockSpec((rows, columns), lambda i, j, *_: (i, j)), [*y_NV.shape], y_NV.dtype
    return pl.pallas_call(
        functools.partial(kernel, vocabulary=vocabulary),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(blocks, pl.cdiv(vocabulary, columns)),
            in_specs=[*(pl.BlockSpec((rows, x.shape[1]), lambda i, *_: (i, 0)) for x in given_by_row), tile],
            out_specs=out,
        ),
        out_shape=jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(y_NV).manual_axis_type),
        # The interpreter, off the TPU, returns an aliased output with the last tile's padding.
        input_output_aliases={4: 0} if in_place and target.platform() == "tpu" else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name=name,
    )(live_G, given.scale[None], *given_by_row, y_NV)


def _over_rows(y_ref: Any, label_ref: Any, vocabulary: int, turn: Callable[[Any, Array, Columns], None]) -> None:
    """Calls `turn(rows, y_CRL, columns)` for a few rows of a tile at a time."""
    pieces, first = y_ref.shape[1] // _LANES, pl.program_id(1) * y_ref.shape[1]

    def group(g: Array, _: None) -> None:
        row = pl.ds(pl.multiple_of(g * _ROWS, _ROWS), _ROWS)
        y_CRL = jnp.stack([y_ref[row, pl.ds(c * _LANES, _LANES)].astype(jnp.float32) for c in range(pieces)])
        column = functools.partial(lax.broadcasted_iota, jnp.int32, y_CRL.shape)
        column_CRL = first + _LANES * column(0) + column(2)
        fresh_CRL = column_CRL < vocabulary
        hit_CRL = fresh_CRL & (column_CRL == label_ref[row, :][None])
        y_CRL = jnp.where(fresh_CRL, jnp.maximum(y_CRL, MASKED), 0)  # past the last column there may be NaN
        turn(row, y_CRL, Columns(fresh_CRL, hit_CRL))

    lax.fori_loop(0, y_ref.shape[0] // _ROWS, group, None)


def _sums_kernel(live_ref: Any, scale_ref: Any, label_ref: Any, y_ref: Any, out_ref: Any, *, vocabulary: int) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)
        out_ref[0] = jnp.full(out_ref.shape[1:], FLOOR, jnp.float32)

    def turn(row: Any, y_CRL: Array, columns: Columns) -> None:
        running = Running(*(out_ref[n, row, :] for n in range(4)))
        for n, x in enumerate(include_tile(running, y_CRL, columns, scale_ref[0], 0)[:4]):
            out_ref[n, row, :] = x

    pl.when(live_ref[pl.program_id(0)] > 0)(lambda: _over_rows(y_ref, label_ref, vocabulary, turn))


def _gradient_kernel(
    live_ref: Any, scale_ref: Any, label_ref: Any, numbers_ref: Any, y_ref: Any, out_ref: Any, *, vocabulary: int
) -> None:
    live = live_ref[pl.program_id(0)] > 0

    def turn(row: Any, y_CRL: Array, columns: Columns) -> None:
        numbers: Sequence[Array] = [numbers_ref[row, pl.ds(n, 1)] for n in range(8)]
        dy_CRL = logit_slopes(y_CRL, Softmax(*numbers[:4]), Slopes(*numbers[4:7]), columns, scale_ref[0], dim=0)
        dy_CRL = jnp.where(numbers[7][None] > 0, dy_CRL, 0)
        for c in range(len(dy_CRL)):
            out_ref[row, pl.ds(c * _LANES, _LANES)] = dy_CRL[c].astype(out_ref.dtype)

    pl.when(live)(lambda: _over_rows(y_ref, label_ref, vocabulary, turn))
    pl.when(~live)(lambda: out_ref.__setitem__(..., jnp.zeros_like(out_ref)))
