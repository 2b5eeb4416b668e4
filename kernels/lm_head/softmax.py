"""Softmax of rows of logits, computed a tile of columns at a time: statistics, and derivatives by the logits.

Logits are z = scale * y: y is h·W, and scale is 1 / temperature. With a softcap, y is tanh(h·W / softcap), and scale is
softcap / temperature. Maxima and their operands are in units of y. XLA may contract a product and a difference to one
rounding, and `scale * y - scale * y` would then not be 0.

Formulas and sources are in docs/head.md. Suffixes: R rows, T columns of a tile, which are dim `dim` of a tile.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .shapes import Array, Bool, Float

FLOOR = -1e25  # below any y, yet differences to it, times any scale, and a vocabulary's worth of them, are finite
MASKED = 2 * FLOOR  # so far below the floor that a tile of nothing else adds nothing
_NEVER = 1e25  # a maximum that makes every probability 0


class TokenLogprobs(NamedTuple):
    """Statistics of each token's `p = softmax(z)` over the vocabulary; float32, nats; 0 at rows that don't count."""

    logprob: Float[Array, "*N"]  # `log p[label]`
    lse: Float[Array, "*N"]  # `log sum exp z`, the normaliser
    entropy: Float[Array, "*N"]  # `-sum p log p`
    likeliest: Bool[Array, "*N"]  # whether no token has a larger logit than the label; ties count
    divergence: Float[Array, "*N"] | None = None  # from the teacher's distribution; None where there is no teacher
    mean_logit: Float[Array, "*N"] | None = None  # of z, over the vocabulary; None where no objective names it
    collision: Float[Array, "*N"] | None = None  # `sum p^2`; None where it isn't asked for

    @property
    def statistics(self) -> "Slopes":
        """The statistics that an objective may depend on, in the order of their slopes."""
        return Slopes(self.logprob, self.lse, self.entropy, self.divergence, self.mean_logit)


class Slopes(NamedTuple):
    """The derivatives of a scalar by the statistics of each token."""

    logprob: Float[Array, "*N"]
    lse: Float[Array, "*N"]
    entropy: Float[Array, "*N"]
    divergence: Any = None  # None where there is no teacher
    mean_logit: Any = None  # for the engines by the sum of z, and None where no objective names it


class Columns(NamedTuple):
    """The columns of a tile that count (the last tile overlaps the tile before), and the place of each row's label."""

    fresh: Bool[Array, "..."]
    hit: Bool[Array, "..."]


class Running(NamedTuple):
    """Sums over the columns seen so far, with e = exp(scale (y - top)) and `top` the maximum of y.

    `sum_e_y` is the sum of e (y - top), `label` the label's y, 0 until it is seen; a teacher has neither. The sums
    of y and of e^2 are None unless requested.
    """

    top: Float[Array, "*R"]
    sum_e: Float[Array, "*R"]
    sum_e_y: Any = None
    label: Any = None
    sum_y: Any = None
    sum_e_e: Any = None


class Softmax(NamedTuple):
    """Statistics over all columns: the maximum of y, log sum e, the label's z less the maximum of z, the entropy.

    With a teacher, also its maximum and log sum e, the divergence, and KL(p || m) for jsd, else 0.
    """

    top: Float[Array, "R"]
    log_sum_e: Float[Array, "R"]
    label: Float[Array, "R"]
    entropy: Float[Array, "R"]
    teacher_top: Any = None
    teacher_log_sum_e: Any = None
    divergence: Any = None
    to_mixture: Any = None
    mean_logit: Any = None
    collision: Any = None

    def outputs(self, live: Bool[Array, "*R"], scale: Any) -> TokenLogprobs:
        """The statistics as the head returns them; `live` are the rows that count."""
        lse, likeliest = scale * self.top + self.log_sum_e, (self.label >= 0) & live
        optional = self.divergence, self.mean_logit, self.collision
        return TokenLogprobs(self.label - self.log_sum_e, lse, self.entropy, likeliest, *optional)


def empty_running(zeros_R: Float[Array, "*R"], mean_logit: bool = False, collision: bool = False) -> Running:
    """The state before any column, with the sums that the mean logit and the collision take if they are asked for."""
    sum_y, sum_e_e = zeros_R if mean_logit else None, zeros_R if collision else None
    return Running(zeros_R + FLOOR, zeros_R, zeros_R, zeros_R, sum_y, sum_e_e)


def include_tile(running: Running, y_RT: Float[Array, "..."], columns: Columns, scale: Any, dim: int = 1) -> Running:
    """The state after one more tile of columns."""
    y_RT = jnp.where(columns.fresh, y_RT, MASKED)
    top = jnp.maximum(running.top, y_RT.max(axis=dim))
    below_RT = y_RT - jnp.expand_dims(top, dim)
    e_RT, old = jnp.exp(below_RT * scale), raised(running, top, scale)
    if old.label is None or old.sum_e_y is None:
        return Running(top, old.sum_e + e_RT.sum(axis=dim))
    return Running(
        top=top,
        sum_e=old.sum_e + e_RT.sum(axis=dim),
        sum_e_y=old.sum_e_y + (e_RT * below_RT).sum(axis=dim),
        label=old.label + jnp.where(columns.hit, y_RT, 0).sum(axis=dim),
        sum_y=None if old.sum_y is None else old.sum_y + jnp.where(columns.fresh, y_RT, 0).sum(axis=dim),
        sum_e_e=None if old.sum_e_e is None else old.sum_e_e + (e_RT * e_RT).sum(axis=dim),
    )


def raised(running: Running, top: Float[Array, "*R"], scale: Any) -> Running:
    """The state relative to another maximum."""
    shift = running.top - top
    factor, sum_e_y, sum_e_e = jnp.exp(shift * scale), running.sum_e_y, running.sum_e_e
    if sum_e_y is not None:
        sum_e_y = factor * (sum_e_y + shift * running.sum_e)
    if sum_e_e is not None:
        sum_e_e = factor * factor * sum_e_e
    return running._replace(top=top, sum_e=factor * running.sum_e, sum_e_y=sum_e_y, sum_e_e=sum_e_e)


def combine(a: Running, b: Running, scale: Any) -> Running:
    """The state after the columns of `a` and `b`, which are disjoint."""
    top = jnp.maximum(a.top, b.top)
    a, b = raised(a, top, scale), raised(b, top, scale)
    return jax.tree.map(jnp.add, a, b)._replace(top=top)


def combine_all(parts: Running, scale: Any) -> Running:
    """The state after the columns of all parts, stacked along a first dim."""
    top = parts.top.max(axis=0)
    return jax.tree.map(lambda x: x.sum(axis=0), raised(parts, top, scale))._replace(top=top)


def across_devices(running: Running, scale: Any, axis: Any) -> Running:
    """The state after the columns of all devices along `axis`, which exchange a maximum and a row's sums."""
    if axis is None:
        return running
    top = lax.pmax(running.top, axis)
    return Running(top, *lax.psum(raised(running, top, scale)[1:], axis))


def finish_live(
    running: Running, live: Bool[Array, "R"], scale: Any, axis: Any, vocabulary: int | None = None
) -> Softmax:
    """The statistics after the last column, over the devices along `axis` if given; 0 at rows that don't count.

    `vocabulary` is the number of columns in the mean logit.
    """
    running = across_devices(running, scale, axis)
    log_sum_e = jnp.log(running.sum_e)
    # H = lse - E[z], both relative to the maximum
    entropy = log_sum_e - scale * (running.sum_e_y / running.sum_e)
    softmax = Softmax(running.top, log_sum_e, scale * (running.label - running.top), entropy)
    if running.sum_y is not None:
        softmax = softmax._replace(mean_logit=running.sum_y * (scale / vocabulary))
    if running.sum_e_e is not None:
        softmax = softmax._replace(collision=running.sum_e_e / running.sum_e**2)
    return jax.tree.map(lambda x: jnp.where(live, x, 0), softmax)


def log_probabilities(
    y_RT: Float[Array, "..."], top: Float[Array, "*R"], log_sum_e: Float[Array, "*R"], scale: Any, dim: int = 1
) -> Float[Array, "..."]:
    return (y_RT - jnp.expand_dims(top, dim)) * scale - jnp.expand_dims(log_sum_e, dim)


def logit_slopes(
    y_RT: Float[Array, "..."],
    softmax: Softmax,
    slopes: Slopes,
    columns: Columns,
    scale: Any,
    *,
    entropy: bool = True,
    dim: int = 1,
) -> Float[Array, "..."]:
    """`dz = g_logprob (onehot - p) + g_lse p - g_entropy p (log p + entropy) + g_mean`, where `slopes` has a row's g.

    Without `entropy` its term is 0, and without the mean's slope g_mean is.
    """
    log_p_RT = log_probabilities(y_RT, softmax.top, softmax.log_sum_e, scale, dim)
    g_logprob, by_p_RT = (jnp.expand_dims(x, dim) for x in (slopes.logprob, slopes.lse - slopes.logprob))
    if entropy:
        g_entropy, of_row = (jnp.expand_dims(x, dim) for x in (slopes.entropy, softmax.entropy))
        by_p_RT -= g_entropy * (log_p_RT + of_row)
    dz_RT = jnp.exp(log_p_RT) * by_p_RT + jnp.where(columns.hit, g_logprob, 0)
    if slopes.mean_logit is not None:
        dz_RT += jnp.expand_dims(slopes.mean_logit, dim)
    return jnp.where(columns.fresh, dz_RT, 0)


def label_slope(softmax: Softmax, slopes: Slopes, temperature: Array, softcap: float | None) -> Float[Array, "R"]:
    """The derivative by the label's product h·W; 1 - p is computed by expm1."""
    log_p = softmax.label - softmax.log_sum_e
    p = jnp.exp(log_p)
    slope = slopes.lse * p - slopes.logprob * jnp.expm1(log_p) - slopes.entropy * p * (log_p + softmax.entropy)
    if slopes.mean_logit is not None:
        slope += slopes.mean_logit
    if softcap is not None:
        slope *= cap_slope(softmax.label * (temperature / softcap) + softmax.top)
    return slope / temperature


def cap_slope(y: Float[Array, "..."]) -> Float[Array, "..."]:
    """The derivative of tanh, given its value `y`; finite where `y` is a mask's floor."""
    y = jnp.maximum(y, -1)
    return (1 + y) * (1 - y)


class RowFactors(NamedTuple):
    """Each row's factors of the derivatives by its products h·W, float32.

    A derivative is `at_label` in the label's column, elsewhere `p (at_p + at_p_log_p log p) + at_all` times the cap's
    derivative. The last four include 1 / temperature, and `at_label` the cap's derivative at the label.
    """

    top: Float[Array, "R"]  # the maximum of y over the whole vocabulary
    log_sum_e: Float[Array, "R"]
    at_p: Float[Array, "R"]
    at_p_log_p: Float[Array, "R"]  # 0 where the loss doesn't depend on the entropy
    at_label: Float[Array, "R"]
    at_all: Any = None  # None where the loss doesn't depend on the mean logit

    def where(self, live: Bool[Array, "R"]) -> "RowFactors":
        """The factors, but 0 at rows that don't count, with a maximum that makes every probability 0 there."""
        zeroed = jax.tree.map(lambda x: jnp.where(live, x, 0), self)
        return zeroed._replace(top=jnp.where(live, self.top, _NEVER))


def row_factors(softmax: Softmax, slopes: Slopes, temperature: Array, softcap: float | None) -> RowFactors:
    """The factors for the derivatives `slopes` by the rows' statistics."""
    scale = 1 / temperature
    by_p = slopes.lse - slopes.logprob - slopes.entropy * softmax.entropy
    at_label = label_slope(softmax, slopes, temperature, softcap)
    at_all = None if slopes.mean_logit is None else slopes.mean_logit * scale
    return RowFactors(softmax.top, softmax.log_sum_e, by_p * scale, -slopes.entropy * scale, at_label, at_all)
