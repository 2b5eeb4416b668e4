"""Statistics of logits and their gradient in plain XLA, on any backend and in any memory layout.

Accelerators reduce all columns at once with `combine`, which reads the logits once and makes no array of their size. On
a CPU such a reduction takes 13 times as long as the loop over tiles that is used there.

Suffixes: N rows, R of a block; V vocabulary, T columns of a tile.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Integer

from kernels.lm_head import target
from kernels.lm_head.contract import TokenLogprobs
from kernels.lm_head.live_rows import live_rows
from kernels.lm_head.manual_axes import vary, varying_axes
from kernels.lm_head.softmax import Running, Softmax, combine

FLOOR = -1e30  # below any logit that counts, yet differences to it, and a vocabulary's worth of them, are finite

_ROWS, _COLUMNS = 8, 4096  # of a tile on a CPU: 128 KiB in float32


def sums(
    logits: Float[Array, "*N V"], labels: Integer[Array, "*N"], live: Bool[Array, "*N"], scale: Float[Array, ""]
) -> Running:
    """The softmax's sums over all columns of `z = scale * logits` above the floor; rows not live hold anything."""
    if target.platform() == "cpu" and live.size:
        by_row = _tile_by_tile(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), live.reshape(-1), scale)
        return Running(*(x.reshape(live.shape) for x in by_row))
    z = scale * logits.astype(jnp.float32)
    hit = labels[..., None] == jnp.arange(logits.shape[-1])
    # The label's z is one more sum: a gather makes XLA copy logits that lie in some other order.
    columns = (jnp.maximum(z, 2 * FLOOR), jnp.ones_like(z), jnp.zeros_like(z), jnp.where(hit, z, 0))
    nothing = tuple(map(jnp.float32, (FLOOR, 0, 0, 0)))
    return Running(*lax.reduce(columns, nothing, lambda a, b: tuple(combine(Running(*a), Running(*b))), (z.ndim - 1,)))


def gradient(
    logits: Float[Array, "*N V"],
    labels: Integer[Array, "*N"],
    live: Bool[Array, "*N"],
    scale: Float[Array, ""],
    softmax: Softmax,
    slopes: TokenLogprobs,
) -> Float[Array, "*N V"]:
    """The derivatives by the logits of a scalar with derivatives `slopes` by the statistics; elementwise."""
    factors = row_factors(softmax, slopes, scale)
    top, log_sum_e, at_p, at_p_log_p, at_label = (x[..., None] for x in factors)
    log_p = (scale * logits.astype(jnp.float32) - top) - log_sum_e
    hit = labels[..., None] == jnp.arange(logits.shape[-1])
    slope = p_term(log_p, at_p, at_p_log_p) + jnp.where(hit, at_label, 0)
    return jnp.where(live[..., None], slope, 0).astype(logits.dtype)


def row_factors(softmax: Softmax, slopes: TokenLogprobs, scale: Float[Array, ""]) -> tuple[Float[Array, "*N"], ...]:
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
            label_R = jnp.where(fresh_T & (column_T == labels_R[:, None]), z_RT, 0).sum(axis=1)
            z_RT = jnp.where(fresh_T, jnp.maximum(z_RT, 2 * FLOOR), 2 * FLOOR)
            top_R = jnp.maximum(z_RT.max(axis=1), FLOOR)
            below_RT = z_RT - top_R[:, None]
            e_RT = jnp.exp(below_RT)
            return combine(running, Running(top_R, e_RT.sum(axis=1), (e_RT * below_RT).sum(axis=1), label_R))

        zeros_R = vary(jnp.zeros(rows), axes)
        running = lax.fori_loop(0, tiles, tile, Running(zeros_R + FLOOR, zeros_R, zeros_R, zeros_R))
        return jax.tree.map(lambda x_N, x_R: lax.dynamic_update_slice(x_N, x_R, (row,)), all_N, running)

    zeros_N = vary(jnp.zeros(number), axes)
    return live_blocks.over_blocks(1, block, Running(zeros_N, zeros_N, zeros_N, zeros_N))
