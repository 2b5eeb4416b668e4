"""The likeliest tokens of each row, and what else is found without labels in one pass over the vocabulary: plain XLA.

Suffixes: N rows, R rows of a block; T columns of a tile, K columns of a list.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels.lm_head import contract, xla
from kernels.lm_head.arguments import checked_inputs, checked_options
from kernels.lm_head.contract import Inputs, Options
from kernels.lm_head.layout import HeadSharding, Rows, run_on_mesh
from kernels.lm_head.sharded import Sharded, on_devices
from kernels.lm_head.softmax import Columns, Softmax, empty_running, finish_live, include_tile
from kernels.lm_head.target import same_varying

Lists = tuple[Array, ...]
"""Columns of each row, [N, K] each: their logits and ids, and what else is known of them."""


def top_k_logprobs(
    hidden: Float[Array, "*N D"],
    weight: Float[Array, "V D"],
    k: int,
    *,
    where: Bool[Array, "*N"] | None = None,
    temperature: float | Float[Array, ""] = 1.0,
    softcap: float | None = None,
    dtype: Any = None,
    sharding: HeadSharding | None = None,
) -> tuple[Float[Array, "*N K"], Int[Array, "*N K"]]:
    """The k largest log-probabilities of each row, float32, and their ids, int32; the largest first, ties by lower id.

    One matrix product, and no logits [N, V]. It has no gradient. Arguments are as for `token_logprobs`, and so is the
    ValueError. Rows that don't count give 0.
    """
    if not isinstance(k, int) or not 1 <= k <= np.shape(weight)[0]:
        raise ValueError(f"k must be a number from 1 to the vocabulary's {np.shape(weight)[0]}, not {k!r}")

    def pass_(inputs: Inputs, options: Options) -> Lists:
        softmax, lists = search(inputs, options, k, partial(largest, k))
        z_NK, id_NK = largest(k, of_all_shards(options, lists))
        logprob_NK = (z_NK - softmax.top[:, None]) - softmax.log_sum_e[:, None]
        return tuple(jnp.where(inputs.live[:, None], x, 0) for x in (logprob_NK, id_NK))

    inputs = checked_inputs(hidden, weight, where=where, temperature=temperature)
    return over_rows(pass_, sharding, inputs, softcap, dtype)


def search(
    inputs: Inputs,
    options: Options,
    k: int,
    choose: Callable[[Lists], Lists],
    noise: Callable[[Array, Array], Array] | None = None,
) -> tuple[Softmax, Lists]:
    """The statistics, and the k columns that `choose` takes of many: of those of one tile, and of two lists.

    Lists of this shard are (z, id), and with `noise(id_T, row_R)` [R, T] they have z + noise as well.
    """

    def include(state: Any, z_RT: Array, columns: Columns, column_T: Array, row_R: Array) -> Any:
        running, lists = state
        z_RT, id_T = jnp.where(columns.fresh, z_RT, -jnp.inf), first_column(options, inputs) + column_T
        new = z_RT, jnp.broadcast_to(id_T, z_RT.shape), *([] if noise is None else [z_RT + noise(id_T, row_R)])
        lists = tuple(jnp.concatenate(both, axis=1) for both in zip(lists, choose(new), strict=True))
        return include_tile(running, z_RT, columns), choose(lists)

    def empty(rows: int) -> Any:
        nothing = contract.zeros(inputs, rows, k) - jnp.inf, contract.zeros(inputs, rows, k, dtype=jnp.int32)
        return empty_running(contract.zeros(inputs, rows)), (*nothing, *([] if noise is None else nothing[:1]))

    running, lists = xla.stream(inputs, options, empty, include)
    return finish_live(running, inputs.live, options.vocabulary_axis), lists


def largest(k: int, lists: Lists, by: int = 0) -> Lists:
    """The k columns in which the `by`th array is largest, or all if they are fewer; ties in their order."""
    k = min(k, lists[by].shape[1])
    place_RK = jnp.argmax(lists[by], axis=1, keepdims=True) if k == 1 else lax.top_k(lists[by], k)[1]
    return tuple(jnp.take_along_axis(x, place_RK, axis=1) for x in lists)


def first_column(options: Options, inputs: Inputs) -> Array:
    """The id of the first column on this device."""
    shard = 0 if options.vocabulary_axis is None else lax.axis_index(options.vocabulary_axis)
    return jnp.int32(shard * len(inputs.weight))


def of_all_shards(options: Options, lists: Lists) -> Lists:
    """The lists of all shards of the vocabulary beside each other, in their order."""
    axis = options.vocabulary_axis
    return lists if axis is None else tuple(lax.all_gather(x, axis, axis=1, tiled=True) for x in lists)


def over_rows(
    pass_: Callable[..., Lists], sharding: HeadSharding | None, inputs: Inputs, softcap: Any, dtype: Any, *given: Any
) -> Any:
    """`pass_(inputs, options, *given)` of checked inputs, whose labels mean nothing.

    All that is given and returned has rows [*N, ...], in the pass [N, ...].
    """
    inputs, given = same_varying((inputs, given))
    options = checked_options(softcap, dtype, inputs[:2])

    def run(rows: Rows, inputs: Inputs, *given: Array) -> Lists:
        given, count = tuple(map(rows.flat, given)), len(inputs.labels)
        if not count:  # one row is computed and dropped
            one = lambda x: jnp.ones((1, *x.shape[1:]), x.dtype)  # noqa: E731
            given = tuple(map(one, given))
            inputs = Inputs(one(inputs.hidden), inputs.weight, one(inputs.labels), one(inputs.live), inputs.temperature)
        found = on_devices(pass_, Sharded.of(xla, rows.sharding), inputs, options, *given)
        return tuple(rows.folded(x[:count]) for x in found)

    return run_on_mesh(run, sharding, inputs, given)
