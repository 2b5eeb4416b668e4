"""Statistics and gradients of token_logprobs by every engine against float64.

What is right, and how near is near enough, is said in lm_head_cases.py; what is strict in strict_tpu.py and
strict_gpu.py; what is off which tile in engines.py. Losses are in test_head_losses.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
import lm_head_cases as cases
import numpy as np
import pytest
from engines import (
    BF16,
    CHUNKED_BF16,
    EVERY,
    F32,
    FULL_BF16,
    GPU,
    ONE_EACH,
    TPU,
    TPU_F32,
    XLA_BF16,
    Engine,
    engines,
    parameter,
)
from lm_head_cases import OBJECTIVES, SCALES, Problem, check, poisoned, random_cotangents, values_and_gradients
from oracle import SLACK, Rows, exact

from lm_head import token_logprobs
from lm_head.softmax import Slopes


def assert_accurate(engine: Engine, problem: Problem, cotangents: Slopes | None = None, **options: Any) -> Rows:
    """Values and gradients, after they were found as accurate as those of full logits."""
    with engine.strictly():
        return check(problem, cotangents or random_cotangents(len(problem.labels)), impl=engine.impl, **options)


# --- sizes, softmaxes, rows that don't count ---


@pytest.mark.parametrize(
    ("engine", "shape"),
    [
        parameter(XLA_BF16, (1, 131, 16)),
        parameter(XLA_BF16, (24, 2, 16)),
        parameter(XLA_BF16, (5003, 37, 8)),
        parameter(TPU_F32, (1, 385, 64)),  # the last step has one column
        parameter(TPU, (40, 326, 200)),  # the last step has none
        parameter(TPU, (129, 2, 128)),
        parameter(GPU, (1, 136, 64)),
        parameter(GPU, (129, 8, 64)),
        parameter(GPU, (7, 1032, 192), slow=True),
    ],
)
def test_any_size_is_as_accurate_as_full_logits(engine: Engine, shape: tuple[int, int, int]) -> None:
    assert_accurate(engine, engine._replace(shape=shape, dtype=engine.dtype).problem())


@engines(*EVERY)
@pytest.mark.parametrize(
    ("softmax", "rows", "options"),
    [
        ("near-uniform", "every", {}),
        ("peaked", "most", {"temperature": 0.6}),
        ("peaked", "a block and one", {"temperature": 2.5}),
        ("saturated", "few", {}),  # a block's free places have no statistics: exponentials must not meet their zeros
        ("saturated", "none", {}),
    ],
)
def test_any_softmax_of_any_rows_is_as_accurate_as_full_logits(
    engine: Engine, softmax: str, rows: str, options: dict[str, Any]
) -> None:
    """The temperature is traced."""
    assert_accurate(engine, engine.problem(SCALES[softmax]), live=engine.live(rows), **options)


@engines()
def test_the_softcap_comes_before_the_temperature(engine: Engine) -> None:
    assert_accurate(engine, engine.problem(30.0), softcap=20.0, temperature=0.6)


def matches(engine: Engine) -> Problem:
    """Two rows of three are weight rows scaled up to a logit of 1e4, with and without its label."""
    hidden, weight, labels = (np.array(x, np.float64) for x in engine.problem())
    match = np.random.default_rng(1).integers(0, len(weight), len(hidden))
    planted = np.arange(len(hidden)) % 3 > 0
    scaled = weight[match] * (1e4 / (weight[match] ** 2).sum(axis=1, keepdims=True))
    labels = np.where(planted & (np.arange(len(hidden)) % 2 == 0), match, labels.astype(int))
    return typed(engine, np.where(planted[:, None], scaled, hidden), weight, labels)


def ties(engine: Engine) -> Problem:
    """Columns in three tiles are the largest of every third row, and one of them is the label of every sixth."""
    hidden, weight, labels = (np.array(x, np.float64) for x in engine.problem())
    weight[0] = weight[-1] = weight[3]
    hidden[::3] = weight[3] * (1e4 / (weight[3] ** 2).sum())
    labels[::6] = 3
    return typed(engine, hidden, weight, labels)


def maxima_that_move(engine: Engine) -> Problem:
    """The running maximum is raised in every tile, or in the first alone, or in the last and partial one."""
    (n, v, _), (hidden, weight, labels) = engine.shape, engine.problem(1.0)
    column = jnp.arange(float(v))
    steps = jnp.stack([column, -column, jnp.where(column > v - 5, 500.0, 0.0)])
    weight = weight.at[:, :3].set(steps.T.astype(engine.dtype))
    return Problem(hidden.at[:, :3].set(jnp.eye(3, dtype=engine.dtype)[np.arange(n) % 3]), weight, labels)


def far_below_zero(engine: Engine) -> Problem:
    """A column past the vocabulary, whose product is 0, would have the largest of all logits."""
    hidden, weight, labels = engine.problem()
    return Problem(hidden.at[:, 0].set(30), weight.at[:, 0].set(-10), labels)


def typed(engine: Engine, hidden: np.ndarray, weight: np.ndarray, labels: np.ndarray) -> Problem:
    return Problem(jnp.asarray(hidden, engine.dtype), jnp.asarray(weight, engine.dtype), jnp.asarray(labels, jnp.int32))


EXTREMES = [parameter(engine, make) for engine in EVERY for make in (matches, ties)]
EXTREMES += [parameter(engine, make) for engine in ONE_EACH for make in (maxima_that_move, far_below_zero)]


@pytest.mark.parametrize(("engine", "make"), EXTREMES)
def test_matches_and_ties_at_10000_and_extremes_in_any_tile_are_as_accurate_as_full_logits(
    engine: Engine, make: Any
) -> None:
    assert_accurate(engine, make(engine))


@engines()
def test_the_outputs_alone_are_as_accurate_as_full_logits(engine: Engine) -> None:
    """On a TPU they are another kernel's, with one product. Labels may be narrow, and unsigned."""
    live, problem = engine.live("most"), engine.problem()
    problem = problem._replace(labels=problem.labels.astype(jnp.uint16))
    with engine.strictly():
        got = jax.jit(lambda *x: token_logprobs(*x, where=live, impl=engine.impl))(*poisoned(problem, ~live))
    want = exact(*problem, lambda *_: np.zeros((3, len(live))), where=live)
    for x, y in zip(got[:3], want[:3], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


# --- labels, shapes and dtypes ---


@pytest.mark.parametrize("leading", [(24, 1), (), (0,)], ids=str)
def test_outputs_are_float32_and_gradients_have_their_input_s_shape_and_dtype(leading: tuple[int, ...]) -> None:
    hidden, weight, row = jnp.zeros((*leading, 16), BF16), jnp.zeros((131, 16)), jnp.zeros(leading)
    problem = Problem(hidden, weight, jnp.zeros(leading, int))
    rows = values_and_gradients.eval_shape(*problem, Slopes(row, row, row))
    loss, rows_of_loss = cases.loss_and_gradients.eval_shape(problem, OBJECTIVES["cross-entropy"], (), row)
    want = [(leading, F32)] * 3 + [(hidden.shape, BF16), (weight.shape, F32)]
    assert [(x.shape, x.dtype) for x in (*rows, *rows_of_loss, loss)] == [*want, *want, ((), F32)]


# --- a copy of the weight ---


@engines(FULL_BF16, CHUNKED_BF16, XLA_BF16, GPU)
def test_a_copy_is_multiplied_in_place_of_the_weight_which_gets_its_gradient(engine: Engine) -> None:
    """The weight is NaN, so that nothing reads it; its gradient is float32, and of bfloat16 products not rounded."""
    problem, cotangents, live = engine.problem(), random_cotangents(engine.shape[0]), engine.live("most")
    objective, weights = OBJECTIVES["entropy bonus"], jnp.where(live, 0.7, 0.0)

    def run(weight: jax.Array, **options: Any) -> tuple[Rows, Rows]:
        given, options = problem._replace(weight=weight), {"impl": engine.impl, "temperature": 0.6, **options}
        rows = values_and_gradients(*given, cotangents, where=jnp.asarray(live), **options)
        return rows, cases.loss_and_gradients(given, objective, (), weights, **options).rows

    with engine.strictly():
        found = run(jnp.full(problem.weight.shape, jnp.nan, F32), weight_copy=problem.weight)
        expected = run(problem.weight)
    of_loss = cases.exact_loss(*problem, objective, weights=weights, temperature=0.6).rows
    of_rows = exact(*problem, lambda *_: cotangents, where=live, temperature=0.6)
    for got, plainly, truth in zip(found, expected, (of_rows, of_loss), strict=True):
        assert got.weight.dtype == F32
        for x, y in zip(got, plainly, strict=True):
            np.testing.assert_array_equal(x.astype(y.dtype), y)
        errors = [np.abs(np.float64(x.weight) - truth.weight).sum() for x in (got, plainly)]
        assert errors[0] <= errors[1] * (0.9 if engine.dtype == BF16 else 1)


# --- TPUs: dh from the expectation of W, where the entropy has no cotangent ---


WITHOUT_ENTROPY = random_cotangents(300)._replace(entropy=None)


@engines(TPU_F32, TPU)
def test_likelihoods_have_their_gradient_without_the_entropy_on_tpus(engine: Engine) -> None:
    """Where the expectation is saved in bfloat16, dh's largest error may be larger than that of full logits."""
    options: dict[str, Any] = {"temperature": 0.7, "softcap": 20.0, "largest": SLACK if engine is TPU_F32 else 0}
    assert_accurate(engine, engine.problem(), WITHOUT_ENTROPY, live=engine.live("most"), **options)


@engines(TPU_F32, TPU)
def test_a_label_with_all_but_1e_5_of_the_probability_keeps_its_gradient_on_tpus(engine: Engine) -> None:
    """dh is (1 - p) (W[label] - the others' mean of W); a 1 - p from a rounded sum has an error of 1e-2."""
    hidden, weight, labels = engine.problem(1.0)
    at_label = weight[labels].astype(F32)
    lse = jax.nn.logsumexp(hidden.astype(F32) @ weight.T.astype(F32), axis=1)
    wanted = (lse + np.log(1e6))[:, None] * at_label / (at_label**2).sum(axis=1, keepdims=True)
    problem = Problem((hidden + wanted).astype(engine.dtype), weight, labels)
    cotangents = Slopes(jnp.ones(300), jnp.zeros(300), jnp.zeros(300))
    truth, tolerance = exact(*problem, lambda *_: cotangents), 1e-4 if engine is TPU_F32 else 2**-7
    assert 1e-6 < np.median(-truth.logprob) < 1e-4
    with engine.strictly():
        where = jnp.ones(300, bool)
        got = values_and_gradients(*problem, cotangents._replace(entropy=None), impl="mosaic_tpu", where=where)
    error = np.linalg.norm(np.asarray(got.hidden, np.float64) - truth.hidden, axis=1)
    assert np.max(error / np.linalg.norm(truth.hidden, axis=1)) < tolerance
    np.testing.assert_allclose(got.logprob, truth.logprob, rtol=tolerance)
