"""Statistics of logits and their gradient in plain XLA, on any backend and in any memory layout.

Accelerators reduce all columns at once with `combine`, which reads the logits once and makes no array of their size. On
a CPU such a reduction takes 13 times as long as the loop over tiles that is used there.

Suffixes: N rows, R of a block; V vocabulary, T columns of a tile.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Integer

from kernels.lm_head import target
from kernels.lm_head.live_rows import live_rows, write
from kernels.lm_head.softmax import (
    FLOOR,
    MASKED,
    Columns,
    Running,
    Slopes,
    Softmax,
    combine,
    empty_running,
    include_tile,
)
from kernels.lm_head.target import vary, varying_axes

_ROWS, _COLUMNS = 8, 4096  # of a tile on a CPU: 128 KiB in float32


class Given(NamedTuple):
    """The arguments of both passes. Rows that don't count may hold anything."""

    logits: Float[Array, "*N V"]
    labels: Integer[Array, "*N"]
    live: Bool[Array, "*N"]
    scale: Float[Array, ""]  # z is so many times the logits


def sums(given: Given) -> Running:
    """The softmax's sums over all columns of `z = scale * logits` above the floor."""
    logits, labels, live, scale = given
    if target.platform() == "cpu" and live.size:
        by_row = _tile_by_tile(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), live.reshape(-1), scale)
        return Running(*(x.reshape(live.shape) for x in by_row))
    z = scale * logits.astype(jnp.float32)
    hit = labels[..., None] == jnp.arange(logits.shape[-1])
    # The label's z is one more sum: a gather makes XLA copy logits that lie in some other order.
    columns = (jnp.maximum(z, MASKED), jnp.ones_like(z), jnp.zeros_like(z), jnp.where(hit, z, 0))
    nothing = tuple(map(jnp.float32, (FLOOR, 0, 0, 0)))
    return Running(*lax.reduce(columns, nothing, lambda a, b: tuple(combine(Running(*a), Running(*b))), (z.ndim - 1,)))


def gradient(given: Given, softmax: Softmax, slopes: Slopes) -> Float[Array, "*N V"]:
    """The derivatives by the logits of a scalar with derivatives `slopes` by the statistics; elementwise."""
    logits, labels, live, scale = given
    factors = row_factors(softmax, slopes, scale)
    top, log_sum_e, at_p, at_p_log_p, at_label = (x[..., None] for x in factors)
    log_p = (scale * logits.astype(jnp.float32) - top) - log_sum_e
    hit = labels[..., None] == jnp.arange(logits.shape[-1])
    slope = p_term(log_p, at_p, at_p_log_p) + jnp.where(hit, at_label, 0)
    return jnp.where(live[..., None], slope, 0).astype(logits.dtype)


def row_factors(softmax: Softmax, slopes: Slopes, scale: Float[Array, ""]) -> tuple[Float[Array, "*N"], ...]:
    """Each row's maximum, log of the sum, and the factors of p, p log p and the label's 1 in a logit's derivative."""
    at_p = slopes.lse - slopes.logprob - slopes.entropy * softmax.entropy
    return softmax.top, softmax.log_sum_e, scale * at_p, -scale * slopes.entropy, scale * slopes.logprob


def p_term(log_p: Float[Array, "*z"], at_p: Float[Array, "*#z"], at_p_log_p: Float[Array, "*#z"]) -> Float[Array, "*z"]:
    """The part of a logit's derivative that has p as a factor: 0 where p is 0, even if log p is -inf."""
    return jnp.exp(log_p) * (at_p + at_p_log_p * jnp.maximum(log_p, FLOOR))


def _tile_by_tile(
    logits: Float[Array, "N V"], labels: Integer[Array, "N"], live: Bool[Array, "N"], scale: Float[Array, ""]
) -> Running:
    number, vocabulary = logits.shape
    rows, columns = min(_ROWS, number), min(_COLUMNS, vocabulary)
    blocks, tiles = -(-number // rows), -(-vocabulary // columns)
    in_blocks = jnp.pad(live, (0, blocks * rows - number)).reshape(blocks, rows)
    live_blocks = live_rows(in_blocks.any(axis=1), 1)
    axes = varying_axes(logits)

    def block(i: Array, all_N: Running) -> Running:
        row = jnp.minimum(live_blocks.row[i] * rows, number - rows)  # the last block starts early, to be a whole one
        labels_R = lax.dynamic_slice(labels, (row,), (rows,))

        def tile(c: Array, running: Running) -> Running:
            column = jnp.minimum(c * columns, vocabulary - columns)
            # Without the barrier, XLA widens all of bfloat16 logits to float32 ahead of the loop.
            array, start = lax.optimization_barrier((logits, (row, column)))
            z_RT = scale * lax.dynamic_slice(array, start, (rows, columns)).astype(jnp.float32)
            column_T = column + jnp.arange(columns)
            fresh_T = column_T >= c * columns
            hit_RT = fresh_T & (column_T == labels_R[:, None])
            # The label's may be -inf; what is summed may not.
            label_R = running.label + jnp.where(hit_RT, z_RT, 0).sum(axis=1)
            return include_tile(running, jnp.maximum(z_RT, MASKED), Columns(fresh_T, hit_RT))._replace(label=label_R)

        running = lax.fori_loop(0, tiles, tile, empty_running(vary(jnp.zeros(rows, jnp.float32), axes)))
        return write(all_N, running, row)

    zeros_N = vary(jnp.zeros(number, jnp.float32), axes)
    return live_blocks.over_blocks(1, block, Running(zeros_N, zeros_N, zeros_N, zeros_N))
