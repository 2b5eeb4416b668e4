"""Statistics and gradients of token_logprobs by every engine against float64.

The right answers and the tolerances are in oracle.py, the strict interpreters in strict_tpu.py and strict_gpu.py.
Shapes off the tiles are in engines.py, and losses in test_losses.py.
"""

from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import OBJECTIVES, SCALES, Problem, assert_near, check, random_cotangents, values_and_gradients
from engines import BF16, EVERY, F32, GPU, NARROW, PLAIN, TPU, TPU_F32, XLA, XLA_BF16, Engine, every, parameter
from oracle import EPS, SLACK, Slopes, Teacher, assert_as_accurate_as_rounding, exact

from lm_head import token_logprobs, token_loss

# --- the oracle, checked by finite differences, by distributions known by heart, and by answers that it must refuse ---

RNG = np.random.default_rng(0)
HIDDEN, WEIGHT, LABELS = RNG.normal(size=(3, 4)), RNG.normal(size=(6, 4)), np.array([0, 4, 2])
SLOPES, LIVE = Slopes(*RNG.normal(size=(5, 3))), np.array([True, False, True])
TEACHER = Teacher(RNG.normal(size=(3, 5)), RNG.normal(size=(7, 5)), temperature=0.9, softcap=None)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize(("temperature", "softcap"), [(0.7, None), (1.3, 2.0)])
def test_the_gradients_are_the_values_central_differences(kind: str, temperature: float, softcap: float | None) -> None:
    def run(hidden: np.ndarray = HIDDEN, weight: np.ndarray = WEIGHT) -> tuple[float, np.ndarray, np.ndarray]:
        teacher = TEACHER._replace(kind=kind)
        options = {"where": LIVE, "temperature": temperature, "softcap": softcap, "vocabulary": 5, "teacher": teacher}
        answer = exact(hidden, weight, LABELS, lambda _: SLOPES, **options).answer
        statistics = [getattr(answer, name) for name in Slopes._fields]
        return float(np.sum(SLOPES * np.array(statistics))), answer.hidden, answer.weight

    for i, (name, x) in enumerate({"hidden": HIDDEN, "weight": WEIGHT}.items()):
        for index in np.ndindex(x.shape):
            step = np.zeros_like(x)
            step[index] = 1e-5
            slope = (run(**{name: x + step})[0] - run(**{name: x - step})[0]) / 2e-5
            np.testing.assert_allclose(run()[1 + i][index], slope, rtol=1e-6, atol=1e-8)


def test_the_oracle_matches_a_coin_s_exact_values() -> None:
    """The student has probabilities 3/4 and 1/4; the teacher takes both to be equally likely."""
    one, odds, fair = np.ones((1, 1)), np.log([[3.0], [1.0]]), np.zeros((2, 1))
    kinds = ("forward_kl", "reverse_kl")
    coins = {kind: exact(one, odds, [0], teacher=Teacher(one, fair, kind)).answer for kind in kinds}
    forward, reverse = 0.5 * np.log(2 / 3) + 0.5 * np.log(2), 0.75 * np.log(1.5) + 0.25 * np.log(0.5)
    np.testing.assert_allclose([x.divergence for x in coins.values()], [[forward], [reverse]])
    coin = coins["forward_kl"]
    np.testing.assert_allclose([coin.logprob, coin.lse], [[np.log(3 / 4)], [np.log(4)]])
    np.testing.assert_allclose([coin.entropy, coin.mean_logit], [[np.log(4) - 3 / 4 * np.log(3)], [np.log(3) / 2]])
    np.testing.assert_allclose(coin.collision, [10 / 16])


def test_the_oracle_refuses_nan_errors_and_other_shapes() -> None:
    right = exact(HIDDEN, WEIGHT, LABELS, lambda _: SLOPES._replace(divergence=None))
    assert_as_accurate_as_rounding(right.answer, right)
    wrong = {"lse": right.answer.lse + 1e-4, "hidden": right.answer.hidden * np.nan, "weight": right.answer.weight[:-1]}
    for name, x in wrong.items():
        with pytest.raises(AssertionError, match=name):
            assert_as_accurate_as_rounding(right.answer._replace(**{name: x}), right)


# --- sizes, softmaxes, rows that don't count ---


def maxima_that_move(engine: Engine) -> Problem:
    """The running maximum is raised in every tile, or in the first tile alone, or in the last and partial tile."""
    (n, v, _), (hidden, weight, labels) = engine.shape, engine.problem(1.0)
    column = jnp.arange(float(v))
    steps = jnp.stack([column, -column, jnp.where(column > v - 5, 500.0, 0.0)])
    weight = weight.at[:, :3].set(steps.T.astype(engine.dtype))
    return Problem(hidden.at[:, :3].set(jnp.eye(3, dtype=engine.dtype)[np.arange(n) % 3]), weight, labels)


def far_below_zero(engine: Engine) -> Problem:
    """A column past the vocabulary has a product of 0: its logit would be the largest."""
    hidden, weight, labels = engine.problem()
    return Problem(hidden.at[:, 0].set(30), weight.at[:, 0].set(-10), labels)


PROBLEMS = [
    ("peaked", "most", {"temperature": 0.6, "softcap": 20.0, "collision": True}),
    ("near-uniform", "every", {}),
    ("peaked", "a block and one", {"temperature": 2.5}),
    ("saturated", "few", {}),  # a block's free places have no statistics: exponentials must not meet their zeros
    ("saturated", "none", {}),
    *((make, "every", {}) for make in (maxima_that_move, far_below_zero)),
]


@pytest.mark.parametrize(("engine", "softmax", "rows", "options"), every(EVERY, *PROBLEMS))
def test_any_softmax_of_any_rows_matches_float64(engine: Engine, softmax: Any, rows: str, options: Any) -> None:
    """The temperature is traced."""
    problem = engine.problem(SCALES[softmax]) if softmax in SCALES else softmax(engine)
    with engine.strictly():
        check(problem, random_cotangents(len(problem.labels)), live=engine.live(rows), impl=engine.impl, **options)


@pytest.mark.parametrize(
    ("engine", "shape"),
    [
        parameter(XLA_BF16, (1, 131, 16)),
        parameter(XLA_BF16, (5003, 37, 8)),
        *every(PLAIN, ((3, 1, 1),), ((2, 5, 1),)),
        parameter(TPU, (40, 326, 200), nightly=True),  # the last step has no column
        parameter(TPU_F32, (1, 385, 64), nightly=True),  # the last step has one column
        parameter(TPU, (129, 2, 128), nightly=True),
        parameter(GPU, (1, 136, 64), nightly=True),
        parameter(GPU, (129, 8, 64), nightly=True),
        parameter(GPU, (7, 1032, 192), nightly=True),
    ],
)
def test_any_size_matches_float64(engine: Engine, shape: tuple[int, int, int]) -> None:
    problem = engine._replace(shape=shape).problem()
    with engine.strictly():
        check(problem, random_cotangents(shape[0]), impl=engine.impl)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [parameter(TPU), parameter(TPU_F32, nightly=True)])
def test_likelihoods_have_gradients_without_entropy_on_tpus(engine: Engine) -> None:
    """dh comes from the expectation of W. Where that is bfloat16, dh's largest error may be more than rounding's."""
    options: dict[str, Any] = {"temperature": 0.7, "softcap": 20.0, "largest": SLACK if engine is TPU_F32 else 0}
    cotangents = random_cotangents(300)._replace(entropy=None)
    with engine.strictly():
        check(engine.problem(), cotangents, live=engine.live("most"), impl=engine.impl, **options)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [parameter(TPU_F32), parameter(TPU, nightly=True)])
def test_a_near_certain_label_keeps_its_gradient_on_tpus(engine: Engine) -> None:
    """dh is (1 - p) (W[label] - the mean of W's other rows). With a rounded sum, 1 - p has an error of 1e-2."""
    hidden, weight, labels = engine.problem(1.0)
    at_label = weight[labels].astype(F32)
    lse = jax.nn.logsumexp(hidden.astype(F32) @ weight.T.astype(F32), axis=1)
    wanted = (lse + np.log(1e6))[:, None] * at_label / (at_label**2).sum(axis=1, keepdims=True)
    problem = Problem((hidden + wanted).astype(engine.dtype), weight, labels)
    cotangents, tolerance = Slopes(jnp.ones(300), jnp.zeros(300)), 1e-4 if engine is TPU_F32 else 2**-7
    right = exact(*problem, lambda _: cotangents).answer
    assert 1e-6 < np.median(-right.logprob) < 1e-4
    with engine.strictly():
        got = values_and_gradients(problem, cotangents, impl="mosaic_tpu", where=jnp.ones(300, bool))
    error = np.linalg.norm(np.asarray(got.hidden, np.float64) - right.hidden, axis=1)
    assert np.max(error / np.linalg.norm(right.hidden, axis=1)) < tolerance
    np.testing.assert_allclose(got.logprob, right.logprob, rtol=tolerance)


# --- whole numbers: their products have no rounding in any dtype and order ---


def whole_numbers(engine: Engine, vocabulary: int, most: int = 3) -> Problem:
    """Logits tie often, and half of the labels are the likeliest. Rows of the weight past the vocabulary are larger."""
    (n, v, d), rng = engine.shape, np.random.default_rng(0)
    hidden, weight = rng.integers(-most, most + 1, (n, d)), rng.integers(-3, 4, (v, d))
    hidden, weight = (np.asarray(jnp.asarray(x, engine.dtype), np.float64) for x in (hidden, weight))
    y = hidden @ weight[:vocabulary].T
    likeliest = [rng.choice(np.flatnonzero(row == row.max())) for row in y]  # any column that ties
    weight[vocabulary:] = 100
    labels = np.where(np.arange(n) % 2, likeliest, rng.integers(0, vocabulary, n))
    return Problem(*(jnp.asarray(x, engine.dtype) for x in (hidden, weight)), jnp.asarray(labels, jnp.int32))


HEATS = [(1e-6, None), (0.7, 20.0), (2.5, None), (1e-9, None), (1e-9, 20.0), (1e3, None), (1e3, 20.0)]


@pytest.mark.parametrize(("engine", "temperature", "softcap"), every((*PLAIN, TPU, TPU_F32, GPU), *HEATS))
def test_logits_of_any_size_lose_nothing_to_the_temperature(engine, temperature, softcap):
    """Products to 10,000 and a little. A statistic is off by roundings of its own, and under a softcap by tanh's.

    Whether the label is the likeliest, ties included, is exact. Where one token has all of the probability, the label's
    slope is 0 or 1 over the temperature.
    """
    common = engine.shape[1] - 90
    problem, live = whole_numbers(engine, common, most=400), engine.live("most")
    options: dict[str, Any] = {"softcap": softcap, "vocabulary": common, "where": live}
    sick, how = cases.poisoned(problem, ~live), {"temperature": temperature, "impl": engine.impl, "collision": True}
    with engine.strictly():
        got = values_and_gradients(sick, Slopes(jnp.ones(len(live))), **options, **how)
    heat, ones = float(np.float32(temperature)), np.ones(len(live))
    right = exact(*problem, lambda _: Slopes(ones), temperature=heat, **options).answer
    assert np.max(got.logprob) <= 0
    by_tanh = 0 if softcap is None else np.abs(right.lse).max()
    for name in ("logprob", "lse", "entropy", "collision"):
        value, want = (np.asarray(getattr(x, name), np.float64) for x in (got, right))
        np.testing.assert_array_less(np.abs(value - want), 8 * EPS * (1 + np.abs(want) + by_tanh), name)
    if softcap is None:
        hidden, weight, labels = (np.asarray(x, np.float64) for x in problem)
        y = hidden @ weight[:common].T
        correct = live & (y[np.arange(len(y)), labels.astype(int)] == y.max(axis=1))
        np.testing.assert_array_equal(got.likeliest, correct)
        rounding = 64 * EPS if engine.dtype == F32 else 2**-7
        for x, want in ((got.hidden, right.hidden), (got.weight, right.weight)):
            np.testing.assert_allclose(x, want, rtol=0, atol=rounding * np.abs(want).max())


@pytest.mark.parametrize("engine", [parameter(XLA), parameter(TPU_F32, slow=True)])
def test_a_steep_entropy_slope_meets_no_infinity(engine: Engine) -> None:
    """A mask's log-probability times this slope is beyond float32, and 0 times infinity is not 0."""
    small, steep = engine._replace(shape=(16, 100, 128)), np.full(16, 100, np.float32)
    problem, slopes, heat = small.problem(3e-6), Slopes(entropy=steep), np.float32(1e-6)
    with small.strictly():
        gradient = values_and_gradients(problem, slopes, temperature=heat, impl=engine.impl).hidden
    want = exact(*problem, lambda _: slopes, temperature=float(heat)).answer.hidden
    np.testing.assert_allclose(gradient, want, rtol=0, atol=64 * EPS * np.abs(want).max())


# --- labels ---


@pytest.mark.slow
def test_labels_are_the_same_in_every_integer_dtype() -> None:
    """The vocabulary is larger than some of the dtypes reach; 64 bits are NumPy's own."""
    hidden, weight, labels = XLA.problem()

    @jax.jit
    def run(given: Any) -> Any:
        return [token_logprobs(hidden, weight, x).logprob for pair in given for x in pair]

    dtypes = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
    fitting = [np.minimum(labels, min(XLA.shape[1] - 1, np.iinfo(dtype).max)) for dtype in dtypes]
    logprobs = run([(x, x.astype(dtype)) for x, dtype in zip(fitting, dtypes, strict=True)])
    np.testing.assert_array_equal(logprobs[::2], logprobs[1::2])
    for bad in (np.int64(2**32 + 5), np.int64(-(2**40))):
        with pytest.raises(ValueError, match=f"one is {bad}"):
            token_logprobs(hidden, weight, np.full(90, bad))
    narrow = np.resize([156, 3, 7], 90).astype(np.uint8)  # 156 is -100 in eight bits
    ignored = {x: token_logprobs(hidden, weight, narrow, ignore_index=x).lse == 0 for x in (-100, 156)}
    assert not ignored[-100].any()
    np.testing.assert_array_equal(ignored[156], narrow == 156)


def test_where_weights_and_ignore_index_count_the_same_tokens() -> None:
    problem, live = XLA.problem(), jnp.asarray(XLA.live("most"))
    labels = jnp.where(live, problem.labels, -100)
    ways: list[dict[str, Any]] = [{"where": live}, {"weights": live.astype(F32)}, {"ignore_index": -100}]
    ways += [{"where": jnp.arange(90) != 3, "weights": jnp.arange(90) % 4.0, "ignore_index": -100}]

    @jax.jit
    def run(labels: jax.Array) -> Any:
        got = [token_logprobs(*problem[:2], labels, **given) for given in ways]
        return got, [token_loss(*problem[:2], labels, OBJECTIVES["cross-entropy"], **given) for given in ways]

    got, losses = run(labels)
    for tokens, (loss, beside) in zip(got[:3], losses[:3], strict=True):
        assert_near((tokens, loss, beside), (got[0], losses[0][0], got[0]), 1e-6)
    all_three = live & (jnp.arange(90) != 3) & (jnp.arange(90) % 4 != 0)
    np.testing.assert_array_equal(got[3].lse != 0, all_three)
    assert_near(losses[3][0], -jnp.sum(jnp.where(all_three, jnp.arange(90) % 4 * got[0].logprob, 0)))


# --- shapes and dtypes, a copy of the weight ---


@pytest.mark.parametrize("leading", [(24, 1), (), (0,)], ids=str)
def test_outputs_are_float32_and_gradients_as_their_inputs(leading: tuple[int, ...]) -> None:
    hidden, weight, row = jnp.zeros((*leading, 16), BF16), jnp.zeros((131, 16)), jnp.zeros(leading)
    problem = Problem(hidden, weight, jnp.zeros(leading, int))
    rows = values_and_gradients.eval_shape(problem, Slopes(row, row, row))
    loss, rows_of_loss = cases.loss_and_gradients.eval_shape(problem, OBJECTIVES["cross-entropy"], (), row)
    want = [(leading, F32)] * 3 + [(hidden.shape, BF16), (weight.shape, F32), (leading, jnp.bool)]
    arrays = [x for x in (*rows, *rows_of_loss, loss) if x is not None]
    assert [(x.shape, x.dtype) for x in arrays] == [*want, *want, ((), F32)]


@pytest.mark.parametrize("engine", every((*NARROW, GPU), kernels="nightly"))
def test_a_weight_copy_is_multiplied_and_the_weight_learns(engine: Engine) -> None:
    """The weight is NaN, so that nothing reads it; its gradient is float32, and of bfloat16 products not rounded."""
    narrow, live = engine.problem(), engine.live("most")
    weights, cotangents = jnp.where(live, 0.7, 0.0), random_cotangents(len(live))
    unread = narrow._replace(weight=jnp.full(narrow.weight.shape, jnp.nan, F32))
    as_wide = narrow._replace(weight=narrow.weight.astype(F32))
    options: dict[str, Any] = {"impl": engine.impl, "temperature": 0.6, "weight_copy": narrow.weight}
    with engine.strictly():
        values = values_and_gradients(unread, cotangents, where=jnp.asarray(live), **options)
        loss = cases.loss_and_gradients(unread, OBJECTIVES["entropy bonus"], (), weights, **options)
    how: dict[str, Any] = {"temperature": 0.6, "dtype": BF16}
    assert_as_accurate_as_rounding(values, exact(*as_wide, lambda _: cotangents, where=live, **how))
    right = cases.exact_loss(*as_wide, OBJECTIVES["entropy bonus"], weights=weights, **how)
    assert_as_accurate_as_rounding(loss.rows, right.rows)
    assert values.weight.dtype == loss.rows.weight.dtype == F32
