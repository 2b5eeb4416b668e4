"""`token_loss` by the Pallas engines against float64, under strict interpreters: objectives, workspaces and rows.

Sizes are those of mosaic_engines.py. A workspace of 0 leads to logits that are computed twice (on Hopper but for those
of one tile of three, which are kept in the memory of dW), a small one to several waves of rows whose exponentials are
kept (on Hopper to more columns), a large one to a single pass.
"""

import dataclasses
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
    assert_as_accurate_as_plain,
    check_loss,
    loss_and_gradients,
    operands_for,
    plain_loss_and_gradients,
    poisoned,
    random_problem,
    sparse_weights,
)
from mosaic_engines import GPU, GPU_SIZES, TPU, TPU_F32, Engine, every_engine
from oracle import Objective, exact_loss
from strict_gpu import needs_interpreter, strict_interpreter

from kernels.lm_head import token_loss
from kernels.lm_head.contract import Inputs, Options
from kernels.lm_head.gpu import tiles as gpu_tiles
from kernels.lm_head.gpu.plan import make_plan
from kernels.lm_head.gpu.tiles import Sizes, Tiles
from kernels.lm_head.tpu import engine as mosaic_tpu

BF16 = jnp.bfloat16
CLIPPED, CROSS_ENTROPY = OBJECTIVES["clipped ratio"], OBJECTIVES["cross-entropy"]
ALL = 1 << 30
WAVES = 200_000 + 4 * 499 * 64
"""Bytes on a TPU: exponentials of 128 rows, and a float32 sum of dW."""
N, V, D = GPU.shape
SOME_COLUMNS, SOME_ROWS, SUM = 77_000, 100_000, 4 * V * D
"""Bytes on Hopper: logits of a tile of columns, of a block of rows, and a float32 sum of dW."""
every_workspace = pytest.mark.parametrize("workspace", ["none", "some", "all"])


def bytes_of(engine: Engine, workspace: str) -> int:
    return {"none": 0, "some": WAVES if engine.impl == "mosaic_tpu" else SOME_COLUMNS, "all": ALL}[workspace]


def inputs_of(shape: tuple[int, int, int], dtype: Any) -> Inputs:
    hidden, weight, labels = random_problem(shape, dtype=dtype)
    return Inputs(hidden, weight, labels, jnp.ones(shape[0], bool), jnp.float32(1))


@pytest.mark.parametrize("engine", [TPU, TPU_F32], ids=["bfloat16", "float32"])
def test_workspaces_on_tpus_are_waves_of_so_many_rows(engine: Engine) -> None:
    options = Options(None, jnp.dtype(engine.dtype), entropy_slopes=False)
    with engine.strictly():
        waves = [
            mosaic_tpu._wave(inputs_of(engine.shape, engine.dtype), dataclasses.replace(options, workspace=x))
            for x in (0, WAVES, ALL)
        ]
    assert [wave and wave[1] for wave in waves] == [None, 128, 384]


@pytest.mark.parametrize(
    ("workspace", "n", "dtype", "rows", "in_dw", "columns"),
    [
        (0, N, BF16, 256, 128, 0),
        (SOME_COLUMNS, N, BF16, 256, 128, 128),
        (ALL, N, BF16, 256, 128, V - 128),
        (0, N, jnp.float32, 256, 256, 0),
        (SOME_ROWS, 400, jnp.float32, 128, 0, V),
        (SOME_ROWS + SUM, 400, BF16, 128, 0, V),
    ],
)
def test_workspaces_on_hopper_are_so_many_rows_and_columns(
    workspace: int, n: int, dtype: Any, rows: int, in_dw: int, columns: int
) -> None:
    with gpu_tiles.override(GPU_SIZES):
        plan = make_plan(inputs_of((n, V, D), dtype), Options(None, jnp.dtype(BF16), workspace))
    assert (plan.rows, plan.in_dw.columns, min(plan.workspace_columns, V - in_dw)) == (rows, in_dw, columns)


def assert_accurate(engine: Engine, problem: Problem, objective: Objective, weights: jax.Array, **options: Any) -> Loss:
    """The loss and its gradients, after they were found as accurate as those of full logits."""
    operands = operands_for(problem, objective)
    with engine.strictly():
        return check_loss(problem, objective, operands, weights, impl=engine.impl, **options)


@every_engine
@every_workspace
@pytest.mark.parametrize("softmax", SCALES)
def test_any_workspace_is_as_accurate_as_full_logits(engine: Engine, workspace: str, softmax: str) -> None:
    problem, weights = engine.problem(SCALES[softmax]), sparse_weights(engine.shape[0])
    assert_accurate(engine, problem, CLIPPED, weights, workspace=bytes_of(engine, workspace))


@pytest.mark.parametrize(
    ("engine", "workspace"),
    [(TPU, "all"), (TPU_F32, "some"), pytest.param(GPU, "all", marks=needs_interpreter)],
    ids=["tpu", "tpu float32, waves", "gpu"],
)
def test_an_objective_of_the_entropy_is_as_accurate_as_full_logits(engine: Engine, workspace: str) -> None:
    problem, objective, weights = engine.problem(10.0), OBJECTIVES["nonlinear in both"], sparse_weights(engine.shape[0])
    options: dict[str, Any] = {"temperature": 0.8, "softcap": 4.0, "workspace": bytes_of(engine, workspace)}
    # At logits of 10 the largest error of dW is that of one entry, where the program with full logits may be lucky.
    assert_accurate(engine, problem, objective, weights, largest=False, **options)


@every_engine
@every_workspace
@pytest.mark.parametrize("rows", ["none", "the last", "scattered, less than a block"])
def test_rows_of_weight_zero_give_zeros_and_leak_nothing(engine: Engine, workspace: str, rows: str) -> None:
    live, problem = engine.live(rows), engine.problem()
    operands = [jnp.where(live, x, jnp.nan) for x in operands_for(problem, CLIPPED)]
    weights = jnp.asarray(np.linspace(-1, 2, len(live)) * live, jnp.float32)
    with engine.strictly():
        dirty, workspace_bytes = poisoned(problem, ~live), bytes_of(engine, workspace)
        got = check_loss(dirty, CLIPPED, operands, weights, impl=engine.impl, workspace=workspace_bytes)
    assert not np.any([np.asarray(x)[~live] for x in got.rows[:3]])
    assert not np.any(np.asarray(got.rows.hidden, np.float32)[~live])
    assert live.any() or (got.loss == 0 and not np.any(got.rows.weight))


@every_engine
@every_workspace
def test_a_nan_in_a_row_that_counts_is_not_hidden(engine: Engine, workspace: str) -> None:
    problem, weights, impl = engine.problem(), jnp.ones(engine.shape[0]), engine.impl
    sick, operands = problem._replace(hidden=problem.hidden.at[5].set(jnp.nan)), operands_for(problem, CLIPPED)
    with engine.strictly():
        got = loss_and_gradients(sick, CLIPPED, operands, weights, impl=impl, workspace=bytes_of(engine, workspace))
    assert np.isnan(got.loss)
    assert np.isnan(got.rows.weight).any()
    for x in got.rows[:3]:
        np.testing.assert_array_equal(np.isnan(x), np.arange(len(weights)) == 5)
    np.testing.assert_array_equal(np.isnan(got.rows.hidden).any(axis=1), np.arange(len(weights)) == 5)


@every_engine
@pytest.mark.parametrize("workspace", [0, ALL], ids=["none", "all"])
@pytest.mark.parametrize("side", [0, 1], ids=["hidden alone", "weight alone"])
def test_a_frozen_side_does_not_change_the_gradient_of_the_other(engine: Engine, side: int, workspace: int) -> None:
    """Without the weight's gradient nothing is kept; without that of hidden, no expectation of W is computed."""
    problem, operands = engine.problem(), operands_for(engine.problem(), CLIPPED)
    both = assert_accurate(engine, problem, CLIPPED, jnp.ones(engine.shape[0]), workspace=workspace)

    def loss(x: jax.Array) -> jax.Array:
        sides = [x if i == side else y for i, y in enumerate(problem[:2])]
        return token_loss(*sides, problem.labels, CLIPPED.in_jax, *operands, workspace=workspace, impl=engine.impl)[0]

    with engine.strictly():
        got = jax.jit(jax.grad(loss))(problem[side])
    got, want = (np.asarray(x, np.float32) for x in (got, both.rows[3 + side]))
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-9 * np.abs(want).max())


@pytest.mark.parametrize(
    ("engine", "workspace"),
    [
        pytest.param(TPU, WAVES, id="tpu, waves"),
        pytest.param(GPU, SOME_ROWS, id="gpu, waves", marks=needs_interpreter),
        pytest.param(GPU, 0, id="gpu, blocks of rows", marks=[needs_interpreter, pytest.mark.slow]),
    ],
)
def test_float32_masters_with_bfloat16_products_get_gradients_that_were_rounded_once(
    engine: Engine, workspace: int
) -> None:
    """A float32 dW is its own sum over waves. It is as exact as for bfloat16 inputs, but not rounded to bfloat16.

    Blocks of rows are what the trainer gives a GPU: float32 masters, and more than 8192 tokens.
    """
    masters, narrow, weights = engine._replace(dtype=jnp.float32).problem(), engine.problem(), jnp.ones(engine.shape[0])
    sizes = GPU_SIZES if workspace else dataclasses.replace(GPU_SIZES, most_rows=128)
    with engine.strictly(), gpu_tiles.override(sizes):
        got = loss_and_gradients(masters, CROSS_ENTROPY, (), weights, dtype=BF16, impl=engine.impl, workspace=workspace)
    yardstick = plain_loss_and_gradients(narrow, CROSS_ENTROPY, (), weights)
    assert_as_accurate_as_plain(got.rows, yardstick.rows, exact_loss(*narrow, CROSS_ENTROPY, weights=weights).rows)
    for gradient in got.rows[3:]:
        assert np.any(gradient != gradient.astype(BF16).astype(jnp.float32))


# --- Hopper: logits in float16, sums over waves and blocks, clusters ---


@needs_interpreter
@pytest.mark.parametrize("workspace", [0, ALL], ids=["in dW's memory", "in the workspace"])
def test_a_rare_word_gets_its_gradient_though_logits_are_kept_in_float16(workspace: int) -> None:
    """Its probabilities are as small as 1e-20 of the largest, which in float16 would be 0."""
    problem = GPU.problem(30.0)
    got = assert_accurate(GPU, problem, CROSS_ENTROPY, jnp.ones(N), workspace=workspace).rows.weight.astype(jnp.float32)
    want = exact_loss(*problem, CROSS_ENTROPY, weights=jnp.ones(N)).rows.weight
    size = np.linalg.norm(want, axis=1)
    rare = ~np.isin(np.arange(V), problem.labels) & (size < 1e-4 * size.max())
    assert rare.sum() > 5
    np.testing.assert_array_less(np.linalg.norm(got - want, axis=1)[rare], 0.05 * size[rare])


@needs_interpreter
def test_waves_that_add_to_one_sum_are_as_accurate_as_full_logits() -> None:
    """Room for logits of some rows, and for the float32 sum that a narrower gradient needs."""
    problem = GPU.problem(shape=(400, V, D))
    assert_accurate(GPU, problem, CLIPPED, jnp.linspace(-1, 2, 400), workspace=SOME_ROWS + SUM)


@needs_interpreter
def test_blocks_that_share_a_cluster_keep_logits_as_accurately() -> None:
    problem = GPU.problem(shape=(300, 520, 128))
    with gpu_tiles.override(Sizes(Tiles(columns=256, slots=2, cluster=2), chunk=256)), strict_interpreter():
        check_loss(problem, CROSS_ENTROPY, (), sparse_weights(300), impl="mosaic_gpu", workspace=ALL)


@needs_interpreter
@pytest.mark.parametrize("workspace", [0, pytest.param(ALL, marks=pytest.mark.slow)], ids=["none kept", "all kept"])
def test_blocks_of_rows_whose_sums_are_added_are_as_accurate_as_full_logits(workspace: int) -> None:
    problem = GPU.problem(shape=(290, 264, 128))
    with gpu_tiles.override(dataclasses.replace(GPU_SIZES, most_rows=128)), strict_interpreter():
        check_loss(problem, CROSS_ENTROPY, (), sparse_weights(290), impl="mosaic_gpu", workspace=workspace)
