"""The Pallas kernels for Hopper against float64, under the strict interpreter: sizes, softmaxes, cotangents and rows.

What is right and how near is near enough is said in lm_head_oracle.py, what is strict in strict_gpu.py. Products are of
bfloat16, the only ones there are. Tiles are small: 200 rows make two blocks, 296 columns three tiles of two chunks, of
each the last not full, and 128 features two slabs.
Objectives, workspaces and left-out tiles are in test_mosaic_gpu_loss.py, JAX's transformations and refusals in
test_mosaic_gpu_program.py.
"""

import sys
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
    plain_values_and_gradients,
    planted_problem,
    poisoned,
    random_cotangents,
    random_problem,
    tied_problem,
    values_and_gradients,
)
from lm_head_oracle import assert_as_accurate_as_plain, exact
from strict_gpu import needs_interpreter, strict_interpreter

from kernels.lm_head import TokenLogprobs, token_logprobs
from kernels.lm_head.gpu import tiles as gpu_tiles
from kernels.lm_head.gpu.tiles import Sizes, Tiles

pytestmark = needs_interpreter

BF16 = jnp.bfloat16
SHAPE = (200, 296, 128)
SLOW = pytest.mark.slow
SIZES = [(1, 136, 64), (129, 8, 64), pytest.param((128, 256, 64), marks=SLOW), pytest.param((7, 1032, 192), marks=SLOW)]
"""Of N, V and D: one token, eight words, nothing off a tile, many tiles."""
ONE_BLOCK = Sizes(Tiles(columns=128, slots=2, cluster=1), chunk=256)
TWO_BLOCKS = Sizes(Tiles(columns=256, slots=2, cluster=2), chunk=256)
"""A cluster's blocks of 128 rows each, which share what they load of the weight."""

LIVE = {
    "none": np.zeros(200, bool),
    "the first": np.arange(200) == 0,
    "the last": np.arange(200) == 199,
    "scattered": np.random.default_rng(5).random(200) < 0.4,
    "a block": np.arange(200) < 128,
    "a block and one": np.arange(200) >= 71,
}


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    with gpu_tiles.override(ONE_BLOCK):
        yield


def judge(problem: Problem, cotangents: TokenLogprobs | None = None, **options: Any) -> Plain:
    """Values and gradients, after they were found as accurate as those of full logits."""
    if cotangents is None:
        cotangents = random_cotangents(len(problem.labels))
    with strict_interpreter():
        return check(problem, cotangents, impl="mosaic_gpu", **options)


def fitting(problem: Problem) -> Problem:
    """Cut to the shape that is compiled already."""
    n, v, d = SHAPE
    labels = np.where(problem.labels[:n] < v, problem.labels[:n], 3)
    hidden, weight = (jnp.tile(x[:, : d // 2], 2) for x in (problem.hidden[:n], problem.weight[:v]))
    return Problem(hidden, weight, jnp.asarray(labels))


# --- sizes, softmaxes ---


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_any_size_is_as_accurate_as_full_logits(shape: tuple[int, int, int]) -> None:
    judge(random_problem(shape, dtype=BF16))


@pytest.mark.parametrize("softmax", SCALES)
def test_any_softmax_is_as_accurate_as_full_logits(softmax: str) -> None:
    judge(random_problem(SHAPE, SCALES[softmax], BF16))


@pytest.mark.parametrize("cotangent", ["logprob", "lse", "entropy"])
def test_each_output_has_its_gradient(cotangent: str) -> None:
    judge(random_problem(SHAPE, dtype=BF16), random_cotangents(200, cotangent))


@pytest.mark.parametrize("make", [planted_problem, tied_problem])
def test_exact_matches_and_ties_at_10000_are_as_accurate_as_full_logits(make: Any) -> None:
    judge(fitting(make(BF16, 1e4)))


def test_logits_that_rise_and_fall_from_tile_to_tile_are_as_accurate_as_full_logits() -> None:
    """The running maximum is raised in every tile, or in the first alone, or in the last and partial one."""
    hidden, weight, labels = random_problem(SHAPE, 1.0, BF16)
    steps = jnp.stack([jnp.arange(296.0), -jnp.arange(296.0), jnp.where(jnp.arange(296) > 291, 500.0, 0.0)])
    weight = weight.at[:, :3].set(steps.T.astype(BF16))
    hidden = hidden.at[:, :3].set(jnp.eye(3, dtype=BF16)[np.arange(200) % 3])
    judge(Problem(hidden, weight, labels))


def test_logits_far_below_zero_are_as_accurate_as_full_logits() -> None:
    """A column past the vocabulary, whose product is 0, would have the largest of all logits."""
    hidden, weight, labels = random_problem(SHAPE, dtype=BF16)
    judge(Problem(hidden.at[:, 0].set(30), weight.at[:, 0].set(-10), labels))


def test_a_certain_label_has_logprob_and_entropy_zero_and_no_gradient() -> None:
    eye = jnp.eye(128, dtype=BF16)
    labels = jnp.arange(200, dtype=jnp.int32) % 128
    problem = Problem(10240 * eye[labels], jnp.zeros((296, 128), BF16).at[:128].set(eye), labels)
    ones = jnp.ones(200)
    got = judge(problem, TokenLogprobs(ones, 0 * ones, ones))
    assert not np.any([got.logprob, got.entropy])
    np.testing.assert_array_equal(got.lse, 10240)
    assert not np.any(got.hidden)
    assert not np.any(got.weight)


@pytest.mark.parametrize(
    "wide",
    [
        pytest.param(("hidden",), marks=SLOW, id="hidden"),
        pytest.param(("weight",), marks=SLOW, id="weight"),
        pytest.param(("hidden", "weight"), id="both"),
    ],
)
def test_float32_masters_with_bfloat16_products_get_float32_gradients(wide: tuple[str, ...]) -> None:
    """As exact as bfloat16 inputs give them, but not rounded to bfloat16 at the end."""
    problem, cotangents = random_problem(SHAPE), random_cotangents(200)
    rounded = Problem(*(x.astype(BF16) for x in problem[:2]), problem.labels)
    given = rounded._replace(**{name: getattr(problem, name) for name in wide})
    with strict_interpreter():
        got = values_and_gradients(*given, cotangents, impl="mosaic_gpu", dtype=BF16)
    yardstick = plain_values_and_gradients(*rounded, cotangents)
    assert_as_accurate_as_plain(got, yardstick, exact(*rounded, lambda *_: cotangents))
    for name in wide:
        gradient = getattr(got, name)
        assert np.any(gradient != gradient.astype(BF16).astype(jnp.float32))


def test_the_outputs_alone_are_as_accurate_as_full_logits() -> None:
    live, problem = LIVE["scattered"], random_problem(SHAPE, dtype=BF16)
    with strict_interpreter():
        got = jax.jit(lambda *x: token_logprobs(*x, where=live, impl="mosaic_gpu"))(*poisoned(problem, ~live))
    want = exact(*problem, lambda *_: np.zeros((3, 200)), where=live)
    for x, y in zip(got, want[:3], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
        assert not np.any(np.asarray(x)[~live])


# --- clusters, chance ---


def test_blocks_that_share_a_cluster_are_as_accurate_as_full_logits() -> None:
    problem = random_problem((300, 520, 128), dtype=BF16)
    with gpu_tiles.override(TWO_BLOCKS):
        judge(poisoned(problem, np.zeros(300, bool)), where=jnp.arange(300) % 7 != 0)


@pytest.mark.parametrize("multiprocessors", [1, pytest.param(3, marks=SLOW)])
def test_any_number_of_multiprocessors_gives_the_same(multiprocessors: int) -> None:
    problem, cotangents = random_problem(SHAPE, dtype=BF16), random_cotangents(200)
    given = (*problem, cotangents)
    with strict_interpreter(multiprocessors=multiprocessors):
        run = jax.jit(lambda *x: values_and_gradients.__wrapped__(*x, impl="mosaic_gpu"))
        got = run(*given)
    assert_as_accurate_as_plain(got, plain_values_and_gradients(*given), exact(*problem, lambda *_: cotangents))


@pytest.mark.parametrize("seconds", [1e-6, 1e-4, 1e-2])
def test_threads_that_take_turns_otherwise_give_the_same_and_find_no_race(seconds: float) -> None:
    problem, before = random_problem(SHAPE, dtype=BF16), sys.getswitchinterval()
    calm = judge(problem)
    sys.setswitchinterval(seconds)
    try:
        jax.tree.map(np.testing.assert_array_equal, judge(problem), calm)
    finally:
        sys.setswitchinterval(before)


# --- scaling ---


def test_the_softcap_comes_first_then_a_temperature_that_may_be_traced() -> None:
    problem, cotangents = random_problem(SHAPE, 30.0, BF16), random_cotangents(200)

    @jax.jit
    def traced(temperature: jax.Array) -> Plain:
        def outputs(h: jax.Array, w: jax.Array) -> TokenLogprobs:
            return token_logprobs(h, w, problem.labels, temperature=temperature, softcap=20.0, impl="mosaic_gpu")

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
    edges = jnp.asarray([0, 1, 7, 8, 63, 64, 127, 128, 129, 191, 192, 255, 256, 257, 263, 264, 294, 295], jnp.int32)
    judge(random_problem(SHAPE, dtype=BF16)._replace(labels=jnp.resize(edges, 200)))


@pytest.mark.parametrize("label", [296, 383, 384, 512, 2**31 - 1, -1, -(2**31)])
def test_a_traced_label_outside_of_the_vocabulary_hits_nothing(label: int) -> None:
    """Nor the padding of the last tile. Its logprob is -lse, and its gradient that of the normaliser alone."""
    problem, cotangents = random_problem(SHAPE, dtype=BF16), random_cotangents(200)
    outside = problem._replace(labels=problem.labels.at[::2].set(label))
    with strict_interpreter():
        got = values_and_gradients(*outside, cotangents, impl="mosaic_gpu", where=jnp.ones(200, bool))
    np.testing.assert_array_equal(got.logprob[::2], -got.lse[::2])
    without = cotangents.logprob.at[::2].set(0)
    lse = cotangents.lse.at[::2].add(-cotangents.logprob[::2])
    truth = exact(*problem, lambda *_: (without, lse, cotangents.entropy))
    for x, y in zip(got[3:], truth[3:5], strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=0, atol=2**-7 * np.abs(y).max())


# --- rows that don't count ---


@pytest.mark.parametrize("rows", LIVE)
def test_rows_left_out_give_zeros_and_leak_nothing(rows: str) -> None:
    live, problem = LIVE[rows], random_problem(SHAPE, dtype=BF16)
    poison = TokenLogprobs(*(jnp.where(live, x, jnp.nan) for x in random_cotangents(200)))
    with strict_interpreter():
        dirty = poisoned(problem, ~live)
        got = values_and_gradients(*dirty, poison, impl="mosaic_gpu", where=jnp.asarray(live))
    cotangents = random_cotangents(200)
    yardstick = plain_values_and_gradients(*problem, cotangents, where=live)
    assert_as_accurate_as_plain(got, yardstick, exact(*problem, lambda *_: cotangents, where=live))
    assert not np.any([np.asarray(x)[~live] for x in got[:3]])
    assert not np.any(np.asarray(got.hidden, np.float32)[~live])


def test_rows_left_out_of_a_saturated_softmax_give_zeros_and_leak_nothing() -> None:
    """Their places hold other rows, with statistics of none: exponentials of 1e4 must not meet their zeros."""
    live = LIVE["scattered"]
    problem, cotangents = random_problem(SHAPE, SCALES["saturated"], BF16), random_cotangents(200)
    with strict_interpreter():
        got = values_and_gradients(*problem, cotangents, impl="mosaic_gpu", where=jnp.asarray(live))
    yardstick = plain_values_and_gradients(*problem, cotangents, where=live)
    assert_as_accurate_as_plain(got, yardstick, exact(*problem, lambda *_: cotangents, where=live))


def test_a_nan_in_a_row_that_counts_is_not_hidden() -> None:
    problem = random_problem(SHAPE, dtype=BF16)
    sick = np.arange(200) == 5
    problem = problem._replace(hidden=jnp.where(sick[:, None], jnp.nan, problem.hidden))
    with strict_interpreter():
        got = values_and_gradients(*problem, random_cotangents(200), impl="mosaic_gpu", where=jnp.ones(200, bool))
    for x in got[:3]:
        np.testing.assert_array_equal(np.isnan(x), sick)
    np.testing.assert_array_equal(np.isnan(got.hidden).any(axis=1), sick)
    assert np.isnan(got.weight).any()


# --- frozen sides ---


@pytest.mark.parametrize("side", [0, 1], ids=["hidden alone", "weight alone"])
def test_a_frozen_side_changes_nothing_of_the_other(side: int) -> None:
    problem, cotangents = random_problem(SHAPE, dtype=BF16), random_cotangents(200)
    both = judge(problem, cotangents)

    def outputs(x: jax.Array) -> TokenLogprobs:
        sides = [x if i == side else y for i, y in enumerate(problem[:2])]
        return token_logprobs(*sides, problem.labels, impl="mosaic_gpu")

    with strict_interpreter():
        (got,) = jax.jit(lambda x: jax.vjp(outputs, x)[1](cotangents))(problem[side])
    np.testing.assert_array_equal(got, both[3 + side])
