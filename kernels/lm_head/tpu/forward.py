"""The forward kernel for TPUs: statistics, and on request E_q[W] or the exponentials for a later product.

A block of R rows of hidden states stays on the chip while the weight passes by in tiles. The kernel takes S columns of
a tile at a time, transposed as in dW's kernel. A row's sums thus lie along lanes and cost no reduction across them. The
order is: y = W hᵀ, then the sums of `Running`, then the sum of e W, where e = exp(z - maximum so far). The sum is
rescaled when the maximum rises, as in FlashAttention (arXiv:2205.14135, section 3.1). The MXU computes the next S
columns of y meanwhile. Where there is no second product, a tile's last columns wait for the next tile's products.

The label's column is left out of `top` and of all sums but `sum_y`. `top` is FLOOR if there is no other column. The
label's logit is a product with the gathered row of W; it is FLOOR if the label is in none of these columns. If the
label's p is near 1, the sum of the other columns' exponentials keeps its digits, which a sum with the label's column
loses. So 1 - p is as exact as the logits. Blocks past the rows that count cost nothing.

Suffixes: R rows of a block, T columns of a tile, S columns of a step, C groups of 8 columns, 8 or 1 sublanes, L the 128
lanes; M all rows, D features, V vocabulary. A row's sums are repeated in all sublanes or spread over them, and added up
at the end. `y` is in the units of softmax.py. z is never formed: exponents are scale (y - top). q is the softmax over
all columns but the label's.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..contract import Inputs, Options, as_operand, capped, dot, number_of_columns, scale_of
from ..shapes import Array, Float, Integer
from ..softmax import FLOOR, Running, Softmax, cap_slope
from . import tiles
from .tiles import LANES, Case, Tiles, case_of

SUBLANES = 8
LOG2E = math.log2(math.e)


class KeptExponentials(NamedTuple):
    """Exponentials of a wave's rows, as backward takes them."""

    exponential: Float[Array, "V M"]
    """exp(scale (y - top)); with a softcap, times its slope 1 - y²; 0 at labels."""
    top: Float[Array, "steps M"]
    """The rows' running maximum when a step of columns was computed: tile j, step s is at SUBLANES * j + s."""
    tile: Tiles


def forward(
    inputs: Inputs, options: Options, *, tile: Tiles, mean: Any = None, keep: bool = False
) -> tuple[Running, Float[Array, "M D"] | None, KeptExponentials | None]:
    """Sums of the rows that count, which are the first, over the vocabulary, E_q[W], and with `keep` exponentials.

    The results of other rows are undefined. `mean` is the dtype of E_q[W], the sum of q W over these columns, times the
    cap's slope, if any; None: it isn't computed. A label outside of these columns must be negative.
    """
    hidden, weight, labels, dtype = inputs.hidden, inputs.weight, inputs.labels, options.dtype
    (rows, features), across = hidden.shape, pl.cdiv(len(weight), tile.columns)
    case = case_of(inputs, options, "forward", mean, keep)
    spec = functools.partial(block_spec, case, tile)
    outputs = {"sums": Output((SUBLANES, rows), jnp.float32, spec((SUBLANES, tile.rows), lambda i, j: (0, i)))}
    sums = ["top", "sum_e", "sum_e_y", *["sum_y"] * (options.mean_over is not None), *["sum_e_e"] * options.collision]
    scratch: dict[str, Any] = {name: pltpu.VMEM((SUBLANES, tile.rows), jnp.float32) for name in sums}
    if mean is None and not keep:
        scratch["carried"] = pltpu.VMEM((tile.step, tile.rows), jnp.float32)
    if mean is not None:
        outputs["mean"] = Output((rows, features), mean, spec((tile.rows, features), lambda i, j: (i, 0)))
        scratch["sum"] = pltpu.VMEM((tile.rows, features), jnp.float32)
    if keep:
        for name, height, out_dtype in (("kept", tile.columns, dtype), ("kept_top", SUBLANES, jnp.float32)):
            outputs[name] = Output((across * height, rows), out_dtype, spec((height, tile.rows), lambda i, j: (j, i)))
    name = "head_forward" + ("_mean" if mean is not None else "") + ("_keep" if keep else "")
    out = kernel_call(_kernel, case, tile, name, inputs, options, outputs=outputs, scratch=scratch)
    kept = KeptExponentials(out["kept"], out["kept_top"], tile) if keep else None
    y = capped((as_operand(hidden, dtype) * label_rows(weight, labels, dtype)).sum(axis=1), options.softcap)
    named_sums = dict(zip(sums, out["sums"], strict=False))
    return Running(label=jnp.where(labels >= 0, y, FLOOR), **named_sums), out.get("mean"), kept


def finish(running: Running, inputs: Inputs, options: Options) -> tuple[Softmax, Float[Array, "R"]]:
    """The softmax over the columns of all shards of the vocabulary, and this device's share.

    The share is the probability of this device's columns except the label's. Softmax and share are 0 at rows that don't
    count. Devices exchange two maxima and a row's sums.
    """
    scale, axis = scale_of(inputs.temperature, options.softcap), options.vocabulary_axis
    top, label = (running.top, running.label) if axis is None else lax.pmax((running.top, running.label), axis)
    highest = jnp.maximum(top, label)
    shift, label_z = (running.top - highest) * scale, (label - highest) * scale
    sum_y: Any = running.sum_y
    sum_e_e: Any = jnp.exp(2 * shift) * running.sum_e_e if options.collision else None
    sum_e = local_sum_e = jnp.exp(shift) * running.sum_e
    sum_e_z = jnp.exp(shift) * (running.sum_e_y * scale + shift * running.sum_e)
    if axis is not None:
        sum_e, sum_e_z, sum_y, sum_e_e = lax.psum((sum_e, sum_e_z, sum_y, sum_e_e), axis)
    # Where the label is the maximum, this is log(1 + sum_e), and expm1 is 0.
    log_sum_e = jnp.log1p(sum_e + jnp.expm1(label_z))
    entropy = log_sum_e - (sum_e_z + jnp.exp(label_z) * label_z) * jnp.exp(-log_sum_e)
    softmax = Softmax(highest, log_sum_e, jnp.where(label == FLOOR, -highest * scale, label_z), entropy)
    if options.mean_over is not None:
        softmax = softmax._replace(mean_logit=sum_y * (scale / options.mean_over))
    if options.collision:
        softmax = softmax._replace(collision=(sum_e_e + jnp.exp(2 * label_z)) * jnp.exp(-2 * log_sum_e))
    return jax.tree.map(lambda x: jnp.where(inputs.live, x, 0), (softmax, local_sum_e * jnp.exp(-log_sum_e)))


def label_rows(weight: Float[Array, "V D"], labels: Integer[Array, "M"], dtype: jnp.dtype) -> Float[Array, "M D"]:
    """The labels' rows of the weight as `as_operand` gives them; any rows for negative labels."""
    return as_operand(weight[jnp.maximum(labels, 0)], dtype)


def _kernel(*refs: Any, tile: Tiles, options: Options) -> None:
    ints, scale, hidden, weight, labels, out, scratch = refs
    i, j = pl.program_id(0), pl.program_id(1)
    last = pl.num_programs(1) - 1
    number, columns = ints[0], ints[1]
    softcap, dtype = options.softcap, options.dtype
    exponent = scale[0] * LOG2E
    rows, step, features = tile.rows, tile.step, hidden.shape[1]
    steps = tile.columns // step
    has_mean, keeps, carries = "mean" in out, "kept" in out, "carried" in scratch
    sums = [name for name in Running._fields if name in scratch and name != "top"]

    @pl.when(i * rows < number)
    def _() -> None:
        @pl.when(j == 0)
        def _() -> None:
            # Exponentials of the floor itself are 1; the first column that counts rescales them to 0.
            scratch["top"][...] = jnp.full((SUBLANES, rows), FLOOR)
            for name in sums:
                scratch[name][...] = jnp.zeros((SUBLANES, rows), jnp.float32)
            if carries:
                scratch["carried"][...] = jnp.full((step, rows), FLOOR)
            if has_mean:
                scratch["sum"][...] = jnp.zeros((rows, features), jnp.float32)
            if "hidden" in scratch:
                scratch["hidden"][...] = hidden[...].astype(dtype)

        h_RD, w_TD = scratch.get("hidden", hidden), scratch.get("weight", weight)
        if "weight" in scratch:
            load_tile(w_TD, weight)
        zero_tail(w_TD, columns - j * tile.columns, j == last)

        def products(s: int) -> Float[Array, "S R"]:
            return capped(dot(w_TD[pl.ds(s * step, step), :], h_RD[...], (1, 1), dtype), softcap)

        def by_sublane(x_SR: Array) -> Float[Array, "C 8 R"]:
            return x_SR.reshape(-1, SUBLANES, rows)

        def add_to_sums(y_SR: Array, s: int) -> tuple[Array, Array, Array]:
            """Adds step s of this tile; its exponentials for E_q[W], the maximum so far, the factor of earlier sums."""
            first = j * tile.columns + s * step
            column_SR = lax.broadcasted_iota(jnp.int32, (step, rows), 0)
            y_SR = jnp.where(column_SR < columns - first, y_SR, FLOOR)
            if "sum_y" in scratch:
                scratch["sum_y"][...] += by_sublane(jnp.where(y_SR == FLOOR, 0, y_SR)).sum(axis=0)
            y_SR = jnp.where(column_SR == labels[...] - first, FLOOR, y_SR)

            old_top_8R, old_sum_e_8R = scratch["top"][...], scratch["sum_e"][...]
            y_C8R = by_sublane(y_SR)
            highest_1R = y_C8R.max(axis=0).max(axis=0, keepdims=True)
            top_8R = jnp.maximum(old_top_8R, jnp.broadcast_to(highest_1R, (SUBLANES, rows)))
            below_C8R = y_C8R - top_8R
            e_C8R = jnp.exp2(below_C8R * exponent)
            shift_8R = old_top_8R - top_8R
            rescale_8R = jnp.exp2(shift_8R * exponent)
            scratch["top"][...] = top_8R
            scratch["sum_e"][...] = rescale_8R * old_sum_e_8R + e_C8R.sum(axis=0)
            scratch["sum_e_y"][...] = rescale_8R * (scratch["sum_e_y"][...] + shift_8R * old_sum_e_8R) + (
                e_C8R * below_C8R
            ).sum(axis=0)
            if "sum_e_e" in scratch:
                e_e_8R = (e_C8R * e_C8R).sum(axis=0)
                scratch["sum_e_e"][...] = rescale_8R * rescale_8R * scratch["sum_e_e"][...] + e_e_8R
            e_SR = e_C8R.reshape(step, rows)
            return (e_SR if softcap is None else e_SR * cap_slope(y_SR)), top_8R[:1], rescale_8R[:1]

        def add_to_mean(s: int, e_SR: Array, rescale_1R: Array) -> None:
            scratch["sum"][...] = scratch["sum"][...] * lanes(to_lanes(rescale_1R), features) + dot(
                e_SR, w_TD[pl.ds(s * step, step), :], (0, 0), dtype
            )

        # The softmax beside the products of step s is of the step before; for s = 0 of the last tile.
        y_next = scratch["carried"][...] if carries else products(0)
        ahead = 0 if carries else 1
        to_add: tuple[Any, ...] = ()
        for s in range(steps):
            y_SR = y_next
            if s + ahead < steps:
                y_next = products(s + ahead)
            e_SR, top_1R, rescale_1R = add_to_sums(y_SR, s + ahead - 1)
            if keeps:
                out["kept"][pl.ds(s * step, step), :] = e_SR.astype(dtype)
                out["kept_top"][pl.ds(s, 1), :] = top_1R
            if has_mean:
                if to_add:
                    add_to_mean(*to_add)
                to_add = s, e_SR.astype(dtype), rescale_1R
        if has_mean:
            add_to_mean(*to_add)
        if carries:
            scratch["carried"][...] = y_next

        @pl.when(j == last)
        def _() -> None:
            if carries:
                add_to_sums(scratch["carried"][...], steps - 1)
            out["sums"][pl.ds(0, 1), :] = scratch["top"][...][:1]
            for n, name in enumerate(sums, 1):
                out["sums"][pl.ds(n, 1), :] = scratch[name][...].sum(axis=0, keepdims=True)
            if has_mean:
                mean_RD = scratch["sum"][...] * lanes(to_lanes(1 / out["sums"][pl.ds(1, 1), :]), features)
                out["mean"][...] = mean_RD.astype(out["mean"].dtype)


# --- shared with the backward kernels -----------------------------------------------------------------------------


Operand = tuple[Array, pl.BlockSpec]


class Output(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any
    spec: pl.BlockSpec


def kernel_call(
    kernel: Callable[..., None],
    case: Case,
    tile: Tiles,
    name: str,
    inputs: Inputs,
    options: Options,
    *,
    streamed: Sequence[Operand] = (),
    others: Sequence[Operand] = (),
    outputs: dict[str, Output],
    scratch: dict[str, Any],
    aliases: dict[int, int] | None = None,
) -> dict[str, Array]:
    """The results of a kernel over blocks of rows (rows that count come first) and tiles of the weight.

    The kernel's refs are, in order: two arrays of scalars (how many rows and how many columns count; the scale), hidden
    states, `streamed` (default: the weight), labels, `others`, outputs by name, and scratch by name. If an argument has
    another dtype, scratch has `hidden` or `weight` in the products' dtype, for a block or a tile.
    """
    hidden, work = inputs.hidden, case.tokens * case.vocabulary
    height, features = tile.rows, hidden.shape[1]
    spec = functools.partial(block_spec, case, tile, live=True)
    across = pl.cdiv(len(inputs.weight), tile.columns)

    def index(*step: Any) -> Any:
        if not case.by_rows:
            return step[0]
        i, j, ints, _ = step  # past the rows that count the last tile, so that nothing is fetched
        return jnp.where(i * tile.rows < ints[0], j, across - 1)

    streamed = streamed or [tile_of_rows(inputs.weight, tile.columns, index)]
    operands = [(hidden, spec((height, features), lambda i, j: (i, 0))), *streamed]
    operands += [(inputs.labels[None], spec((1, height), lambda i, j: (0, i))), *others]
    if case.hidden != case.product:
        scratch["hidden"] = pltpu.VMEM((height, features), case.product)
    if (case.weight != case.product or tiles.turned(features)) and case.kernel != "kept":
        scratch["weight"] = pltpu.VMEM((tile.columns, features), case.product)
    grid = pl.cdiv(len(hidden), height), across
    typed = functools.partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(hidden).manual_axis_type)
    return pl.pallas_call(
        functools.partial(kernel, tile=tile, options=options),
        out_shape={name: typed(out.shape, out.dtype) for name, out in outputs.items()},
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid if case.by_rows else grid[::-1],
            in_specs=[spec for _, spec in operands],
            out_specs={name: out.spec for name, out in outputs.items()},
            scratch_shapes=[scratch],
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
    )(
        jnp.stack([inputs.live.sum(dtype=jnp.int32), number_of_columns(inputs)]),
        scale_of(inputs.temperature, options.softcap)[None],
        *(array for array, _ in operands),
    )


def block_spec(
    case: Case, tile: Tiles, shape: tuple[int, int], place: Callable[[Any, Any], tuple[Any, Any]], live: bool = False
) -> pl.BlockSpec:
    """A block at `place(i, j)` for block i of rows and tile j of the weight.

    With `live`, i is at most the last block with rows that count, so that past it nothing is fetched.
    """

    def index(*step: Any) -> tuple[Any, Any]:
        i, j = step[:2] if case.by_rows else step[1::-1]
        return place(jnp.minimum(i, jnp.maximum(lax.div(step[2][0] - 1, jnp.int32(tile.rows)), 0)) if live else i, j)

    return pl.BlockSpec(shape, index)


def tile_of_rows(matrix: Float[Array, "V D"], rows: int, place: Callable[..., Any]) -> Operand:
    """A matrix as XLA keeps it, and its tile number `place(*step)` of so many rows."""
    if tiles.turned(matrix.shape[1]):
        return matrix.T, pl.BlockSpec((matrix.shape[1], rows), lambda *step: (0, place(*step)))
    return matrix, pl.BlockSpec((rows, matrix.shape[1]), lambda *step: (place(*step), 0))


def load_tile(to: Any, tile: Any) -> None:
    """Loads a tile of rows, in another dtype."""
    to[...] = (tile[...].T if tiles.turned(to.shape[1]) else tile[...]).astype(to.dtype)


def store_tile(to: Any, tile: Any) -> None:
    """Stores a tile of rows in its matrix's dtype."""
    to[...] = (tile[...].T if tiles.turned(tile.shape[1]) else tile[...]).astype(to.dtype)


def zero_tail(block: Any, rows: Any, is_last: Any) -> None:
    """Zeroes a last block's rows from `rows` on, past the array's end: they may hold NaN, and 0 times NaN is not 0."""

    @pl.when(is_last)
    def _() -> None:
        row = lax.broadcasted_iota(jnp.int32, block.shape, 0)
        block[...] = jnp.where(row < rows, block[...], 0)


def to_lanes(row_1R: Array) -> Array:
    """[1, R] to [R, L], the same in each lane."""
    return jnp.broadcast_to(row_1R, (LANES, row_1R.shape[1])).T


def lanes(x_RL: Array, width: int) -> Array:
    """[R, L], the same in all lanes, to [R, width]."""
    return jnp.tile(x_RL, (1, pl.cdiv(width, LANES)))[:, :width]
