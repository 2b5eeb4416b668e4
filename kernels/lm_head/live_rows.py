"""Loops over the rows that count, a block at a time; their duration follows the number of rows.

Suffixes: N rows, M rows rounded up to whole blocks, R rows of a block; D features, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from . import contract
from .contract import Gradients, Inputs, Options
from .shapes import Array, Bool, Integer

Carry = TypeVar("Carry")


class LiveRows(NamedTuple):
    """An order with the rows that count first. Later places repeat the first row, so no uncounted row is read."""

    row: Integer[Array, "M"]  # the row at each place
    place: Integer[Array, "N"]  # the place of each row; a row that doesn't count has a place of at least `number`
    number: Integer[Array, ""]  # how many rows count

    def over_blocks(
        self, block: int, body: Callable[[Array, Carry], Carry], carry: Carry, in_step: tuple[str, ...] = ()
    ) -> Carry:
        """Runs `carry = body(i, carry)` for each block i with a row that counts, and returns the last carry.

        All devices along the mesh axes `in_step` run it equally often, as a body with collectives needs.
        """
        number = lax.pmax(self.number, in_step) if in_step else self.number

        def step(state: tuple[Array, Carry]) -> tuple[Array, Carry]:
            return state[0] + 1, body(*state)

        return lax.while_loop(lambda state: state[0] * block < number, step, (jnp.int32(0), carry))[1]

    def block(self, i: Array, block: int) -> tuple[Integer[Array, "R"], Bool[Array, "R"]]:
        """The rows of block i, and which of them count (the others repeat the first row)."""
        first = i * block
        live_R = first + jnp.arange(block) < self.number
        return lax.dynamic_slice_in_dim(self.row, first, block), live_R


def live_rows(live: Bool[Array, "N"], block: int) -> LiveRows:
    """The order of rows for blocks of `block` rows."""
    # Without the barrier, libtpu 0.0.42 crashes where 64 rows are known to count ("scatter_emitter.cc: Check failed").
    live = lax.optimization_barrier(live)
    # By counting: two sorts of 65536 rows would cost the TPU compiler half a minute.
    row, ahead = jnp.arange(len(live)), jnp.cumsum(live, dtype=jnp.int32)
    count = jnp.sum(live, dtype=jnp.int32)
    place = jnp.where(live, ahead - 1, count + row - ahead)
    order = jnp.zeros_like(row).at[place].set(row, unique_indices=True)
    places = jnp.arange(round_up(len(live), block))
    return LiveRows(order[jnp.where(places < count, places, 0)], place, count)


def write(whole: Carry, rows: Carry, start: Array) -> Carry:
    """A tree of arrays [M, ...] with the rows of a block written at place `start`."""
    return jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, start, 0), whole, rows)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def over_waves(
    inputs: Inputs,
    options: Options,
    rows: int,
    wave: Callable[[Array, Array, Any, Any], tuple[Carry, Any, Any, Any]],
    all_M: Carry,
    *,
    kept: Any = None,
    one_always_runs: bool = False,
) -> tuple[Carry, Gradients]:
    """Statistics [N, ...], a tree of arrays such as `all_M`, and the wanted gradients, `rows` rows at a time.

    `wave(row_R, live_R, dw_VD, kept)` returns a wave's statistics and dh, `dw_VD` plus the wave's part, and `kept` for
    the next wave to overwrite. If `one_always_runs`, a single wave runs without a loop, and `dw_VD` is None.
    """
    live = live_rows(inputs.live, rows)
    (dh_dtype, dw_dtype), single = contract.gradient_dtypes(inputs, options), len(live.row) == rows

    def step(i: Array, carry: Any) -> Any:
        all_M, dh_MD, dw_VD, kept = carry
        all_R, dh_RD, dw_VD, kept = wave(*live.block(i, rows), dw_VD, kept)
        if dh_MD is not None:
            dh_MD = write(dh_MD, dh_RD.astype(dh_dtype), i * rows)
        return write(all_M, all_R, i * rows), dh_MD, dw_VD, kept

    dh_shape = len(live.row), inputs.weight.shape[1]
    dh_MD = contract.zeros(inputs, *dh_shape, dtype=dh_dtype) if options.wants_hidden else None
    if single and one_always_runs:
        all_M, dh_MD, dw_VD, _ = step(jnp.int32(0), (all_M, dh_MD, None, kept))
    else:
        shape, dtype = inputs.weight.shape, dw_dtype if single else jnp.float32
        nothing = contract.zeros(inputs, *shape, dtype=dtype) if options.wants_weight else None
        all_M, dh_MD, dw_VD, _ = live.over_blocks(rows, step, (all_M, dh_MD, nothing, kept), options.in_step)
    dh = None if dh_MD is None else jnp.where(inputs.live[:, None], dh_MD[live.place], 0)
    return jax.tree.map(lambda x: x[live.place], all_M), (dh, None if dw_VD is None else dw_VD.astype(dw_dtype))
