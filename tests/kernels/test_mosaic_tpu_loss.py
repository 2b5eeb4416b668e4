"""The Pallas TPU kernels behind `token_loss`, under the strict interpreter: objectives, workspaces and rows.

As in test_mosaic_tpu.py, tiles are small. A workspace of 0 leads to the kernels that compute logits twice; one for 128
tokens to several waves of tokens whose exponentials are kept; a large one to a single wave. Objectives of the entropy
always compute logits twice.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lm_head_cases import (
    OBJECTIVES,
    SCALES,
    Loss,
    Problem,
    check_loss,
    every_dtype,
    loss_and_gradients,
    operands_for,
    poisoned,
    random_problem,
    sparse_weights,
)
from lm_head_oracle import Objective
from strict_tpu import strict_interpreter

from kernels.lm_head import token_loss
from kernels.lm_head.tpu import tiles

SHAPE = (300, 700, 64)
ONE_WAVE = 1 << 30
WAVES = 4 * 768 * 128 + 4 * 700 * 64
"""Bytes for what is kept of 128 rows, in whole tiles, and for the float32 sum of a narrower gradient by the weight."""

every_workspace = pytest.mark.parametrize("workspace", [0, WAVES, ONE_WAVE], ids=["recomputed", "waves", "one wave"])

LIVE = {
    "none": np.zeros(300, bool),
    "one": np.arange(300) == 17,
    "scattered": np.random.default_rng(5).random(300) < 0.4,
    "the last": np.arange(300) >= 260,
    "every": np.ones(300, bool),
}


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    with tiles.override(rows=128, columns=256, step=128, call=256):
        yield


def judge(problem: Problem, objective: Objective, weights: jax.Array, **options: Any) -> Loss:
    """The loss and its gradients, after they were found as accurate as those of full logits."""
    operands = operands_for(problem, objective)
    with strict_interpreter():
        return check_loss(problem, objective, operands, weights, impl="mosaic_tpu", **options)


@every_workspace
@every_dtype
def test_any_workspace_is_as_accurate_as_full_logits(workspace: int, dtype: Any) -> None:
    judge(random_problem(SHAPE, dtype=dtype), OBJECTIVES["clipped ratio"], sparse_weights(300), workspace=workspace)


@pytest.mark.parametrize("name", ["entropy bonus", "nonlinear in both"])
def test_an_objective_of_the_entropy_is_as_accurate_as_full_logits(name: str) -> None:
    problem = random_problem(SHAPE, 10.0, jnp.bfloat16)
    judge(problem, OBJECTIVES[name], sparse_weights(300), temperature=0.8, softcap=4.0)


def test_a_last_step_without_columns_is_as_accurate_as_full_logits() -> None:
    problem = random_problem((40, 2374, 200), dtype=jnp.bfloat16)
    judge(problem, OBJECTIVES["cross-entropy"], jnp.ones(40), workspace=ONE_WAVE)


@every_workspace
@pytest.mark.parametrize("softmax", SCALES)
def test_any_softmax_is_as_accurate_as_full_logits(workspace: int, softmax: str) -> None:
    problem = random_problem(SHAPE, SCALES[softmax], jnp.bfloat16)
    judge(problem, OBJECTIVES["clipped ratio"], sparse_weights(300), workspace=workspace)


def test_temperature_and_softcap_are_as_accurate_as_full_logits() -> None:
    problem, objective = random_problem(SHAPE, 10.0), OBJECTIVES["cross-entropy"]
    judge(problem, objective, sparse_weights(300), workspace=WAVES, temperature=0.8, softcap=4.0)


@every_workspace
@pytest.mark.parametrize("rows", LIVE)
def test_rows_of_weight_zero_give_zeros_and_leak_nothing(workspace: int, rows: str) -> None:
    live, objective = LIVE[rows], OBJECTIVES["clipped ratio"]
    problem = random_problem(SHAPE)
    operands = [jnp.where(live, x, jnp.nan) for x in operands_for(problem, objective)]
    weights = jnp.asarray(np.linspace(-1, 2, 300) * live, jnp.float32)
    dirty = poisoned(problem, ~live)
    with strict_interpreter():
        got = check_loss(dirty, objective, operands, weights, impl="mosaic_tpu", workspace=workspace)
    assert not np.any([np.asarray(x)[~live] for x in got.rows[:3]])
    assert not np.any(np.asarray(got.rows.hidden)[~live])
    assert live.any() or (got.loss == 0 and not np.any(got.rows.weight))


@every_workspace
def test_a_nan_in_a_row_that_counts_is_not_hidden(workspace: int) -> None:
    problem, objective, weights = random_problem(SHAPE), OBJECTIVES["clipped ratio"], jnp.ones(300)
    operands = operands_for(problem, objective)
    sick = problem._replace(hidden=problem.hidden.at[5].set(jnp.nan))
    with strict_interpreter():
        got = loss_and_gradients(sick, objective, operands, weights, impl="mosaic_tpu", workspace=workspace)
    assert np.isnan(got.loss)
    assert np.isnan(got.rows.weight).any()
    np.testing.assert_array_equal(np.isnan(got.rows.hidden).any(axis=1), np.arange(300) == 5)


@pytest.mark.parametrize("side", [0, 1], ids=["hidden alone", "weight alone"])
def test_a_frozen_side_changes_nothing_of_the_other(side: int) -> None:
    """Without the weight's gradient nothing is kept; without that of hidden, its expectation isn't made."""
    problem, objective = random_problem(SHAPE), OBJECTIVES["clipped ratio"]
    both, operands = judge(problem, objective, jnp.ones(300), workspace=ONE_WAVE), operands_for(problem, objective)

    def loss(x: jax.Array) -> jax.Array:
        sides = [x if i == side else y for i, y in enumerate(problem[:2])]
        options: dict[str, Any] = {"workspace": ONE_WAVE, "impl": "mosaic_tpu"}
        return token_loss(*sides, problem.labels, objective.in_jax, *operands, **options)[0]

    with strict_interpreter():
        value, got = jax.jit(jax.value_and_grad(loss))(problem[side])
    np.testing.assert_allclose(value, both.loss, rtol=1e-6)
    np.testing.assert_allclose(got, both.rows[3 + side], rtol=1e-5, atol=1e-6)


def test_the_cotangent_of_the_loss_scales_its_gradients() -> None:
    problem, objective, weights = random_problem(SHAPE), OBJECTIVES["clipped ratio"], sparse_weights(300)
    operands, workspace = operands_for(problem, objective), ONE_WAVE

    @jax.jit
    def gradients(factor: jax.Array) -> tuple[jax.Array, jax.Array]:
        def total(h: jax.Array, w: jax.Array) -> jax.Array:
            options: dict[str, Any] = {"weights": weights, "workspace": workspace, "impl": "mosaic_tpu"}
            return factor * token_loss(h, w, problem.labels, objective.in_jax, *operands, **options)[0]

        return jax.grad(total, argnums=(0, 1))(problem.hidden, problem.weight)

    rows = judge(problem, objective, weights, workspace=workspace).rows
    for factor in (-3.0, 0.0):
        with strict_interpreter():
            got = gradients(jnp.float32(factor))
        for x, once in zip(got, (rows.hidden, rows.weight), strict=True):
            np.testing.assert_allclose(x, factor * once, rtol=1e-5, atol=1e-6)


def test_float32_masters_with_bfloat16_products_get_float32_gradients() -> None:
    problem, objective = random_problem(SHAPE), OBJECTIVES["cross-entropy"]
    rounded = [x.astype(jnp.bfloat16) for x in problem[:2]]
    options: dict[str, Any] = {"impl": "mosaic_tpu", "workspace": WAVES}
    near = judge(Problem(*rounded, problem.labels), objective, jnp.ones(300), workspace=WAVES)
    with strict_interpreter():
        got = loss_and_gradients(problem, objective, (), jnp.ones(300), dtype=jnp.bfloat16, **options)
    for gradient, narrow in zip(got.rows[3:], near.rows[3:], strict=True):
        np.testing.assert_allclose(gradient, narrow.astype(jnp.float32), rtol=2**-7, atol=1e-6)
        assert np.any(gradient != gradient.astype(jnp.bfloat16).astype(jnp.float32))
