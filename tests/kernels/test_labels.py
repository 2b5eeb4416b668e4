"""What labels say beside their log-probability: whether they are the likeliest, don't count, or are out of range.

And what an objective gets by name: the log-normaliser, and the mean of the logits.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import BF16, F32, FULL, GPU, TPU, TPU_F32, XLA, XLA_BF16, Engine, engines, parameter
from lm_head_cases import Problem, assert_near
from oracle import exact

from lm_head import token_logprobs, token_loss

RNG = np.random.default_rng(0)


def whole_numbers(shape: tuple[int, int, int], dtype):
    """Whole numbers tie often, and every dtype sums them exactly."""
    n, v, d = shape
    hidden, weight = (RNG.integers(-2, 3, size).astype(dtype) for size in ((n, d), (v, d)))
    where = RNG.random(n) < 0.7
    logits = hidden.astype(np.float64) @ weight.astype(np.float64).T
    wanted = np.array([RNG.choice(np.flatnonzero(row == row.max())) for row in logits])  # any of those that tie
    labels = np.where(RNG.random(n) < 0.5, wanted, RNG.integers(0, v, n))
    correct = where & (logits[np.arange(n), labels] == logits.max(1))
    labels[~where], hidden[~where] = -100, np.nan
    return [jnp.asarray(x) for x in (hidden, weight, labels, where)], correct


@engines(XLA, XLA_BF16, FULL, TPU, GPU)
def test_the_likeliest_label_ties_included_is_that_of_full_logits_in_both_functions(engine: Engine):
    (hidden, weight, labels, where), correct = whole_numbers(engine.shape, engine.dtype)
    options = {"where": where, "impl": engine.impl}
    with engine.strictly():
        alone = jax.jit(lambda *x: token_logprobs(*x, **options))(hidden, weight, labels)
        beside = jax.jit(lambda *x: token_loss(*x, lambda logprob, _: -logprob, **options)[1])(hidden, weight, labels)
    for tokens in (alone, beside):
        np.testing.assert_array_equal(tokens.likeliest, correct)


def z_loss(logprob, entropy, *, lse):
    return -logprob + 0.01 * lse**2


def smoothed(logprob, entropy, advantage, *, lse, mean_logit):
    return -advantage * (0.9 * logprob + 0.1 * (mean_logit - lse)) + 0.01 * entropy


def in_float64(problem: Problem, objective, operands, weights, temperature):
    """Loss and gradients by full logits, which JAX differentiates."""
    with jax.enable_x64(True):
        hidden, weight = (jnp.asarray(np.asarray(x, np.float64)) for x in problem[:2])

        def loss(hidden, weight):
            z = hidden @ weight.T / temperature
            log_p = jax.nn.log_softmax(z)
            logprob, entropy = log_p[jnp.arange(len(z)), problem.labels], -jnp.sum(jnp.exp(log_p) * log_p, 1)
            named = {"lse": jax.nn.logsumexp(z, 1), "mean_logit": z.mean(1)}
            named = named if objective is smoothed else {"lse": named["lse"]}
            return jnp.sum(weights * objective(logprob, entropy, *operands, **named))

        return jax.value_and_grad(loss, (0, 1))(hidden, weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "objective"),
    [
        *(parameter(engine, smoothed) for engine in (XLA, XLA_BF16, FULL, GPU)),
        *(parameter(engine, z_loss) for engine in (XLA, TPU_F32)),
    ],
)
def test_an_objective_may_take_the_normaliser_and_the_mean_logit_by_name(engine: Engine, objective):
    """Rows that don't count hold NaN."""
    problem, live = engine.problem(), engine.live("most")
    operands = [jnp.asarray(RNG.normal(size=len(live)), F32)] if objective is smoothed else []
    weights = jnp.asarray(live * RNG.normal(size=len(live)), F32)
    sick = jnp.where(live[:, None], problem.hidden, jnp.nan)

    def loss(hidden, weight):
        options = {"weights": weights, "temperature": 0.7, "impl": engine.impl}
        return token_loss(hidden, weight, problem.labels, objective, *operands, **options)[0]

    with engine.strictly():
        value, (dh, dw) = jax.jit(jax.value_and_grad(loss, (0, 1)))(sick, problem.weight)
    want, wanted = in_float64(problem, objective, operands, weights, 0.7)
    tolerance = 5e-5 if engine.dtype == F32 else 2e-2
    assert_near(value, want, tolerance)
    assert_near([x.astype(F32) for x in (dh, dw)], wanted, tolerance)


def test_the_mean_logit_is_that_of_the_copy_and_its_gradient_reaches_the_weight():
    problem = XLA.problem()
    copy = problem.weight.astype(BF16)

    def loss(weight, **given):
        return token_loss(problem.hidden, weight, problem.labels, lambda *_, mean_logit: mean_logit, **given)[0]

    value, dw = jax.jit(jax.value_and_grad(loss))(problem.weight, weight_copy=copy)
    want, wanted = jax.jit(jax.value_and_grad(loss))(copy.astype(F32))
    assert_near((value, dw), (want, wanted))


def test_what_counts_may_be_said_by_where_weights_or_a_label_in_both_functions():
    problem, live = XLA.problem(), jnp.asarray(XLA.live("most"))
    labels = jnp.where(live, problem.labels, -100)
    ways = [{"where": live}, {"weights": live.astype(F32)}, {"ignore_index": -100}]
    ways = [*ways, {"where": jnp.arange(90) != 3, "weights": jnp.arange(90) % 4.0, "ignore_index": -100}]

    @jax.jit
    def run(labels):
        got = [token_logprobs(*problem[:2], labels, **given) for given in ways]
        return got, [token_loss(*problem[:2], labels, lambda logprob, _: -logprob, **given) for given in ways]

    got, losses = run(labels)
    for tokens, (loss, beside) in zip(got[:3], losses[:3], strict=True):
        assert_near((tokens, loss, beside), (got[0], losses[0][0], got[0]), 1e-6)
    every = live & (jnp.arange(90) != 3) & (jnp.arange(90) % 4 != 0)
    np.testing.assert_array_equal(got[3].lse != 0, every)
    assert_near(losses[3][0], -jnp.sum(jnp.where(every, jnp.arange(90) % 4 * got[0].logprob, 0)))


@engines(XLA, FULL, TPU, GPU)
def test_traced_labels_out_of_range_give_nan_and_change_no_other_row(engine: Engine):
    """A ValueError says so where labels are known."""
    problem, ones = engine.problem(), jnp.ones(engine.shape[0])
    labels = problem.labels.at[5].set(-100).at[9].set(10**6)
    bad = np.isin(np.arange(len(ones)), [5, 9])

    @jax.jit
    def run(hidden, weight, labels):
        def loss(hidden, weight):
            return token_loss(hidden, weight, labels, lambda logprob, _: -logprob, weights=ones, impl=engine.impl)

        def mean(weight):
            return token_logprobs(hidden, weight, labels, impl=engine.impl).logprob.mean()

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, weight), jax.value_and_grad(mean)(weight)

    with engine.strictly():
        ((loss, tokens), (dh, dw)), (mean, by_mean) = run(*problem[:2], labels)
    right = exact(*problem, lambda *_: np.zeros((3, len(ones)))).logprob
    np.testing.assert_array_equal(np.isnan(tokens.logprob), bad)
    assert not tokens.likeliest[bad].any()
    assert np.isfinite(tokens.lse).all()
    assert_near(tokens.logprob[~bad], right[~bad])
    assert all(np.isnan(broken) for broken in (loss, mean, dw.sum(), by_mean.sum()))
    np.testing.assert_array_equal(np.isnan(dh.astype(F32).sum(1)), bad)
