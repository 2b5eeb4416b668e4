"""Statistics of logits and their gradient on TPUs: two Pallas kernels, each of which reads the logits once.

The grid is (leading dims, blocks of rows, tiles of columns), tiles innermost. Forward keeps a maximum and two sums for
every 128th column (every 16th, where rows lie along the lanes) and merges these behind the last tile. Backward writes
the gradient over the tile of logits that it is made from. Where no row of a block counts, one tile is fetched and not
read. Columns past the last are -inf to the forward pass, and the backward pass leaves them unwritten.

XLA puts the dim in lanes that wastes least memory, and copies all logits where a kernel takes another: so the kernels
take logits either way round (`memory_order`).

Suffixes: P a piece of 16 x 128 logits; K the pieces that are computed at a time. `y` is a logit; z = scale * y.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Integer

from kernels.lm_head.live_rows import round_up
from kernels.lm_head.softmax import FLOOR, Running, Softmax, TokenLogprobs
from kernels.logits.xla import Given, p_term, row_factors

_LANES = 128
_PIECE = {2: (16, _LANES), 1: (_LANES, 16)}  # rows and columns, by the axis of the columns; bfloat16 has 16 sublanes
_TILE = {2: (256, 8192), 1: (512, 4096)}  # rows, and bytes of a row, by the same. 2 MiB
_AT_A_TIME, _IN_A_TURN = 8, 32  # pieces
_LOG2E = math.log2(math.e)


def obstacle(logits: Float[Array, "*N V"]) -> str | None:
    """The reason why the kernels can't take these logits, or None."""
    if logits.dtype == jnp.float16:
        return "TPUs don't compute with float16"
    if logits.ndim < 2 or not logits.size:
        return f"it takes rows of logits, and these are {list(logits.shape)}"
    return None


def has_default_layout(logits: Float[Array, "*N V"]) -> bool:
    """Whether the kernels take logits of this shape in XLA's default layout."""
    return memory_order(logits)[:-2] == tuple(range(logits.ndim - 2))


def memory_order(logits: Float[Array, "*N V"]) -> tuple[int, ...]:
    """The dims, from major to minor, of such an array in a TPU's memory: the order that takes least.

    The last but one is padded to 8, or a power of two below that, and the last to 128, as found with libtpu 0.0.42.
    """

    def size(order: tuple[int, ...]) -> int:
        *outer, sublanes, lanes = (logits.shape[dim] for dim in order)
        least = max(4 // logits.dtype.itemsize, 1 << (sublanes - 1).bit_length())
        return math.prod(outer) * (round_up(sublanes, 8) if sublanes > 8 else least) * round_up(lanes, _LANES)

    return min(itertools.permutations(range(logits.ndim)), key=size)


def sums(given: Given) -> Running:
    """The softmax's sums over all columns of `z = scale * logits`."""
    logits, labels, live, scale = given
    plan, y = _laid_out(logits)
    vocabulary = logits.shape[-1]
    out = pl.pallas_call(
        functools.partial(_sums_kernel, plan=plan, last_columns=vocabulary - (plan.tiles - 1) * plan.columns),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=plan.grid,
            in_specs=[plan.spec(plan.columns, plan.fetched)],
            out_specs=plan.spec(3, plan.first),
            scratch_shapes=[pltpu.VMEM(plan.place(plan.rows, plan.width), jnp.float32)] * 3,
        ),
        out_shape=_result((len(y), *plan.place(logits.shape[-2], 3)), jnp.float32, logits),
        compiler_params=_PARAMETERS,
        cost_estimate=pl.CostEstimate(
            flops=8 * logits.size, transcendentals=logits.size, bytes_accessed=logits.size * logits.dtype.itemsize
        ),
        name="logits_sums",
    )(plan.live_blocks(live), scale[None], y)
    top, sum_e, sum_e_z = (x.reshape(live.shape) for x in jnp.moveaxis(out, plan.axis, 0))
    inside = (labels >= 0) & (labels < vocabulary)
    label = jnp.take_along_axis(logits, jnp.where(inside, labels, 0)[..., None], axis=-1)[..., 0].astype(jnp.float32)
    return Running(scale * top, sum_e, scale * sum_e_z, jnp.where(inside, scale * label, 0))


def gradient(given: Given, softmax: Softmax, slopes: TokenLogprobs) -> Float[Array, "*N V"]:
    """The derivatives by the logits of a scalar with derivatives `slopes` by the statistics, in the logits' memory."""
    logits, labels, live, scale = given
    plan, y = _laid_out(logits)
    factors = (*row_factors(softmax, slopes, scale), live.astype(jnp.float32))
    rows = (len(y), logits.shape[-2])
    out = pl.pallas_call(
        functools.partial(_gradient_kernel, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=plan.grid,
            in_specs=[
                plan.spec(1, plan.first),
                plan.spec(len(factors), plan.first),
                plan.spec(plan.columns, plan.fetched),
            ],
            out_specs=plan.spec(plan.columns, plan.each),
        ),
        out_shape=_result(y.shape, y.dtype, logits),
        input_output_aliases={4: 0},
        compiler_params=_PARAMETERS,
        cost_estimate=pl.CostEstimate(
            flops=12 * logits.size, transcendentals=logits.size, bytes_accessed=2 * logits.size * logits.dtype.itemsize
        ),
        name="logits_gradient",
    )(
        plan.live_blocks(live),
        scale[None],
        jnp.expand_dims(labels.astype(jnp.int32).reshape(rows), plan.axis),
        jnp.stack([x.reshape(rows) for x in factors], plan.axis),
        y,
    )
    return (out if plan.axis == 2 else out.swapaxes(1, 2)).reshape(logits.shape)


# --- layout ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How the logits are divided into tiles: [B, T, V] with `axis` 2, [B, V, T] with 1."""

    axis: int
    batch: int
    blocks: int
    rows: int
    tiles: int
    columns: int

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.batch, self.blocks, self.tiles

    @property
    def width(self) -> int:
        """The number of columns of a piece."""
        return _PIECE[self.axis][1]

    def place(self, row: Any, column: Any) -> tuple[Any, Any]:
        """A pair for rows and columns in the order of the array's dims."""
        return (row, column) if self.axis == 2 else (column, row)

    def spec(self, columns: int, index: Any) -> pl.BlockSpec:
        return pl.BlockSpec((1, *self.place(self.rows, columns)), index)

    def each(self, b: Any, i: Any, c: Any, live: Any, scale: Any) -> tuple[Any, ...]:
        return b, *self.place(i, c)

    def first(self, b: Any, i: Any, c: Any, live: Any, scale: Any) -> tuple[Any, ...]:
        return b, *self.place(i, 0)

    def fetched(self, b: Any, i: Any, c: Any, live: Any, scale: Any) -> tuple[Any, ...]:
        return b, *self.place(i, jnp.where(live[b * self.blocks + i] > 0, c, 0))

    def live_blocks(self, live: Bool[Array, "*N"]) -> Integer[Array, "G"]:
        """1 for a block with a row that counts, else 0, flat: scalar memory would pad each row to 128 numbers."""
        live_BT = live.reshape(self.batch, -1)
        padded = jnp.pad(live_BT, ((0, 0), (0, self.blocks * self.rows - live_BT.shape[1])))
        return padded.reshape(self.batch * self.blocks, self.rows).any(axis=1).astype(jnp.int32)


def _laid_out(logits: Float[Array, "*N V"]) -> tuple[_Plan, Float[Array, "B _ _"]]:
    """The plan, and the logits with the dims that the kernels take: the same memory, if the default layout allows."""
    time, vocabulary = logits.shape[-2:]
    y = logits.reshape(-1, time, vocabulary)
    axis = 1 if has_default_layout(logits) and memory_order(logits)[-1] != logits.ndim - 1 else 2
    rows, row_bytes = _TILE[axis]
    group, width = _PIECE[axis]
    rows, columns = min(rows, round_up(time, group)), min(row_bytes // y.dtype.itemsize, round_up(vocabulary, width))
    plan = _Plan(axis, len(y), pl.cdiv(time, rows), rows, pl.cdiv(vocabulary, columns), columns)
    return plan, y if axis == 2 else y.swapaxes(1, 2)


def _result(shape: tuple[int, ...], dtype: Any, like: Array) -> jax.ShapeDtypeStruct:
    """The shape of a result that varies, under `shard_map`, over the axes that `like` varies over."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


_PARAMETERS = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))


# --- the kernels --------------------------------------------------------------------------------------------------


def _sums_kernel(
    live_ref: Any, scale_ref: Any, y_ref: Any, out_ref: Any, *running: Any, plan: _Plan, last_columns: int
) -> None:
    b, i, tile = (pl.program_id(axis) for axis in range(3))
    live, exponent = live_ref[b * plan.blocks + i] > 0, scale_ref[0] * _LOG2E
    along = plan.axis - 1

    @pl.when(tile == 0)
    def _start() -> None:
        for ref, value in zip(running, (FLOOR, 0, 0), strict=True):
            ref[...] = jnp.full(ref.shape, value, jnp.float32)

    def include(columns: int) -> None:
        """Adds the tile's first columns, whose number is known while tracing."""

        def turn(row: Any, first: Any, columns: int) -> None:
            at = plan.place(row, slice(None))
            state = [ref[at] for ref in running]
            for start in range(0, columns, _AT_A_TIME * plan.width):
                pieces = []
                for column in range(start, min(start + _AT_A_TIME * plan.width, columns), plan.width):
                    y_P = y_ref[0, *plan.place(row, pl.ds(first + column, plan.width))].astype(jnp.float32)
                    if column + plan.width > columns:
                        there = lax.broadcasted_iota(jnp.int32, y_P.shape, along) < columns - column
                        y_P = jnp.where(there, y_P, -jnp.inf)
                    pieces.append(y_P)
                state = _with(state, pieces, exponent)
            for ref, x in zip(running, state, strict=True):
                ref[at] = x

        _over(plan, columns, turn)

    last = tile == plan.tiles - 1
    pl.when(live & ~last)(lambda: include(plan.columns))
    pl.when(live & last)(lambda: include(last_columns))

    @pl.when(last)
    def _merge() -> None:
        tops, sums_e, sums_e_z = (ref[...] for ref in running)
        top = tops.max(axis=along, keepdims=True)
        shift = tops - top
        rescale = jnp.exp2(shift * exponent)
        sum_e = (rescale * sums_e).sum(axis=along, keepdims=True)
        sum_e_z = (rescale * (sums_e_z + shift * sums_e)).sum(axis=along, keepdims=True)
        for n, x in enumerate((top, sum_e, sum_e_z)):
            out_ref[0, *plan.place(slice(None), slice(n, n + 1))] = x


def _over(plan: _Plan, columns: int, turn: Callable[[Any, Any, int], None]) -> None:
    """Calls `turn(rows, first column, number of columns)` for a block's groups of rows and its first columns."""
    rows, step = _PIECE[plan.axis][0], _IN_A_TURN * plan.width

    def group(g: Array, _: None) -> None:
        row = pl.ds(pl.multiple_of(g * rows, rows), rows)
        lax.fori_loop(0, columns // step, lambda k, _: turn(row, pl.multiple_of(k * step, step), step), None)
        if columns % step:
            turn(row, columns // step * step, columns % step)

    lax.fori_loop(0, plan.rows // rows, group, None)


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


def _gradient_kernel(
    live_ref: Any, scale_ref: Any, label_ref: Any, factors_ref: Any, y_ref: Any, out_ref: Any, *, plan: _Plan
) -> None:
    b, i, tile = (pl.program_id(axis) for axis in range(3))
    live, scale = live_ref[b * plan.blocks + i] > 0, scale_ref[0]
    along = plan.axis - 1

    def turn(row: Any, first: Any, columns: int) -> None:
        at = (0, *plan.place(row, slice(None)))
        label, factors = label_ref[at] - tile * plan.columns - first, factors_ref[at]
        parts = jnp.split(factors, factors.shape[along], axis=along)
        top, log_sum_e, at_p, at_p_log_p, at_label, counts = parts
        for start in range(0, columns, _AT_A_TIME * plan.width):
            width = min(_AT_A_TIME * plan.width, columns - start)
            place = (0, *plan.place(row, pl.ds(first + start, width)))
            z_K = y_ref[place].astype(jnp.float32) * scale
            hit_K = lax.broadcasted_iota(jnp.int32, z_K.shape, along) == label - start
            dy_K = p_term((z_K - top) - log_sum_e, at_p, at_p_log_p) + jnp.where(hit_K, at_label, 0)
            out_ref[place] = jnp.where(counts > 0, dy_K, 0).astype(out_ref.dtype)

    pl.when(live)(lambda: _over(plan, plan.columns, turn))

    @pl.when(~live)
    def _clear() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)
