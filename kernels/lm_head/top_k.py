"""The likeliest tokens of each row, found in one pass over the vocabulary: plain XLA.

Suffixes: N rows, R rows of a block; T columns of a tile, K columns of a list.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import contract, xla
from .arguments import checked_inputs, checked_options
from .contract import Inputs, Options
from .layout import HeadSharding, Rows, run_on_mesh
from .shapes import Array, Bool, Float, Int
from .sharded import Sharded
from .softmax import Columns, Softmax, empty_running, finish_live, include_tile
from .target import same_varying

Lists = tuple[Array, ...]
"""Columns of each row, [N, K] each: their logits and ids."""


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

    inputs = checked_inputs(hidden, weight, where=where, temperature=temperature)
    inputs = same_varying(inputs)
    options = checked_options(softcap, dtype, inputs[:2])

    def pass_(inputs: Inputs, options: Options) -> Lists:
        softmax, lists = _search(inputs, options, k)
        axis = options.vocabulary_axis
        if axis is not None:  # the lists of all shards beside each other, in their order
            lists = tuple(lax.all_gather(x, axis, axis=1, tiled=True) for x in lists)
        z_NK, id_NK = _largest(k, lists)
        logprob_NK = (z_NK - softmax.top[:, None]) - softmax.log_sum_e[:, None]
        return tuple(jnp.where(inputs.live[:, None], x, 0) for x in (logprob_NK, id_NK))

    def run(rows: Rows, inputs: Inputs) -> Lists:
        count = len(inputs.labels)
        if not count:  # one row is computed and dropped
            one = lambda x: jnp.ones((1, *x.shape[1:]), x.dtype)  # noqa: E731
            inputs = Inputs(one(inputs.hidden), inputs.weight, one(inputs.labels), one(inputs.live), inputs.temperature)
        engine: Any = Sharded.of(xla, rows.sharding)
        on_mesh = isinstance(engine, Sharded)
        found = engine.run(pass_, engine.rows, inputs, options) if on_mesh else pass_(inputs, options)
        return tuple(rows.folded(x[:count]) for x in found)

    return run_on_mesh(run, sharding, inputs)


def _search(inputs: Inputs, options: Options, k: int) -> tuple[Softmax, Lists]:
    """The statistics, and the k largest columns of this shard of the vocabulary."""
    shard = 0 if options.vocabulary_axis is None else lax.axis_index(options.vocabulary_axis)
    first = jnp.int32(shard * len(inputs.weight))

    def include(state: Any, z_RT: Array, columns: Columns, column_T: Array, _: Array) -> Any:
        running, lists = state
        z_RT = jnp.where(columns.fresh, z_RT, -jnp.inf)
        new = _largest(k, (z_RT, jnp.broadcast_to(first + column_T, z_RT.shape)))
        z_RK, id_RK = (jnp.concatenate(both, axis=1) for both in zip(lists, new, strict=True))
        return include_tile(running, z_RT, columns), _largest(k, (z_RK, id_RK))

    def empty(rows: int) -> Any:
        nothing = contract.zeros(inputs, rows, k) - jnp.inf, contract.zeros(inputs, rows, k, dtype=jnp.int32)
        return empty_running(contract.zeros(inputs, rows)), nothing

    running, lists = xla.stream(inputs, options, empty, include)
    return finish_live(running, inputs.live, options.vocabulary_axis), lists


def _largest(k: int, lists: Lists) -> Lists:
    """The k columns with the largest logits, or all if they are fewer; ties in their order."""
    z, ids = lists
    k = min(k, z.shape[1])
    place_RK = jnp.argmax(z, axis=1, keepdims=True) if k == 1 else lax.top_k(z, k)[1]
    return jnp.take_along_axis(z, place_RK, axis=1), jnp.take_along_axis(ids, place_RK, axis=1)
