"""Statistics of logits and their gradient on TPUs: two Pallas kernels, each of which reads the logits once.

The grid is (blocks of rows, tiles of columns), tiles innermost. Forward keeps a maximum and two sums for every 128th
column and merges these behind the last tile. Backward writes the gradient over the tile of logits that it is made from.
Where no row of a block counts, one tile is fetched and not read. Columns past the last are -inf to the forward pass,
and the backward pass leaves them unwritten.

XLA puts the dim in lanes that wastes least memory, and copies all logits where a kernel takes another: the kernels are
the default where columns are whole lanes, as all published vocabularies are.

Suffixes: P a piece of 16 x 128 logits; K the pieces that are computed at a time. `y` is a logit; z = scale * y.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Shaped

from kernels.lm_head.live_rows import round_up
from kernels.lm_head.softmax import FLOOR, Running, Slopes, Softmax
from kernels.logits.xla import Given, p_term, row_factors

_LANES, _GROUP = 128, 16  # columns and rows of a piece; bfloat16 has 16 sublanes
_ROWS, _ROW_BYTES = 256, 8192  # of a tile: 2 MiB
_AT_A_TIME, _IN_A_TURN = 8, 32  # pieces
_LOG2E = math.log2(math.e)


def obstacle(logits: Float[Array, "*N V"]) -> str | None:
    """The reason why the kernels can't take these logits, or None."""
    if logits.ndim < 2 or not logits.size:
        return f"it takes rows of logits, and these are {list(logits.shape)}"
    return None


def has_rows_in_order(logits: Float[Array, "*N V"]) -> bool:
    """Whether XLA surely lays logits of this shape out as [N, V], in which the kernels take them: it pads nothing."""
    *outer, rows, columns = logits.shape
    return columns % _LANES == 0 and (rows % 8 == 0 or math.prod(outer) == 1)


def sums(given: Given) -> Running:
    """The softmax's sums over all columns of `z = scale * logits`."""
    logits, labels, live, scale = given
    (rows, columns), vocabulary = _tile(logits), logits.shape[-1]
    running = [pltpu.VMEM((rows, _LANES), jnp.float32)] * 3
    kernel = functools.partial(_sums_kernel, last_columns=vocabulary - (pl.cdiv(vocabulary, columns) - 1) * columns)
    out_N3 = _call(kernel, given, "logits_sums", flops=8, scratch=running)
    top, sum_e, sum_e_z = (x.reshape(live.shape) for x in out_N3.T)
    inside = (labels >= 0) & (labels < vocabulary)
    label = jnp.take_along_axis(logits, jnp.where(inside, labels, 0)[..., None], axis=-1)[..., 0].astype(jnp.float32)
    return Running(scale * top, sum_e, scale * sum_e_z, jnp.where(inside, scale * label, 0))


def gradient(given: Given, softmax: Softmax, slopes: Slopes) -> Float[Array, "*N V"]:
    """The derivatives by the logits of a scalar with derivatives `slopes` by the statistics, in the logits' memory."""
    logits, labels, live, scale = given
    factors = jnp.stack([x.reshape(-1) for x in (*row_factors(softmax, slopes, scale), live.astype(jnp.float32))], 1)
    labels_N1 = labels.astype(jnp.int32).reshape(-1, 1)
    by_row = [labels_N1, factors]
    return _call(_gradient_kernel, given, "logits_gradient", flops=12, by_row=by_row).reshape(logits.shape)


def _call(
    kernel: Callable[..., None],
    given: Given,
    name: str,
    *,
    flops: int,
    by_row: Sequence[Shaped[Array, "N _"]] = (),
    scratch: Sequence[Any] = (),
) -> Float[Array, "N _"]:
    """A kernel's result: with `by_row` [N, V] in the memory of the logits, else three float32 sums a row.

    Its refs are, for each block, whether a row of it counts; the scale; blocks of `by_row`; a tile of logits; the
    result's block; and scratch. `flops` are those of a logit.
    """
    logits, _, live, scale = given
    y_NV = logits.reshape(-1, logits.shape[-1])
    (count, vocabulary), (rows, columns) = y_NV.shape, _tile(logits)
    blocks = pl.cdiv(count, rows)
    # Flat: scalar memory would pad each row of two dims to 128 numbers.
    live_G = jnp.pad(live.reshape(-1), (0, blocks * rows - count)).reshape(blocks, rows).any(axis=1).astype(jnp.int32)
    in_place = bool(by_row)
    width, dtype = (vocabulary, logits.dtype) if in_place else (3, jnp.float32)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(blocks, pl.cdiv(vocabulary, columns)),
            in_specs=[
                *(pl.BlockSpec((rows, x.shape[1]), lambda i, c, *_: (i, 0)) for x in by_row),
                pl.BlockSpec((rows, columns), lambda i, c, live, _: (i, jnp.where(live[i] > 0, c, 0))),
            ],
            out_specs=pl.BlockSpec((rows, columns if in_place else width), lambda i, c, *_: (i, c if in_place else 0)),
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct((count, width), dtype, manual_axis_type=jax.typeof(logits).manual_axis_type),
        input_output_aliases={2 + len(by_row): 0} if in_place else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=flops * logits.size,
            transcendentals=logits.size,
            bytes_accessed=(1 + in_place) * logits.size * logits.dtype.itemsize,
        ),
        name=name,
    )(live_G, scale[None], *by_row, y_NV)


def _tile(logits: Float[Array, "*N V"]) -> tuple[int, int]:
    """Rows and columns of a tile."""
    *lead, vocabulary = logits.shape
    rows = min(_ROWS, round_up(math.prod(lead), _GROUP))
    return rows, min(_ROW_BYTES // logits.dtype.itemsize, round_up(vocabulary, _LANES))


# --- the kernels --------------------------------------------------------------------------------------------------


def _sums_kernel(live_ref: Any, scale_ref: Any, y_ref: Any, out_ref: Any, *running: Any, last_columns: int) -> None:
    i, tile = pl.program_id(0), pl.program_id(1)
    live, exponent = live_ref[i] > 0, scale_ref[0] * _LOG2E

    @pl.when(tile == 0)
    def _start() -> None:
        for ref, value in zip(running, (FLOOR, 0, 0), strict=True):
            ref[...] = jnp.full(ref.shape, value, jnp.float32)

    def include(columns: int) -> None:
        """Adds the tile's first columns, whose number is known while tracing."""

        def turn(row: Any, first: Any, columns: int) -> None:
            state = [ref[row, :] for ref in running]
            for start in range(0, columns, _AT_A_TIME * _LANES):
                pieces = []
                for column in range(start, min(start + _AT_A_TIME * _LANES, columns), _LANES):
                    y_P = y_ref[row, pl.ds(first + column, _LANES)].astype(jnp.float32)
                    if column + _LANES > columns:
                        there = lax.broadcasted_iota(jnp.int32, y_P.shape, 1) < columns - column
                        y_P = jnp.where(there, y_P, -jnp.inf)
                    pieces.append(y_P)
                state = _with(state, pieces, exponent)
            for ref, x in zip(running, state, strict=True):
                ref[row, :] = x

        _over(y_ref.shape[0], columns, turn)

    last = tile == pl.num_programs(1) - 1
    pl.when(live & ~last)(lambda: include(y_ref.shape[1]))
    pl.when(live & last)(lambda: include(last_columns))

    @pl.when(last)
    def _merge() -> None:
        tops, sums_e, sums_e_z = (ref[...] for ref in running)
        top = tops.max(axis=1, keepdims=True)
        shift = tops - top
        rescale = jnp.exp2(shift * exponent)
        sum_e = (rescale * sums_e).sum(axis=1, keepdims=True)
        sum_e_z = (rescale * (sums_e_z + shift * sums_e)).sum(axis=1, keepdims=True)
        for n, x in enumerate((top, sum_e, sum_e_z)):
            out_ref[:, slice(n, n + 1)] = x


def _over(rows: int, columns: int, turn: Callable[[Any, Any, int], None]) -> None:
    """Calls `turn(rows, first column, number of columns)` for a block's groups of rows and its first columns."""
    step = _IN_A_TURN * _LANES

    def group(g: Array, _: None) -> None:
        row = pl.ds(pl.multiple_of(g * _GROUP, _GROUP), _GROUP)
        lax.fori_loop(0, columns // step, lambda k, _: turn(row, pl.multiple_of(k * step, step), step), None)
        if columns % step:
            turn(row, columns // step * step, columns % step)

    lax.fori_loop(0, rows // _GROUP, group, None)


def _with(
    state: Sequence[Float[Array, "P Q"]], pieces: Sequence[Float[Array, "P Q"]], exponent: Float[Array, ""]
) -> list[Float[Array, "P Q"]]:
    """The maximum, the sum of e and that of `e (y - top)`, place by place, after these pieces too."""
    old, sum_e, sum_e_z = state
    top = _pairwise(jnp.maximum, [*pieces, old])
    shift = old - top
    rescale = jnp.exp2(shift * exponent)
    below = [y - top for y in pieces]
    e = [jnp.exp2(x * exponent) for x in below]
    # A logit of -inf gives 0 and not NaN.
    sums_e_z = [jnp.maximum(x, FLOOR) * weight for x, weight in zip(below, e, strict=True)]
    return [
        top,
        rescale * sum_e + _pairwise(jnp.add, e),
        rescale * (sum_e_z + shift * sum_e) + _pairwise(jnp.add, sums_e_z),
    ]


def _pairwise(operation: Any, xs: Sequence[Array]) -> Array:
    """The reduction of `xs` as a balanced tree, which has the fewest dependent steps."""
    while len(xs) > 1:
        xs = [operation(*xs[i : i + 2]) if i + 1 < len(xs) else xs[i] for i in range(0, len(xs), 2)]
    return xs[0]


def _gradient_kernel(live_ref: Any, scale_ref: Any, label_ref: Any, factors_ref: Any, y_ref: Any, out_ref: Any) -> None:
    live, scale = live_ref[pl.program_id(0)] > 0, scale_ref[0]
    tile_columns = y_ref.shape[1]

    def turn(row: Any, first: Any, columns: int) -> None:
        label, factors = label_ref[row, :] - pl.program_id(1) * tile_columns - first, factors_ref[row, :]
        top, log_sum_e, at_p, at_p_log_p, at_label, counts = jnp.split(factors, factors.shape[1], axis=1)
        for start in range(0, columns, _AT_A_TIME * _LANES):
            place = row, pl.ds(first + start, min(_AT_A_TIME * _LANES, columns - start))
            z_K = y_ref[place].astype(jnp.float32) * scale
            hit_K = lax.broadcasted_iota(jnp.int32, z_K.shape, 1) == label - start
            dy_K = p_term((z_K - top) - log_sum_e, at_p, at_p_log_p) + jnp.where(hit_K, at_label, 0)
            out_ref[place] = jnp.where(counts > 0, dy_K, 0).astype(out_ref.dtype)

    pl.when(live)(lambda: _over(y_ref.shape[0], tile_columns, turn))

    @pl.when(~live)
    def _clear() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)
