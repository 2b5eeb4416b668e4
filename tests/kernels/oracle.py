"""The oracle: what the head must compute, in float64 NumPy with full logits, and how near an answer has to come.

docs/head.md has the formulas. Rows that don't count are never read. Logits are computed for some rows at a time, twice
(before and after the cotangents are known), so that any size fits. It is for tests and tools/bench alone, and
shares no code with an engine.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

LOGITS = 2**25  # at a time: 256 MiB of float64
TILE = 8192  # rows of the weight that are widened at a time

# Two orders of the same sum round differently: an error may exceed the plain computation's by this factor ...
SLACK = 1.25
# ... and, where the plain computation is right by luck, by so many times the result's resolution (see `Resolution`).
HAIR = 4.0
_EPS = float(np.finfo(np.float32).eps)


class Resolution(NamedTuple):
    """How far each result moves, at most, when logits and results are rounded to float32 once."""

    logprob: float
    lse: float
    entropy: float
    hidden: float
    weight: float


class Exact(NamedTuple):
    """The statistics and both gradients; rows that don't count are zero."""

    logprob: Float[np.ndarray, " N"]
    lse: Float[np.ndarray, " N"]
    entropy: Float[np.ndarray, " N"]
    hidden: Float[np.ndarray, "N D"]  # the gradient by hidden
    weight: Float[np.ndarray, "V D"]  # the gradient by weight
    resolution: Resolution


class Objective(NamedTuple):
    """An elementwise objective, written for jax.numpy and NumPy alike, and its derivatives by hand."""

    value: Callable[..., Any]  # (array module, logprob, entropy, *operands) to the value
    slopes: Callable[..., tuple[Any, Any]]  # (logprob, entropy, *operands) to the derivatives by both, in NumPy
    operands: int

    def in_jax(self, logprob: Array, entropy: Array, *operands: Array) -> Array:
        return self.value(jnp, logprob, entropy, *operands)


class ExactLoss(NamedTuple):
    loss: float
    resolution: float
    rows: Exact


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
    hidden, weight, labels = np.asarray(hidden), np.asarray(weight), np.asarray(labels)
    live = np.arange(len(labels)) if where is None else np.flatnonzero(np.asarray(where))
    statistics, steepness = np.zeros((3, len(labels))), np.zeros(len(labels))
    dh, dw = np.zeros(hidden.shape, np.float64), np.zeros(weight.shape, np.float64)
    largest = 1.0

    def block(rows: Integer[np.ndarray, " R"]) -> tuple[np.ndarray, ...]:
        h_RD = hidden[rows].astype(np.float64)
        y_RV = np.concatenate([h_RD @ weight[tile].astype(np.float64).T for tile in _tiles(len(weight))], axis=1)
        tanh_RV = None if softcap is None else np.tanh(y_RV / softcap)
        z_RV = (y_RV if tanh_RV is None else softcap * tanh_RV) / temperature
        slope_RV = (np.ones_like(y_RV) if tanh_RV is None else 1 - tanh_RV**2) / temperature
        top_R1 = z_RV.max(axis=1, keepdims=True)
        log_sum_R1 = np.log(np.exp(z_RV - top_R1).sum(axis=1, keepdims=True))
        return h_RD, z_RV, slope_RV, (top_R1 + log_sum_R1)[:, 0], (z_RV - top_R1) - log_sum_R1

    for rows in _blocks(live, len(weight)):
        _, z_RV, _, lse_R, log_p_RV = block(rows)
        entropy_R = -(np.exp(log_p_RV) * log_p_RV).sum(axis=1)
        statistics[:, rows] = log_p_RV[np.arange(len(rows)), labels[rows]], lse_R, entropy_R
        largest = max(largest, 1 + float(np.abs(z_RV).max()))
    g_logprob, g_lse, g_entropy = (np.asarray(g, np.float64) for g in cotangents(*statistics))
    for rows in _blocks(live, len(weight)):
        h_RD, z_RV, slope_RV, _, log_p_RV = block(rows)
        p_RV = np.exp(log_p_RV)
        by_entropy_RV = -p_RV * (log_p_RV + statistics[2, rows, None])
        steepness[rows] = np.abs(by_entropy_RV * z_RV).sum(axis=1)
        dz_RV = (g_lse - g_logprob)[rows, None] * p_RV + g_entropy[rows, None] * by_entropy_RV
        dz_RV[np.arange(len(rows)), labels[rows]] += g_logprob[rows]
        dy_RV = dz_RV * slope_RV
        for tile in _tiles(len(weight)):
            dh[rows] += dy_RV[:, tile] @ weight[tile].astype(np.float64)
            dw[tile] += dy_RV[:, tile].T @ h_RD

    of_entropy = 1 + steepness.max(initial=0) + statistics[2].max(initial=0)
    of_gradients = (largest * max(x.max(initial=0), -x.min(initial=0)) for x in (dh, dw))
    moves = Resolution(largest, largest, of_entropy, *of_gradients)
    logprob, lse, entropy = statistics
    return Exact(logprob, lse, entropy, dh, dw, Resolution(*(_EPS * float(x) for x in moves)))


def exact_loss(
    hidden: Any, weight: Any, labels: Any, objective: Objective, *operands: Any, weights: Any, **options: Any
) -> ExactLoss:
    """sum_i weights_i objective_i over the rows of weight other than zero, and its gradients; `options` are `exact`'s.

    The operands are [N] numbers each.
    """
    live = np.asarray(weights) != 0
    w = np.where(live, np.asarray(weights, np.float64), 0)
    given = [np.where(live, np.asarray(x, np.float64), 0) for x in operands]

    def cotangents(logprob: np.ndarray, lse: np.ndarray, entropy: np.ndarray) -> tuple[Any, Any, Any]:
        by_logprob, by_entropy = objective.slopes(logprob, entropy, *given)
        return w * by_logprob, 0 * w, w * by_entropy

    rows = exact(hidden, weight, labels, cotangents, where=live, **options)
    values = w * objective.value(np, rows.logprob, rows.entropy, *given)
    by_logprob, _, by_entropy = cotangents(*rows[:3])
    moves = rows.resolution
    resolution = _EPS * np.abs(values) + moves.logprob * np.abs(by_logprob) + moves.entropy * np.abs(by_entropy)
    return ExactLoss(float(values.sum()), float(resolution.sum()), rows)


def _blocks(live: Integer[np.ndarray, " L"], vocabulary: int) -> Iterator[Integer[np.ndarray, " R"]]:
    """The rows that count, as many at a time as have `LOGITS` logits."""
    most = max(1, LOGITS // vocabulary)
    return (live[start : start + most] for start in range(0, len(live), most))


def _tiles(vocabulary: int) -> list[slice]:
    return [slice(start, start + TILE) for start in range(0, vocabulary, TILE)]
