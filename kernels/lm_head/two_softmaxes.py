"""Two softmaxes over the same columns, seen a tile at a time: their divergence, and its derivatives by the student's z.

With p the student's probabilities, q the teacher's and m = beta q + (1 - beta) p (Agarwal et al. 2023, GKD,
arXiv:2306.13649, section 3):

    forward_kl  KL(q || p)                              dz = p - q
    reverse_kl  KL(p || q)                              dz = p (log p - log q - KL)
    jsd         beta KL(q || m) + (1 - beta) KL(p || m)  dz = (1 - beta) p (log p - log m - KL(p || m))

With equal logits every divergence and gradient is exactly 0. Suffixes as in softmax.py; each model has its state. Pairs
are (student, teacher).
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .shapes import Array, Bool, Float
from .softmax import (
    FLOOR,
    MASKED,
    Columns,
    Running,
    Softmax,
    across_devices,
    finish_live,
    include_tile,
    log_probabilities,
    raised,
)

Kind = Literal["forward_kl", "reverse_kl", "jsd"]
KINDS: tuple[Kind, ...] = ("forward_kl", "reverse_kl", "jsd")
Both = tuple[Array, ...]  # the student's and the teacher's


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Divergence:
    kind: Kind
    beta: float = 0.0  # of jsd alone

    @property
    def in_one_pass(self) -> bool:
        """Whether sums over unnormalised exponentials give the value: not with m, which takes both normalisers."""
        return self.kind != "jsd"

    @property
    def order(self) -> tuple[int, int]:
        """(first, second) of KL(first || second): 0 is the student's softmax, 1 the teacher's."""
        return (1, 0) if self.kind == "forward_kl" else (0, 1)


REVERSE_KL = Divergence("reverse_kl")


class RunningPair(NamedTuple):
    """Each softmax's state, and `cross`: the sum of e (log e - log e'), where KL(first || other) has these e and e'."""

    student: Running
    teacher: Running
    cross: Float[Array, "*R"]

    def raised(self, tops: Both, scales: Both, measure: Divergence) -> "RunningPair":
        """The state relative to other maxima."""
        (first, other), models = measure.order, self[:2]
        shifts = [(x.top - top) * scale for x, top, scale in zip(models, tops, scales, strict=True)]
        cross = jnp.exp(shifts[first]) * (self.cross + (shifts[first] - shifts[other]) * models[first].sum_e)
        student, teacher = map(raised, models, tops, scales)
        return RunningPair(student, teacher, cross)


def empty_pair(student: Running, zeros_R: Float[Array, "*R"]) -> RunningPair:
    """The state before any column, with the student's part given."""
    return RunningPair(student, Running(zeros_R + FLOOR, zeros_R), zeros_R)


def include_tiles(running: RunningPair, y_RT: Both, columns: Columns, scales: Both, measure: Divergence) -> RunningPair:
    """The state after one more tile of columns of both models."""
    y_RT = tuple(jnp.where(columns.fresh, y, MASKED) for y in y_RT)
    models = [include_tile(x, y, columns, scale) for x, y, scale in zip(running[:2], y_RT, scales, strict=True)]
    tops, (first, other) = (models[0].top, models[1].top), measure.order
    cross = running.cross
    if measure.in_one_pass:
        below = [(y - top[:, None]) * scale for y, top, scale in zip(y_RT, tops, scales, strict=True)]
        apart_RT = jnp.where(columns.fresh, below[first] - below[other], 0)
        cross = running.raised(tops, scales, measure).cross + (jnp.exp(below[first]) * apart_RT).sum(axis=1)
    return RunningPair(models[0], models[1], cross)


def finish_pair(
    running: RunningPair,
    live: Bool[Array, "R"],
    scales: Both,
    measure: Divergence,
    axis: Any,
    vocabulary: int | None = None,
) -> Softmax:
    """The statistics after the last column, over the devices along `axis` if given; 0 at rows that don't count.

    For jsd the divergence is still to be added up (`mixture_terms`). Devices exchange two maxima and five sums a row.
    """
    if axis is not None:
        tops = tuple(jax.lax.pmax(x.top, axis) for x in running[:2])
        cross = jax.lax.psum(running.raised(tops, scales, measure).cross, axis)
        models = (across_devices(x, scale, axis) for x, scale in zip(running[:2], scales, strict=True))
        running = RunningPair(*models, cross)  # type: ignore[call-arg, arg-type]
    (student, teacher, cross), (first, other) = running, measure.order
    sums = student.sum_e, teacher.sum_e
    divergence = cross / sums[first] - jnp.log(sums[first]) + jnp.log(sums[other])
    values = teacher.top, jnp.log(teacher.sum_e), divergence if measure.in_one_pass else cross
    top, log_sum_e, divergence = (jnp.where(live, x, 0) for x in values)
    softmax = finish_live(student, live, scales[0], None, vocabulary)
    return softmax._replace(
        teacher_top=top, teacher_log_sum_e=log_sum_e, divergence=divergence, to_mixture=jnp.zeros_like(top)
    )


def both_log_p(y_RT: Both, softmax: Softmax, scales: Both) -> Both:
    """Both softmaxes' log-probabilities."""
    return (
        log_probabilities(y_RT[0], softmax.top, softmax.log_sum_e, scales[0]),
        log_probabilities(y_RT[1], softmax.teacher_top, softmax.teacher_log_sum_e, scales[1]),
    )


def mixture_terms(log_p_RT: Both, fresh: Bool[Array, "..."], measure: Divergence) -> Both:
    """Each column's terms of jsd and of KL(p || m)."""
    of_student_RT, of_teacher_RT = (
        jnp.where(fresh, jnp.exp(log_p), 0) * above
        for log_p, above in zip(log_p_RT, above_mixture(log_p_RT, measure), strict=True)
    )
    return measure.beta * of_teacher_RT + (1 - measure.beta) * of_student_RT, of_student_RT


def above_mixture(log_p_RT: Both, measure: Divergence) -> Both:
    """log p - log m and log q - log m: 0 where p = q."""
    apart_RT = log_p_RT[0] - log_p_RT[1]
    # log m less the larger of the two; the smaller one's share of m is its part of the sum.
    share_RT = jnp.where(apart_RT > 0, measure.beta, 1 - measure.beta)
    # With t = tanh(x / 2), expm1(-x) is -2 t / (1 + t).
    tanh_RT = jnp.tanh(jnp.abs(apart_RT) / 2)
    mixture_RT = jnp.log1p(-2 * share_RT * tanh_RT / (1 + tanh_RT))
    return jnp.minimum(apart_RT, 0) - mixture_RT, jnp.minimum(-apart_RT, 0) - mixture_RT


def divergence_slopes(
    y_RT: Both,
    softmax: Softmax,
    slopes: Float[Array, "*R"],
    fresh: Bool[Array, "..."],
    scales: Both,
    measure: Divergence,
) -> Float[Array, "..."]:
    """The derivatives by the student's z of a scalar with derivatives `slopes` by the rows' divergences."""
    log_p_RT = both_log_p(y_RT, softmax, scales)
    divergence, to_mixture, slopes = (x[:, None] for x in (softmax.divergence, softmax.to_mixture, slopes))
    p_RT, q_RT = map(jnp.exp, log_p_RT)
    if measure.kind == "forward_kl":
        dz_RT = p_RT - q_RT
    elif measure.kind == "reverse_kl":
        dz_RT = p_RT * (log_p_RT[0] - log_p_RT[1] - divergence)
    else:
        dz_RT = (1 - measure.beta) * p_RT * (above_mixture(log_p_RT, measure)[0] - to_mixture)
    return jnp.where(fresh, slopes * dz_RT, 0)
