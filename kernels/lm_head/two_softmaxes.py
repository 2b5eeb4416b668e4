"""Two softmaxes over the same columns, seen a tile at a time: their divergence, and its derivatives by the student's z.

With p the student's probabilities, q the teacher's and m = beta q + (1 - beta) p (Agarwal et al. 2023, GKD,
arXiv:2306.13649, section 3):

    forward_kl  KL(q || p)                              dz = p - q
    reverse_kl  KL(p || q)                              dz = p (log p - log q - KL)
    jsd         beta KL(q || m) + (1 - beta) KL(p || m)  dz = (1 - beta) p (log p - log m - KL(p || m))

Where both have the same logits, all of it is exactly 0. Suffixes: R rows, T columns of a tile, which are dim `dim` of a
tile of both models' logits: 2, but 1 in TPU kernels, where columns come before rows. These have z, and its maxima, in
units of `scale`: a product by 1 / temperature before the maximum is subtracted would not be rounded the same twice.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from .contract import Gradients, Inputs, Options
from .shapes import Array, Bool, Float
from .softmax import FLOOR, MASKED

Kind = Literal["forward_kl", "reverse_kl", "jsd"]
KINDS: tuple[Kind, ...] = ("forward_kl", "reverse_kl", "jsd")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Divergence:
    kind: Kind
    beta: float  # of jsd alone

    @property
    def in_one_pass(self) -> bool:
        """Whether sums over unnormalised exponentials give the value: not with m, which takes both normalisers."""
        return self.kind != "jsd"


class Pair(NamedTuple):
    """Student and teacher at the same rows. `columns`, as far as both weights reach, are the tokens that both have."""

    student: Inputs  # labels aren't looked at
    teacher: Inputs

    @property
    def live(self) -> Bool[Array, "N"]:
        return self.student.live

    @property
    def common(self) -> int:
        """The number of rows that both weights have."""
        return min(len(self.student.weight), len(self.teacher.weight))


class RunningPair(NamedTuple):
    """Sums over the columns seen so far, with e = exp(z - top) and `top` the maximum of z, of each softmax.

    `cross` is the sum of e (z - top - (z' - top')), where e and z are the first argument's of the KL divergence, and
    primes are the other's.
    """

    top: Float[Array, "2 R"]
    sum_e: Float[Array, "2 R"]
    cross: Float[Array, "R"]


class TwoSoftmaxes(NamedTuple):
    """The maximum of z and log sum exp(z - top), of student and teacher; the divergence; KL(p || m) for jsd, else 0."""

    top: Float[Array, "R"]
    log_sum_e: Float[Array, "R"]
    teacher_top: Float[Array, "R"]
    teacher_log_sum_e: Float[Array, "R"]
    divergence: Float[Array, "R"]
    to_mixture: Float[Array, "R"]

    def outputs(self, live: Bool[Array, "R"]) -> tuple[Float[Array, "R"]]:
        """What a loss is a function of; 0 at rows that don't count."""
        return (self.divergence,)


@runtime_checkable
class PairEngine(Protocol):
    """An implementation of divergences, as `contract.Engine` is one of the head. Rows that don't count are 0."""

    def forward(self, pair: Pair, how: Divergence, options: Options) -> TwoSoftmaxes:
        """The statistics of all rows."""

    def gradients(
        self, pair: Pair, found: TwoSoftmaxes, slopes: Float[Array, "N"], how: Divergence, options: Options
    ) -> Gradients:
        """The student's wanted gradients of a scalar with derivatives `slopes`; dh is this vocabulary shard's part."""

    def loss_and_gradients(
        self, pair: Pair, weights: Float[Array, "N"], how: Divergence, options: Options
    ) -> tuple[TwoSoftmaxes, Gradients]:
        """The statistics, and the wanted gradients of the divergences' sum with these weights."""

    def obstacle(self, pair: Pair, options: Options) -> str | None:
        """The reason why it can't run, or None. The pair may be shapes and dtypes alone."""


def empty(zeros_R: Float[Array, "R"]) -> RunningPair:
    """The state before any column."""
    zeros_2R = jnp.stack([zeros_R, zeros_R])
    return RunningPair(zeros_2R + FLOOR, zeros_2R, zeros_R)


def include_tile(
    running: RunningPair,
    z_2RT: Float[Array, "2 *R T"],
    fresh: Bool[Array, "..."],
    how: Divergence,
    dim: int = 2,
    scale: Any = 1,
) -> RunningPair:
    """The state after one more tile of columns, of which `fresh` count."""
    z_2RT = jnp.where(fresh, z_2RT, MASKED)
    top = jnp.maximum(running.top, z_2RT.max(axis=dim))
    below_2RT = z_2RT - jnp.expand_dims(top, dim)
    e_2RT = jnp.exp(below_2RT * scale)
    raised = _raised(running, top, how, scale)
    cross = raised.cross
    if how.in_one_pass:
        first = _first(how)
        apart_RT = jnp.where(fresh, (below_2RT[first] - below_2RT[1 - first]) * scale, 0)
        cross += (e_2RT[first] * apart_RT).sum(axis=dim - 1)
    return RunningPair(top, raised.sum_e + e_2RT.sum(axis=dim), cross)


def combine_all(parts: RunningPair, how: Divergence, scale: Any) -> RunningPair:
    """The state after the columns of all parts, which are stacked along the dim before the rows."""
    top = parts.top.max(axis=1)
    raised = _raised(parts, top[:, None], how, scale)
    return RunningPair(top, raised.sum_e.sum(axis=1), raised.cross.sum(axis=0))


def finish(
    running: RunningPair, live: Bool[Array, "R"], how: Divergence, axis: str | None, scale: Any = 1
) -> TwoSoftmaxes:
    """The statistics after all columns, of all devices along `axis` if there is one; 0 at rows that don't count.

    For jsd the divergence is still to be added up (`mixture_terms`). Devices exchange two maxima and three sums a row.
    """
    if axis is not None:
        top = lax.pmax(running.top, axis)
        raised = _raised(running, top, how, scale)
        running = RunningPair(top, *lax.psum((raised.sum_e, raised.cross), axis))
    log_sum_e, first = jnp.log(running.sum_e), _first(how)
    divergence = running.cross / running.sum_e[first] - log_sum_e[first] + log_sum_e[1 - first]
    (top, teacher_top), (own, teachers) = running.top, log_sum_e
    found = (top, own, teacher_top, teachers, divergence if how.in_one_pass else 0, 0)
    return TwoSoftmaxes(*(jnp.where(live, x, 0.0) for x in found))


def statistics(
    tiles: int,
    logits: Callable[[Array], tuple[Float[Array, "2 R T"], Bool[Array, "T"]]],
    live: Bool[Array, "R"],
    how: Divergence,
    axis: str | None,
) -> TwoSoftmaxes:
    """The statistics of rows; `logits` gives both models' in tile c, and which of its columns count there."""

    def tile(c: Array, running: RunningPair) -> RunningPair:
        return include_tile(running, *logits(c), how)

    zeros_R = 0 * live.astype(jnp.float32)
    found = finish(lax.fori_loop(0, tiles, tile, empty(zeros_R)), live, how, axis)
    if how.in_one_pass:
        return found

    def mixture(c: Array, sums: Float[Array, "2 R"]) -> Float[Array, "2 R"]:
        z_2RT, fresh_T = logits(c)
        terms = mixture_terms(log_p(z_2RT, found), fresh_T, how)
        # In one reduction: XLA for GPUs would write arrays that two of them share.
        zero, add = (jnp.float32(0), jnp.float32(0)), lambda x, y: (x[0] + y[0], x[1] + y[1])
        return sums + jnp.stack(lax.reduce(terms, zero, add, (1,)))

    sums = lax.fori_loop(0, tiles, mixture, jnp.stack([zeros_R, zeros_R]))
    divergence, to_mixture = jnp.where(live, sums if axis is None else lax.psum(sums, axis), 0)
    return found._replace(divergence=divergence, to_mixture=to_mixture)


def log_p(z_2RT: Float[Array, "2 *R T"], found: TwoSoftmaxes, dim: int = 2, scale: Any = 1) -> Float[Array, "2 *R T"]:
    """Both softmaxes' log-probabilities."""
    top_2R = jnp.stack([found.top, found.teacher_top])
    log_sum_e_2R = jnp.stack([found.log_sum_e, found.teacher_log_sum_e])
    return (z_2RT - jnp.expand_dims(top_2R, dim)) * scale - jnp.expand_dims(log_sum_e_2R, dim)


def mixture_terms(
    log_p_2RT: Float[Array, "2 *R T"], fresh: Bool[Array, "..."], how: Divergence
) -> tuple[Float[Array, "*R T"], Float[Array, "*R T"]]:
    """What each column of a tile adds to jsd, and to KL(p || m)."""
    p_2RT = jnp.where(fresh, jnp.exp(log_p_2RT), 0)
    of_student_RT, of_teacher_RT = p_2RT * above_mixture(log_p_2RT, how)
    return how.beta * of_teacher_RT + (1 - how.beta) * of_student_RT, of_student_RT


def above_mixture(log_p_2RT: Float[Array, "2 *R T"], how: Divergence) -> Float[Array, "2 *R T"]:
    """log p - log m and log q - log m: 0 where p = q."""
    apart_RT = log_p_2RT[0] - log_p_2RT[1]
    # log m less the larger of the two; the smaller one's share of m is its part of the sum.
    share_RT = jnp.where(apart_RT > 0, how.beta, 1 - how.beta)
    # With t = tanh(x / 2), expm1(-x) is -2 t / (1 + t): kernels for TPUs have no expm1.
    tanh_RT = jnp.tanh(jnp.abs(apart_RT) / 2)
    mixture_RT = jnp.log1p(-2 * share_RT * tanh_RT / (1 + tanh_RT))
    return jnp.stack([jnp.minimum(apart_RT, 0), jnp.minimum(-apart_RT, 0)]) - mixture_RT


def logit_slopes(
    z_2RT: Float[Array, "2 *R T"],
    found: TwoSoftmaxes,
    slopes: Float[Array, "..."],
    fresh: Bool[Array, "..."],
    how: Divergence,
    dim: int = 2,
    scale: Any = 1,
) -> Float[Array, "*R T"]:
    """The derivatives by the student's logits of a scalar with derivatives `slopes` by the rows' divergences."""
    log_p_2RT = log_p(z_2RT, found, dim, scale)
    divergence, to_mixture, slopes = (jnp.expand_dims(x, dim - 1) for x in (found.divergence, found.to_mixture, slopes))
    p_RT, q_RT = jnp.exp(log_p_2RT)
    if how.kind == "forward_kl":
        dz_RT = p_RT - q_RT
    elif how.kind == "reverse_kl":
        dz_RT = p_RT * (log_p_2RT[0] - log_p_2RT[1] - divergence)
    else:
        dz_RT = (1 - how.beta) * p_RT * (above_mixture(log_p_2RT, how)[0] - to_mixture)
    return jnp.where(fresh, slopes * dz_RT, 0)


def _first(how: Divergence) -> int:
    """The softmax over which KL's expectation is taken: 0 the student's, 1 the teacher's."""
    return int(how.kind == "forward_kl")


def _raised(running: RunningPair, top: Float[Array, "2 *R"], how: Divergence, scale: Any) -> RunningPair:
    """The sums relative to other maxima."""
    shift, first = running.top - top, _first(how)
    e = jnp.exp(shift * scale)
    apart = (shift[first] - shift[1 - first]) * scale
    return RunningPair(top, e * running.sum_e, e[first] * (running.cross + apart * running.sum_e[first]))
