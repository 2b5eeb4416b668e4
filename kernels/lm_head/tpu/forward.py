"""The forward kernel for TPUs: statistics, and on request E_p[W] or the exponentials for a later product.

A block of R rows of hidden states stays on the chip while the weight passes by in tiles. The kernel takes S columns of
a tile at a time: y = h Wᵀ, then the running sums of `softmax.py`, then the sum of e W, where e = exp(z - maximum so
far), rescaled when the maximum rises, as in FlashAttention (arXiv:2205.14135, section 3.1). The MXU computes the next
S columns of y meanwhile. The callers add the label's own column exactly. Blocks of rows past `number` cost nothing.

Suffixes: R rows of a block, T columns of a tile, S columns of a step, L the 128 lanes; M all rows, D features,
V vocabulary. A row's sums are repeated in all lanes, [R, L], or are spread over them and added up at the end.
`y` is the capped product; z = y / temperature is never formed: exponents are (y - top) / temperature.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Integer

from kernels.lm_head.contract import dot
from kernels.lm_head.softmax import Running
from kernels.lm_head.tpu import tiles
from kernels.lm_head.tpu.tiles import LANES, Case, Tiles

FLOOR = -1e30  # below any product, yet its sums and differences are finite
SUBLANES = 8
LOG2E = math.log2(math.e)


class Kept(NamedTuple):
    """Exponentials of a wave's rows, as backward takes them."""

    exponential: Float[Array, "M V"]
    """exp((y - top) / temperature); with a softcap, times its slope 1 - (y / cap)²; 0 at labels."""
    top: Float[Array, "steps M"]
    """The rows' running maximum when a step of columns was computed: tile j, step s is at SUBLANES * j + s."""
    tile: Tiles


def forward(
    hidden: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    labels: Integer[Array, "M"],
    number: Integer[Array, ""],
    columns: Integer[Array, ""],
    temperature: Float[Array, ""],
    *,
    tile: Tiles,
    softcap: float | None,
    dtype: jnp.dtype,
    mean: jnp.dtype | None = None,
    keep: bool = False,
) -> tuple[Running, Float[Array, "M D"] | None, Kept | None]:
    """Running sums of rows [0, number) over columns [0, columns), in units of y, E_p[W], and with `keep` exponentials.

    The results of other rows are undefined. `mean` is the dtype of E_p[W], the sum of p W over these columns but the
    label's, p being the softmax over these columns (times the cap's slope, if any); None: it isn't computed.
    """
    rows, features = hidden.shape
    gradient, sizes = jnp.dtype(mean or hidden.dtype), (rows, len(weight), features)
    case = Case("forward", *sizes, hidden.dtype, weight.dtype, dtype, gradient, mean is not None, keep)
    blocks, tiles_of_weight = pl.cdiv(rows, tile.rows), pl.cdiv(len(weight), tile.columns)
    typed = functools.partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(hidden).manual_axis_type)
    row_block = live_block(tile)

    outputs = {
        "sums": (typed((SUBLANES, rows), jnp.float32), pl.BlockSpec((SUBLANES, tile.rows), lambda i, *_: (0, i)))
    }
    scratch: dict[str, Any] = {
        name: pltpu.VMEM((tile.rows, LANES), jnp.float32) for name in ("top", "sum_e", "sum_e_z", "label_y")
    }
    scratch["label"] = pltpu.VMEM((tile.rows, LANES), jnp.int32)
    if mean is not None:
        outputs["mean"] = typed((rows, features), mean), pl.BlockSpec((tile.rows, features), lambda i, *_: (i, 0))
        scratch["sum"] = pltpu.VMEM((tile.rows, features), jnp.float32)
    if keep:
        outputs["kept"] = (
            typed((rows, tiles_of_weight * tile.columns), dtype),
            pl.BlockSpec((tile.rows, tile.columns), lambda i, j, *_: (i, j)),
        )
        outputs["kept_top"] = (
            typed((tiles_of_weight * SUBLANES, rows), jnp.float32),
            pl.BlockSpec((SUBLANES, tile.rows), lambda i, j, *_: (j, i)),
        )
    scratch |= operands(tile, features, hidden.dtype, weight.dtype, dtype)
    out = kernel_call(
        functools.partial(_kernel, tile=tile, softcap=softcap, dtype=dtype),
        case,
        tile,
        "head_forward" + ("_mean" if mean is not None else "") + ("_keep" if keep else ""),
        out_shape={name: shape for name, (shape, _) in outputs.items()},
        grid=(blocks, tiles_of_weight),
        in_specs=[
            pl.BlockSpec((tile.rows, features), lambda i, j, ints, _: (row_block(i, ints), 0)),
            pl.BlockSpec((tile.columns, features), live_tile(tile, tiles_of_weight)),
            pl.BlockSpec((1, tile.rows), lambda i, j, ints, _: (0, row_block(i, ints))),
        ],
        out_specs={name: spec for name, (_, spec) in outputs.items()},
        scratch=scratch,
    )(jnp.stack([number, columns]), (1 / temperature)[None], hidden, weight, labels[None])
    kept = Kept(out["kept"], out["kept_top"], tile) if keep else None
    return Running(*out["sums"][:4]), out.get("mean"), kept


def _kernel(*refs: Any, tile: Tiles, softcap: float | None, dtype: jnp.dtype) -> None:
    ints, scales, hidden, weight, labels, out, scratch = refs
    i, j = pl.program_id(0), pl.program_id(1)
    last = pl.num_programs(1) - 1
    number, columns = ints[0], ints[1]
    exponent = scales[0] * LOG2E
    rows, step = tile.rows, tile.step
    features = hidden.shape[1]
    has_mean, keeps = "mean" in out, "kept" in out

    @pl.when(i * rows < number)
    def _() -> None:
        @pl.when(j == 0)
        def _() -> None:
            for name in ("sum_e", "sum_e_z", "label_y"):
                scratch[name][...] = jnp.zeros((rows, LANES), jnp.float32)
            scratch["top"][...] = jnp.full((rows, LANES), FLOOR)
            scratch["label"][...] = to_lanes(labels[...])
            if has_mean:
                scratch["sum"][...] = jnp.zeros((rows, features), jnp.float32)
            if "hidden" in scratch:
                scratch["hidden"][...] = hidden[...].astype(dtype)

        zero_tail(weight, columns - j * tile.columns, j == last)
        h_RD, w_TD = scratch.get("hidden", hidden), scratch.get("weight", weight)
        if "weight" in scratch:
            w_TD[...] = weight[...].astype(dtype)

        def products(s: int) -> Float[Array, "R S"]:
            return dot(h_RD[...], w_TD[pl.ds(s * step, step), :], (1, 1), dtype)

        def add_mean(s: int, e_RS: Array, rescale_RL: Array) -> None:
            scratch["sum"][...] = scratch["sum"][...] * lanes(rescale_RL, features) + dot(
                e_RS, w_TD[pl.ds(s * step, step), :], (1, 0), dtype
            )

        y_next = products(0)
        to_add: tuple[Any, ...] = ()
        kept_tops = []
        for s in range(tile.columns // step):
            y_RS = y_next
            if s + 1 < tile.columns // step:
                y_next = products(s + 1)
            y_RS = y_RS if softcap is None else softcap * jnp.tanh(y_RS / softcap)
            first = j * tile.columns + s * step
            column_RS = lax.broadcasted_iota(jnp.int32, (rows, step), 1)
            y_RS = jnp.where(column_RS < columns - first, y_RS, FLOOR)
            hit_RS = column_RS == lanes(scratch["label"][...] - first, step)

            old_top_RL, old_sum_e_RL = scratch["top"][...], scratch["sum_e"][...]
            top_RL = jnp.maximum(old_top_RL, to_lanes_of(y_RS.max(axis=1, keepdims=True)))
            below_RS = y_RS - lanes(top_RL, step)
            e_RS = jnp.exp2(below_RS * exponent)
            shift_RL = old_top_RL - top_RL
            rescale_RL = jnp.exp2(shift_RL * exponent)
            scratch["top"][...] = top_RL
            scratch["sum_e"][...] = rescale_RL * old_sum_e_RL + folded(e_RS)
            scratch["sum_e_z"][...] = rescale_RL * (scratch["sum_e_z"][...] + shift_RL * old_sum_e_RL) + folded(
                e_RS * below_RS
            )
            scratch["label_y"][...] += folded(jnp.where(hit_RS, y_RS, 0))
            if has_mean or keeps:
                slope_RS = e_RS if softcap is None else e_RS * cap_slope(y_RS, softcap)
                others_RS = jnp.where(hit_RS, 0, slope_RS).astype(dtype)
            if keeps:
                out["kept"][:, pl.ds(s * step, step)] = others_RS
                kept_tops.append(top_RL)
            if has_mean:
                if to_add:
                    add_mean(*to_add)
                to_add = s, others_RS, rescale_RL
        if has_mean:
            add_mean(*to_add)
        if keeps:
            out["kept_top"][...] = to_rows(kept_tops)

        @pl.when(j == last)
        def _() -> None:
            sum_e_RL = row_sum(scratch["sum_e"][...])
            sums = [scratch["top"][...], sum_e_RL, row_sum(scratch["sum_e_z"][...]), row_sum(scratch["label_y"][...])]
            out["sums"][...] = to_rows(sums)
            if has_mean:
                out["mean"][...] = (scratch["sum"][...] * lanes(1 / sum_e_RL, features)).astype(out["mean"].dtype)


# --- shared with the backward kernels -----------------------------------------------------------------------------


def kernel_call(
    kernel: Callable[..., None],
    case: Case,
    tile: Tiles,
    name: str,
    *,
    out_shape: Any,
    grid: tuple[int, int],
    in_specs: list[pl.BlockSpec],
    out_specs: Any,
    scratch: dict[str, Any],
    aliases: dict[int, int] | None = None,
) -> Callable[..., Any]:
    """The `pallas_call` of a kernel with two prefetched arrays of scalars, integers and floats, ahead of its blocks."""
    work = case.tokens * case.vocabulary
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=grid, in_specs=in_specs, out_specs=out_specs, scratch_shapes=[scratch]
        ),
        input_output_aliases=aliases or {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=tiles.limit(case, tile)
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * tiles.products(case) * work * case.features,
            transcendentals=work,
            bytes_accessed=tiles.traffic(case, tile),
        ),
        name=name,
    )


def live_block(tile: Tiles) -> Callable[..., Any]:
    """Index map: the block of rows for step i; past the rows that count the last one, so that nothing is fetched."""
    return lambda i, ints: jnp.minimum(i, jnp.maximum(pl.cdiv(ints[0], tile.rows) - 1, 0))


def live_tile(tile: Tiles, tiles_of_weight: int) -> Callable[..., Any]:
    """Index map: the tile of the weight for step (i, j); past the rows that count the last one."""
    return lambda i, j, ints, _: (jnp.where(i * tile.rows < ints[0], j, tiles_of_weight - 1), 0)


def operands(tile: Tiles, features: int, hidden: Any, weight: Any, product: Any) -> dict[str, Any]:
    """Scratch for a block and a tile in the products' dtype, where the arguments have another."""
    scratch = {}
    if hidden != product:
        scratch["hidden"] = pltpu.VMEM((tile.rows, features), product)
    if weight != product:
        scratch["weight"] = pltpu.VMEM((tile.columns, features), product)
    return scratch


def cap_slope(y: Array, softcap: float) -> Array:
    """Derivative of `softcap * tanh(x / softcap)`, given its value `y`; finite where `y` is a mask's floor."""
    return 1 - (jnp.maximum(y, -softcap) * (1 / softcap)) ** 2


def zero_tail(block: Any, rows: Any, is_last: Any) -> None:
    """Zeroes a last block's rows from `rows` on, past the array's end: they may hold NaN, and 0 times NaN is not 0."""

    @pl.when(is_last)
    def _() -> None:
        row = lax.broadcasted_iota(jnp.int32, block.shape, 0)
        block[...] = jnp.where(row < rows, block[...], 0)


def to_lanes(row_1R: Array) -> Array:
    """[1, R] to [R, L], the same in each lane."""
    return jnp.broadcast_to(row_1R, (LANES, row_1R.shape[1])).T


def to_lanes_of(column_R1: Array) -> Array:
    return jnp.broadcast_to(column_R1, (column_R1.shape[0], LANES))


def to_rows(columns_RL: list[Array]) -> Array:
    """Up to 8 arrays [R, L], each the same in all lanes, to the rows of one [8, R]."""
    lane = lax.broadcasted_iota(jnp.int32, columns_RL[0].shape, 1)
    combined = columns_RL[-1]
    for n, column_RL in reversed(list(enumerate(columns_RL[:-1]))):
        combined = jnp.where(lane == n, column_RL, combined)
    return combined.T[:SUBLANES]


def lanes(x_RL: Array, width: int) -> Array:
    """[R, L], the same in all lanes, to [R, width]."""
    return jnp.tile(x_RL, (1, pl.cdiv(width, LANES)))[:, :width]


def folded(x_RS: Array) -> Array:
    """The sum over columns with the same lane: [R, S] to [R, L]."""
    return sum((x_RS[:, first : first + LANES] for first in range(0, x_RS.shape[1], LANES)), start=jnp.float32(0))


def row_sum(x_RL: Array) -> Array:
    return to_lanes_of(x_RL.sum(axis=1, keepdims=True))
