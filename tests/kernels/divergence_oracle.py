"""The oracle of divergences: what `token_divergence` must compute, in float64 NumPy with full logits of both models.

It is written from the formulas (GKD, arXiv:2306.13649) and shares no code with an engine. With p the teacher's softmax
and q the student's over the tokens that both have, and z the student's logits,

    forward_kl  sum p log(p/q)                              its slopes by z:  q - p
    reverse_kl  sum q log(q/p)                              q (log(q/p) - KL)
    jsd         beta KL(p||m) + (1 - beta) KL(q||m)         (1 - beta) q (log(q/m) - KL(q||m))

where m = beta p + (1 - beta) q. Suffixes: R rows that count, K tokens that both have, D features (T the teacher's).
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

_EPS = float(np.finfo(np.float32).eps)


class Divergences(NamedTuple):
    """A divergence for each token, and both gradients of a weighted sum of them; or one number for each of these."""

    values: Any  # [N]
    hidden: Any  # [N, D]: the gradient by the student's hidden states
    weight: Any  # [V, D]: the gradient by the student's weight


class ExactDivergences(NamedTuple):
    """What is right, and how far each result moves, at most, when logits and results are rounded to float32 once."""

    values: Float[np.ndarray, " N"]
    hidden: Float[np.ndarray, "N D"]
    weight: Float[np.ndarray, "V D"]
    resolution: Divergences


def exact_divergences(
    hidden: Any,
    weight: Any,
    teacher_hidden: Any,
    teacher_weight: Any,
    cotangents: Any,
    *,
    kind: str,
    beta: float = 0.5,
    where: Bool[Any, " N"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    teacher_temperature: float | None = None,
    vocabulary: int | None = None,
) -> ExactDivergences:
    """The divergences, and the gradients of `sum_i cotangents_i * divergence_i` by the student's arrays.

    Args:
        hidden: [N, D] of any dtype, as `weight` [V, D], `teacher_hidden` [N, T] and `teacher_weight` [V_t, T].
        cotangents: [N]; never read where `where` [N] is False, as the rows of both models.
        vocabulary: both models' first so many tokens are all there are. None: the smaller vocabulary.
    """
    live = np.arange(len(hidden)) if where is None else np.flatnonzero(np.asarray(where))
    common = min(len(weight), len(teacher_weight)) if vocabulary is None else vocabulary
    g_R1 = np.asarray(cotangents)[live].astype(np.float64)[:, None]

    def logits(h: Any, w: Any, temperature: float = temperature) -> tuple[np.ndarray, ...]:
        """One model: hidden states, weight, logits, their slopes by the product, log-probabilities."""
        h_RD, w_KD = np.asarray(h)[live].astype(np.float64), np.asarray(w)[:common].astype(np.float64)
        y_RK = h_RD @ w_KD.T
        tanh_RK = 0 * y_RK if softcap is None else np.tanh(y_RK / softcap)
        z_RK = (y_RK if softcap is None else softcap * tanh_RK) / temperature
        below_RK = z_RK - z_RK.max(axis=1, keepdims=True)
        log_p_RK = below_RK - np.log(np.exp(below_RK).sum(axis=1, keepdims=True))
        return h_RD, w_KD, z_RK, (1 - tanh_RK**2) / temperature, log_p_RK

    h_RD, w_KD, z_RK, slope_RK, log_q_RK = logits(hidden, weight)
    _, _, teacher_z_RK, _, log_p_RK = logits(teacher_hidden, teacher_weight, teacher_temperature or temperature)
    p_RK, q_RK = np.exp(log_p_RK), np.exp(log_q_RK)

    def kl(log_a_RK: np.ndarray, log_b_RK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """KL(a||b) [R, 1], and its slopes by the logits of a, where b is given."""
        ratio_RK = log_a_RK - log_b_RK
        value_R1 = (np.exp(log_a_RK) * ratio_RK).sum(axis=1, keepdims=True)
        return value_R1, np.exp(log_a_RK) * (ratio_RK - value_R1)

    if kind == "forward_kl":
        value_R1, by_teacher_z_RK = kl(log_p_RK, log_q_RK)
        by_z_RK, mass_RK = q_RK - p_RK, q_RK + p_RK
    elif kind == "reverse_kl":
        value_R1, by_z_RK = kl(log_q_RK, log_p_RK)
        by_teacher_z_RK, mass_RK = p_RK - q_RK, q_RK * (1 + value_R1)
    elif kind == "jsd":
        log_m_RK = np.logaddexp(np.log(beta) + log_p_RK, np.log1p(-beta) + log_q_RK)
        of_teacher, of_student = kl(log_p_RK, log_m_RK), kl(log_q_RK, log_m_RK)
        value_R1 = beta * of_teacher[0] + (1 - beta) * of_student[0]
        # Through log m the slope is -sum m dm/m = -d(sum m) = 0, so that m counts as given.
        by_teacher_z_RK, by_z_RK = beta * of_teacher[1], (1 - beta) * of_student[1]
        mass_RK = (1 - beta) * q_RK * (1 + of_student[0])
    else:
        raise ValueError(kind)

    values, dh, dw = np.zeros(len(hidden)), np.zeros(np.shape(hidden)), np.zeros(np.shape(weight))
    dy_RK = g_R1 * by_z_RK * slope_RK
    values[live], dh[live], dw[:common] = value_R1[:, 0], dy_RK @ w_KD, dy_RK.T @ h_RD

    largest = 1 + max(np.abs(x).max(initial=0) for x in (z_RK, teacher_z_RK))
    moves_R = np.abs(by_z_RK * z_RK).sum(axis=1) + np.abs(by_teacher_z_RK * teacher_z_RK).sum(axis=1)
    mass_RK = np.abs(g_R1) * mass_RK * slope_RK  # the terms of which the slopes are differences
    sums = (mass_RK @ np.abs(w_KD), mass_RK.T @ np.abs(h_RD))
    moves = [largest * np.abs(x).max(initial=0) + y.max(initial=0) for x, y in zip((dh, dw), sums, strict=True)]
    of_values = 1 + moves_R.max(initial=0) + values.max(initial=0)
    return ExactDivergences(values, dh, dw, Divergences(*(_EPS * float(x) for x in (of_values, *moves))))
