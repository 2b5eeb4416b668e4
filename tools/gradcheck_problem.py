"""The inputs that tools/gradcheck.py checks the head with, their exact results, and those of plain full logits."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels.lm_head import reference, token_loss
from kernels.lm_head.reference import Objective

LOGITS = 2**25
"""Logits that `plain` makes at a time: 128 MiB."""


def clipped_ratio(xp: Any, logprob: Any, entropy: Any, advantage: Any, old: Any) -> Any:
    """GRPO's objective, with an entropy bonus large enough to show in the gradients."""
    ratio = xp.exp(logprob - old)
    return -xp.minimum(ratio * advantage, xp.clip(ratio, 0.8, 1.2) * advantage) - 0.5 * entropy


def clipped_ratio_slopes(logprob: Any, entropy: Any, advantage: Any, old: Any) -> tuple[Any, Any]:
    ratio = np.exp(logprob - old)
    clipped = np.where(advantage > 0, ratio > 1.2, ratio < 0.8)
    return np.where(clipped, 0, -ratio * advantage), 0 * entropy - 0.5


OBJECTIVES = {
    "cross_entropy": Objective(
        lambda xp, logprob, entropy: -logprob,
        lambda logprob, entropy: (0 * logprob - 1, 0 * entropy),
        operands=0,
    ),
    "grpo": Objective(clipped_ratio, clipped_ratio_slopes, operands=2),
}


class Problem(NamedTuple):
    """Inputs in NumPy. Rows of weight 0 don't count: their hidden states are NaN, their labels -100."""

    hidden: Float[np.ndarray, "N D"]
    weight: Float[np.ndarray, "V D"]
    labels: Int[np.ndarray, "N"]
    weights: Float[np.ndarray, "N"]
    advantages: Float[np.ndarray, "N"]
    log_ratios: Float[np.ndarray, "N"]
    """Log-ratios of the policy to the old one: between the clips or beyond one of them, never near it."""
    objective: Objective
    temperature: float
    softcap: float | None


class Results(NamedTuple):
    """The results that are compared, or one number for each."""

    loss: Any
    logprob: Any
    lse: Any
    entropy: Any
    dh: Any
    dW: Any


class Truth(NamedTuple):
    results: Results
    resolution: Results
    operands: tuple[Float[np.ndarray, "N"], ...]
    """The objective's operands; old log-probabilities follow from the true ones: no rounding clips a token."""


def make_problem(
    shape: tuple[int, int, int],
    objective: str,
    *,
    softmax: str = "near-uniform",
    live: float = 1.0,
    dtype: Any = "float32",
    param_dtype: Any = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    seed: int = 0,
) -> Problem:
    """N tokens of D features, a vocabulary of V; products of unit variance.

    Unless `softmax` is "near-uniform", two rows of three are a row of the weight, scaled up to a product of log V + 2
    ("peaked") or 1000 ("saturated"). Half of these matches are the label. The weight holds what `dtype` can hold.
    """
    tokens, features, vocabulary = shape
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((vocabulary, features), np.float32)
    weight *= features**-0.5
    hidden = rng.standard_normal((tokens, features), np.float32)
    labels = rng.integers(0, vocabulary, tokens)
    labels[0], labels[-1] = 0, vocabulary - 1
    if softmax != "near-uniform":
        largest = 1000 if softmax == "saturated" else math.log(vocabulary) + 2
        row = np.arange(tokens)
        match = weight[np.where(row % 2 == 0, labels, rng.integers(0, vocabulary, tokens))]
        scaled = match * (largest / (match**2).sum(axis=1, keepdims=True))
        hidden = np.where(row[:, None] % 3 > 0, scaled, hidden)
    weights = rng.uniform(0.5, 1.5, tokens) * (rng.permutation(tokens) < round(live * tokens))
    hidden[weights == 0], labels[weights == 0] = np.nan, -100
    log_ratios = rng.uniform(-0.15, 0.15, tokens) + rng.choice([-0.45, 0, 0.4], tokens)
    return Problem(
        hidden.astype(jnp.dtype(dtype)),
        weight.astype(jnp.dtype(dtype)).astype(jnp.dtype(param_dtype or dtype)),
        labels.astype(np.int32),
        weights.astype(np.float32),
        rng.standard_normal(tokens, np.float32),
        log_ratios.astype(np.float32),
        OBJECTIVES[objective],
        temperature,
        softcap,
    )


def exact(problem: Problem) -> Truth:
    """The oracle's results in float64."""
    operands: tuple[Any, ...] = (problem.advantages, lambda logprob: (logprob - problem.log_ratios).astype(np.float32))
    operands = operands[: problem.objective.operands]
    scale = {"temperature": problem.temperature, "softcap": problem.softcap}
    found = reference.exact_loss(*problem[:3], problem.objective, *operands, weights=problem.weights, **scale)
    rows = found.rows
    given = tuple(x(rows.logprob) if callable(x) else x for x in operands)
    return Truth(Results(found.loss, *rows[:5]), Results(found.resolution, *rows.resolution), given)


def plain(problem: Problem, operands: tuple[Float[np.ndarray, "N"], ...]) -> Results:
    """The results of impl full_logits, some tokens at a time; what these add to dW is summed in float32."""
    options: Any = {"temperature": problem.temperature, "softcap": problem.softcap, "dtype": problem.hidden.dtype}

    @jax.jit
    def block(hidden: Array, weight: Array, labels: Array, weights: Array, *operands: Array) -> Any:
        def loss(hidden: Array, weight: Array) -> Any:
            objective = problem.objective.in_jax
            return token_loss(
                hidden, weight, labels, objective, *operands, weights=weights, impl="full_logits", **options
            )

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, weight)

    arrays = (problem.hidden, problem.labels, problem.weights, *operands)
    weight, found = jnp.asarray(problem.weight, jnp.float32), []
    total, dw = jnp.zeros(()), jnp.zeros(problem.weight.shape)
    for place in parts(len(problem.hidden), max(1, LOGITS // len(problem.weight))):
        hidden, *rest = (x[place] for x in arrays)
        (value, tokens), (dh, own) = block(hidden, weight, *rest)
        total, dw = total + value, dw + own
        found.append([np.asarray(x) for x in (*tokens, dh)])
    logprob, lse, entropy, dh = (np.concatenate(x) for x in zip(*found, strict=True))
    return Results(np.asarray(total), logprob, lse, entropy, dh, np.asarray(dw.astype(problem.weight.dtype)))


def norms(x: Any, less: Any = 0.0) -> tuple[float, float]:
    """The largest magnitude and the root mean square of x - less; in float64, without a copy of x as a whole."""
    x, less = np.atleast_1d(x), np.broadcast_to(less, np.atleast_1d(x).shape)
    largest, squares = 0.0, 0.0
    for part in parts(len(x), reference.TILE):
        difference = x[part].astype(np.float64) - less[part]
        largest = np.maximum(largest, np.abs(difference).max())  # NaN stays NaN
        squares += np.vdot(difference, difference)
    return float(largest), math.sqrt(squares / x.size)


def parts(length: int, most: int) -> list[slice]:
    return [slice(start, min(start + most, length)) for start in range(0, length, most)]
