"""The likeliest tokens of each row, found in one pass over the vocabulary: plain XLA.

Suffixes: N rows, R rows of a block; T columns of a tile, K columns of a list.
"""

import functools
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
from .softmax import empty_running, finish_live, include_tile, log_probabilities
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

    inputs = same_varying(checked_inputs(hidden, weight, where=where, temperature=temperature))
    options = checked_options(softcap, dtype, inputs[:2])

    def pass_(inputs: Inputs, options: Options) -> Lists:
        axes, plan = options.vocabulary_axis, xla.make_plan(inputs)
        zeros = contract.zeros(inputs, 0, k), contract.zeros(inputs, 0, k, dtype=jnp.int32)
        found = xla.over_rows(plan, inputs, options, functools.partial(_search, plan, options, k), zeros)
        if axes is not None:  # the lists of all shards beside each other, in their order
            found = _largest(k, tuple(lax.all_gather(x, axes, axis=1, tiled=True) for x in found))
        logprob_NK, id_NK = found
        return tuple(jnp.where(inputs.live[:, None], x, 0) for x in (logprob_NK, id_NK))

    def run(rows: Rows, inputs: Inputs) -> Lists:
        engine: Any = Sharded.of(xla, rows.sharding)
        on_mesh = isinstance(engine, Sharded)
        found = engine.run(pass_, engine.rows, inputs, options) if on_mesh else pass_(inputs, options)
        return tuple(map(rows.folded, found))

    if not inputs.labels.size:
        return tuple(jnp.zeros((*inputs.labels.shape, k), dtype) for dtype in (jnp.float32, jnp.int32))  # type: ignore[return-value]
    return run_on_mesh(run, sharding, inputs)


def _search(plan: xla.Plan, options: Options, k: int, own: Inputs) -> Lists:
    """The log-probabilities and ids of the k largest columns of this shard of the vocabulary, for a block's rows."""
    shard = 0 if options.vocabulary_axis is None else lax.axis_index(options.vocabulary_axis)
    first, (scale,) = jnp.int32(shard * len(own.weight)), contract.scales_of(own, options)
    zeros_R = contract.zeros(own, plan.block)

    def include(c: Array, state: Any) -> Any:
        (running, lists), columns = state, xla.columns_of(plan, own, c)
        (y_RT,) = xla.logits_of_tile(plan, own, options, c)
        ids = jnp.broadcast_to(first + xla.start_of(plan, c) + jnp.arange(plan.tile, dtype=jnp.int32), y_RT.shape)
        new = _largest(k, (jnp.where(columns.fresh, y_RT, -jnp.inf), ids))
        joined = tuple(jnp.concatenate(both, axis=1) for both in zip(lists, new, strict=True))
        return include_tile(running, y_RT, columns, scale), _largest(k, joined)

    lists = contract.zeros(own, plan.block, k) - jnp.inf, contract.zeros(own, plan.block, k, dtype=jnp.int32)
    running, (y_RK, id_RK) = lax.fori_loop(0, plan.tiles, include, (empty_running(zeros_R), lists))
    softmax = finish_live(running, own.live, scale, options.vocabulary_axis)
    return log_probabilities(y_RK, softmax.top, softmax.log_sum_e, scale), id_RK


def _largest(k: int, lists: Lists) -> Lists:
    """The k columns with the largest logits, or all if they are fewer; ties in their order."""
    z, ids = lists
    k = min(k, z.shape[1])
    place_RK = jnp.argmax(z, axis=1, keepdims=True) if k == 1 else lax.top_k(z, k)[1]
    return jnp.take_along_axis(z, place_RK, axis=1), jnp.take_along_axis(ids, place_RK, axis=1)
