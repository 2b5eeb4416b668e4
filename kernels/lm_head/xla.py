"""The head in plain XLA, a tile of logits at a time: the CPU's engine and every other backend's fallback.

Rows that count are moved to the front, and a `while_loop` takes them in blocks. The two ways to the gradients are in
docs/head.md: recomputation (4 matrix products) and waves (3). A teacher of E features adds r = E / D products each time
that logits are computed. Without kept logits, jsd computes them once more, since the mixture needs both normalisers.

Suffixes: N rows, M rows rounded up to whole blocks, R rows of a block; D features; V vocabulary, C tiles of T columns.
`y` is in the units of softmax.py, a tuple of the student's and, if given, the teacher's.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import contract, target
from .contract import Gradients, Inputs, Options, Terms
from .live_rows import live_rows, over_waves, round_up, write
from .shapes import Array, Bool, Float
from .softmax import Columns, Slopes, Softmax, cap_slope, include_tile, logit_slopes
from .two_softmaxes import both_log_p, divergence_slopes, empty_pair, finish_pair, include_tiles, mixture_terms

_CPU_BLOCK, _BLOCK = 256, 1024
_TILE, _TILE_ELEMENTS = 2048, 2**22  # columns at most, and elements of a tile of dW: 16 MiB in float32
_LEAST_WAVE, _MOST_WAVE = 64, 2048  # fewer rows would touch all of dW too often, more make a tile too large

Logits = tuple[Array, ...]  # the student's y [R, T] and, if given, the teacher's


class Tiling(NamedTuple):
    """Blocks of rows and tiles of columns, of the first `vocabulary` rows of each weight."""

    block: int
    tile: int
    tiles: int
    vocabulary: int


def obstacle(inputs: Inputs, options: Options) -> None:
    """It always runs."""


def loss_and_gradients(inputs: Inputs, terms: Terms, options: Options) -> tuple[Softmax, Gradients]:
    """Loss and gradients: in waves if the workspace has room for their logits, else with recomputed logits."""
    plan = waves_plan(inputs)
    wave = wave_rows(plan, inputs, options)
    if wave:
        return _waves(plan._replace(block=wave), inputs, terms, options)
    softmax, _ = forward(inputs, dataclasses.replace(options, workspace=0))
    return softmax, gradients(inputs, softmax, None, contract.loss_slopes(softmax, terms, inputs, options), options)


def forward(inputs: Inputs, options: Options, plan: Tiling | None = None) -> tuple[Softmax, None]:
    """The statistics of all tokens: 1 matrix product, r with a teacher; twice that for jsd without room for logits."""
    wave, plan, options = plan is None, plan or make_plan(inputs), options.values_alone
    if inputs.teacher is not None:
        rows = 0 if options.divergence.in_one_pass or not wave else wave_rows(plan, inputs, options)
        if rows:
            return _waves(plan._replace(block=rows), inputs, None, options)[0], None
        nothing = contract.no_statistics(inputs, options, 0)
        return over_rows(plan, inputs, options, lambda part: statistics(plan, part, options)[0], nothing), None
    # Devices exchange their sums of all rows at once: the loop over blocks needs no step in common.
    alone = dataclasses.replace(options, vocabulary_axis=None)
    empty = contract.no_columns(contract.zeros(inputs, 0), options)
    running = over_rows(plan, inputs, alone, lambda part: _running(plan, part, options)[0], empty)
    return contract.finish(running, inputs, options), None


def over_rows(plan: Tiling, inputs: Inputs, options: Options, block: Callable[[Inputs], Any], nothing: Any) -> Any:
    """A tree of arrays [N, ...] such as `nothing`, which `block` gives for the inputs of a block's rows."""
    live = live_rows(inputs.live, plan.block)

    def step(i: Array, all_M: Any) -> Any:
        return write(all_M, block(rows_of(inputs, *live.block(i, plan.block))), i * plan.block)

    unvisited = jax.tree.map(lambda x: contract.zeros(inputs, len(live.row), *x.shape[1:], dtype=x.dtype), nothing)
    all_M = live.over_blocks(plan.block, step, unvisited, options.in_step)
    return jax.tree.map(lambda x: x[live.place], all_M)


def gradients(
    inputs: Inputs, softmax: Softmax, saved: None, slopes: Slopes, options: Options, plan: Tiling | None = None
) -> Gradients:
    """The gradients by recomputation, tile by tile and in each block by block: 3 + r products, 2 + r for one alone."""
    plan = plan or make_plan(inputs)
    live = live_rows(inputs.live, plan.block)
    vocabulary, features = inputs.weight.shape
    dh_dtype, dw_dtype = contract.gradient_dtypes(inputs, options)

    def tile(c: Array, carry: Any) -> Any:
        dh_MD, dw_VD = carry

        def block(i: Array, carry: Any) -> Any:
            row_R, live_R = live.block(i, plan.block)
            part, (dh_MD, dw_TD) = rows_of(inputs, row_R, live_R), carry
            softmax_R, slopes_R = jax.tree.map(lambda x: jnp.where(live_R, x[row_R], 0), (softmax, slopes))
            dy_RT = slopes_of_tile(plan, part, options, logits_of_tile(plan, part, options, c), c, softmax_R, slopes_R)
            if options.wants_hidden:
                dh_RD = product(options, dy_RT, weight_tile(plan, inputs.weight, c), (1, 0))
                dh_MD = add_rows(dh_MD, dh_RD, i * plan.block)
            if options.wants_weight:
                dw_TD += product(options, dy_RT, part.hidden, (0, 0))
            return dh_MD, dw_TD

        dw_TD = contract.zeros(inputs, plan.tile, features) if options.wants_weight else None
        dh_MD, dw_TD = live.over_blocks(plan.block, block, (dh_MD, dw_TD))
        return dh_MD, None if dw_TD is None else add_rows(dw_VD, dw_TD, start_of(plan, c))

    dh_MD = contract.zeros(inputs, len(live.row), features) if options.wants_hidden else None
    dw_VD = contract.zeros(inputs, vocabulary, features, dtype=dw_dtype) if options.wants_weight else None
    dh_MD, dw_VD = _over_tiles(plan, tile, (dh_MD, dw_VD))
    return None if dh_MD is None else dh_MD.astype(dh_dtype)[live.place], dw_VD


def _waves(plan: Tiling, inputs: Inputs, terms: Terms | None, options: Options) -> tuple[Softmax, Gradients]:
    """Statistics and wanted gradients, keeping a block's logits: 3 + r products, 2 + r for one gradient alone."""

    def step(row_R: Array, live_R: Array, dw_VD: Array | None, kept: Any) -> Any:
        part = rows_of(inputs, row_R, live_R)
        softmax_R, kept = statistics(plan, part, options, kept)
        dh_RD = contract.zeros(inputs, *part.hidden.shape) if options.wants_hidden else None
        if terms is None or not options.wants_any:
            return softmax_R, dh_RD, dw_VD, kept
        slopes_R = contract.loss_slopes(softmax_R, terms.of_rows(row_R), part, options)

        def backward(c: Array, carry: Any) -> Any:
            dy_RT = slopes_of_tile(plan, part, options, tuple(y[c] for y in kept), c, softmax_R, slopes_R)
            dh_RD, dw_VD = carry
            if options.wants_hidden:
                dh_RD += product(options, dy_RT, weight_tile(plan, inputs.weight, c), (1, 0))
            if options.wants_weight:
                dw_VD = add_rows(dw_VD, product(options, dy_RT, part.hidden, (0, 0)), start_of(plan, c))
            return dh_RD, dw_VD

        return softmax_R, *lax.fori_loop(0, plan.tiles, backward, (dh_RD, dw_VD)), kept

    all_M = contract.no_statistics(inputs, options, round_up(len(inputs.labels), plan.block))
    kept = tuple(contract.zeros(inputs, plan.tiles, plan.block, plan.tile) for _ in _models(inputs))
    return over_waves(inputs, options, plan.block, step, all_M, kept=kept)


def statistics(
    plan: Tiling, part: Inputs, options: Options, kept: Logits | None = None
) -> tuple[Softmax, Logits | None]:
    """The statistics of a block's rows, and all of their y [C, R, T], written over `kept` if that is given."""
    scales, measure, axis = contract.scales_of(part, options), options.divergence, options.vocabulary_axis
    running, kept = _running(plan, part, options, kept)
    if part.teacher is None:
        return contract.finish(running, part, options), kept
    softmax = finish_pair(running, part.live, scales, measure, axis, options.mean_over)
    if measure.in_one_pass:
        return softmax, kept

    def mixture(c: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        y = logits_of_tile(plan, part, options, c) if kept is None else tuple(x[c] for x in kept)
        terms = mixture_terms(both_log_p(y, softmax, scales), columns_of(plan, part, c).fresh, measure)
        # In one reduction: XLA for GPUs would write arrays that two of them share.
        zero, add = (jnp.float32(0), jnp.float32(0)), lambda x, y: (x[0] + y[0], x[1] + y[1])
        return jax.tree.map(jnp.add, sums, tuple(lax.reduce(terms, zero, add, (1,))))

    nothing = (contract.zeros(part, len(part.labels)),) * 2
    sums = _over_tiles(plan, mixture, nothing)
    divergence, to_mixture = (jnp.where(part.live, x, 0) for x in (sums if axis is None else lax.psum(sums, axis)))
    return softmax._replace(divergence=divergence, to_mixture=to_mixture), kept


def _running(plan: Tiling, part: Inputs, options: Options, kept: Logits | None = None) -> tuple[Any, Logits | None]:
    """A block's sums over this device's columns, and its y as in `statistics`."""
    scales, zeros_R = contract.scales_of(part, options), contract.zeros(part, len(part.labels))

    def include(c: Array, carry: Any) -> Any:
        (running, kept), y, columns = carry, logits_of_tile(plan, part, options, c), columns_of(plan, part, c)
        if kept is not None:
            kept = tuple(lax.dynamic_update_index_in_dim(x, new, c, 0) for x, new in zip(kept, y, strict=True))
        if part.teacher is None:
            return include_tile(running, y[0], columns, scales[0]), kept
        return include_tiles(running, y, columns, scales, options.divergence), kept

    student = contract.no_columns(zeros_R, options)
    running = student if part.teacher is None else empty_pair(student, zeros_R)
    return _over_tiles(plan, include, (running, kept))


# --- blocks and tiles ---------------------------------------------------------------------------------------------


def make_plan(inputs: Inputs) -> Tiling:
    models, tokens = _models(inputs), len(inputs.labels)
    vocabulary, features = min(len(x.weight) for x in models), max(x.weight.shape[1] for x in models)
    most = min(_TILE, max(256, _TILE_ELEMENTS // features))
    tile = min(vocabulary, round_up(-(-vocabulary // -(-vocabulary // most)), 128))
    block = _CPU_BLOCK if target.platform() == "cpu" else _BLOCK
    return Tiling(min(block, round_up(tokens, 8)), tile, -(-vocabulary // tile), vocabulary)


def waves_plan(inputs: Inputs) -> Tiling:
    """The plan of waves: on a GPU one tile, since cuBLAS multiplies all columns in half the time of many tiles."""
    plan = make_plan(inputs)
    return plan._replace(tile=plan.vocabulary, tiles=1) if target.platform() == "gpu" else plan


def wave_rows(plan: Tiling, inputs: Inputs, options: Options) -> int:
    """The rows of a wave with kept logits, or 0 to recompute logits."""
    rows, room = round_up(len(inputs.labels), 8), options.workspace
    models, on_gpu = len(_models(inputs)), target.platform() == "gpu"
    bytes_a_row = 4 * models * plan.tiles * plan.tile
    if on_gpu:  # dy of every column, in the products' dtype, is an array as well
        bytes_a_row += options.dtype.itemsize * plan.tile
    wave = min(rows, _MOST_WAVE, (plan.block // models if room is None else room // bytes_a_row) // 8 * 8)
    narrow = options.wants_weight and contract.gradient_dtypes(inputs, options)[1] != jnp.float32
    if narrow and wave < rows and not (room is None and on_gpu):
        # Several waves are summed in float32, which is no gradient then but one more array. On a GPU the default takes
        # it all the same, as chunks of logits do: computing logits twice costs more time there.
        left = 0 if room is None else max(0, room - 4 * inputs.weight.size)
        wave = min(wave, left // bytes_a_row // 8 * 8)
    return wave if wave >= min(rows, _LEAST_WAVE) else 0


def rows_of(inputs: Inputs, row_R: Array, live_R: Bool[Array, "R"]) -> Inputs:
    """The inputs of these rows, with hidden states of 0 where they don't count: a block may run for collectives."""
    return zeroed(inputs.each_row(lambda x: x[row_R])._replace(live=live_R))


def zeroed(inputs: Inputs) -> Inputs:
    """The inputs with hidden states of 0 at rows that don't count, where they may hold anything."""
    teacher, live_N1 = inputs.teacher, inputs.live[:, None]
    if teacher is not None:
        teacher = teacher._replace(hidden=jnp.where(live_N1, teacher.hidden, 0))
    return inputs._replace(hidden=jnp.where(live_N1, inputs.hidden, 0), teacher=teacher)


def columns_of(plan: Tiling, part: Inputs, c: Array) -> Columns:
    """The columns of tile c that count in it, and which of them is each row's label."""
    column_T = start_of(plan, c) + jnp.arange(plan.tile)
    fresh_T = column_T >= c * plan.tile
    if part.columns is not None:
        fresh_T &= column_T < part.columns
    return Columns(fresh_T, fresh_T & (column_T == part.labels[:, None]))


def weight_tile(plan: Tiling, weight: Float[Array, "V D"], c: Array) -> Float[Array, "T D"]:
    # A slice of all rows would be a copy where its start is traced.
    return weight if plan.tile == len(weight) else lax.dynamic_slice_in_dim(weight, start_of(plan, c), plan.tile)


def product(options: Options, a: Array, b: Array, dims: tuple[int, int]) -> Float[Array, "_ _"]:
    return contract.dot(a.astype(options.dtype), b.astype(options.dtype), dims, options.dtype)


def add_rows(x: Array, rows: Array, start: Array) -> Array:
    old = lax.dynamic_slice_in_dim(x, start, len(rows))
    return lax.dynamic_update_slice_in_dim(x, (old + rows).astype(x.dtype), start, 0)


def _models(inputs: Inputs) -> tuple[Any, ...]:
    return (inputs,) if inputs.teacher is None else (inputs, inputs.teacher)


def _over_tiles(plan: Tiling, body: Callable[[Array, Any], Any], carry: Any) -> Any:
    """`carry = body(c, carry)` for each tile c."""
    return body(jnp.int32(0), carry) if plan.tiles == 1 else lax.fori_loop(0, plan.tiles, body, carry)


def start_of(plan: Tiling, c: Array) -> Array:
    """The first column of tile c; the last tile begins early enough to be whole."""
    return jnp.minimum(c * plan.tile, plan.vocabulary - plan.tile)


def logits_of_tile(plan: Tiling, part: Inputs, options: Options, c: Array) -> Logits:
    """y of tile c."""
    caps = options.softcap, options.teacher_softcap
    return tuple(
        contract.capped(product(options, x.hidden, weight_tile(plan, x.weight, c), (1, 1)), cap)
        for x, cap in zip(_models(part), caps, strict=False)
    )


def slopes_of_tile(
    plan: Tiling, part: Inputs, options: Options, y: Logits, c: Array, softmax: Softmax, slopes: Slopes
) -> Float[Array, "R T"]:
    """The derivatives, by the student's products of tile c, of a scalar with derivatives `slopes` by the statistics."""
    columns, scales, dz_RT = columns_of(plan, part, c), contract.scales_of(part, options), jnp.zeros_like(y[0])
    if options.token_slopes or options.entropy_slopes:
        dz_RT = logit_slopes(y[0], softmax, slopes, columns, scales[0], entropy=options.entropy_slopes)
    if slopes.divergence is not None:
        measure = options.divergence
        dz_RT += divergence_slopes(y, softmax, slopes.divergence, columns.fresh, scales, measure)
    return (dz_RT if options.softcap is None else dz_RT * cap_slope(y[0])) / part.temperature
