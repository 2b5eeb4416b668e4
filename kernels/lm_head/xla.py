"""The head in plain XLA, a tile of logits at a time: the CPU's implementation and every other backend's fallback.

Rows that count are moved ahead of the others, and a `while_loop` takes them in blocks. docs/head.md describes the two
ways to the gradients: recomputation (4 matrix products) and waves (3).

Suffixes: N rows, M rows rounded up to whole blocks, R rows of a block; D features; V vocabulary, C tiles of T columns.
`y` is the product of hidden states and weight, `z` the logits.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from . import contract, target
from .contract import Gradients, Inputs, Options, Terms
from .live_rows import live_rows, over_waves, round_up, write
from .shapes import Array, Bool, Float, Int, Integer
from .softmax import (
    Columns,
    Slopes,
    Softmax,
    empty_running,
    finish_live,
    include_tile,
    logit_slopes,
)

State = TypeVar("State")

_CPU_BLOCK, _BLOCK = 256, 1024
_TILE, _TILE_ELEMENTS = 2048, 2**22  # columns at most, and elements of a tile of dW: 16 MiB in float32
_LEAST_WAVE, _MOST_WAVE = 64, 2048  # fewer rows would touch all of dW too often, more make a tile too large


class Plan(NamedTuple):
    """Blocks of rows and tiles of columns, of the first `vocabulary` rows of a weight."""

    block: int
    tile: int
    tiles: int
    vocabulary: int


def obstacle(inputs: Inputs, options: Options) -> None:
    """It always runs."""


def loss_and_gradients(inputs: Inputs, terms: Terms, options: Options) -> tuple[Softmax, Gradients]:
    plan = make_plan(len(inputs.labels), *inputs.weight.shape)
    wave = wave_rows(plan, inputs, options)
    if wave:
        return _waves(plan._replace(block=wave), inputs, terms, options)
    softmax, _ = forward(inputs, options)
    slopes = contract.loss_slopes(inputs.live, softmax, terms)
    return softmax, gradients(inputs, softmax, None, slopes, options)


def forward(inputs: Inputs, options: Options) -> tuple[Softmax, None]:
    """The statistics of all tokens: 1 matrix product."""

    empty = lambda rows: empty_running(contract.zeros(inputs, rows))  # noqa: E731
    running = stream(inputs, options, empty, lambda running, z, columns, *_: include_tile(running, z, columns))
    return finish_live(running, inputs.live, options.vocabulary_axis), None


def stream(
    inputs: Inputs,
    options: Options,
    empty: Callable[[int], State],
    include: Callable[[State, Array, Columns, Array, Array], State],
) -> State:
    """The state of all rows after one pass over the vocabulary, a tree of arrays [N, ...]: 1 matrix product.

    `empty` makes the state of so many rows, and `include(state, z_RT, columns, column_T, row_R)` the one after a tile
    of logits. Rows that don't count have ones.
    """
    plan = make_plan(len(inputs.labels), *inputs.weight.shape)
    live = live_rows(inputs.live, plan.block)

    def block(i: Array, all_M: State) -> State:
        row_R, _ = live.block(i, plan.block)
        h_RD, labels_R = inputs.hidden[row_R], inputs.labels[row_R]

        def tile(c: Array, state: State) -> State:
            w_TD, columns = _tile(plan, inputs, c, labels_R)
            z_RT = contract.logits_of(inputs, options, product(options, h_RD, w_TD, (1, 1)))
            return include(state, z_RT, columns, start_of(plan, c) + jnp.arange(plan.tile), row_R)

        return write(all_M, lax.fori_loop(0, plan.tiles, tile, empty(plan.block)), i * plan.block)

    unvisited = jax.tree.map(jnp.ones_like, empty(len(live.row)))
    all_M = live.over_blocks(plan.block, block, unvisited)
    return jax.tree.map(lambda x: x[live.place], all_M)


def gradients(
    inputs: Inputs,
    softmax: Softmax,
    saved: None,
    slopes: Slopes,
    options: Options,
) -> Gradients:
    """The gradients by recomputation: 3 matrix products, 2 for one gradient alone."""
    plan = make_plan(len(inputs.labels), *inputs.weight.shape)

    def dy(c: Array, row_R: Array, live_R: Array) -> Float[Array, "R T"]:
        w_TD, columns = _tile(plan, inputs, c, inputs.labels[row_R])
        softmax_R = jax.tree.map(lambda x: x[row_R], softmax)
        slopes_R = jax.tree.map(lambda g: jnp.where(live_R, g[row_R], 0), slopes)
        y_RT = product(options, inputs.hidden[row_R], w_TD, (1, 1))
        return _product_slopes(inputs, options, y_RT, softmax_R, slopes_R, columns)

    return products_of_slopes(plan, inputs, options, dy)


def products_of_slopes(
    plan: Plan,
    inputs: Inputs,
    options: Options,
    dy: Callable[[Array, Array, Array], Float[Array, "R T"]],
) -> Gradients:
    """The wanted gradients, tile by tile and in each block by block; `dy(c, row_R, live_R)` are slopes by products."""
    live = live_rows(inputs.live, plan.block)

    def tile(c: Array, carry: Any) -> Any:
        dh_MD, dw_VD = carry

        def block(i: Array, carry: Any) -> Any:
            row_R, live_R = live.block(i, plan.block)
            dy_RT, (dh_MD, dw_TD) = dy(c, row_R, live_R), carry
            if options.wants_hidden:
                dh_RD = product(options, dy_RT, weight_tile(plan, inputs, c), (1, 0))
                dh_MD = add_rows(dh_MD, dh_RD, i * plan.block)
            if options.wants_weight:
                dw_TD += product(options, dy_RT, inputs.hidden[row_R], (0, 0))
            return dh_MD, dw_TD

        dw_TD = contract.zeros(inputs, plan.tile, features) if options.wants_weight else None
        dh_MD, dw_TD = live.over_blocks(plan.block, block, (dh_MD, dw_TD))
        return dh_MD, None if dw_TD is None else add_rows(dw_VD, dw_TD, start_of(plan, c))

    vocabulary, features = inputs.weight.shape
    dh_dtype, dw_dtype = contract.gradient_dtypes(inputs, options)
    dh_MD = contract.zeros(inputs, len(live.row), features) if options.wants_hidden else None
    dw_VD = contract.zeros(inputs, vocabulary, features, dtype=dw_dtype) if options.wants_weight else None
    dh_MD, dw_VD = lax.fori_loop(0, plan.tiles, tile, (dh_MD, dw_VD))
    return None if dh_MD is None else dh_MD.astype(dh_dtype)[live.place], dw_VD


def _waves(plan: Plan, inputs: Inputs, terms: Terms, options: Options) -> tuple[Softmax, Gradients]:
    """Statistics and gradients, keeping a block's products: 3 matrix products, 2 for one gradient alone."""

    def wave(row_R: Array, live_R: Array, h_RD: Array, y_CRT: Array) -> Any:
        labels_R = inputs.labels[row_R]

        def forward(c: Array, carry: Any) -> Any:
            running, y_CRT = carry
            w_TD, columns = _tile(plan, inputs, c, labels_R)
            y_RT = product(options, h_RD, w_TD, (1, 1))
            running = include_tile(running, contract.logits_of(inputs, options, y_RT), columns)
            return running, lax.dynamic_update_index_in_dim(y_CRT, y_RT, c, 0)

        nothing = empty_running(contract.zeros(inputs, plan.block))
        running, y_CRT = lax.fori_loop(0, plan.tiles, forward, (nothing, y_CRT))
        softmax_R = finish_live(running, live_R, options.vocabulary_axis)
        slopes_R = contract.loss_slopes(live_R, softmax_R, terms.of_rows(row_R))

        def dy(c: Array) -> Float[Array, "R T"]:
            columns = _tile(plan, inputs, c, labels_R)[1]
            return _product_slopes(inputs, options, y_CRT[c], softmax_R, slopes_R, columns)

        return softmax_R, y_CRT, dy

    all_M = Softmax(*(contract.zeros(inputs, round_up(len(inputs.labels), plan.block)) for _ in Softmax._fields))
    kept = contract.zeros(inputs, plan.tiles, plan.block, plan.tile)
    return in_waves(plan, inputs, options, wave, all_M, kept)


def in_waves(
    plan: Plan,
    inputs: Inputs,
    options: Options,
    wave: Callable[[Array, Array, Array, Array], tuple[State, Array, Callable[[Array], Float[Array, "R T"]]]],
    all_M: State,
    kept: Array,
) -> tuple[State, Gradients]:
    """What `over_waves` gives, a tile of columns at a time.

    `wave(row_R, live_R, h_RD, kept)` gives a block's statistics, what it has kept for backward, and tiles of slopes.
    """

    def step(row_R: Array, live_R: Array, dw_VD: Array | None, kept: Array) -> Any:
        # A block may have no row that counts, and still run for its collectives: its rows must not hold NaN.
        h_RD = jnp.where(live_R[:, None], inputs.hidden[row_R], 0)
        all_R, kept, dy = wave(row_R, live_R, h_RD, kept)

        def backward(c: Array, carry: Any) -> Any:
            dy_RT, (dh_RD, dw_VD) = dy(c), carry
            if options.wants_hidden:
                dh_RD += product(options, dy_RT, weight_tile(plan, inputs, c), (1, 0))
            if options.wants_weight:
                dw_VD = add_rows(dw_VD, product(options, dy_RT, h_RD, (0, 0)), start_of(plan, c))
            return dh_RD, dw_VD

        dh_RD = contract.zeros(inputs, *h_RD.shape) if options.wants_hidden else None
        if options.wants_any:
            dh_RD, dw_VD = lax.fori_loop(0, plan.tiles, backward, (dh_RD, dw_VD))
        return all_R, dh_RD, dw_VD, kept

    return over_waves(inputs, options, plan.block, step, all_M, kept=kept)


# --- blocks and tiles ---------------------------------------------------------------------------------------------


def make_plan(tokens: int, vocabulary: int, features: int) -> Plan:
    most = min(_TILE, max(256, _TILE_ELEMENTS // features))
    tile = min(vocabulary, round_up(-(-vocabulary // -(-vocabulary // most)), 128))
    block = _CPU_BLOCK if target.platform() == "cpu" else _BLOCK
    return Plan(min(block, round_up(tokens, 8)), tile, -(-vocabulary // tile), vocabulary)


def wave_rows(plan: Plan, inputs: Inputs, options: Options, logits: int = 1) -> int:
    """The number of rows of which so many sets of logits are kept at a time, or 0 to compute them again."""
    rows = round_up(len(inputs.labels), 8)
    bytes_a_row = 4 * logits * plan.tiles * plan.tile
    room = plan.block * 4 * plan.tiles * plan.tile if options.workspace is None else options.workspace
    wave = min(rows, _MOST_WAVE, room // bytes_a_row // 8 * 8)
    if options.wants_weight and contract.gradient_dtypes(inputs, options)[1] != jnp.float32 and wave < rows:
        # Several waves are summed in float32, which is no gradient then but one more array.
        room = 0 if options.workspace is None else max(0, options.workspace - 4 * inputs.weight.size)
        wave = min(wave, room // bytes_a_row // 8 * 8)
    return wave if wave >= min(rows, _LEAST_WAVE) else 0


def start_of(plan: Plan, c: Array) -> Array:
    """The first column of tile c; the last tile begins early enough to be whole."""
    return jnp.minimum(c * plan.tile, plan.vocabulary - plan.tile)


def columns_of(plan: Plan, inputs: Inputs, c: Array) -> tuple[Int[Array, "T"], Bool[Array, "T"]]:
    """The columns of tile c, and which of them count in it."""
    column_T = start_of(plan, c) + jnp.arange(plan.tile)
    fresh_T = column_T >= c * plan.tile
    return column_T, fresh_T if inputs.columns is None else fresh_T & (column_T < inputs.columns)


def weight_tile(plan: Plan, inputs: Inputs, c: Array) -> Float[Array, "T D"]:
    return lax.dynamic_slice_in_dim(inputs.weight, start_of(plan, c), plan.tile)


def _tile(plan: Plan, inputs: Inputs, c: Array, labels_R: Integer[Array, "R"]) -> tuple[Float[Array, "T D"], Columns]:
    column_T, fresh_T = columns_of(plan, inputs, c)
    return weight_tile(plan, inputs, c), Columns(fresh_T, fresh_T & (column_T == labels_R[:, None]))


def product(options: Options, a: Array, b: Array, dims: tuple[int, int]) -> Float[Array, "_ _"]:
    return contract.dot(a.astype(options.dtype), b.astype(options.dtype), dims, options.dtype)


def _product_slopes(
    inputs: Inputs, options: Options, y_RT: Array, softmax_R: Softmax, slopes_R: Slopes, columns: Columns
) -> Float[Array, "R T"]:
    z_RT, pull = jax.vjp(functools.partial(contract.logits_of, inputs, options), y_RT)
    return pull(logit_slopes(z_RT, softmax_R, slopes_R, columns))[0]


def add_rows(x: Array, rows: Array, start: Array) -> Array:
    old = lax.dynamic_slice_in_dim(x, start, len(rows))
    return lax.dynamic_update_slice_in_dim(x, (old + rows).astype(x.dtype), start, 0)
