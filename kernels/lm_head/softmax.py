"""Softmax of rows of logits that are seen a tile of columns at a time: statistics, and derivatives by the logits.

docs/head.md has the formulas and their sources. Suffixes: R rows, T columns of a tile.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .shapes import Array, Bool, Float

FLOOR = -1e30  # below any logit, yet differences to it, and a vocabulary's worth of them, are finite
MASKED = 2 * FLOOR  # so far below the floor that a tile of nothing else adds nothing
_NEVER = 1e30  # a maximum that makes every probability 0


class TokenLogprobs(NamedTuple):
    """Statistics of each token's `p = softmax(z)` over the vocabulary; float32, nats; 0 at rows that don't count."""

    logprob: Float[Array, "*N"]  # `log p[label]`
    lse: Float[Array, "*N"]  # `log sum exp z`, the normaliser
    entropy: Float[Array, "*N"]  # `-sum p log p`
    likeliest: Bool[Array, "*N"]  # whether no token has a larger logit than the label; ties count


class Slopes(NamedTuple):
    """The derivatives of a scalar by three statistics of each token."""

    logprob: Float[Array, "*N"]
    lse: Float[Array, "*N"]
    entropy: Float[Array, "*N"]


class Columns(NamedTuple):
    """The columns of a tile that count (the last tile overlaps the one before), and the place of each row's label."""

    fresh: Bool[Array, "T"]
    hit: Bool[Array, "R T"]


class Running(NamedTuple):
    """Sums over the columns seen so far, with e = exp(z - top) and `top` the maximum of z.

    `sum_e_z` is the sum of e (z - top), `label` the label's z, 0 until it is seen.
    """

    top: Float[Array, "R"]
    sum_e: Float[Array, "R"]
    sum_e_z: Float[Array, "R"]
    label: Float[Array, "R"]


class Softmax(NamedTuple):
    """Statistics over all columns: the maximum of z, log sum exp(z - top), the label's z - top, the entropy."""

    top: Float[Array, "R"]
    log_sum_e: Float[Array, "R"]
    label: Float[Array, "R"]
    entropy: Float[Array, "R"]

    def outputs(self, live: Bool[Array, "*R"]) -> TokenLogprobs:
        """What the head returns; `live` are the rows that count."""
        likeliest = (self.label >= 0) & live
        return TokenLogprobs(self.label - self.log_sum_e, self.top + self.log_sum_e, self.entropy, likeliest)


def empty_running(zeros_R: Float[Array, "R"]) -> Running:
    """The state before any column."""
    return Running(zeros_R + FLOOR, zeros_R, zeros_R, zeros_R)


def include_tile(running: Running, z_RT: Float[Array, "R T"], columns: Columns) -> Running:
    """The state after one more tile of columns."""
    z_RT = jnp.where(columns.fresh, z_RT, MASKED)
    top = jnp.maximum(running.top, z_RT.max(axis=1))
    below_RT = z_RT - top[:, None]
    e_RT, (sum_e, sum_e_z) = jnp.exp(below_RT), _raised(running, top)
    return Running(
        top=top,
        sum_e=sum_e + e_RT.sum(axis=1),
        sum_e_z=sum_e_z + (e_RT * below_RT).sum(axis=1),
        label=running.label + jnp.where(columns.hit, z_RT, 0).sum(axis=1),
    )


def combine(a: Running, b: Running) -> Running:
    """The state after the columns of both, which have none in common."""
    top = jnp.maximum(a.top, b.top)
    (sum_e_a, sum_e_z_a), (sum_e_b, sum_e_z_b) = (_raised(x, top) for x in (a, b))
    return Running(top, sum_e_a + sum_e_b, sum_e_z_a + sum_e_z_b, a.label + b.label)


def combine_all(parts: Running) -> Running:
    """The state after the columns of all parts, stacked along a first dim."""
    top = parts.top.max(axis=0)
    sum_e, sum_e_z = _raised(parts, top)
    return Running(top, sum_e.sum(axis=0), sum_e_z.sum(axis=0), parts.label.sum(axis=0))


def _raised(running: Running, top: Float[Array, "*R"]) -> tuple[Float[Array, "*S"], Float[Array, "*S"]]:
    """sum_e and sum_e_z relative to another maximum."""
    shift = running.top - top
    return jnp.exp(shift) * running.sum_e, jnp.exp(shift) * (running.sum_e_z + shift * running.sum_e)


def finish_live(running: Running, live: Bool[Array, "R"], axis: str | None) -> Softmax:
    """The statistics after all columns, of all devices along `axis` if there is one; 0 at rows that don't count.

    The devices exchange a maximum and three sums a row.
    """
    if axis is not None:
        top = lax.pmax(running.top, axis)
        running = Running(top, *lax.psum((*_raised(running, top), running.label), axis))
    log_sum_e = jnp.log(running.sum_e)
    # H = lse - E[z], both relative to the maximum
    entropy = log_sum_e - running.sum_e_z / running.sum_e
    softmax = running.top, log_sum_e, running.label - running.top, entropy
    return Softmax(*(jnp.where(live, x, 0) for x in softmax))


def logit_slopes(z_RT: Float[Array, "R T"], softmax: Softmax, slopes: Slopes, columns: Columns) -> Float[Array, "R T"]:
    """`dz = g_logprob (onehot - p) + g_lse p - g_entropy p (log p + entropy)`, where `slopes` has a row's three g."""
    g_logprob, g_lse, g_entropy, entropy = (
        x[:, None] for x in (slopes.logprob, slopes.lse, slopes.entropy, softmax.entropy)
    )
    log_p_RT = (z_RT - softmax.top[:, None]) - softmax.log_sum_e[:, None]
    by_p_RT = g_lse - g_logprob - g_entropy * (log_p_RT + entropy)
    dz_RT = jnp.exp(log_p_RT) * by_p_RT + jnp.where(columns.hit, g_logprob, 0)
    return jnp.where(columns.fresh, dz_RT, 0)


def label_slope(softmax: Softmax, slopes: Slopes, temperature: Array, softcap: float | None) -> Float[Array, "R"]:
    """The derivative by the label's y = h·W, in which 1 - p is computed by expm1."""
    log_p = softmax.label - softmax.log_sum_e
    p = jnp.exp(log_p)
    slope = slopes.lse * p - slopes.logprob * jnp.expm1(log_p) - slopes.entropy * p * (log_p + softmax.entropy)
    if softcap is not None:
        y = (softmax.label + softmax.top) * temperature
        slope *= 1 - (y / softcap) ** 2
    return slope / temperature


class RowFactors(NamedTuple):
    """Each row's numbers from which a kernel makes dy, the derivatives by its products y = h·W, float32.

    dy is `at_label` in the label's column, and elsewhere `p (at_p + at_p_log_p log p) dcap/dy`. The last three include
    1 / temperature, and `at_label` the cap's derivative at the label.
    """

    top: Float[Array, "R"]  # the maximum over the whole vocabulary, in the kernel's units
    log_sum_e: Float[Array, "R"]
    at_p: Float[Array, "R"]
    at_p_log_p: Float[Array, "R"]  # 0 where the loss doesn't depend on the entropy
    at_label: Float[Array, "R"]

    def where(self, live: Bool[Array, "R"]) -> "RowFactors":
        """The same, but 0 at rows that don't count, with a maximum that makes every probability 0 there."""
        zeroed = jax.tree.map(lambda x: jnp.where(live, x, 0), self)
        return zeroed._replace(top=jnp.where(live, self.top, _NEVER))


def row_factors(
    softmax: Softmax, top: Float[Array, "R"], slopes: Slopes, temperature: Array, softcap: float | None
) -> RowFactors:
    """The factors for the derivatives `slopes` by the rows' statistics."""
    scale = 1 / temperature
    by_p = slopes.lse - slopes.logprob - slopes.entropy * softmax.entropy
    at_label = label_slope(softmax, slopes, temperature, softcap)
    return RowFactors(top, softmax.log_sum_e, by_p * scale, -slopes.entropy * scale, at_label)
