"""What the head must give, from full logits of some tokens at a time: exactly in NumPy, and plainly in JAX.

`exact` is the truth that tools/gradcheck.py holds an implementation against: wide arithmetic on the host, derivatives
by hand. `plain` is the yardstick of how near one can come: the program that anybody would write, in the dtype that is
checked. Both take any N, D and V that leave room for a few arrays of the weight's shape and of `LOGITS` logits.

Suffixes: N tokens, R rows of a block, D features, V vocabulary. `y` is the product of hidden states and weight, `z` the
logits: y after softcap and temperature.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from mllm.train import objectives

LOGITS = 2**25  # at a time: 256 MiB of float64
TILE = 8192  # rows of the weight that are widened at a time


class Objective(NamedTuple):
    in_jax: Callable[..., Array]
    """(logprob, entropy, *operands) -> loss, elementwise."""
    by_hand: Callable[..., tuple[Any, Any, Any]]
    """The same in NumPy, with its derivatives by logprob and by entropy."""
    operands: int
    """0, or 2: advantages and old log-probabilities."""


def cross_entropy(logprob: np.ndarray, entropy: np.ndarray) -> tuple[Any, Any, Any]:
    return -logprob, 0 * logprob - 1, 0 * entropy


# A bonus large enough to show in the gradients.
GRPO = objectives.GrpoObjective(num_iterations=2, entropy_coef=0.5)


def grpo(logprob: np.ndarray, entropy: np.ndarray, advantages: np.ndarray, old: np.ndarray) -> tuple[Any, Any, Any]:
    ratio, (low, high) = np.exp(logprob - old), GRPO.clip_range
    loss = -np.minimum(ratio * advantages, np.clip(ratio, low, high) * advantages) - GRPO.entropy_coef * entropy
    clipped = np.where(advantages > 0, ratio > high, ratio < low)
    return loss, np.where(clipped, 0, -ratio * advantages), 0 * entropy - GRPO.entropy_coef


OBJECTIVES = {"cross_entropy": Objective(objectives.sft, cross_entropy, 0), "grpo": Objective(GRPO, grpo, 2)}


class Problem(NamedTuple):
    """In NumPy. Rows of weight 0 don't count: their hidden states are NaN, their labels -100."""

    hidden: Float[np.ndarray, "N D"]
    weight: Float[np.ndarray, "V D"]
    labels: Int[np.ndarray, "N"]
    weights: Float[np.ndarray, "N"]
    advantages: Float[np.ndarray, "N"]
    log_ratios: Float[np.ndarray, "N"]
    """Of the policy to the old one: between the clips or beyond one of them, never near it."""
    objective: Objective
    temperature: float
    softcap: float | None


class Results(NamedTuple):
    """What is compared; or one number for each."""

    loss: Any
    logprob: Any
    lse: Any
    entropy: Any
    dh: Any
    dW: Any


class Truth(NamedTuple):
    results: Results
    resolution: Results
    """How far each moves, at most, when logits and results are rounded to float32 once."""
    operands: tuple[Float[np.ndarray, "N"], ...]
    """Of the objective; old log-probabilities follow from the true ones, so that no rounding clips a token."""


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


def exact(problem: Problem, wide: str) -> Truth:
    """Every result in `wide` arithmetic. With p = softmax(z), its entropy H, and the objective's derivatives g,

    dz = g_logprob (onehot - p) - g_entropy p (log p + H).
    """
    tokens, features = problem.hidden.shape
    vocabulary = len(problem.weight)
    live = np.flatnonzero(problem.weights)
    logprob, lse, entropy, loss, old, g_logprob, g_entropy, steepness = np.zeros((8, tokens))
    dh, dw = np.zeros((tokens, features), wide), np.zeros((vocabulary, features), wide)
    largest = 0.0
    tiles, places = parts(vocabulary, TILE), parts(len(live), max(1, LOGITS // vocabulary))
    with progress(f"{wide} reference", 3 * len(tiles) * len(places), "tile") as bar:
        for place in places:
            rows = live[place]
            label = np.arange(len(rows)), problem.labels[rows]
            h_RD = problem.hidden[rows].astype(wide)
            y_RV = np.empty((len(rows), vocabulary), wide)
            for tile in tiles:
                y_RV[:, tile] = h_RD @ problem.weight[tile].astype(wide).T
                bar.update()
            z_RV, slope_RV = logits(problem, y_RV)

            top_R1 = z_RV.max(axis=1, keepdims=True)
            log_p_RV = z_RV - top_R1
            log_total_R1 = np.log(np.exp(log_p_RV).sum(axis=1, keepdims=True))
            log_p_RV -= log_total_R1
            p_RV = np.exp(log_p_RV)
            entropy_R1 = -(p_RV * log_p_RV).sum(axis=1, keepdims=True)
            logprob[rows], lse[rows], entropy[rows] = log_p_RV[label], (top_R1 + log_total_R1)[:, 0], entropy_R1[:, 0]

            old[rows] = (logprob[rows] - problem.log_ratios[rows]).astype(np.float32)
            operands = (problem.advantages[rows], old[rows])[: problem.objective.operands]
            of_token = problem.objective.by_hand(logprob[rows], entropy[rows], *operands)
            loss[rows], g_logprob[rows], g_entropy[rows] = (problem.weights[rows] * x for x in of_token)
            tilt_RV = p_RV * (log_p_RV + entropy_R1)
            g_logprob_R1, g_entropy_R1 = g_logprob[rows, None].astype(wide), g_entropy[rows, None].astype(wide)
            dy_RV = -(g_logprob_R1 * p_RV + g_entropy_R1 * tilt_RV)
            dy_RV[label] += g_logprob[rows]
            dy_RV *= slope_RV
            for tile in tiles:
                dh[rows] += dy_RV[:, tile] @ problem.weight[tile].astype(wide)
                dw[tile] += dy_RV[:, tile].T @ h_RD
                bar.update(2)

            largest = max(largest, float(np.abs(z_RV).max()))
            steepness[rows] = np.abs(tilt_RV * z_RV).sum(axis=1)

    of_logit, of_entropy = 1 + largest, 1 + steepness.max() + entropy.max()
    resolution = Results(
        loss=np.abs(loss).sum() + of_logit * np.abs(g_logprob).sum() + of_entropy * np.abs(g_entropy).sum(),
        logprob=of_logit,
        lse=of_logit,
        entropy=of_entropy,
        dh=of_logit * norms(dh)[0],
        dW=of_logit * norms(dw)[0],
    )
    eps = float(np.finfo(np.float32).eps)
    return Truth(
        Results(loss.sum(), logprob, lse, entropy, dh, dw),
        Results(*(eps * float(x) for x in resolution)),
        (problem.advantages, old.astype(np.float32))[: problem.objective.operands],
    )


def logits(problem: Problem, y_RV: Float[np.ndarray, "R V"]) -> tuple[Float[np.ndarray, "R V"], Any]:
    """And their derivative by the products."""
    if problem.softcap is None:
        return y_RV / problem.temperature, 1 / problem.temperature
    tanh_RV = np.tanh(y_RV / problem.softcap)
    return problem.softcap * tanh_RV / problem.temperature, (1 - tanh_RV**2) / problem.temperature


def plain(problem: Problem, operands: tuple[Float[np.ndarray, "N"], ...]) -> Results:
    """Products of hidden's dtype, float32 in between; what blocks of tokens add to dW is summed in float32."""
    tokens, vocabulary, dtype = len(problem.hidden), len(problem.weight), problem.hidden.dtype
    rows = min(tokens, max(1, LOGITS // vocabulary))
    precision = jax.lax.Precision.HIGHEST if dtype == np.float32 else None

    def product(spec: str, x: Array, y: Array) -> Float[Array, "_ _"]:
        x, y = x.astype(dtype), y.astype(dtype)
        return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=jnp.float32)

    @partial(jax.jit, donate_argnums=0)
    def block(dw_VD: Array, weight: Array, h_RD: Array, labels: Array, weights: Array, *operands: Array) -> Any:
        live = weights != 0
        h_RD = jnp.where(live[:, None], h_RD, 0)

        def of_products(y_RV: Array) -> tuple[Array, tuple[Array, ...]]:
            z_RV = y_RV if problem.softcap is None else problem.softcap * jnp.tanh(y_RV / problem.softcap)
            z_RV = z_RV / problem.temperature
            log_p_RV = jax.nn.log_softmax(z_RV)
            logprob = jnp.take_along_axis(log_p_RV, labels[:, None], axis=1)[:, 0]
            entropy = -jnp.sum(jnp.exp(log_p_RV) * log_p_RV, axis=1)
            values = (logprob, jax.nn.logsumexp(z_RV, axis=1), entropy)
            logprob, lse, entropy = (jnp.where(live, x, 0) for x in values)
            loss = weights * problem.objective.in_jax(logprob, entropy, *operands)
            return loss.sum(), (loss, logprob, lse, entropy)

        dy_RV, of_tokens = jax.grad(of_products, has_aux=True)(product("rd,vd->rv", h_RD, weight))
        dw_VD += product("rv,rd->vd", dy_RV, h_RD)
        return dw_VD, (*of_tokens, product("rv,vd->rd", dy_RV, weight).astype(dtype))

    weight = jnp.asarray(problem.weight)
    dw_VD = jnp.zeros(weight.shape, jnp.float32)
    found = []
    places = parts(tokens, rows)
    with progress("full logits", len(places), "block") as bar:
        for place in places:
            short = rows - (place.stop - place.start)
            arrays = (problem.hidden, problem.labels, problem.weights, *operands)
            whole = [np.pad(x[place], [(0, short), (0, 0)][: x.ndim]) for x in arrays]
            dw_VD, of_block = block(dw_VD, weight, *whole)
            found.append([np.asarray(x)[: rows - short] for x in of_block])
            bar.update()
    loss, logprob, lse, entropy, dh = (np.concatenate(x) for x in zip(*found, strict=True))
    return Results(loss.sum(), logprob, lse, entropy, dh, np.asarray(dw_VD.astype(weight.dtype)))


def norms(x: Any, less: Any = None) -> tuple[float, float]:
    """The largest magnitude and the root mean square of x, or of a difference; in float64, without a copy of x."""
    x, less = np.atleast_1d(x), None if less is None else np.atleast_1d(less)
    largest, squares = 0.0, 0.0
    for part in parts(len(x), TILE):
        difference = x[part].astype(np.float64)
        if less is not None:
            difference -= less[part]
        largest = np.maximum(largest, np.abs(difference).max())  # NaN stays NaN
        squares += np.vdot(difference, difference)
    return float(largest), math.sqrt(squares / x.size)


def parts(length: int, most: int) -> list[slice]:
    return [slice(start, min(start + most, length)) for start in range(0, length, most)]


def progress(title: str, total: int, unit: str) -> tqdm:
    """A bar with the time that is left, for what takes more than two seconds."""
    return tqdm(total=total, desc=title, unit=unit, delay=2, leave=False, dynamic_ncols=True)
