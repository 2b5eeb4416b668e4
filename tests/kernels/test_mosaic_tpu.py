"""The Pallas TPU kernels against float64, under the strict interpreter: sizes, dtypes, softmaxes, cotangents and rows.

What is right and how near is near enough is said in lm_head_oracle.py, what is strict in strict_tpu.py. Tiles are the
smallest that a TPU takes: 300 rows make three blocks, two of them in one call of a kernel and one in the next, and
700 columns three tiles of two steps each, the last not full.
Objectives and workspaces are in test_mosaic_tpu_loss.py, the kernels' work and JAX's transformations in
test_mosaic_tpu_program.py.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lm_head_cases import (
    SCALES,
    Plain,
    Problem,
    check,
    every_dtype,
    plain_values_and_gradients,
    planted_problem,
    poisoned,
    random_cotangents,
    random_problem,
    tied_problem,
    values_and_gradients,
)
from lm_head_oracle import SLACK, assert_as_accurate_as_plain, exact, largest_magnitude, root_mean_square
from strict_tpu import strict_interpreter

from kernels.lm_head import TokenLogprobs, token_logprobs
from kernels.lm_head.tpu import tiles

SHAPE = (300, 700, 64)
SIZES = [(1, 300, 64), (7, 1009, 128), (40, 2374, 200)]
"""Of N, V and D: off every tile. The last step of the last tile has one column at V = 300, none at V = 2374."""

LIVE = {
    "none": np.zeros(300, bool),
    "the first": np.arange(300) == 0,
    "the last": np.arange(300) == 299,
    "scattered, of several blocks": np.random.default_rng(5).random(300) < 0.6,
    "scattered, less than a block": np.random.default_rng(5).random(300) < 0.3,
    "a whole block": np.arange(300) % 2 * (np.arange(300) < 256) == 1,
    "a block and one": np.arange(300) < 129,
    "every": np.ones(300, bool),
}


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    with tiles.override(rows=128, columns=256, step=128, call=256):
        yield


def judge(problem: Problem, cotangents: TokenLogprobs | None = None, **options: Any) -> Plain:
    """Values and gradients, after they were found as accurate as those of full logits."""
    if cotangents is None:
        cotangents = random_cotangents(len(problem.labels))
    with strict_interpreter():
        return check(problem, cotangents, impl="mosaic_tpu", **options)


# --- sizes, dtypes, softmaxes ---


@every_dtype
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_any_size_is_as_accurate_as_full_logits(shape: tuple[int, int, int], dtype: Any) -> None:
    judge(random_problem(shape, dtype=dtype))


def test_two_words_are_as_accurate_as_full_logits() -> None:
    judge(random_problem((129, 2, 128)))


@every_dtype
@pytest.mark.parametrize("softmax", SCALES)
def test_any_softmax_is_as_accurate_as_full_logits(softmax: str, dtype: Any) -> None:
    judge(random_problem(SHAPE, SCALES[softmax], dtype))


@every_dtype
@pytest.mark.parametrize("cotangent", ["logprob", "lse", "entropy"])
def test_each_output_has_its_gradient(cotangent: str, dtype: Any) -> None:
    judge(random_problem(SHAPE, dtype=dtype), random_cotangents(300, cotangent))


@every_dtype
@pytest.mark.parametrize("make", [planted_problem, tied_problem])
def test_exact_matches_and_ties_at_10000_are_as_accurate_as_full_logits(make: Any, dtype: Any) -> None:
    judge(make(dtype, 1e4))


def test_logits_that_rise_and_fall_from_tile_to_tile_are_as_accurate_as_full_logits() -> None:
    """The running maximum is raised in every tile, or in the first alone, or in the last and partial one."""
    hidden, weight, labels = random_problem(SHAPE, 1.0)
    steps = jnp.stack([jnp.arange(700.0), -jnp.arange(700.0), jnp.where(jnp.arange(700) > 695, 500.0, 0.0)])
    weight = weight.at[:, :3].set(steps.T)
    hidden = hidden.at[:, :3].set(jnp.eye(3)[np.arange(300) % 3])
    judge(Problem(hidden, weight, labels))


def test_a_certain_label_has_logprob_and_entropy_zero_and_no_gradient() -> None:
    eye = jnp.eye(64, dtype=jnp.float32)
    labels = jnp.arange(300, dtype=jnp.int32) % 64
    problem = Problem(1e4 * eye[labels], jnp.zeros((700, 64)).at[:64].set(eye), labels)
    ones = jnp.ones(300)
    got = judge(problem, TokenLogprobs(ones, 0 * ones, ones))
    assert not np.any([got.logprob, got.entropy])
    np.testing.assert_array_equal(got.lse, 1e4)
    assert not np.any(got.hidden)
    assert not np.any(got.weight)


def test_float32_masters_with_bfloat16_products_get_float32_gradients() -> None:
    """As exact as bfloat16 inputs give them, but not rounded to bfloat16 at the end."""
    problem, cotangents = random_problem(SHAPE), random_cotangents(300)
    rounded = Problem(*(x.astype(jnp.bfloat16) for x in problem[:2]), problem.labels)
    with strict_interpreter():
        got = values_and_gradients(*problem, cotangents, impl="mosaic_tpu", dtype=jnp.bfloat16)
    yardstick = plain_values_and_gradients(*rounded, cotangents)
    assert_as_accurate_as_plain(got, yardstick, exact(*rounded, lambda *_: cotangents))
    for gradient in (got.hidden, got.weight):
        assert np.any(gradient != gradient.astype(jnp.bfloat16).astype(jnp.float32))


def likelihoods(problem: Problem, cotangents: TokenLogprobs, where: np.ndarray, **options: Any) -> Plain:
    """Values and gradients, where the entropy has no cotangent, not even zeros."""

    @jax.jit
    def run(hidden: jax.Array, weight: jax.Array) -> Plain:
        def both(h: jax.Array, w: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            got = token_logprobs(h, w, problem.labels, where=where, impl="mosaic_tpu", **options)
            return (got.logprob, got.lse), got.entropy

        outputs, pull_back, entropy = jax.vjp(both, hidden, weight, has_aux=True)
        return Plain(*outputs, entropy, *pull_back((cotangents.logprob, cotangents.lse)))

    with strict_interpreter():
        return run(problem.hidden, problem.weight)


def test_likelihoods_have_their_gradient_without_the_entropy_s() -> None:
    """That by hidden is made of the expectation of W, which comes with the values."""
    live, cotangents = LIVE["scattered, of several blocks"], random_cotangents(300, "logprob lse")
    problem, options = random_problem(SHAPE), {"where": live, "temperature": 0.7, "softcap": 20.0}
    got = likelihoods(poisoned(problem, ~live), cotangents, **options)
    yardstick = plain_values_and_gradients(*problem, cotangents, **options)
    assert_as_accurate_as_plain(got, yardstick, exact(*problem, lambda *_: cotangents, **options))
    assert not np.any(np.asarray(got.hidden)[~live])


def test_the_expectation_that_is_saved_in_bfloat16_is_rounded_once_more() -> None:
    """The gradient by hidden may then be off by half as much again as that of full logits, where it is worst."""
    cotangents, where = random_cotangents(300, "logprob lse"), np.ones(300, bool)
    problem = random_problem(SHAPE, dtype=jnp.bfloat16)
    got = likelihoods(problem, cotangents, where)
    yardstick = plain_values_and_gradients(*problem, cotangents)
    truth = exact(*problem, lambda *_: cotangents)
    assert_as_accurate_as_plain(got._replace(hidden=yardstick.hidden), yardstick, truth)
    error, allowed = (np.asarray(x.hidden, np.float64) - truth.hidden for x in (got, yardstick))
    assert root_mean_square(error) <= SLACK * root_mean_square(allowed)
    assert largest_magnitude(error) <= 1.5 * largest_magnitude(allowed)


def test_the_outputs_alone_are_as_accurate_as_full_logits() -> None:
    """They are another kernel's, with one product."""
    live = LIVE["scattered, of several blocks"]
    problem = random_problem(SHAPE)
    with strict_interpreter():
        alone = jax.jit(lambda *x: token_logprobs(*x, where=live, impl="mosaic_tpu"))
        got = alone(*poisoned(problem, ~live))
    want = exact(*problem, lambda *_: np.zeros((3, 300)), where=live)
    for x, y in zip(got, want[:3], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
        assert not np.any(np.asarray(x)[~live])


# --- scaling ---


def test_the_softcap_comes_first_then_a_temperature_that_may_be_traced() -> None:
    problem, cotangents = random_problem(SHAPE, 30.0, jnp.bfloat16), random_cotangents(300)

    @jax.jit
    def traced(temperature: jax.Array) -> Plain:
        def outputs(h: jax.Array, w: jax.Array) -> TokenLogprobs:
            return token_logprobs(h, w, problem.labels, temperature=temperature, softcap=20.0, impl="mosaic_tpu")

        outputs, pull_back = jax.vjp(outputs, *problem[:2])
        return Plain(*outputs, *pull_back(cotangents))

    for temperature in (0.6, 2.5):
        with strict_interpreter():
            got = traced(jnp.float32(temperature))
        options: dict[str, Any] = {"temperature": temperature, "softcap": 20.0}
        yardstick = plain_values_and_gradients(*problem, cotangents, **options)
        assert_as_accurate_as_plain(got, yardstick, exact(*problem, lambda *_: cotangents, **options))


# --- labels ---


def test_labels_at_the_edges_of_tiles_and_vocabulary_are_found() -> None:
    edges = jnp.asarray([0, 1, 127, 128, 255, 256, 383, 384, 511, 512, 513, 639, 640, 641, 699], jnp.int32)
    judge(random_problem(SHAPE)._replace(labels=jnp.tile(edges, 20)))


@pytest.mark.parametrize("label", [700, 767, 768, 1024, 2**31 - 1, -1, -(2**31)])
def test_a_traced_label_outside_of_the_vocabulary_hits_nothing(label: int) -> None:
    """Nor the padding of the last tile. Its logprob is -lse, and its gradient that of the normaliser alone."""
    problem, cotangents = random_problem(SHAPE), random_cotangents(300)
    outside = problem._replace(labels=problem.labels.at[::2].set(label))
    with strict_interpreter():
        got = values_and_gradients(*outside, cotangents, impl="mosaic_tpu", where=jnp.ones(300, bool))
    np.testing.assert_array_equal(got.logprob[::2], -got.lse[::2])
    without = cotangents.logprob.at[::2].set(0)
    lse = cotangents.lse.at[::2].add(-cotangents.logprob[::2])
    truth = exact(*problem, lambda *_: (without, lse, cotangents.entropy))
    np.testing.assert_allclose(got.hidden, truth.hidden, rtol=0, atol=1e-4 * np.abs(truth.hidden).max())
    np.testing.assert_allclose(got.weight, truth.weight, rtol=0, atol=1e-4 * np.abs(truth.weight).max())


# --- rows that don't count ---


@every_dtype
@pytest.mark.parametrize("rows", LIVE)
def test_rows_left_out_give_zeros_and_leak_nothing(rows: str, dtype: Any) -> None:
    live = LIVE[rows]
    problem = poisoned(random_problem(SHAPE, dtype=dtype), ~live)
    poison = TokenLogprobs(*(jnp.where(live, x, jnp.nan) for x in random_cotangents(300)))
    with strict_interpreter():
        got = values_and_gradients(*problem, poison, impl="mosaic_tpu", where=jnp.asarray(live))
    cotangents = random_cotangents(300)
    yardstick = plain_values_and_gradients(*problem, cotangents, where=live)
    assert_as_accurate_as_plain(got, yardstick, exact(*problem, lambda *_: cotangents, where=live))
    assert not np.any([np.asarray(x)[~live] for x in got[:3]])
    assert not np.any(np.asarray(got.hidden, np.float32)[~live])


def test_rows_left_out_of_a_saturated_softmax_give_zeros_and_leak_nothing() -> None:
    """Their places hold other rows, with statistics of none: exponentials of 1e4 must not meet their zeros."""
    live = LIVE["scattered, less than a block"]
    problem, cotangents = random_problem(SHAPE, SCALES["saturated"]), random_cotangents(300)
    with strict_interpreter():
        got = values_and_gradients(*problem, cotangents, impl="mosaic_tpu", where=jnp.asarray(live))
    yardstick = plain_values_and_gradients(*problem, cotangents, where=live)
    assert_as_accurate_as_plain(got, yardstick, exact(*problem, lambda *_: cotangents, where=live))


def test_logits_far_below_zero_are_as_accurate_as_full_logits() -> None:
    """A column past the vocabulary, whose product is 0, would have the largest of all logits."""
    hidden, weight, labels = random_problem(SHAPE)
    judge(Problem(hidden.at[:, 0].set(30), weight.at[:, 0].set(-10), labels))


def test_a_nan_in_a_row_that_counts_is_not_hidden() -> None:
    problem = random_problem(SHAPE)
    sick = np.arange(300) == 5
    problem = problem._replace(hidden=jnp.where(sick[:, None], jnp.nan, problem.hidden))
    with strict_interpreter():
        got = values_and_gradients(*problem, random_cotangents(300), impl="mosaic_tpu", where=jnp.ones(300, bool))
    for x in got[:3]:
        np.testing.assert_array_equal(np.isnan(x), sick)
    np.testing.assert_array_equal(np.isnan(got.hidden).any(axis=1), sick)
    assert np.isnan(got.weight).any()


# --- frozen sides ---


@pytest.mark.parametrize("side", [0, 1], ids=["hidden alone", "weight alone"])
def test_a_frozen_side_changes_nothing_of_the_other(side: int) -> None:
    problem, cotangents = random_problem(SHAPE), random_cotangents(300)
    both = judge(problem, cotangents)

    def outputs(x: jax.Array) -> TokenLogprobs:
        sides = [x if i == side else y for i, y in enumerate(problem[:2])]
        return token_logprobs(*sides, problem.labels, impl="mosaic_tpu")

    with strict_interpreter():
        (got,) = jax.jit(lambda x: jax.vjp(outputs, x)[1](cotangents))(problem[side])
    np.testing.assert_allclose(got, both[3 + side], rtol=1e-5, atol=1e-6)
