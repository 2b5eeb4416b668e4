"""`filter_eps`: gradients without tiles in which no token is likely, streaming on any machine, Hopper interpreted.

Tokens of a peaked vocabulary have all their probability in the first columns, as frequent words have. What is left out
is bounded by the probabilities that are below the threshold, a token and a column at a time.
"""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lm_head_cases import Problem, random_problem
from strict_gpu import needs_interpreter, strict_interpreter

from kernels.lm_head import token_logprobs, token_loss
from kernels.lm_head.gpu import tiles as gpu_tiles
from kernels.lm_head.gpu.tiles import Sizes, Tiles

EPS = 2.0**-12
SHAPES = {"xla": (24, 5000, 16), "mosaic_gpu": (200, 496, 128)}
FREQUENT = {"xla": 1000, "mosaic_gpu": 120}
"""Columns that are likely; all of the first tile."""
every_engine = pytest.mark.parametrize("impl", ["xla", pytest.param("mosaic_gpu", marks=needs_interpreter)])


def peaked(impl: str) -> Problem:
    """Logits of rare words are 20 below those of frequent ones; a label in nine is a rare word."""
    hidden, weight, labels = random_problem(SHAPES[impl], 2.0, jnp.bfloat16)
    n, v, _ = SHAPES[impl]
    frequent = jnp.arange(v) < FREQUENT[impl]
    rare = jnp.arange(n) % 9 == 0
    labels = jnp.where(rare, v - 1, labels % FREQUENT[impl])
    return Problem(hidden.at[:, 0].set(1), weight.at[:, 0].set(jnp.where(frequent, 0, -20)), labels)


def losses(problem: Problem, impl: str, objective: Any = lambda logprob, entropy: -logprob, **options: Any) -> Any:
    """((loss, tokens), (dh, dW)); gradients in float32, as of float32 parameters."""
    masters = [x.astype(jnp.float32) for x in problem[:2]]

    def loss(h: jax.Array, w: jax.Array) -> Any:
        asked = {"dtype": jnp.bfloat16, "workspace": 0, **options}
        return token_loss(h, w, problem.labels, objective, impl=impl, **asked)

    sizes = Sizes(Tiles(columns=128, slots=2, cluster=1), chunk=256)
    interpreted = strict_interpreter() if impl == "mosaic_gpu" else contextlib.nullcontext()
    with gpu_tiles.override(sizes), interpreted:
        return jax.block_until_ready(jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*masters))


@functools.cache
def whole_and_filtered(impl: str) -> tuple[Any, Any]:
    return losses(peaked(impl), impl), losses(peaked(impl), impl, filter_eps=EPS)


def probabilities(problem: Problem) -> np.ndarray:
    h, w = (np.asarray(x, np.float64) for x in problem[:2])
    z = h @ w.T
    p = np.exp(z - z.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


@every_engine
def test_values_stay_and_gradients_lack_no_more_than_what_is_below_the_threshold(impl: str) -> None:
    problem = peaked(impl)
    (whole, (dh, dw)), (filtered, (dh_f, dw_f)) = whole_and_filtered(impl)
    jax.tree.map(np.testing.assert_array_equal, filtered, whole)
    p = probabilities(problem)
    lacking = np.where(p < EPS, p, 0)
    lacking[np.arange(len(p)), problem.labels] = 0
    h, w = (np.abs(np.asarray(x, np.float64)) for x in problem[:2])
    for got, want, most in ((dh_f, dh, lacking @ w), (dw_f, dw, lacking.T @ h)):
        assert np.all(np.abs(np.asarray(got, np.float64) - want) <= 1.01 * most + 1e-5 * np.abs(want).max())


@every_engine
def test_tiles_without_a_likely_token_or_a_label_are_left_out(impl: str) -> None:
    """Their rows of dW are exactly zero; the last tile, that of the rare labels, is not left out."""
    (_, (_, dw)), (_, (_, dw_f)) = whole_and_filtered(impl)
    assert np.all(np.any(dw, axis=1))
    zero = ~np.any(dw_f, axis=1)
    _, v, _ = SHAPES[impl]
    assert np.mean(zero) > 0.3
    assert not zero[: FREQUENT[impl]].any()
    assert not zero[v - 1]
    np.testing.assert_allclose(dw_f[v - 1], dw[v - 1], rtol=1e-5)


@every_engine
def test_with_a_workspace_the_same_tiles_are_left_out(impl: str) -> None:
    """Of those, too, whose logits it keeps; and rare words of the others get the gradient that is theirs."""
    (_, without), (_, kept) = whole_and_filtered(impl)[1], losses(peaked(impl), impl, filter_eps=EPS, workspace=2**30)
    np.testing.assert_array_equal(np.any(kept[1], axis=1), np.any(without[1], axis=1))
    for x, y in zip(kept, without, strict=True):
        assert np.all(np.abs(x - y) <= 2**-5 * np.abs(y).max(axis=1, keepdims=True))


@every_engine
def test_below_every_probability_it_changes_nothing(impl: str) -> None:
    problem = random_problem(SHAPES[impl], 1.0, jnp.bfloat16)
    assert probabilities(problem).min() > 1e-8
    jax.tree.map(np.testing.assert_array_equal, losses(problem, impl, filter_eps=1e-8), losses(problem, impl))


@pytest.mark.slow
@every_engine
def test_an_entropy_s_slope_is_left_out_with_it(impl: str) -> None:
    """Which is p (log p + H): of probabilities below the threshold at most |log p + H| times as much."""
    problem, bonus = peaked(impl), lambda logprob, entropy: -logprob - 0.1 * entropy
    (_, whole), (_, filtered) = (losses(problem, impl, bonus, **x) for x in ({}, {"filter_eps": EPS}))
    for got, want in zip(filtered, whole, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())
    assert np.mean(~np.any(filtered[1], axis=1)) > 0.3


def test_token_logprobs_takes_it_too() -> None:
    problem = peaked("xla")

    def gradient(**options: Any) -> jax.Array:
        total = lambda w: token_logprobs(problem.hidden, w, problem.labels, impl="xla", **options).logprob.sum()  # noqa: E731
        return jax.jit(jax.grad(total))(problem.weight)

    assert np.mean(~np.any(gradient(filter_eps=EPS), axis=1)) > 0.3
    assert np.all(np.any(gradient(), axis=1))


@pytest.mark.parametrize("eps", [0, -1e-3, 1, 2.0, float("nan"), float("inf")])
def test_what_is_no_probability_is_refused(eps: float) -> None:
    with pytest.raises(ValueError, match="filter_eps"):
        token_loss(*random_problem((3, 5, 8)), lambda logprob, entropy: -logprob, filter_eps=eps)


def test_a_traced_threshold_is_refused() -> None:
    with pytest.raises(ValueError, match="filter_eps"):
        jax.jit(lambda eps: token_logprobs(*random_problem((3, 5, 8)), filter_eps=eps))(0.1)
