"""The head on TPUs: the choice and order of kernels.

Rows that count are moved to the front, block by block (`live_rows.py`). The orders of work are in docs/head.md. The
sums, E_q[W] and the kept exponentials leave out the label's column (`forward.py`). A probability near 1 thus loses no
digits to rounding. A loss that uses the entropy, or the mean logit under a softcap, needs the dh kernel,
because dh doesn't follow from E_q[W].

Suffixes: N rows, M rows rounded up to whole blocks, R rows of a block; D features, V vocabulary.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import contract, target
from ..contract import Gradients, Inputs, Options, Terms
from ..live_rows import live_rows, over_waves, round_up, write
from ..shapes import Array, Float
from ..softmax import RowFactors, Slopes, Softmax, row_factors
from . import backward, tiles
from .forward import finish
from .forward import forward as forward_kernel
from .tiles import Tiles, case_of

_DEFAULT_WAVE = 1024  # rows with kept exponentials where the caller names no workspace


class Saved(NamedTuple):
    """Results of forward that backward needs."""

    share: Float[Array, "N"]
    """The probability of this shard's columns but the label's."""
    mean: Float[Array, "N D"] | None
    """E_q[W], times the cap's slope; q is the softmax over this shard's columns but the label's."""


def obstacle(inputs: Inputs, options: Options) -> str | None:
    if inputs.teacher is not None:
        return "it has no kernels for a teacher"
    if target.platform() != "tpu" and not tiles.overridden():  # tests set tiles, and interpret the kernels elsewhere
        return f"it needs a TPU, and this is a {target.platform()}"
    try:
        tiles.choose(case_of(inputs, options, "forward", jnp.float32))
        tiles.choose(case_of(inputs, options, "hidden"))
        tiles.choose(case_of(inputs, options, "weight"))
    except ValueError as error:
        return str(error)
    return None


def forward(inputs: Inputs, options: Options) -> tuple[Softmax, Saved | None]:
    dtype = inputs.hidden.dtype if options.wants_hidden else None
    tile, rows = _plan(inputs, options, jnp.float32 if options.wants_hidden else None)
    live = live_rows(inputs.live, rows)

    def over(i: Array, running_and_mean: Any) -> Any:
        part = _rows(inputs, *live.block(i, rows))
        return write(running_and_mean, forward_kernel(part, options, tile=tile, mean=dtype)[:2], i * rows)

    running_M = contract.no_columns(contract.zeros(inputs, len(live.row)), options)
    mean_MD = None if dtype is None else contract.zeros(inputs, len(live.row), inputs.hidden.shape[1], dtype=dtype)
    running, mean = jax.tree.map(lambda x: x[live.place], live.over_blocks(rows, over, (running_M, mean_MD)))
    softmax, share = finish(running, inputs, options)
    return softmax, Saved(share, mean) if options.wants_any else None


def gradients(inputs: Inputs, softmax: Softmax, saved: Saved, slopes: Slopes, options: Options) -> Gradients:
    factors = _row_factors(inputs, options, softmax, slopes)
    dh = dw = None
    if options.wants_hidden and _needs_logits(options):
        dh = _hidden_gradient(inputs, factors, options)
    elif options.wants_hidden:
        assert saved.mean is not None
        local = inputs._replace(labels=contract.local_labels(inputs))
        dh = backward.hidden_gradient_from_mean(local, options, softmax, slopes, saved.share, saved.mean)
        dh = jnp.where(inputs.live[:, None], dh, 0).astype(contract.gradient_dtypes(inputs, options)[0])
    if options.wants_weight:
        dw = _weight_gradient(inputs, factors, options)
    return dh, dw


def loss_and_gradients(inputs: Inputs, terms: Terms, options: Options) -> tuple[Softmax, Gradients]:
    """Loss and gradients: in waves if the workspace allows them, else with logits computed twice."""
    wave = _wave(inputs, options)
    keep = wave is not None
    mean = jnp.dtype(jnp.float32) if options.wants_hidden and not _needs_logits(options) else None
    tile, rows = wave or _plan(inputs, options, mean)
    count = round_up(len(inputs.labels), rows)

    def over(row_R: Array, live_R: Array, dw_VD: Array | None, _: None) -> Any:
        part = _rows(inputs, row_R, live_R)
        running, mean_RD, kept = forward_kernel(part, options, tile=tile, mean=mean, keep=keep)
        softmax_R, share_R = finish(running, part, options)
        slopes_R = contract.loss_slopes(softmax_R, terms.of_rows(row_R), part, options)
        factors_R, dh_RD = _row_factors(part, options, softmax_R, slopes_R), None
        if mean_RD is not None:
            dh_RD = backward.hidden_gradient_from_mean(part, options, softmax_R, slopes_R, share_R, mean_RD)
        elif options.wants_hidden:
            hidden_tile = tiles.choose(case_of(part, options, "hidden"))
            dh_RD = backward.gradient("hidden", part, factors_R, options, hidden_tile)
        if kept is not None:
            so_far = None if count == rows else dw_VD
            dw_VD = backward.gradient("kept", part, factors_R, options, kept.tile, kept, so_far)
        return softmax_R, dh_RD, dw_VD, None

    sums = dataclasses.replace(options, wants_weight=keep)
    softmax, (dh, dw) = over_waves(inputs, sums, rows, over, contract.no_statistics(inputs, options, count))
    if options.wants_weight and not keep:
        # One array of hidden's shape at a time: dh is complete before the rows are gathered once more.
        dh, hidden = lax.optimization_barrier((dh, inputs.hidden))
        factors = _row_factors(inputs, options, softmax, contract.loss_slopes(softmax, terms, inputs, options))
        dw = _weight_gradient(inputs._replace(hidden=hidden), factors, options)
    return softmax, (dh, dw)


# --- the kernels over blocks of rows ------------------------------------------------------------------------------


def _rows(inputs: Inputs, row_R: Array, live_R: Array) -> Inputs:
    """The inputs of these rows alone, with labels as `local_labels` gives them."""
    return inputs._replace(hidden=inputs.hidden[row_R], labels=contract.local_labels(inputs)[row_R], live=live_R)


def _row_factors(inputs: Inputs, options: Options, softmax: Softmax, slopes: Slopes) -> RowFactors:
    return row_factors(softmax, slopes, inputs.temperature, options.softcap).where(inputs.live)


def _hidden_gradient(inputs: Inputs, factors: RowFactors, options: Options) -> Float[Array, "N D"]:
    tile = tiles.choose(case_of(inputs, options, "hidden"))
    rows = tiles.call_rows(len(inputs.labels), inputs.hidden.shape[1], tile)
    live = live_rows(inputs.live, rows)

    def over(i: Array, dh_MD: Array) -> Array:
        row_R, live_R = live.block(i, rows)
        part, factors_R = _rows(inputs, row_R, live_R), jax.tree.map(lambda x: x[row_R], factors).where(live_R)
        return write(dh_MD, backward.gradient("hidden", part, factors_R, options, tile), i * rows)

    dtype = contract.gradient_dtypes(inputs, options)[0]
    dh_MD = live.over_blocks(rows, over, contract.zeros(inputs, len(live.row), inputs.hidden.shape[1], dtype=dtype))
    return jnp.where(inputs.live[:, None], dh_MD[live.place], 0)


def _weight_gradient(inputs: Inputs, factors: RowFactors, options: Options) -> Float[Array, "V D"]:
    tile = tiles.choose(case_of(inputs, options, "weight"))
    live = live_rows(inputs.live, tile.rows)
    live_M = jnp.arange(len(live.row)) < live.number
    factors_M = jax.tree.map(lambda x: x[live.row], factors).where(live_M)
    return backward.gradient("weight", _rows(inputs, live.row, live_M), factors_M, options, tile)


def _needs_logits(options: Options) -> bool:
    """Whether dh and dy need every logit, because they don't follow from E_q[W] and exponentials."""
    return options.entropy_slopes or (options.mean_over is not None and options.softcap is not None)


# --- sizes --------------------------------------------------------------------------------------------------------


def _plan(inputs: Inputs, options: Options, mean: Any) -> tuple[Tiles, int]:
    """Tiles of the forward kernel, and the rows of one call of it."""
    tile = tiles.choose(case_of(inputs, options, "forward", mean))
    return tile, tiles.call_rows(len(inputs.labels), inputs.hidden.shape[1], tile)


def _wave(inputs: Inputs, options: Options) -> tuple[Tiles, int] | None:
    """Tiles, and the rows of a wave with kept exponentials; None if nothing is kept."""
    if not options.wants_weight or _needs_logits(options):
        return None
    mean = jnp.float32 if options.wants_hidden else None
    tile = tiles.choose(case_of(inputs, options, "forward", mean, keep=True))
    bytes_a_row = tiles.kept_bytes(len(inputs.weight), options.dtype, tile)
    needed = -(-len(inputs.labels) // tile.rows) * tile.rows
    room = _DEFAULT_WAVE * bytes_a_row if options.workspace is None else options.workspace
    if needed * bytes_a_row > room and contract.gradient_dtypes(inputs, options)[1] != jnp.float32:
        # Several waves are summed in float32, in an array beside dW.
        room = 0 if options.workspace is None else options.workspace - 4 * inputs.weight.size
    rows = min(needed, room // bytes_a_row)
    cores = tiles.cores()
    if rows < cores * tile.rows:
        tile = dataclasses.replace(tile, rows=max(tiles.LANES, rows // cores // tiles.LANES * tiles.LANES))
    rows = rows // tile.rows * tile.rows
    return (tile, rows) if rows == needed or (rows > 0 and _are_faster(inputs, options, mean, tile, rows)) else None


def _are_faster(inputs: Inputs, options: Options, mean: Any, tile: Tiles, rows: int) -> bool:
    """Whether several waves take no longer than computing logits twice. Each wave reads and writes a float32 dW."""
    in_two_passes = (case_of(inputs, options, "forward", mean), case_of(inputs, options, "weight"))
    float32 = dataclasses.replace(options, gradient_dtypes=(jnp.dtype(jnp.float32),) * 2)
    in_waves = (case_of(inputs, options, "forward", mean, keep=True), case_of(inputs, float32, "kept"))
    a_wave = sum(tiles.seconds(dataclasses.replace(case, tokens=rows), tile) for case in in_waves)
    recomputed = sum(tiles.seconds(case, tiles.choose(case)) for case in in_two_passes)
    return -(-len(inputs.labels) // rows) * a_wave <= recomputed
