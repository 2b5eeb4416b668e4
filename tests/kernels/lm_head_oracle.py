"""What the LM head must compute, in float64 NumPy with full logits, and how near an answer has to come.

With the scaled logits z = softcap * tanh(hidden @ weight.T / softcap) / temperature (softcap None: no tanh)
and p = softmax(z), a row with label y has, in nats, logprob = z_y - lse, lse = log sum_v exp(z_v) and entropy
H = -sum_v p_v log p_v. Cotangents g of the three give

    dz = g_logprob (onehot(y) - p) + g_lse p + g_entropy (-p (log p + H)).

Rows that `where` leaves out are deleted before anything is computed: nothing that they hold can matter.
Nothing in the oracle is differentiated automatically; tests/kernels/test_lm_head.py checks its formulas against
central finite differences. `plain`, the ordinary JAX program with full logits, is the yardstick of accuracy.
Speed, memory and the checking of arguments are left out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

FLOAT32_EPS = float(np.finfo(np.float32).eps)

# "At most the error of the plain computation, plus a hair": this is the only place where the hair is defined.
# Two orders of the same sum round differently, so an error may exceed the plain one by this factor ...
SLACK = 1.25
# ... and, where the plain computation is right by luck, by so many times the float32 resolution of the
# result, which is how far it moves when every logit moves by one part in 2^23 (see `Resolution`).
HAIR = 4.0


class Resolution(NamedTuple):
    """Options far each result moves, at most, when logits and results are rounded to float32 once."""

    logprob: float
    lse: float
    entropy: float
    hidden: float
    weight: float


class Exact(NamedTuple):
    """Everything that the head returns, in float64; rows that do not count are zero."""

    logprob: Float[np.ndarray, " N"]
    lse: Float[np.ndarray, " N"]
    entropy: Float[np.ndarray, " N"]
    hidden: Float[np.ndarray, "N D"]
    """The gradient in hidden."""
    weight: Float[np.ndarray, "V D"]
    """The gradient in weight."""
    resolution: Resolution


Rows: TypeAlias = Float[np.ndarray, " N"]
Cotangents: TypeAlias = Callable[[Rows, Rows, Rows], tuple[Any, Any, Any]]
"""From (logprob, lse, entropy) to the derivatives of a total in each of them, one number a row."""


def exact(
    hidden: Any,
    weight: Any,
    labels: Any,
    cotangents: Cotangents,
    *,
    where: Bool[np.ndarray, " N"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Exact:
    """The head's outputs and the gradients of any scalar of them; inputs of any dtype count as they are."""
    live = np.ones(len(labels), bool) if where is None else np.asarray(where, bool)
    h, w, y = np.asarray(hidden, np.float64)[live], np.asarray(weight, np.float64), np.asarray(labels)[live]
    rows = np.arange(len(y))

    def put_back(x: np.ndarray) -> np.ndarray:
        out = np.zeros((len(live), *x.shape[1:]))
        out[live] = x
        return out

    raw = h @ w.T
    capped = raw if softcap is None else softcap * np.tanh(raw / softcap)
    slope = (np.ones_like(raw) if softcap is None else 1 - np.tanh(raw / softcap) ** 2) / temperature
    z = capped / temperature
    top = z.max(axis=1, keepdims=True)
    lse = top[:, 0] + np.log(np.exp(z - top).sum(axis=1))
    log_p = z - lse[:, None]
    p = np.exp(log_p)
    entropy = -(p * log_p).sum(axis=1)
    values = put_back(log_p[rows, y]), put_back(lse), put_back(entropy)

    g_logprob, g_lse, g_entropy = (np.asarray(g, np.float64)[live] for g in cotangents(*values))
    entropy_slope = -p * (log_p + entropy[:, None])
    dz = (g_lse - g_logprob)[:, None] * p + g_entropy[:, None] * entropy_slope
    dz[rows, y] += g_logprob
    draw = dz * slope
    dh, dw = draw @ w, draw.T @ h

    largest = 1 + np.abs(z).max(initial=0)
    rounding = Resolution(
        logprob=largest,
        lse=largest,
        entropy=1 + np.abs(entropy_slope * z).sum(axis=1).max(initial=0) + entropy.max(initial=0),
        hidden=largest * np.abs(dh).max(initial=0),
        weight=largest * np.abs(dw).max(initial=0),
    )

    return Exact(*values, put_back(dh), dw, Resolution(*(FLOAT32_EPS * x for x in rounding)))


class Objective(NamedTuple):
    """An elementwise objective, written for jax.numpy and NumPy alike, and its derivatives by hand."""

    value: Callable[..., Any]
    """(array module, logprob, entropy, *operands) to the value."""
    slopes: Callable[..., tuple[Any, Any]]
    """(logprob, entropy, *operands) to the derivatives in logprob and in entropy, in NumPy."""
    operands: int

    def in_jax(self, logprob: jax.Array, entropy: jax.Array, *operands: jax.Array) -> jax.Array:
        return self.value(jnp, logprob, entropy, *operands)


class ExactLoss(NamedTuple):
    loss: float
    resolution: float
    rows: Exact


def exact_loss(
    hidden: Any, weight: Any, labels: Any, objective: Objective, *operands: Any, weights: Any, **options: Any
) -> ExactLoss:
    """sum_i weights_i objective_i over the rows of weight other than zero, and its gradients."""
    live = np.asarray(weights) != 0
    w = np.where(live, np.asarray(weights, np.float64), 0)
    operands = tuple(np.where(live, np.asarray(x, np.float64), 0) for x in operands)

    def cotangents(logprob: Rows, lse: Rows, entropy: Rows) -> tuple[Rows, Rows, Rows]:
        d_logprob, d_entropy = objective.slopes(logprob, entropy, *operands)
        return w * d_logprob, 0 * w, w * d_entropy

    rows = exact(hidden, weight, labels, cotangents, where=live, **options)
    values = w * objective.value(np, rows.logprob, rows.entropy, *operands)
    g_logprob, _, g_entropy = cotangents(rows.logprob, rows.lse, rows.entropy)
    resolution = (
        FLOAT32_EPS * np.abs(values).sum()
        + rows.resolution.logprob * np.abs(g_logprob).sum()
        + rows.resolution.entropy * np.abs(g_entropy).sum()
    )
    return ExactLoss(float(values.sum()), float(resolution), rows)


class Plain(NamedTuple):
    """The same five results as `Exact`, from float32 arithmetic on full logits."""

    logprob: Float[jax.Array, " N"]
    lse: Float[jax.Array, " N"]
    entropy: Float[jax.Array, " N"]
    hidden: Float[jax.Array, "N D"]
    weight: Float[jax.Array, "V D"]


def plain(
    hidden: Float[jax.Array, "N D"],
    weight: Float[jax.Array, "V D"],
    labels: Int[jax.Array, " N"],
    total: Callable[..., Float[jax.Array, ""]],
    *,
    where: Bool[jax.Array, " N"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Plain:
    """What anybody would write with full logits: products of the inputs' dtype, float32 in between.

    It is as accurate as full logits get: the logits are not rounded to bfloat16; on the way to the gradients
    only the products' operands and results are. `total` makes a scalar of (logprob, lse, entropy).
    """
    live = jnp.ones(labels.shape, bool) if where is None else where
    hidden = jnp.where(live[:, None], hidden, 0)

    def outputs(raw: Float[jax.Array, "N V"]) -> tuple[jax.Array, jax.Array, jax.Array]:
        z = (raw if softcap is None else softcap * jnp.tanh(raw / softcap)) / temperature
        log_p = jax.nn.log_softmax(z)
        logprob = jnp.take_along_axis(log_p, labels[:, None], axis=1)[:, 0]
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=1)
        lse = jax.nn.logsumexp(z, axis=1)
        return jnp.where(live, logprob, 0), jnp.where(live, lse, 0), jnp.where(live, entropy, 0)

    def product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)

    values, pull_back = jax.vjp(outputs, product("nd,vd->nv", hidden, weight))
    (dz,) = pull_back(jax.grad(lambda outputs: total(*outputs))(values))
    dz = dz.astype(hidden.dtype)
    dh = product("nv,vd->nd", dz, weight).astype(hidden.dtype)
    dw = product("nv,nd->vd", dz, hidden).astype(weight.dtype)
    return Plain(*values, dh, dw)


def assert_as_accurate_as_plain(got: Any, yardstick: Plain, truth: Exact) -> None:
    """The criterion: of each of the five results, the root-mean-square and the largest error against `truth`.

    `got` has the fields of `Plain`. NaN anywhere in `got` fails.
    """
    for name in Plain._fields:
        want, ours, theirs = (np.asarray(getattr(x, name), np.float64) for x in (truth, got, yardstick))
        assert ours.shape == want.shape, f"{name} has shape {ours.shape}, not {want.shape}"
        hair = HAIR * getattr(truth.resolution, name)
        for norm in (root_mean_square, largest_magnitude):
            error, allowed = norm(ours - want), SLACK * norm(theirs - want) + hair
            assert error <= allowed, (
                f"{norm.__name__} error of {name} is {error:.3g}; plain has {norm(theirs - want):.3g}, "
                f"and with the hair {hair:.3g} allowed is {allowed:.3g}"
            )


def root_mean_square(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2))) if x.size else 0.0


def largest_magnitude(x: np.ndarray) -> float:
    return float(np.max(np.abs(x))) if x.size else 0.0
