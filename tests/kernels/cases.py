"""Problems, masks and objectives, and checks of token_logprobs and token_loss against the oracle.

Shapes are few, and each way to call the head is compiled once a shape.
"""

import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from oracle import SLACK, Answer, Objective, Slopes, Teacher, assert_as_accurate_as_rounding, exact, exact_loss

from lm_head import TokenLogprobs, token_logprobs, token_loss

POISON = jnp.array([jnp.nan, jnp.inf, -jnp.inf])
SCALES = {"near-uniform": 1.0, "peaked": 30.0, "saturated": 1000.0}


class Problem(NamedTuple):
    hidden: jax.Array
    weight: jax.Array
    labels: jax.Array


def random_problem(shape: tuple[int, int, int], scale: float = 3.0, dtype: Any = jnp.float32) -> Problem:
    """Logits with a standard deviation of `scale`; the first label is 0 and the last V-1."""
    n, v, d = shape
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(n, d)) * scale / np.sqrt(d)
    weight = rng.normal(size=(v, d))
    labels = rng.integers(0, v, n)
    labels[0], labels[-1] = 0, v - 1
    return Problem(jnp.asarray(hidden, dtype), jnp.asarray(weight, dtype), jnp.asarray(labels, jnp.int32))


def teacher_of(problem: Problem, scale: float = 3.0, more: int = 40, **how: Any) -> Teacher:
    """A teacher half as wide again as the student, with `more` tokens. The tokens would be the likeliest by far."""
    (n, d), v, rng = problem.hidden.shape, len(problem.weight), np.random.default_rng(1)
    width = 3 * d // 2
    hidden, weight = rng.normal(size=(n, width)) * scale / np.sqrt(width), rng.normal(size=(v + more, width))
    weight[v:] *= 30
    return Teacher(*(jnp.asarray(x, problem.hidden.dtype) for x in (hidden, weight)), **how)


def random_cotangents(n: int) -> Slopes:
    """Random slopes by log-probability, lse and entropy."""
    return Slopes(*jnp.asarray(np.random.default_rng(2).normal(size=(3, n)), jnp.float32))


def clipped_ratio(logprob: jax.Array, entropy: jax.Array, old: jax.Array, advantage: jax.Array) -> jax.Array:
    ratio = jnp.exp(logprob - old)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)


OBJECTIVES: dict[str, Objective] = {
    "cross-entropy": lambda logprob, entropy: -logprob,
    "entropy bonus": lambda logprob, entropy: -logprob - 0.1 * entropy,
    "entropy alone": lambda logprob, entropy: entropy,
    "clipped ratio": clipped_ratio,
    "nonlinear in both": lambda logprob, entropy, a: jnp.sin(a * logprob) * entropy**2 + jnp.exp(logprob - entropy),
    "smoothed label": lambda logprob, entropy, *, mean_logit, lse=0.0: -0.5 * logprob - 4 * (mean_logit - lse),
    "smoothed label, entropy": lambda logprob, entropy, *, mean_logit: 0.5 * entropy - logprob - mean_logit,
    "teacher alone": lambda logprob, entropy, *, divergence: divergence,
    "entropy and teacher": lambda logprob, entropy, *, divergence: 0.5 * entropy + divergence,
    "label and teacher": lambda logprob, entropy, *, divergence: 0.5 * entropy - logprob + 2 * divergence,
}


def operands_for(problem: Problem, objective: Objective, **options: Any) -> list[jax.Array]:
    """The first operand is near the true logprob, as an old policy's would be; the second an advantage."""
    rng, n = np.random.default_rng(3), len(problem.labels)
    logprob = exact(*problem, **options).answer.logprob
    operands = [logprob + 0.3 * rng.normal(size=n), rng.normal(size=n)]
    parameters = inspect.signature(objective).parameters.values()
    number = sum(x.kind == x.POSITIONAL_OR_KEYWORD for x in parameters) - 2
    return [jnp.asarray(x, jnp.float32) for x in operands[:number]]


def sparse_weights(n: int) -> jax.Array:
    """Weights of either sign, zero in three rows of five; two rows count always."""
    rng = np.random.default_rng(4)
    weights = rng.normal(size=n) * (rng.random(n) < 0.4)
    weights[n // 2], weights[-1] = 0.7, -0.3
    return jnp.asarray(weights, jnp.float32)


@functools.partial(jax.jit, static_argnames=("impl", "softcap", "vocabulary", "collision", "dtype", "sharding"))
def values_and_gradients(problem: Problem, cotangents: Slopes, **options: Any) -> Answer:
    """A statistic without a cotangent stays None. None is not replaced by zeros."""
    given = {name: x for name, x in cotangents._asdict().items() if x is not None}

    def outputs(hidden: jax.Array, weight: jax.Array) -> tuple[dict[str, jax.Array], TokenLogprobs]:
        tokens = token_logprobs(hidden, weight, problem.labels, **options)
        return {name: getattr(tokens, name) for name in given}, tokens

    _, pull_back, tokens = jax.vjp(outputs, *problem[:2], has_aux=True)
    return answer_of(tokens, pull_back(given))


def answer_of(tokens: TokenLogprobs, gradients: Sequence[jax.Array]) -> Answer:
    return Answer(*tokens[:3], *gradients, tokens.divergence, tokens.mean_logit, tokens.collision, tokens.likeliest)


class Loss(NamedTuple):
    loss: jax.Array
    rows: Answer


STATIC = ("objective", "impl", "workspace", "softcap", "vocabulary", "kind", "beta", "dtype", "sharding")


@functools.partial(jax.jit, static_argnames=(*STATIC, "teacher_softcap"))
def loss_and_gradients(problem: Problem, objective: Objective, operands=(), weights=None, **options) -> Loss:
    def loss(hidden: jax.Array, weight: jax.Array) -> tuple[jax.Array, TokenLogprobs]:
        return token_loss(hidden, weight, problem.labels, objective, *operands, weights=weights, **options)

    (value, tokens), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(*problem[:2])
    return Loss(value, answer_of(tokens, gradients))


def check(problem: Problem, cotangents: Slopes, *, live=None, largest=SLACK, impl: str, **options: Any) -> None:
    """Checks the statistics and their gradients. Rows that don't count hold poison, also as cotangents, and give 0."""
    live = np.ones(problem.labels.shape, bool) if live is None else live
    options = {"temperature": 1.0} | options  # a program is compiled once for any temperature
    given = jax.tree.map(lambda x: jnp.where(live, x, jnp.resize(POISON, len(x))), cotangents)
    got = values_and_gradients(poisoned(problem, ~live), given, impl=impl, where=jnp.asarray(live), **options)
    collision = options.pop("collision", False)
    right = exact(*problem, lambda _: cotangents, where=live, **of_oracle(problem, options))
    assert [x is not None for x in got[5:]] == [False, False, collision, True]
    assert_as_accurate_as_rounding(got, right, largest)
    assert_nothing_at(got, ~live)


def check_loss(problem: Problem, objective: Objective, weights, *, teacher=None, largest=SLACK, **options) -> Loss:
    """Checks token_loss; returns its results. Rows of weight zero hold poison, and give zeros."""
    known, live = of_oracle(problem, options), np.asarray(weights) != 0
    operands = operands_for(problem, objective, **known)
    given = [jnp.where(live, x, jnp.resize(POISON, len(x))) for x in operands]
    sick, theirs = poisoned(problem, ~live), {}
    if teacher is not None:
        hidden = poisoned(problem._replace(hidden=teacher.hidden), ~live).hidden
        theirs = {"teacher_hidden": hidden, "teacher_weight": teacher.weight, "kind": teacher.kind}
        theirs |= {"beta": teacher.beta, "teacher_temperature": teacher.temperature, "teacher_softcap": teacher.softcap}
    got = loss_and_gradients(sick, objective, given, weights, **theirs, **options)
    right = exact_loss(*problem, objective, *operands, weights=weights, teacher=teacher, **known)
    assert abs(float(got.loss) - right.loss) <= right.resolution
    named = "mean_logit" in inspect.signature(objective).parameters
    assert [x is not None for x in got.rows[5:]] == [teacher is not None, named, False, True]
    assert_as_accurate_as_rounding(got.rows, right.rows, largest)
    assert_nothing_at(got.rows, ~live)
    return got


def of_oracle(problem: Problem, options: dict[str, Any]) -> dict[str, Any]:
    """The options that change the right answer, or the tolerance."""
    widest = max((x.dtype for x in problem[:2]), key=lambda x: x.itemsize)
    known = {name: x for name, x in options.items() if name in ("temperature", "softcap", "vocabulary")}
    return known | {"dtype": options.get("dtype") or widest}


def poisoned(problem: Problem, dead: np.ndarray) -> Problem:
    """NaN, infinities and impossible labels in the rows that do not count."""
    if not dead.any():
        return problem
    poison = jnp.resize(POISON, problem.hidden.shape).astype(problem.hidden.dtype)
    hidden = jnp.where(dead[:, None], poison, problem.hidden)
    return problem._replace(hidden=hidden, labels=jnp.where(dead, ~problem.labels, problem.labels))


def assert_nothing_at(got: Answer, dead: np.ndarray) -> None:
    for x in jax.tree.leaves(got._replace(weight=None)):
        assert not np.any(np.asarray(x, np.float32)[dead])


def assert_near(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    """Asserts that arrays differ by at most this part of their largest number: another order of the same sums."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.max(np.abs(y), initial=1e-6))


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Every equation of a program, including the equations of loops, branches and kernels."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)):
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                yield from equations(getattr(inner, "jaxpr", inner))
