"""`token_logprobs` by every engine against float64: values, gradients, labels and rows that don't count.

What is right, and how near is near enough, is said in lm_head_cases.py; what is strict in strict_tpu.py and
strict_gpu.py; what is off which tile in engines.py. Losses are in test_head_losses.py.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import BF16, EVERY, F32, FULL, GPU, GPU_SIZES, TPU, TPU_F32, XLA, XLA_BF16, Engine, engines
from lm_head_cases import (
    OBJECTIVES,
    SCALES,
    Plain,
    Problem,
    assert_as_accurate_as_plain,
    check,
    largest_magnitude,
    loss_and_gradients,
    plain_values_and_gradients,
    planted_problem,
    poisoned,
    random_cotangents,
    random_problem,
    root_mean_square,
    tied_problem,
    values_and_gradients,
)
from oracle import SLACK, exact
from strict_gpu import needs_interpreter, strict_interpreter

from kernels.lm_head import TokenLogprobs, token_logprobs
from kernels.lm_head.gpu import tiles as gpu_tiles
from kernels.lm_head.gpu.tiles import Sizes, Tiles


def run(engine: Engine, problem: Problem, cotangents: TokenLogprobs, **options: Any) -> Plain:
    """Values and gradients, by the program that most tests share."""
    options = {"where": jnp.ones(len(problem.labels), bool), **options}
    with engine.strictly():
        return jax.block_until_ready(values_and_gradients(*problem, cotangents, impl=engine.impl, **options))


def assert_accurate(engine: Engine, problem: Problem, cotangents: TokenLogprobs | None = None, **options: Any) -> Plain:
    """Values and gradients, after they were found as accurate as those of full logits."""
    if cotangents is None:
        cotangents = random_cotangents(len(problem.labels))
    with engine.strictly():
        return check(problem, cotangents, impl=engine.impl, **options)


# --- sizes, softmaxes, cotangents ---


@pytest.mark.parametrize(
    ("engine", "shape"),
    [
        pytest.param(XLA_BF16, (1, 131, 16), id="xla, one token"),
        pytest.param(XLA_BF16, (24, 2, 16), id="xla, two words"),
        pytest.param(XLA_BF16, (5, 2011, 8), id="xla, many words"),
        pytest.param(XLA_BF16, (5003, 37, 8), id="xla, many tokens"),
        pytest.param(TPU_F32, (1, 385, 64), id="tpu, one token, and a last step of one column"),
        pytest.param(TPU, (40, 326, 200), id="tpu, a last step without columns"),
        pytest.param(TPU, (129, 2, 128), id="tpu, two words"),
        pytest.param(GPU, (1, 136, 64), id="gpu, one token", marks=needs_interpreter),
        pytest.param(GPU, (129, 8, 64), id="gpu, eight words", marks=needs_interpreter),
        pytest.param(GPU, (7, 1032, 192), id="gpu, many tiles", marks=[needs_interpreter, pytest.mark.slow]),
    ],
)
def test_any_size_is_as_accurate_as_full_logits(engine: Engine, shape: tuple[int, int, int]) -> None:
    assert_accurate(engine, engine.problem(shape=shape))


@engines(*EVERY)
@pytest.mark.parametrize("softmax", SCALES)
def test_any_softmax_is_as_accurate_as_full_logits(engine: Engine, softmax: str) -> None:
    assert_accurate(engine, engine.problem(SCALES[softmax]))


@engines()
@pytest.mark.parametrize("output", TokenLogprobs._fields)
def test_a_cotangent_of_one_output_alone_has_gradients_as_accurate(engine: Engine, output: str) -> None:
    assert_accurate(engine, engine.problem(SCALES["peaked"]), random_cotangents(engine.shape[0], output))


@engines(*EVERY)
@pytest.mark.parametrize("make", [planted_problem, tied_problem])
def test_exact_matches_and_ties_at_10000_are_as_accurate_as_full_logits(engine: Engine, make: Any) -> None:
    assert_accurate(engine, make(engine.dtype, 1e4, engine.shape))


@engines()
def test_logits_that_rise_and_fall_from_tile_to_tile_are_as_accurate_as_full_logits(engine: Engine) -> None:
    """The running maximum is raised in every tile, or in the first alone, or in the last and partial one."""
    (n, v, _), (hidden, weight, labels) = engine.shape, engine.problem(1.0)
    column = jnp.arange(float(v))
    steps = jnp.stack([column, -column, jnp.where(column > v - 5, 500.0, 0.0)])
    weight = weight.at[:, :3].set(steps.T.astype(engine.dtype))
    hidden = hidden.at[:, :3].set(jnp.eye(3, dtype=engine.dtype)[np.arange(n) % 3])
    assert_accurate(engine, Problem(hidden, weight, labels))


@engines()
def test_logits_far_below_zero_are_as_accurate_as_full_logits(engine: Engine) -> None:
    """A column past the vocabulary, whose product is 0, would have the largest of all logits."""
    hidden, weight, labels = engine.problem()
    assert_accurate(engine, Problem(hidden.at[:, 0].set(30), weight.at[:, 0].set(-10), labels))


@engines()
def test_the_outputs_alone_are_as_accurate_as_full_logits(engine: Engine) -> None:
    """On a TPU they are another kernel's, with one product."""
    live, problem = engine.live("scattered, of several blocks"), engine.problem()
    with engine.strictly():
        got = jax.jit(lambda *x: token_logprobs(*x, where=live, impl=engine.impl))(*poisoned(problem, ~live))
    want = exact(*problem, lambda *_: np.zeros((3, len(live))), where=live)
    for x, y in zip(got, want[:3], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
        assert not np.any(np.asarray(x)[~live])


@engines()
def test_the_softcap_comes_first_then_a_temperature_that_may_be_traced(engine: Engine) -> None:
    problem, cotangents = engine.problem(30.0), random_cotangents(engine.shape[0])

    @jax.jit
    def traced(temperature: jax.Array) -> Plain:
        def outputs(h: jax.Array, w: jax.Array) -> TokenLogprobs:
            return token_logprobs(h, w, problem.labels, temperature=temperature, softcap=20.0, impl=engine.impl)

        outputs, pull_back = jax.vjp(outputs, *problem[:2])
        return Plain(*outputs, *pull_back(cotangents))

    for temperature in (0.6, 2.5):
        with engine.strictly():
            got = traced(jnp.float32(temperature))
        options: dict[str, Any] = {"temperature": temperature, "softcap": 20.0}
        yardstick = plain_values_and_gradients(*problem, cotangents, **options)
        assert_as_accurate_as_plain(got, yardstick, exact(*problem, lambda *_: cotangents, **options))


# --- labels ---


@engines(FULL, XLA)
def test_a_certain_label_has_logprob_and_entropy_zero_and_no_gradient(engine: Engine) -> None:
    eye = jnp.eye(16, dtype=F32)
    labels = jnp.arange(90, dtype=jnp.int32) % 16
    problem = Problem(1e4 * eye[labels], jnp.zeros((301, 16)).at[:16].set(eye), labels)
    ones = jnp.ones(90)
    got = assert_accurate(engine, problem, TokenLogprobs(ones, 0 * ones, ones))
    assert not np.any([got.logprob, got.entropy])
    np.testing.assert_array_equal(got.lse, 1e4)
    assert not np.any(got.hidden)
    assert not np.any(got.weight)


@engines()
def test_a_traced_label_outside_of_the_vocabulary_hits_nothing(engine: Engine) -> None:
    """Nor the padding of the last tile. Its logprob is -lse, and its gradient that of the normaliser alone."""
    n, v, _ = engine.shape
    problem, cotangents = engine.problem(), random_cotangents(n)
    past_tile = -(-v // engine.tile_columns) * engine.tile_columns
    outside = np.asarray([v, past_tile - 1, past_tile, 2**31 - 1, -1, -(2**31)], np.int64)
    labels = problem.labels.at[::2].set(np.resize(outside, (n + 1) // 2).astype(np.int32))
    got = run(engine, problem._replace(labels=labels), cotangents)
    np.testing.assert_array_equal(got.logprob[::2], -got.lse[::2])
    without = cotangents.logprob.at[::2].set(0)
    lse = cotangents.lse.at[::2].add(-cotangents.logprob[::2])
    truth = exact(*problem, lambda *_: (without, lse, cotangents.entropy))
    for x, y in zip(got[3:], truth[3:5], strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=0, atol=2**-7 * np.abs(y).max())


@engines(FULL, XLA)
def test_labels_may_be_narrow_unsigned_integers(engine: Engine) -> None:
    problem = random_problem((5, 20011, 8))
    narrow = problem.labels.astype(jnp.uint16)
    got = jax.jit(lambda *x: token_logprobs(*x, impl=engine.impl))(problem.hidden, problem.weight, narrow)
    want = exact(*problem, lambda *_: np.zeros((3, 5)))
    np.testing.assert_allclose(got.logprob, want.logprob, rtol=1e-5)


# --- rows that don't count, shapes and dtypes ---


@engines()
@pytest.mark.parametrize(
    ("rows", "softmax"),
    [
        ("none", "peaked"),
        ("scattered, of several blocks", "peaked"),
        ("scattered, less than a block", "saturated"),
        ("a block", "peaked"),
        ("a block and one", "peaked"),
    ],
)
def test_rows_left_out_give_zeros_and_leak_nothing(engine: Engine, rows: str, softmax: str) -> None:
    """A block's free places hold rows without statistics: exponentials of 1e4 must not meet their zeros."""
    live, problem = engine.live(rows), engine.problem(SCALES[softmax])
    cotangents, where = random_cotangents(len(live)), jnp.asarray(live)
    poison = TokenLogprobs(*(jnp.where(live, x, jnp.nan) for x in cotangents))
    got = run(engine, poisoned(problem, ~live), poison, where=where)
    yardstick = plain_values_and_gradients(*problem, cotangents, where=where)
    assert_as_accurate_as_plain(got, yardstick, exact(*problem, lambda *_: cotangents, where=live))
    assert not np.any([np.asarray(x)[~live] for x in got[:3]])
    assert not np.any(np.asarray(got.hidden, np.float32)[~live])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("leading", [(24, 1), (), (0,)], ids=str)
def test_outputs_are_float32_and_gradients_have_their_input_s_shape_and_dtype(
    dtype: Any, leading: tuple[int, ...]
) -> None:
    hidden, weight = jnp.zeros((*leading, 16), dtype), jnp.zeros((131, 16))
    problem, row = Problem(hidden, weight, jnp.zeros(leading, int)), jnp.zeros(leading)
    want = [((*leading,), jnp.float32)] * 3 + [(hidden.shape, dtype), (weight.shape, jnp.float32)]
    rows = values_and_gradients.eval_shape(*problem, TokenLogprobs(row, row, row))
    assert [(x.shape, x.dtype) for x in rows] == want
    loss, rows = loss_and_gradients.eval_shape(problem, OBJECTIVES["cross-entropy"], (), row)
    assert [(x.shape, x.dtype) for x in rows] == want
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


# --- TPUs: dh from the expectation of W, where the entropy has no cotangent ---


def likelihoods(
    engine: Engine, problem: Problem, cotangents: TokenLogprobs, where: np.ndarray, **options: Any
) -> Plain:
    """Values and gradients, where the entropy has no cotangent, not even zeros."""

    @jax.jit
    def run(hidden: jax.Array, weight: jax.Array) -> Plain:
        def both(h: jax.Array, w: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            got = token_logprobs(h, w, problem.labels, where=where, impl="mosaic_tpu", **options)
            return (got.logprob, got.lse), got.entropy

        outputs, pull_back, entropy = jax.vjp(both, hidden, weight, has_aux=True)
        return Plain(*outputs, entropy, *pull_back((cotangents.logprob, cotangents.lse)))

    with engine.strictly():
        return run(problem.hidden, problem.weight)


def test_likelihoods_have_their_gradient_without_the_entropy_on_tpus() -> None:
    live, cotangents = TPU.live("scattered, of several blocks"), random_cotangents(300, "logprob lse")
    problem, options = TPU_F32.problem(), {"where": live, "temperature": 0.7, "softcap": 20.0}
    got = likelihoods(TPU_F32, poisoned(problem, ~live), cotangents, **options)
    yardstick = plain_values_and_gradients(*problem, cotangents, **options)
    assert_as_accurate_as_plain(got, yardstick, exact(*problem, lambda *_: cotangents, **options))
    assert not np.any(np.asarray(got.hidden)[~live])


def test_the_expectation_that_is_saved_in_bfloat16_is_rounded_once_more_on_tpus() -> None:
    """The gradient by hidden may then be off by half as much again as that of full logits, where it is worst."""
    problem, cotangents = TPU.problem(), random_cotangents(300, "logprob lse")
    got = likelihoods(TPU, problem, cotangents, np.ones(300, bool))
    yardstick = plain_values_and_gradients(*problem, cotangents)
    truth = exact(*problem, lambda *_: cotangents)
    assert_as_accurate_as_plain(got._replace(hidden=yardstick.hidden), yardstick, truth)
    error, allowed = (np.asarray(x.hidden, np.float64) - truth.hidden for x in (got, yardstick))
    assert root_mean_square(error) <= SLACK * root_mean_square(allowed)
    assert largest_magnitude(error) <= 1.5 * largest_magnitude(allowed)


@pytest.mark.parametrize(("engine", "tolerance"), [(TPU_F32, 1e-4), (TPU, 2**-7)], ids=["float32", "bfloat16"])
def test_a_label_with_all_but_1e_5_of_the_probability_keeps_its_gradient_on_tpus(
    engine: Engine, tolerance: float
) -> None:
    """dh is (1 - p) (W[label] - the others' mean of W); a 1 - p from a rounded sum has an error of 1e-2."""
    hidden, weight, labels = engine.problem(1.0)
    at_label = weight[labels].astype(F32)
    lse = jax.nn.logsumexp(hidden.astype(F32) @ weight.T.astype(F32), axis=1)
    wanted = (lse + np.log(1e6))[:, None] * at_label / (at_label**2).sum(axis=1, keepdims=True)
    problem = Problem((hidden + wanted).astype(engine.dtype), weight, labels)
    cotangents = TokenLogprobs(jnp.ones(300), jnp.zeros(300), jnp.zeros(300))
    truth = exact(*problem, lambda *_: cotangents)
    assert 1e-6 < np.median(-truth.logprob) < 1e-4
    for got in (likelihoods(engine, problem, cotangents, np.ones(300, bool)), run(engine, problem, cotangents)):
        error = np.linalg.norm(np.asarray(got.hidden, np.float64) - truth.hidden, axis=1)
        assert np.max(error / np.linalg.norm(truth.hidden, axis=1)) < tolerance
        np.testing.assert_allclose(got.logprob, truth.logprob, rtol=tolerance)


# --- Hopper: clusters, and the order of events ---


@needs_interpreter
def test_blocks_that_share_a_cluster_are_as_accurate_as_full_logits() -> None:
    """They are 128 rows each, and share what they load of the weight."""
    with gpu_tiles.override(Sizes(Tiles(columns=256, slots=2, cluster=2), chunk=256)), strict_interpreter():
        problem = GPU.problem(shape=(300, 520, 128))
        check(problem, random_cotangents(300), impl="mosaic_gpu", where=jnp.arange(300) % 7 != 0)


@needs_interpreter
@pytest.mark.parametrize("multiprocessors", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_any_number_of_multiprocessors_is_as_accurate(multiprocessors: int) -> None:
    problem, cotangents = GPU.problem(), random_cotangents(200)
    with gpu_tiles.override(GPU_SIZES), strict_interpreter(multiprocessors=multiprocessors):
        got = jax.jit(lambda *x: values_and_gradients.__wrapped__(*x, impl="mosaic_gpu"))(*problem, cotangents)
    assert_as_accurate_as_plain(
        got, plain_values_and_gradients(*problem, cotangents), exact(*problem, lambda *_: cotangents)
    )


@needs_interpreter
@pytest.mark.parametrize("seconds", [1e-6, 1e-2])
def test_threads_that_take_turns_otherwise_give_the_same_bits_without_a_race(seconds: float) -> None:
    problem, before = GPU.problem(), sys.getswitchinterval()
    calm = assert_accurate(GPU, problem)
    sys.setswitchinterval(seconds)
    try:
        jax.tree.map(np.testing.assert_array_equal, assert_accurate(GPU, problem), calm)
    finally:
        sys.setswitchinterval(before)
