"""The head on TPUs: which kernel runs when.

Rows that count are moved ahead of the others, block by block (`live_rows.py`). docs/head.md describes the orders of the
work. All sums leave out the label's column (`others.py`), and so do E_q[W] and the exponentials that are kept: a
probability near 1 loses nothing to rounding. A loss that uses the entropy needs the dh kernel: dh doesn't follow from
E_q[W] there.

Suffixes: N rows, M rows rounded up to whole blocks, R rows of a block; D features, V vocabulary.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Integer

from kernels.lm_head.contract import (
    Gradients,
    Inputs,
    Objective,
    Options,
    Terms,
    TokenLogprobs,
    gradient_dtypes,
    local_labels,
    loss_slopes,
    number_of_columns,
    zeros,
)
from kernels.lm_head.live_rows import LiveRows, live_rows, write
from kernels.lm_head.softmax import Softmax
from kernels.lm_head.tpu import tiles
from kernels.lm_head.tpu.backward import RowFactors, hidden_gradient, kept_weight_gradient, weight_gradient
from kernels.lm_head.tpu.forward import Kept
from kernels.lm_head.tpu.forward import forward as forward_kernel
from kernels.lm_head.tpu.others import Others, finish
from kernels.lm_head.tpu.row_factors import gather_factors, hidden_gradient_from_mean, row_factors
from kernels.lm_head.tpu.tiles import Case, Kernel, Tiles

_DEFAULT_WAVE = 1024  # rows whose exponentials are kept where the caller names no workspace


class Saved(NamedTuple):
    """Results of forward that backward needs."""

    top_y: Float[Array, "N"]
    """The maximum over the whole vocabulary in units of y, bit for bit the one that forward subtracted."""
    share: Float[Array, "N"]
    """The probability of this shard's columns but the label's."""
    mean: Float[Array, "N D"] | None
    """E_q[W], times the cap's slope; q is the softmax over this shard's columns but the label's."""


class _Block(NamedTuple):
    """A block of rows, and their results of the forward kernel."""

    hidden: Float[Array, "R D"]
    labels: Integer[Array, "R"]
    live: Bool[Array, "R"]
    number: Integer[Array, ""]
    row: Integer[Array, "R"]
    others: Others
    mean: Float[Array, "R D"] | None
    kept: Kept | None


def obstacle(inputs: Inputs, options: Options) -> str | None:
    for name, dtype in {"hidden": inputs.hidden.dtype, "weight": inputs.weight.dtype, "dtype": options.dtype}.items():
        if dtype not in (jnp.bfloat16, jnp.float32):
            return f"{name} is {dtype}, and the kernels know bfloat16 and float32"
    cases = (
        _case(inputs, options, "forward", jnp.dtype(jnp.float32)),
        _case(inputs, options, "hidden"),
        _case(inputs, options, "weight"),
    )
    return next((found for case in cases if (found := tiles.obstacle(case))), None)


def statistics(inputs: Inputs, options: Options) -> Softmax:
    return _forward(inputs, options, with_mean=False)[0]


def forward(inputs: Inputs, options: Options) -> tuple[Softmax, Saved]:
    return _forward(inputs, options, with_mean=options.wants_hidden)


def gradients(inputs: Inputs, softmax: Softmax, saved: Saved, slopes: TokenLogprobs, options: Options) -> Gradients:
    factors = row_factors(inputs, softmax, saved.top_y, slopes, options)
    dh = dw = None
    if options.wants_hidden and options.entropy_slopes:
        dh = _hidden_gradient(inputs, factors, options)
    elif options.wants_hidden:
        assert saved.mean is not None
        labels = local_labels(inputs)
        dh = hidden_gradient_from_mean(inputs, options, labels, softmax, slopes, saved.share, saved.mean)
        dh = jnp.where(inputs.live[:, None], dh, 0).astype(gradient_dtypes(inputs, options)[0])
    if options.wants_weight:
        dw = _weight_gradient(inputs, factors, options)
    return dh, dw


def loss_and_gradients(
    inputs: Inputs, objective: Objective, terms: Terms, options: Options
) -> tuple[Softmax, Gradients]:
    """In waves where the workspace allows them, else with logits computed twice."""
    dh_dtype, dw_dtype = gradient_dtypes(inputs, options)
    wave = _wave(inputs, options)
    keep = wave is not None
    with_mean = options.wants_hidden and not options.entropy_slopes
    tile, rows = wave or _plan(inputs, options, with_mean=with_mean)
    live = live_rows(inputs.live, rows)
    one_wave = len(live.row) == rows

    def over(i: Array, carry: Any) -> Any:
        softmax_M, top_y_M, dh_MD, dw_VD = carry
        block = _forward_block(
            inputs, options, tile, live, rows, i, jnp.dtype(jnp.float32) if with_mean else None, keep
        )
        softmax_R, top_y_R, share_R = finish(block.others, inputs.temperature, block.live, options.vocabulary_axis)
        terms_R = Terms(terms.weights[block.row], tuple(x[block.row] for x in terms.operands), terms.shared)
        slopes_R = loss_slopes(objective, block.live, softmax_R.outputs(), terms_R)
        of_block = inputs._replace(hidden=block.hidden, labels=block.labels, live=block.live)
        factors = row_factors(of_block, softmax_R, top_y_R, slopes_R, options)
        if block.mean is not None:
            dh_RD = hidden_gradient_from_mean(inputs, options, block.labels, softmax_R, slopes_R, share_R, block.mean)
            dh_MD = write(dh_MD, dh_RD.astype(dh_dtype), i * rows)
        elif options.wants_hidden:
            dh_MD = write(dh_MD, _hidden_kernel(of_block, factors, block.number, options, tile=None), i * rows)
        if block.kept is not None:
            dw_VD = kept_weight_gradient(
                block.hidden,
                block.kept,
                block.labels,
                block.number,
                inputs.temperature,
                factors,
                None if one_wave else dw_VD,
                vocabulary=len(inputs.weight),
                gradient=dw_dtype if one_wave else jnp.dtype(jnp.float32),
            )
        return write(softmax_M, softmax_R, i * rows), write(top_y_M, top_y_R, i * rows), dh_MD, dw_VD

    count, features = len(live.row), inputs.hidden.shape[1]
    carry = (
        Softmax(*(zeros(inputs, count) for _ in Softmax._fields)),
        zeros(inputs, count),
        zeros(inputs, count, features, dtype=dh_dtype) if options.wants_hidden else None,
        zeros(inputs, *inputs.weight.shape, dtype=dw_dtype if one_wave else jnp.float32) if keep else None,
    )
    in_step = options.token_axes if options.vocabulary_axis else ()
    softmax_M, top_y_M, dh_MD, dw = live.over_blocks(rows, over, carry, in_step)
    softmax, top_y = jax.tree.map(lambda x: x[live.place], (softmax_M, top_y_M))
    dh = None if dh_MD is None else jnp.where(inputs.live[:, None], dh_MD[live.place], 0)
    if dw is not None:
        return softmax, (dh, dw.astype(dw_dtype))
    if options.wants_weight:
        # One array of hidden's shape at a time: dh is complete before the rows are gathered once more.
        dh, hidden = lax.optimization_barrier((dh, inputs.hidden))
        slopes = loss_slopes(objective, inputs.live, softmax.outputs(), terms)
        dw = _weight_gradient(
            inputs._replace(hidden=hidden), row_factors(inputs, softmax, top_y, slopes, options), options
        )
    return softmax, (dh, dw)


# --- the kernels over blocks of rows ------------------------------------------------------------------------------


def _forward(inputs: Inputs, options: Options, with_mean: bool) -> tuple[Softmax, Saved]:
    tile, rows = _plan(inputs, options, with_mean)
    live = live_rows(inputs.live, rows)
    dtype = inputs.hidden.dtype

    def over(i: Array, carry: Any) -> Any:
        others_M, mean_MD = carry
        block = _forward_block(inputs, options, tile, live, rows, i, dtype if with_mean else None)
        if with_mean:
            mean_MD = write(mean_MD, block.mean, i * rows)
        return write(others_M, block.others, i * rows), mean_MD

    others_M = Others(*(zeros(inputs, len(live.row)) for _ in Others._fields))
    mean_MD = zeros(inputs, len(live.row), inputs.hidden.shape[1], dtype=dtype) if with_mean else None
    others, mean = jax.tree.map(lambda x: x[live.place], live.over_blocks(rows, over, (others_M, mean_MD)))
    softmax, top_y, share = finish(others, inputs.temperature, inputs.live, options.vocabulary_axis)
    return softmax, Saved(top_y, share, mean)


def _forward_block(
    inputs: Inputs, options: Options, tile: Tiles, live: LiveRows, rows: int, i: Array, mean: Any, keep: bool = False
) -> _Block:
    row_R, live_R = live.block(i, rows)
    hidden, labels = inputs.hidden[row_R], local_labels(inputs)[row_R]
    number = jnp.clip(live.number - i * rows, 0, rows)
    others, mean_RD, kept = forward_kernel(
        hidden,
        inputs.weight,
        labels,
        number,
        number_of_columns(inputs),
        inputs.temperature,
        tile=tile,
        softcap=options.softcap,
        dtype=options.dtype,
        mean=mean,
        keep=keep,
    )
    return _Block(hidden, labels, live_R, number, row_R, others, mean_RD, kept)


def _hidden_gradient(inputs: Inputs, factors: RowFactors, options: Options) -> Float[Array, "N D"]:
    tile = tiles.choose(_case(inputs, options, "hidden"))
    rows = tiles.call_rows(len(inputs.labels), inputs.hidden.shape[1], tile)
    live = live_rows(inputs.live, rows)

    def over(i: Array, dh_MD: Array) -> Array:
        row_R, live_R = live.block(i, rows)
        of_block = inputs._replace(hidden=inputs.hidden[row_R], labels=local_labels(inputs)[row_R], live=live_R)
        number = jnp.clip(live.number - i * rows, 0, rows)
        factors_R = gather_factors(factors, row_R, live_R)
        return write(dh_MD, _hidden_kernel(of_block, factors_R, number, options, tile), i * rows)

    dtype = gradient_dtypes(inputs, options)[0]
    dh_MD = live.over_blocks(rows, over, zeros(inputs, len(live.row), inputs.hidden.shape[1], dtype=dtype))
    return jnp.where(inputs.live[:, None], dh_MD[live.place], 0)


def _hidden_kernel(
    inputs: Inputs, factors: RowFactors, number: Array, options: Options, tile: Tiles | None
) -> Float[Array, "R D"]:
    return hidden_gradient(
        inputs.hidden,
        inputs.weight,
        inputs.labels,
        number,
        number_of_columns(inputs),
        inputs.temperature,
        factors,
        tile=tile or tiles.choose(_case(inputs, options, "hidden")),
        softcap=options.softcap,
        dtype=options.dtype,
        gradient=gradient_dtypes(inputs, options)[0],
    )


def _weight_gradient(inputs: Inputs, factors: RowFactors, options: Options) -> Float[Array, "V D"]:
    tile = tiles.choose(_case(inputs, options, "weight"))
    live = live_rows(inputs.live, tile.rows)
    live_M = jnp.arange(len(live.row)) < live.number
    return weight_gradient(
        inputs.hidden[live.row],
        inputs.weight,
        local_labels(inputs)[live.row],
        live.number,
        inputs.temperature,
        gather_factors(factors, live.row, live_M),
        tile=tile,
        softcap=options.softcap,
        dtype=options.dtype,
        gradient=gradient_dtypes(inputs, options)[1],
    )


# --- sizes --------------------------------------------------------------------------------------------------------


def _case(inputs: Inputs, options: Options, kernel: Kernel, mean: Any = None, keep: bool = False) -> Case:
    dh, dw = gradient_dtypes(inputs, options)
    gradient = {"forward": jnp.dtype(mean or dh), "hidden": dh}.get(kernel, dw)
    tokens, (vocabulary, features) = len(inputs.labels), inputs.weight.shape
    hidden, weight = jnp.dtype(inputs.hidden.dtype), jnp.dtype(inputs.weight.dtype)
    return Case(kernel, tokens, vocabulary, features, hidden, weight, options.dtype, gradient, mean is not None, keep)


def _plan(inputs: Inputs, options: Options, with_mean: bool) -> tuple[Tiles, int]:
    """Tiles of the forward kernel, and the rows of one call of it."""
    tile = tiles.choose(_case(inputs, options, "forward", jnp.float32 if with_mean else None))
    return tile, tiles.call_rows(len(inputs.labels), inputs.hidden.shape[1], tile)


def _wave(inputs: Inputs, options: Options) -> tuple[Tiles, int] | None:
    """Tiles, and the rows of a wave whose exponentials are kept; None where there is no room, or no use for them."""
    if not options.wants_weight or options.entropy_slopes:
        return None
    mean = jnp.float32 if options.wants_hidden else None
    tile = tiles.choose(_case(inputs, options, "forward", mean, keep=True))
    bytes_a_row = tiles.kept_bytes(len(inputs.weight), options.dtype, tile)
    needed = -(-len(inputs.labels) // tile.rows) * tile.rows
    room = _DEFAULT_WAVE * bytes_a_row if options.workspace is None else options.workspace
    if needed * bytes_a_row > room and gradient_dtypes(inputs, options)[1] != jnp.float32:
        # Several waves are summed in float32, in an array beside dW.
        room = 0 if options.workspace is None else options.workspace - 4 * inputs.weight.size
    rows = min(needed, room // bytes_a_row)
    cores = tiles.cores()
    if rows < cores * tile.rows:
        tile = dataclasses.replace(tile, rows=max(tiles.LANES, rows // cores // tiles.LANES * tiles.LANES))
    rows = rows // tile.rows * tile.rows
    return (tile, rows) if rows > 0 else None
