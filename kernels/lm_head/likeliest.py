"""The likeliest token of each row, found in one pass over the vocabulary: plain XLA."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from . import contract, xla
from .arguments import checked_inputs, checked_options
from .contract import Inputs, Options
from .layout import HeadSharding, LeadingDims, run_on_mesh
from .shapes import Array, Bool, Float, Int
from .sharded import Results, Sharded
from .target import same_varying

Best = tuple[Float[Array, "N"], Int[Array, "N"]]  # the largest y of each row, and its column


def likeliest_tokens(
    hidden: Float[Array, "*N D"],
    weight: Float[Array, "V D"],
    *,
    where: Bool[Array, "*N"] | None = None,
    softcap: float | None = None,
    vocabulary: int | None = None,
    dtype: Any = None,
    sharding: HeadSharding | None = None,
) -> Int[Array, "*N"]:
    """The id of each row's likeliest token, int32, the lowest id on ties; 0 at rows that don't count.

    One matrix product, and no logits [N, V]. Arguments are as for `token_logprobs`, and so is the ValueError.
    """
    inputs = same_varying(checked_inputs(hidden, weight, where=where, vocabulary=vocabulary))
    options = checked_options(softcap, dtype, inputs[:2]).values_alone

    def pass_(inputs: Inputs, options: Options) -> Int[Array, "N"]:
        axes, plan = options.vocabulary_axis, xla.make_plan(inputs)
        nothing = contract.zeros(inputs, 0), contract.zeros(inputs, 0, dtype=jnp.int32)
        y_N, id_N = xla.over_rows(plan, inputs, options, functools.partial(_search, plan, options), nothing)
        if axes is not None:
            id_N += lax.axis_index(axes) * len(inputs.weight)
            most = jnp.iinfo(jnp.int32).max
            id_N = lax.pmin(jnp.where(y_N == lax.pmax(y_N, axes), id_N, most), axes)
        return jnp.where(inputs.live, id_N, 0)

    def run(rows: LeadingDims, inputs: Inputs) -> Int[Array, "*N"]:
        engine: Any = Sharded.of(xla, rows.sharding)
        if not isinstance(engine, Sharded):
            return rows.folded(pass_(inputs, options))
        return rows.folded(engine.run(lambda part, local, *_: Results(pass_(part, local)), inputs, options).rows)

    if not inputs.labels.size:
        return jnp.zeros(inputs.labels.shape, jnp.int32)
    return run_on_mesh(run, sharding, inputs)


def _search(plan: xla.Tiling, options: Options, part: Inputs) -> Best:
    """The best column of this shard of the vocabulary, for a block's rows."""

    def include(c: Array, best: Best) -> Best:
        (y_RT,), fresh_T = xla.logits_of_tile(plan, part, options, c), xla.columns_of(plan, part, c).fresh
        y_RT = jnp.where(fresh_T, y_RT, -jnp.inf)
        column_R, highest_R = jnp.argmax(y_RT, axis=1).astype(jnp.int32), y_RT.max(axis=1)
        better = highest_R > best[0]
        return jnp.where(better, highest_R, best[0]), jnp.where(better, xla.start_of(plan, c) + column_R, best[1])

    nothing = contract.zeros(part, plan.block) - jnp.inf, contract.zeros(part, plan.block, dtype=jnp.int32)
    return lax.fori_loop(0, plan.tiles, include, nothing)
