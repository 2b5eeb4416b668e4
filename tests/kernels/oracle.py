"""The oracle: what the head must compute, in float64 NumPy with full logits, and how near an answer has to come.

docs/head.md has the formulas. Rows that don't count are never read. It shares no code with an engine.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float

# Two orders of the same sum round differently: an error may exceed the plain computation's by this factor ...
SLACK = 1.25
# ... and, where the plain computation is right by luck, by so many times the result's resolution (see `Exact`).
HAIR = 4.0
_EPS = float(np.finfo(np.float32).eps)


class Rows(NamedTuple):
    """The statistics, and both gradients of a scalar of them; or one number for each of the five."""

    logprob: Any  # [N], as the next two
    lse: Any
    entropy: Any
    hidden: Any  # [N, D]: the gradient by hidden
    weight: Any  # [V, D]: the gradient by weight


class Cotangents(NamedTuple):
    """The three statistics' derivatives at each token; the entropy's may be None, which isn't even zeros."""

    logprob: Any
    lse: Any
    entropy: Any


class Exact(NamedTuple):
    """What is right, and how far each result moves, at most, when logits and results are rounded to float32 once."""

    logprob: Float[np.ndarray, " N"]
    lse: Float[np.ndarray, " N"]
    entropy: Float[np.ndarray, " N"]
    hidden: Float[np.ndarray, "N D"]
    weight: Float[np.ndarray, "V D"]
    resolution: Rows


class ExactLoss(NamedTuple):
    loss: float
    resolution: float
    rows: Exact


Objective = Callable[..., jax.Array]
"""(logprob, entropy, *operands) of one token, or of all, to its part of the loss."""


def exact(
    hidden: Any,
    weight: Any,
    labels: Any,
    cotangents: Callable[..., tuple[Any, Any, Any]],
    *,
    where: Bool[Any, " N"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Exact:
    """The head's outputs and the gradients of any scalar of them.

    Args:
        hidden: [N, D] of any dtype, as `weight` [V, D]; labels: [N] integers.
        cotangents: takes (logprob, lse, entropy), [N] each, to the scalar's derivatives by the three, [N] each.
        where: [N], the rows that count; None: all.
    """
    live = np.arange(len(labels)) if where is None else np.flatnonzero(np.asarray(where))
    h_RD, w_VD = np.asarray(hidden)[live].astype(np.float64), np.asarray(weight).astype(np.float64)
    at_label = np.arange(len(live)), np.asarray(labels)[live]
    y_RV = h_RD @ w_VD.T
    tanh_RV = 0 if softcap is None else np.tanh(y_RV / softcap)
    z_RV = (y_RV if softcap is None else softcap * tanh_RV) / temperature
    top_R1 = z_RV.max(axis=1, keepdims=True)
    log_sum_R1 = np.log(np.exp(z_RV - top_R1).sum(axis=1, keepdims=True))
    log_p_RV = (z_RV - top_R1) - log_sum_R1
    p_RV = np.exp(log_p_RV)
    statistics, dh = np.zeros((3, len(labels))), np.zeros(np.shape(hidden))
    statistics[:, live] = log_p_RV[at_label], (top_R1 + log_sum_R1)[:, 0], -(p_RV * log_p_RV).sum(axis=1)

    g_logprob, g_lse, g_entropy = (np.asarray(g, np.float64)[live] for g in cotangents(*statistics))
    by_entropy_RV = -p_RV * (log_p_RV + statistics[2, live, None])
    dz_RV = (g_lse - g_logprob)[:, None] * p_RV + g_entropy[:, None] * by_entropy_RV
    dz_RV[at_label] += g_logprob
    dy_RV = dz_RV * (1 - tanh_RV**2) / temperature
    dh[live], dw = dy_RV @ w_VD, dy_RV.T @ h_RD

    largest = 1 + np.abs(z_RV).max(initial=0)
    steepness = np.abs(by_entropy_RV * z_RV).sum(axis=1).max(initial=0)
    of_entropy = 1 + steepness + statistics[2].max(initial=0)
    moves = (largest, largest, of_entropy, *(largest * np.abs(x).max(initial=0) for x in (dh, dw)))
    return Exact(*statistics, dh, dw, Rows(*(_EPS * float(x) for x in moves)))


def exact_loss(
    hidden: Any, weight: Any, labels: Any, objective: Objective, *operands: Any, weights: Any, **options: Any
) -> ExactLoss:
    """sum_i weights_i objective_i over the rows of weight other than zero, and its gradients; `options` are `exact`'s.

    The operands are [N] numbers each. JAX differentiates the objective, in float64.
    """
    live = np.asarray(weights) != 0
    w, *given = (np.where(live, np.asarray(x, np.float64), 0) for x in (weights, *operands))

    def values_and_slopes(logprob: np.ndarray, entropy: np.ndarray) -> list[np.ndarray]:
        with jax.enable_x64(True):
            values, slopes = jax.vmap(jax.value_and_grad(objective, (0, 1)))(logprob, entropy, *given)
            return [w * np.asarray(x) for x in (values, *slopes)]

    def cotangents(logprob: np.ndarray, lse: np.ndarray, entropy: np.ndarray) -> tuple[Any, Any, Any]:
        _, by_logprob, by_entropy = values_and_slopes(logprob, entropy)
        return by_logprob, 0 * w, by_entropy

    rows = exact(hidden, weight, labels, cotangents, where=live, **options)
    values, by_logprob, by_entropy = values_and_slopes(rows.logprob, rows.entropy)
    moves = rows.resolution
    resolution = _EPS * np.abs(values) + moves.logprob * np.abs(by_logprob) + moves.entropy * np.abs(by_entropy)
    return ExactLoss(float(values.sum()), float(resolution.sum()), rows)
