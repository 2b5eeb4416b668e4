"""`token_loss` by every engine against float64: any objective, workspace, mask and incoming cotangent.

Sizes are those of engines.py. A workspace of 0 leads to logits that are computed twice, a small one to several waves of
rows whose logits or exponentials are kept (on Hopper to one tile of three), a large one to a single pass. Full logits
ignore it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import lm_head_cases as cases
import numpy as np
import pytest
from engines import (
    BF16,
    CHUNKED,
    CHUNKED_BF16,
    F32,
    FULL,
    FULL_BF16,
    GPU,
    GPU_SIZES,
    TPU,
    TPU_F32,
    XLA,
    XLA_BF16,
    Engine,
    engines,
    needs_interpreter,
    parameter,
)
from jax.sharding import AxisType
from lm_head_cases import OBJECTIVES, SCALES, Loss, Problem, loss_and_gradients, sparse_weights
from oracle import Objective, exact, exact_loss

from lm_head import HeadSharding, token_loss
from lm_head.gpu import tiles as gpu_tiles
from lm_head.gpu.tiles import Sizes, Tiles

CLIPPED, CROSS_ENTROPY = OBJECTIVES["clipped ratio"], OBJECTIVES["cross-entropy"]
N, V, D = GPU.shape
ALL, SOME_ROWS = 1 << 30, 100_000
"""Bytes on Hopper: logits of everything, and of a block of rows."""
every_workspace = pytest.mark.parametrize(
    ("engine", "workspace"),
    [
        parameter(FULL, "all"),
        parameter(CHUNKED, "none"),
        *(parameter(engine, workspace) for engine in (XLA, TPU, GPU) for workspace in ("none", "some", "all")),
    ],
)


def assert_accurate(engine: Engine, problem: Problem, objective: Objective, weights: jax.Array, **options: Any) -> Loss:
    """The loss and its gradients, after they were found as accurate as those of full logits."""
    with engine.strictly():
        return cases.check_loss(problem, objective, weights, impl=engine.impl, **options)


# --- objectives, softmaxes, workspaces, rows that don't count ---


@every_workspace
@pytest.mark.parametrize(
    ("softmax", "rows"), [("near-uniform", "most"), ("saturated", "few"), ("peaked", "the last"), ("peaked", "none")]
)
def test_any_workspace_is_as_accurate_as_full_logits(engine: Engine, workspace: str, softmax: str, rows: str) -> None:
    live, problem = engine.live(rows), engine.problem(SCALES[softmax])
    weights = jnp.asarray(np.linspace(-1, 2, len(live)) * live, F32)
    got = assert_accurate(engine, problem, CLIPPED, weights, workspace=engine.bytes_of(workspace))
    assert live.any() or (got.loss == 0 and not np.any(got.rows.weight))


@pytest.mark.parametrize(
    ("engine", "workspace"),
    [
        parameter(FULL_BF16, "all"),
        parameter(CHUNKED_BF16, "some"),
        parameter(XLA_BF16, "none"),
        parameter(XLA, "some"),
        parameter(TPU_F32, "some"),
        parameter(GPU, "all"),
    ],
)
def test_an_objective_of_the_entropy_is_as_accurate_as_full_logits(engine: Engine, workspace: str) -> None:
    problem, objective, weights = engine.problem(10.0), OBJECTIVES["nonlinear in both"], sparse_weights(engine.shape[0])
    options: dict[str, Any] = {"temperature": 0.8, "softcap": 4.0, "workspace": engine.bytes_of(workspace)}
    # At logits of 10 the largest error of dW is that of one entry, where the program with full logits may be lucky.
    assert_accurate(engine, problem, objective, weights, largest=0, **options)


@pytest.mark.parametrize(("impl", "workspace"), [("xla", 0), ("xla", 100_000), ("xla", 1 << 27), ("chunked_logits", 0)])
def test_a_sum_over_many_tokens_does_not_wear_down_in_bfloat16(impl: str, workspace: int) -> None:
    problem, objective = cases.random_problem((5003, 37, 8), 1.0, BF16), OBJECTIVES["entropy bonus"]
    cases.check_loss(problem, objective, jnp.ones(5003), impl=impl, workspace=workspace)


@every_workspace
def test_a_nan_in_a_row_that_counts_is_not_hidden(engine: Engine, workspace: str) -> None:
    problem, weights, impl = engine.problem(), jnp.ones(engine.shape[0]), engine.impl
    sick, operands = problem._replace(hidden=problem.hidden.at[5].set(jnp.nan)), cases.operands_for(problem, CLIPPED)
    with engine.strictly():
        got = loss_and_gradients(sick, CLIPPED, operands, weights, impl=impl, workspace=engine.bytes_of(workspace))
    assert np.isnan(got.loss)
    assert np.isnan(got.rows.weight).any()
    for x in (*got.rows[:3], got.rows.hidden.sum(axis=1)):
        np.testing.assert_array_equal(np.isnan(x), np.arange(len(weights)) == 5)


@engines()
@pytest.mark.parametrize(("side", "workspace"), [(0, ALL), (1, 0), (1, ALL)], ids=["hidden", "weight", "weight kept"])
def test_a_frozen_side_does_not_change_the_gradient_of_the_other(engine: Engine, side: int, workspace: int) -> None:
    """Without the weight's gradient nothing is kept; without that of hidden, no expectation of W is computed."""
    problem, options = engine.problem(), {"workspace": workspace, "impl": engine.impl}
    operands, ones = cases.operands_for(problem, CLIPPED), jnp.ones(engine.shape[0])

    def loss(x: jax.Array) -> jax.Array:
        sides = [x if i == side else y for i, y in enumerate(problem[:2])]
        return token_loss(*sides, problem.labels, CLIPPED, *operands, **options)[0]

    with engine.strictly():
        both = loss_and_gradients(problem, CLIPPED, operands, ones, **options)
        got = jax.jit(jax.grad(loss))(problem[side])
    got, want = (np.asarray(x, np.float32) for x in (got, both.rows[3 + side]))
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-9 * np.abs(want).max())


@pytest.mark.parametrize(
    ("engine", "workspace"),
    [
        parameter(FULL_BF16, 0),
        parameter(CHUNKED_BF16, 0),
        parameter(XLA_BF16, XLA.waves),
        parameter(XLA_BF16, 0),
        parameter(TPU, TPU.waves),
        parameter(GPU, SOME_ROWS),
        parameter(GPU, 0, slow=True),
    ],
)
def test_float32_masters_with_bfloat16_products_get_gradients_that_were_rounded_once(
    engine: Engine, workspace: int
) -> None:
    """A float32 dW is its own sum over waves. It is as exact as for bfloat16 inputs, but not rounded to bfloat16.

    Blocks of rows are what the trainer gives a GPU: float32 masters, and more than 8192 tokens.
    """
    masters, narrow, weights = engine._replace(dtype=F32).problem(), engine.problem(), jnp.ones(engine.shape[0])
    sizes = GPU_SIZES if workspace else BLOCKS_OF_ROWS
    with engine.strictly(), gpu_tiles.override(sizes):
        got = loss_and_gradients(masters, CROSS_ENTROPY, (), weights, dtype=BF16, impl=engine.impl, workspace=workspace)
    yardstick = cases.plain_loss_and_gradients(narrow, CROSS_ENTROPY, (), weights)
    cases.assert_as_accurate_as_plain(
        got.rows, yardstick.rows, exact_loss(*narrow, CROSS_ENTROPY, weights=weights).rows
    )
    for gradient in got.rows[3:]:
        assert np.any(gradient != gradient.astype(BF16).astype(F32))


# --- the rule of differentiation, which every engine shares ---


def test_the_cotangent_of_the_loss_scales_its_gradients() -> None:
    problem, objective, weights = XLA.problem(), OBJECTIVES["entropy bonus"], sparse_weights(90)

    @jax.jit
    def gradients(factor: jax.Array) -> tuple[jax.Array, jax.Array]:
        def total(h: jax.Array, w: jax.Array) -> jax.Array:
            loss, _ = token_loss(h, w, problem.labels, objective, weights=weights, impl="xla")
            return factor * loss + loss**2

        return jax.grad(total, argnums=(0, 1))(problem.hidden, problem.weight)

    loss, rows = loss_and_gradients(problem, objective, (), weights, impl="xla")
    for factor in (3.0, 0.0):
        for got, once in zip(gradients(factor), (rows.hidden, rows.weight), strict=True):
            np.testing.assert_allclose(got, (factor + 2 * loss) * once, rtol=1e-5, atol=1e-5)


def test_the_outputs_beside_the_loss_have_no_gradient() -> None:
    def metrics(h: jax.Array, w: jax.Array) -> jax.Array:
        outputs = token_loss(h, w, XLA.problem().labels, lambda logprob, entropy: -logprob, impl="xla")[1]
        return sum(jnp.sum(x) for x in outputs[:3])

    assert not any(np.any(g) for g in jax.jit(jax.grad(metrics, argnums=(0, 1)))(*XLA.problem()[:2]))


def test_weights_operands_and_what_the_objective_closes_over_get_gradients_too() -> None:
    """With loss = sum_i w_i (a_i logprob_i + c b_i entropy_i), for floating a and c and integers b."""
    problem, w = XLA.problem(), sparse_weights(90)
    a, b = jnp.linspace(-1, 1, 90), jnp.arange(90) % 3

    @jax.jit
    def gradients(w: jax.Array, a: jax.Array, c: jax.Array) -> Any:
        def loss(w: jax.Array, a: jax.Array, c: jax.Array) -> jax.Array:
            objective = lambda logprob, entropy, a, b: a * logprob + c * b * entropy  # noqa: E731
            return token_loss(*problem, objective, a, b, weights=w, impl="xla")[0]

        return jax.grad(loss, argnums=(0, 1, 2))(w, a, c)

    rows = exact(*problem, lambda *_: np.zeros((3, 90)), where=np.asarray(w) != 0)
    by_weights = np.where(w != 0, a * rows.logprob + 0.5 * b * rows.entropy, 0)
    want = by_weights, w * rows.logprob, np.sum(w * b * rows.entropy)
    for x, y in zip(gradients(w, a, jnp.float32(0.5)), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


# --- Hopper: logits in float16, sums over waves and blocks, clusters ---


@needs_interpreter
def test_a_rare_word_gets_its_gradient_though_logits_are_kept_in_float16() -> None:
    """Its probabilities are as small as 1e-20 of the largest, which in float16 would be 0."""
    problem = GPU.problem(30.0)
    got = assert_accurate(GPU, problem, CROSS_ENTROPY, jnp.ones(N), workspace=ALL).rows.weight.astype(F32)
    want = exact_loss(*problem, CROSS_ENTROPY, weights=jnp.ones(N)).rows.weight
    size = np.linalg.norm(want, axis=1)
    rare = ~np.isin(np.arange(V), problem.labels) & (size < 1e-4 * size.max())
    assert rare.sum() > 5
    np.testing.assert_array_less(np.linalg.norm(got - want, axis=1)[rare], 0.05 * size[rare])


CLUSTERS = Sizes(Tiles(columns=256, slots=2, cluster=2), chunk=256)
BLOCKS_OF_ROWS = dataclasses.replace(GPU_SIZES, most_rows=128)


@needs_interpreter
@pytest.mark.parametrize(
    ("sizes", "shape", "objective", "workspace"),
    [
        # Room for logits of some rows, and for the float32 sum that a narrower gradient needs.
        pytest.param(GPU_SIZES, (400, V, D), CLIPPED, SOME_ROWS + 4 * V * D, id="waves that add to one sum"),
        pytest.param(CLUSTERS, (300, 520, 128), CROSS_ENTROPY, 0, id="blocks that share a cluster"),
        pytest.param(BLOCKS_OF_ROWS, (290, 264, 128), CROSS_ENTROPY, 0, id="blocks of rows, none kept"),
        pytest.param(BLOCKS_OF_ROWS, (290, 264, 128), CROSS_ENTROPY, ALL, id="all kept", marks=pytest.mark.slow),
    ],
)
def test_waves_blocks_and_clusters_are_as_accurate_as_full_logits(
    sizes: Sizes, shape: tuple[int, int, int], objective: Objective, workspace: int
) -> None:
    from strict_gpu import strict_interpreter

    problem, weights = GPU._replace(shape=shape).problem(), sparse_weights(shape[0])
    with gpu_tiles.override(sizes), strict_interpreter(multiprocessors=2):
        cases.check_loss(problem, objective, weights, impl="mosaic_gpu", workspace=workspace)


@needs_interpreter
@pytest.mark.parametrize("axes", [{"tokens": ("dp",)}, {"tokens": (), "vocabulary": "dp"}], ids=str)
def test_a_mesh_is_as_accurate_as_full_logits_on_hopper(axes: dict[str, Any]) -> None:
    mesh = jax.make_mesh((2,), ("dp",), (AxisType.Auto,), devices=jax.devices()[:2])
    engine, sharding = GPU._replace(shape=(256, 272, 64)), HeadSharding(mesh, **axes)
    assert_accurate(engine, engine.problem(), CLIPPED, sparse_weights(256), workspace=ALL, sharding=sharding)
