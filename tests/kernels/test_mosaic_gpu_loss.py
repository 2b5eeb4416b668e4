"""The Pallas kernels for Hopper behind `token_loss`, under the strict interpreter: objectives, workspaces and rows.

As in test_mosaic_gpu.py, tiles are small. With a workspace of 0 logits are kept in dW's memory, of one tile of three,
and the others computed twice; with a larger one those of more columns are kept, or of all; where there is room for a
float32 sum of dW, those of some rows, a wave.
"""

import dataclasses
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
    loss_and_gradients,
    operands_for,
    plain_loss_and_gradients,
    poisoned,
    random_problem,
    sparse_weights,
)
from lm_head_oracle import Objective, assert_as_accurate_as_plain, exact_loss
from strict_gpu import needs_interpreter, strict_interpreter

from kernels.lm_head import token_loss
from kernels.lm_head.contract import Inputs, Options
from kernels.lm_head.gpu import plan as gpu_plan
from kernels.lm_head.gpu import tiles as gpu_tiles
from kernels.lm_head.gpu.tiles import Sizes, Tiles

pytestmark = needs_interpreter

BF16 = jnp.bfloat16
SHAPE = (200, 296, 128)
N, V, D = SHAPE
ONE_BLOCK = Sizes(Tiles(columns=128, slots=2, cluster=1), chunk=256, wave_cost=0, cast_cost=0)
TWO_BLOCKS = Sizes(Tiles(columns=256, slots=2, cluster=2), chunk=256)
ALL = 1 << 30
SOME, SOME_ROWS, SUM = 77_000, 100_000, 4 * V * D
"""Bytes: of the logits of a tile of columns, of those of a block of rows, of a float32 sum of dW."""
every_workspace = pytest.mark.parametrize("workspace", [0, SOME, ALL], ids=["none kept", "some kept", "all kept"])

LIVE = {
    "none": np.zeros(200, bool),
    "one": np.arange(200) == 17,
    "scattered": np.random.default_rng(5).random(200) < 0.7,
    "the last": np.arange(200) >= 160,
}


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    with gpu_tiles.override(ONE_BLOCK):
        yield


@pytest.mark.parametrize(
    ("workspace", "n", "dtype", "rows", "lent", "columns"),
    [
        (0, N, BF16, 256, 128, 0),
        (SOME, N, BF16, 256, 128, 128),
        (ALL, N, BF16, 256, 128, V - 128),
        (0, N, jnp.float32, 256, 256, 0),
        (SOME_ROWS, 400, jnp.float32, 128, 0, V),
        (SOME_ROWS + SUM, 400, BF16, 128, 0, V),
    ],
)
def test_workspaces_and_the_memory_of_dw_are_spent_as_they_are_called_here(
    workspace: int, n: int, dtype: Any, rows: int, lent: int, columns: int
) -> None:
    hidden, weight, labels = random_problem((n, V, D), dtype=dtype)
    inputs = Inputs(hidden, weight, labels, jnp.ones(n, bool), jnp.float32(1))
    spent = gpu_plan.make_plan(inputs, Options(None, jnp.dtype(BF16), workspace))
    assert (spent.rows, spent.layout.columns, min(spent.workspace_columns, V - lent)) == (rows, lent, columns)


def judge(problem: Problem, objective: Objective, weights: jax.Array, **options: Any) -> Loss:
    """The loss and its gradients, after they were found as accurate as those of full logits."""
    operands = operands_for(problem, objective)
    with strict_interpreter():
        return check_loss(problem, objective, operands, weights, impl="mosaic_gpu", **options)


@every_workspace
@pytest.mark.parametrize("softmax", SCALES)
def test_any_workspace_is_as_accurate_as_full_logits(workspace: int, softmax: str) -> None:
    problem = random_problem(SHAPE, SCALES[softmax], BF16)
    judge(problem, OBJECTIVES["clipped ratio"], sparse_weights(N), workspace=workspace)


@pytest.mark.parametrize("workspace", [0, ALL], ids=["in dW's memory", "in the workspace"])
def test_a_word_that_no_row_likes_gets_its_gradient_though_logits_are_kept_in_float16(workspace: int) -> None:
    """Its probabilities are as small as 1e-20 of the largest, which in float16 would be none."""
    problem, objective = random_problem(SHAPE, 30.0, BF16), OBJECTIVES["cross-entropy"]
    got = judge(problem, objective, jnp.ones(N), workspace=workspace).rows.weight.astype(jnp.float32)
    want = exact_loss(*problem, objective, weights=jnp.ones(N)).rows.weight
    size = np.linalg.norm(want, axis=1)
    rare = ~np.isin(np.arange(V), problem.labels) & (size < 1e-4 * size.max())
    assert rare.sum() > 5
    np.testing.assert_array_less(np.linalg.norm(got - want, axis=1)[rare], 0.05 * size[rare])


@pytest.mark.parametrize(
    ("name", "workspace"), [("entropy bonus", ALL), pytest.param("nonlinear in both", SOME, marks=pytest.mark.slow)]
)
def test_an_objective_of_the_entropy_is_as_accurate_as_full_logits(name: str, workspace: int) -> None:
    problem = random_problem(SHAPE, 10.0, BF16)
    judge(problem, OBJECTIVES[name], sparse_weights(N), temperature=0.8, softcap=4.0, workspace=workspace)


def test_waves_that_add_to_one_sum_are_as_accurate_as_full_logits() -> None:
    """Room for logits of some rows, and for the float32 sum that a narrower gradient needs."""
    problem = random_problem((400, V, D), dtype=BF16)
    judge(problem, OBJECTIVES["clipped ratio"], jnp.linspace(-1, 2, 400), workspace=SOME_ROWS + SUM)


@pytest.mark.parametrize("workspace", [SOME_ROWS, pytest.param(0, marks=pytest.mark.slow)], ids=["waves", "none kept"])
def test_a_float32_weight_gets_a_gradient_that_was_rounded_once(workspace: int) -> None:
    """In waves it is its own sum. As exact as of bfloat16 inputs, but not rounded to bfloat16 at the end."""
    problem, objective = random_problem(SHAPE), OBJECTIVES["cross-entropy"]
    rounded = [x.astype(BF16) for x in problem[:2]]
    options: dict[str, Any] = {"impl": "mosaic_gpu", "workspace": workspace}
    with strict_interpreter():
        got = loss_and_gradients(problem, objective, (), jnp.ones(N), dtype=BF16, **options)
    narrow = Problem(*rounded, problem.labels)
    yardstick = plain_loss_and_gradients(narrow, objective, (), jnp.ones(N))
    assert_as_accurate_as_plain(got.rows, yardstick.rows, exact_loss(*narrow, objective, weights=jnp.ones(N)).rows)
    for gradient in got.rows[3:]:
        assert np.any(gradient != gradient.astype(BF16).astype(jnp.float32))


def test_blocks_that_share_a_cluster_keep_logits_as_accurately() -> None:
    problem, objective = random_problem((300, 520, 128), dtype=BF16), OBJECTIVES["cross-entropy"]
    with gpu_tiles.override(TWO_BLOCKS):
        judge(problem, objective, sparse_weights(300), workspace=ALL)


@pytest.mark.parametrize("workspace", [0, pytest.param(ALL, marks=pytest.mark.slow)], ids=["none kept", "all kept"])
def test_blocks_of_rows_whose_sums_meet_are_as_accurate_as_full_logits(workspace: int) -> None:
    problem, sizes = random_problem((290, 264, 128), dtype=BF16), dataclasses.replace(ONE_BLOCK, most_rows=128)
    with gpu_tiles.override(sizes):
        judge(problem, OBJECTIVES["cross-entropy"], sparse_weights(290), workspace=workspace)


@every_workspace
@pytest.mark.parametrize("rows", LIVE)
def test_rows_of_weight_zero_give_zeros_and_leak_nothing(workspace: int, rows: str) -> None:
    live, objective = LIVE[rows], OBJECTIVES["clipped ratio"]
    problem = random_problem(SHAPE, dtype=BF16)
    operands = [jnp.where(live, x, jnp.nan) for x in operands_for(problem, objective)]
    weights = jnp.asarray(np.linspace(-1, 2, N) * live, jnp.float32)
    with strict_interpreter():
        dirty = poisoned(problem, ~live)
        got = check_loss(dirty, objective, operands, weights, impl="mosaic_gpu", workspace=workspace)
    assert not np.any([np.asarray(x)[~live] for x in got.rows[:3]])
    assert not np.any(np.asarray(got.rows.hidden, np.float32)[~live])
    assert live.any() or (got.loss == 0 and not np.any(got.rows.weight))


@every_workspace
def test_a_nan_in_a_row_that_counts_is_not_hidden(workspace: int) -> None:
    problem, objective, weights = random_problem(SHAPE, dtype=BF16), OBJECTIVES["clipped ratio"], jnp.ones(N)
    operands = operands_for(problem, objective)
    sick = problem._replace(hidden=problem.hidden.at[5].set(jnp.nan))
    with strict_interpreter():
        got = loss_and_gradients(sick, objective, operands, weights, impl="mosaic_gpu", workspace=workspace)
    assert np.isnan(got.loss)
    assert np.isnan(got.rows.weight).any()
    np.testing.assert_array_equal(np.isnan(got.rows.hidden).any(axis=1), np.arange(N) == 5)


@pytest.mark.slow
@pytest.mark.parametrize("side", [0, 1], ids=["hidden alone", "weight alone"])
def test_a_frozen_side_changes_nothing_of_the_other(side: int) -> None:
    problem, objective = random_problem(SHAPE, dtype=BF16), OBJECTIVES["clipped ratio"]
    both, operands = judge(problem, objective, jnp.ones(N), workspace=ALL), operands_for(problem, objective)

    def loss(x: jax.Array) -> jax.Array:
        sides = [x if i == side else y for i, y in enumerate(problem[:2])]
        options: dict[str, Any] = {"workspace": ALL, "impl": "mosaic_gpu"}
        return token_loss(*sides, problem.labels, objective.in_jax, *operands, **options)[0]

    with strict_interpreter():
        value, got = jax.jit(jax.value_and_grad(loss))(problem[side])
    np.testing.assert_allclose(value, both.loss, rtol=1e-6)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, both.rows[3 + side])), rtol=2**-7, atol=1e-3)


def test_the_cotangent_of_the_loss_scales_its_gradients() -> None:
    problem, objective, weights = random_problem(SHAPE, dtype=BF16), OBJECTIVES["clipped ratio"], sparse_weights(N)
    operands = operands_for(problem, objective)

    @jax.jit
    def gradients(factor: jax.Array) -> tuple[jax.Array, jax.Array]:
        def total(h: jax.Array, w: jax.Array) -> jax.Array:
            options: dict[str, Any] = {"weights": weights, "workspace": 0, "impl": "mosaic_gpu"}
            return factor * token_loss(h, w, problem.labels, objective.in_jax, *operands, **options)[0]

        return jax.grad(total, argnums=(0, 1))(problem.hidden, problem.weight)

    rows = judge(problem, objective, weights, workspace=0).rows
    for factor in (-3.0, 0.0):
        with strict_interpreter():
            got = gradients(jnp.float32(factor))
        for x, once in zip(got, (rows.hidden, rows.weight), strict=True):
            x, once = (np.asarray(y, np.float32) for y in (x, once))
            np.testing.assert_allclose(x, factor * once, rtol=2**-7, atol=1e-6)
