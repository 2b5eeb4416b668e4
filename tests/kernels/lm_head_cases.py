"""Problems, masks and objectives, and checks of token_logprobs and token_loss.

Shapes are few, and subject and yardstick are compiled once a shape. `plain`, the ordinary JAX program with full logits,
is the yardstick of accuracy: `assert_as_accurate_as_plain` says how near to the oracle an answer has to come.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jaxtyping import Bool, Float, Int
from oracle import HAIR, SLACK, Objective, Rows, exact, exact_loss

from lm_head import TokenLogprobs, token_logprobs, token_loss
from lm_head.live_rows import LiveRows
from lm_head.softmax import Slopes

SCALES = {"near-uniform": 1.0, "peaked": 30.0, "saturated": 1000.0}


def plain(
    hidden: Float[jax.Array, "N D"],
    weight: Float[jax.Array, "V D"],
    labels: Int[jax.Array, " N"],
    total: Callable[..., Float[jax.Array, ""]],
    *,
    where: Bool[jax.Array, " N"],
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Rows:
    """The ordinary program with full logits: products of the inputs' dtype, float32 in between.

    It is as accurate as full logits get: the logits are not rounded to bfloat16; on the way to the gradients
    only the products' operands and results are. `total` makes a scalar of (logprob, lse, entropy).
    """
    hidden = jnp.where(where[:, None], hidden, 0)

    def outputs(raw: Float[jax.Array, "N V"]) -> tuple[jax.Array, ...]:
        z = (raw if softcap is None else softcap * jnp.tanh(raw / softcap)) / temperature
        log_p = jax.nn.log_softmax(z)
        logprob = jnp.take_along_axis(log_p, labels[:, None], axis=1)[:, 0]
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=1)
        lse = jax.nn.logsumexp(z, axis=1)
        return tuple(jnp.where(where, x, 0) for x in (logprob, lse, entropy))

    def product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)

    values, pull_back = jax.vjp(outputs, product("nd,vd->nv", hidden, weight))
    (dz,) = pull_back(jax.grad(lambda outputs: total(*outputs))(values))
    dz = dz.astype(hidden.dtype)
    dh = product("nv,vd->nd", dz, weight).astype(hidden.dtype)
    dw = product("nv,nd->vd", dz, hidden).astype(weight.dtype)
    return Rows(*values, dh, dw)


def assert_as_accurate_as_plain(got: Any, yardstick: Any, truth: Any, *, largest: float = SLACK) -> None:
    """The criterion: of each of the results, the root-mean-square and the largest error against `truth`.

    `got` has the fields of `yardstick`. NaN anywhere in `got` fails. By the factor `largest` the largest error may be
    larger than the yardstick's; 0: it is not judged.
    """
    for name in yardstick._fields:
        want, ours, theirs = (np.asarray(getattr(x, name), np.float64) for x in (truth, got, yardstick))
        assert ours.shape == want.shape, f"{name} has shape {ours.shape}, not {want.shape}"
        hair = HAIR * getattr(truth.resolution, name)
        for norm, slack in ((lambda x: np.sqrt(np.mean(x**2)), SLACK), (lambda x: np.max(np.abs(x)), largest)):
            error, of_plain = norm(ours - want), norm(theirs - want)
            assert error <= slack * of_plain + hair or (slack == 0 and not np.isnan(error)), (
                f"{name}: {error:.3g}; plain has {of_plain:.3g}, and the hair is {hair:.3g}"
            )


def assert_near(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    """Asserts that arrays differ by at most this part of their largest number: another order of the same sums."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.max(np.abs(y), initial=1e-6))


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


def random_cotangents(n: int) -> Slopes:
    return Slopes(*jnp.asarray(np.random.default_rng(2).normal(size=(3, n)), jnp.float32))


def clipped_ratio(logprob: jax.Array, entropy: jax.Array, old: jax.Array, advantage: jax.Array) -> jax.Array:
    ratio = jnp.exp(logprob - old)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)


OBJECTIVES: dict[str, Objective] = {
    "cross-entropy": lambda logprob, entropy: -logprob,
    "entropy bonus": lambda logprob, entropy: -logprob - 0.1 * entropy,
    "clipped ratio": clipped_ratio,
    "nonlinear in both": lambda logprob, entropy, a: jnp.sin(a * logprob) * entropy**2 + jnp.exp(logprob - entropy),
}


def operands_for(problem: Problem, objective: Objective) -> list[jax.Array]:
    """The first operand is near the true logprob, as an old policy's would be; the second an advantage."""
    n = len(problem.labels)
    rng = np.random.default_rng(3)
    logprob = exact(*problem, lambda *_: np.zeros((3, n))).logprob
    operands = [logprob + 0.3 * rng.normal(size=n), rng.normal(size=n)]
    return [jnp.asarray(x, jnp.float32) for x in operands[: len(inspect.signature(objective).parameters) - 2]]


def sparse_weights(n: int) -> jax.Array:
    """Weights of either sign, zero in three rows of five; two rows count always."""
    rng = np.random.default_rng(4)
    weights = rng.normal(size=n) * (rng.random(n) < 0.4)
    weights[n // 2], weights[-1] = 0.7, -0.3
    return jnp.asarray(weights, jnp.float32)


def pulled_back(
    hidden: jax.Array, weight: jax.Array, labels: jax.Array, cotangents: Slopes, impl: Any = None, **options: Any
) -> Rows:
    """Values and gradients; where the entropy's cotangent is None, it has none, not even zeros."""
    given = [x for x in cotangents if x is not None]

    def outputs(h: jax.Array, w: jax.Array) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
        outputs = tuple(token_logprobs(h, w, labels, impl=impl, **options))[:3]
        return outputs[: len(given)], outputs[len(given) :]

    outputs, pull_back, others = jax.vjp(outputs, hidden, weight, has_aux=True)
    return Rows(*outputs, *others, *pull_back(tuple(given)))


values_and_gradients = jax.jit(pulled_back, static_argnames=("impl", "softcap", "dtype"))


@functools.partial(jax.jit, static_argnames="softcap")
def plain_values_and_gradients(
    hidden: jax.Array, weight: jax.Array, labels: jax.Array, cotangents: Slopes, **options: Any
) -> Rows:
    def total(*outputs: jax.Array) -> jax.Array:
        return sum(jnp.vdot(g, x) for g, x in zip(cotangents, outputs, strict=True))

    return plain(hidden, weight, labels, total, **options)


class Loss(NamedTuple):
    loss: jax.Array
    rows: Rows


@functools.partial(jax.jit, static_argnames=("objective", "impl", "workspace", "softcap", "dtype", "sharding"))
def loss_and_gradients(
    problem: Problem,
    objective: Objective,
    operands: Sequence[jax.Array] = (),
    weights: jax.Array | None = None,
    **options: Any,
) -> Loss:
    def loss(h: jax.Array, w: jax.Array) -> tuple[jax.Array, TokenLogprobs]:
        return token_loss(h, w, problem.labels, objective, *operands, weights=weights, **options)

    run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (value, outputs), gradients = run(problem.hidden, problem.weight)
    return Loss(value, Rows(*outputs[:3], *gradients))


@functools.partial(jax.jit, static_argnames=("objective", "softcap"))
def plain_loss_and_gradients(
    problem: Problem, objective: Objective, operands: Sequence[jax.Array], weights: jax.Array, **options: Any
) -> Loss:
    def total(logprob: jax.Array, lse: jax.Array, entropy: jax.Array) -> jax.Array:
        live = weights != 0
        safe = [jnp.where(live, x, 0) for x in operands]
        return jnp.sum(jnp.where(live, weights * objective(logprob, entropy, *safe), 0))

    rows = plain(*problem, total, where=weights != 0, **options)
    return Loss(total(rows.logprob, rows.lse, rows.entropy), rows)


def check(
    problem: Problem,
    cotangents: Slopes,
    *,
    impl: str,
    live: np.ndarray | None = None,
    largest: float = SLACK,
    **options: Any,
) -> Rows:
    """Checks the statistics and their gradients; returns these. Rows that don't count hold poison, and give zeros."""
    live = np.ones(problem.labels.shape, bool) if live is None else live
    options = {"temperature": 1.0} | options  # of any temperature, subject and yardstick are compiled once
    given = jax.tree.map(lambda x: jnp.where(live, x, jnp.nan), cotangents)
    got = values_and_gradients(*poisoned(problem, ~live), given, impl=impl, where=jnp.asarray(live), **options)
    cotangents = Slopes(*(jnp.zeros(live.shape) if x is None else x for x in cotangents))
    yardstick = plain_values_and_gradients(*problem, cotangents, where=jnp.asarray(live), **options)
    truth = exact(*problem, lambda *_: cotangents, where=live, **options)
    assert_as_accurate_as_plain(got, yardstick, truth, largest=largest)
    assert_nothing_at(got, ~live)
    return got


def check_loss(
    problem: Problem, objective: Objective, weights: jax.Array, *, impl: str, largest: float = SLACK, **options: Any
) -> Loss:
    """Checks token_loss; returns its results. Rows of weight zero hold poison, and give zeros."""
    operands, live = operands_for(problem, objective), np.asarray(weights) != 0
    given = [jnp.where(live, x, jnp.nan) for x in operands]
    got = loss_and_gradients(poisoned(problem, ~live), objective, given, weights, impl=impl, **options)
    options = {name: x for name, x in options.items() if name not in ("workspace", "sharding")}
    yardstick = plain_loss_and_gradients(problem, objective, operands, weights, **options)
    truth = exact_loss(*problem, objective, *operands, weights=weights, **options)
    allowed = SLACK * abs(float(yardstick.loss) - truth.loss) + HAIR * truth.resolution
    assert abs(float(got.loss) - truth.loss) <= allowed
    assert_as_accurate_as_plain(got.rows, yardstick.rows, truth.rows, largest=largest)
    assert_nothing_at(got.rows, ~live)
    return got


def poisoned(problem: Problem, dead: np.ndarray) -> Problem:
    """NaN, infinities and impossible labels in the rows that do not count."""
    poison = np.resize([np.nan, np.inf, -np.inf], problem.hidden.shape)
    hidden = jnp.where(dead[:, None], jnp.asarray(poison, problem.hidden.dtype), problem.hidden)
    return problem._replace(hidden=hidden, labels=jnp.where(dead, ~problem.labels, problem.labels))


def assert_nothing_at(got: Rows, dead: np.ndarray) -> None:
    for x in got[:4]:
        assert not np.any(np.asarray(x, np.float32)[dead])


def blocks_visited(run: Callable[[jax.Array], Any], rows: int) -> list[int]:
    """How many blocks of rows `run(live)` visits where none of its rows count, 17, or all; it is a jitted function."""
    found: list[int] = []
    block = LiveRows.block

    def counted(self: LiveRows, i: jax.Array, size: int) -> Any:
        jax.debug.callback(lambda: found.append(1))
        return block(self, i, size)

    def visits(live: int) -> int:
        found.clear()
        jax.block_until_ready(run(jnp.int32(live)))
        jax.effects_barrier()
        return len(found)

    with mock.patch.object(LiveRows, "block", counted):
        return [visits(live) for live in (0, 17, rows)]


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Every equation of a program, those of loops, branches and kernels included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)):
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                yield from equations(getattr(inner, "jaxpr", inner))
