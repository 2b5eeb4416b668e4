"""`token_loss` by every engine against float64: any objective, workspace, mask, teacher and incoming cotangent.

Sizes are in engines.py. A workspace of 0 leads to logits that are computed twice, and a large workspace to a single
pass. A small workspace leads to several waves of rows with logits or exponentials that are kept (on Hopper one tile of
three). Full logits ignore it.
"""

import dataclasses
from typing import Any

import cases
import engines
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import OBJECTIVES, Problem, assert_near, check_loss, loss_and_gradients, sparse_weights, teacher_of
from engines import BF16, F32, GPU, KERNELS, NARROW, PLAIN, TPU, TPU_F32, XLA, XLA_BF16, Engine, every, parameter
from oracle import Objective, Slopes, exact, exact_loss

from lm_head import target, token_loss
from lm_head.gpu import tiles as gpu_tiles
from lm_head.gpu.tiles import Sizes, Tiles

CLIPPED, CROSS_ENTROPY = OBJECTIVES["clipped ratio"], OBJECTIVES["cross-entropy"]
N, V, D = GPU.shape
ALL, SOME_ROWS = 1 << 30, 100_000
"""Bytes on Hopper: logits of everything, and of a block of rows."""
PLAIN_WAYS = [*((engine, "none") for engine in PLAIN), (XLA, "some"), (XLA, "all")]
KERNEL_WAYS = [(engine, workspace) for engine in (TPU, GPU) for workspace in ("none", "some", "all")]
OTHER_DTYPES = [(engine, "some") for engine in (*NARROW, TPU_F32)]


# --- objectives, softmaxes, workspaces, rows that don't count ---

LOSSES = [
    ("clipped ratio", 30.0, "most", {"temperature": 0.6}),
    ("clipped ratio", 1000.0, "few", {"temperature": 1.0}),
    ("clipped ratio", 1.0, "the last", {"temperature": 1.0}),
    ("clipped ratio", 30.0, "none", {"temperature": 1.0}),
    ("nonlinear in both", 10.0, "most", {"temperature": 0.8, "softcap": 4.0}),
    ("entropy alone", 3.0, "every", {}),
    ("smoothed label", 3.0, "most", {"temperature": 2.5}),
    ("smoothed label", 10.0, "most", {"softcap": 20.0}),
    ("smoothed label, entropy", 10.0, "most", {"softcap": 20.0}),
]


@pytest.mark.parametrize(
    ("engine", "workspace", "objective", "scale", "rows", "options"),
    [*every([*PLAIN_WAYS, *KERNEL_WAYS], *LOSSES, kernels="quick"), *every(OTHER_DTYPES, LOSSES[4], kernels="nightly")],
)
def test_any_loss_with_any_workspace_matches_float64(engine, workspace, objective, scale, rows, options):
    """The last 90 rows of the weight are no tokens, and would be the likeliest."""
    problem, common = engine.problem(scale), engine.shape[1] - 90
    weight, live = problem.weight.at[common:].multiply(30), engine.live(rows)
    problem = problem._replace(weight=weight, labels=jnp.minimum(problem.labels, common - 1))
    weights = jnp.asarray(np.linspace(-1, 2, len(live)) * live, F32)
    options = {"vocabulary": common, "workspace": engine.bytes_of(workspace), "impl": engine.impl, **options}
    # At these logits the largest error of dW is that of one entry, where rounding may be lucky.
    largest = 0 if engine.dtype == BF16 and scale > 3 else cases.SLACK
    with engine.strictly():
        got = check_loss(problem, OBJECTIVES[objective], weights, largest=largest, **options)
    assert live.any() or (got.loss == 0 and not np.any(got.rows.weight))
    assert not np.any(got.rows.weight[common:])


@pytest.mark.parametrize("engine", [XLA, pytest.param(XLA_BF16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("workspace", [None, 30 * 301 * 6, 0])
def test_xla_gpu_waves_match_float64(engine, workspace, monkeypatch):
    """Traced as for a GPU. A wave has 16 rows by default; without a workspace logits are computed twice, in tiles."""
    monkeypatch.setattr(target, "platform", lambda *_: "gpu")
    weights = sparse_weights(engine.shape[0])
    with engine.strictly():
        check_loss(engine.problem(), OBJECTIVES["entropy bonus"], weights, impl="xla", workspace=workspace)


def test_a_sum_over_many_waves_does_not_wear_down_in_bfloat16() -> None:
    problem, objective = cases.random_problem((5003, 37, 8), 1.0, BF16), OBJECTIVES["entropy bonus"]
    check_loss(problem, objective, jnp.ones(5003), impl="xla", workspace=100_000)


@pytest.mark.parametrize(("engine", "workspace"), every([*PLAIN_WAYS, *KERNEL_WAYS], kernels="nightly"))
def test_a_bad_row_is_not_hidden_and_harms_no_other_row(engine, workspace):
    """NaN in the student's row or in the teacher's. Where labels are known, a ValueError says so."""
    problem, row, ones = engine.problem(), np.arange(engine.shape[0]), jnp.ones(engine.shape[0])
    options: dict[str, Any] = {"workspace": engine.bytes_of(workspace), "impl": engine.impl}
    labels = problem.labels.at[6].set(-100).at[7].set(10**6)
    sick, objective, bad = Problem(problem.hidden.at[5].set(jnp.nan), problem.weight, labels), CROSS_ENTROPY, (5, 6, 7)
    if engine.impl not in KERNELS:
        teacher, objective, bad = teacher_of(problem), OBJECTIVES["label and teacher"], (5, 6, 7, 9)
        options |= {"teacher_hidden": teacher.hidden.at[9].set(jnp.nan), "teacher_weight": teacher.weight}
    with engine.strictly():
        loss, of_loss = loss_and_gradients(sick, objective, (), ones, **options)
        values = cases.values_and_gradients(sick, Slopes(ones), impl=engine.impl)
    right = exact(*problem).answer
    assert np.isnan(loss)
    for result, unsound in ((of_loss, bad), (values, (5, 6, 7))):
        assert np.isnan(result.weight.astype(F32)).any()
        np.testing.assert_array_equal(np.isnan(result.hidden.astype(F32).sum(axis=1)), np.isin(row, unsound))
        np.testing.assert_array_equal(np.isnan(result.logprob), np.isin(row, (5, 6, 7)))
        np.testing.assert_array_equal(np.isnan(result.lse), row == 5)
        assert_near(result.logprob[10:], right.logprob[10:])
    if engine.impl not in KERNELS:
        np.testing.assert_array_equal(np.isnan(of_loss.divergence), np.isin(row, (5, 9)))


FROZEN = [("hidden", "all"), ("weight", "none"), ("weight", "all")]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "side", "workspace"), every((*PLAIN, TPU, GPU), *FROZEN, kernels="nightly"))
def test_a_frozen_side_does_not_change_the_gradient_of_the_other(engine: Engine, side: str, workspace: str) -> None:
    """Without the weight's gradient nothing is kept; without that of hidden, no expectation of W is computed."""
    problem, options = engine.problem(), {"workspace": engine.bytes_of(workspace), "impl": engine.impl}
    operands, ones = cases.operands_for(problem, CLIPPED), jnp.ones(engine.shape[0])

    def loss(x: jax.Array) -> jax.Array:
        return token_loss(*problem._replace(**{side: x}), CLIPPED, *operands, **options)[0]

    with engine.strictly():
        both = loss_and_gradients(problem, CLIPPED, operands, ones, **options)
        got = jax.jit(jax.grad(loss))(getattr(problem, side))
    got, want = (np.asarray(x, np.float32) for x in (got, getattr(both.rows, side)))
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-9 * np.abs(want).max())


@pytest.mark.parametrize(
    ("engine", "workspace"),
    [
        parameter(XLA_BF16, XLA.waves),
        *(parameter(engine, 0, slow=True) for engine in NARROW),
        parameter(GPU, ALL, slow=True),
        *(parameter(*way, nightly=True) for way in ((TPU, TPU.waves), (GPU, 0))),
    ],
)
def test_float32_masters_get_gradients_that_are_not_rounded(engine, workspace):
    """A float32 dW is its own sum over waves, and not rounded to bfloat16.

    Blocks of rows are what the trainer gives a GPU: float32 masters, and more than 8192 tokens.
    """
    masters, weights = engine._replace(dtype=F32).problem(), jnp.ones(engine.shape[0])
    sizes = engines.GPU_SIZES if workspace else BLOCKS_OF_ROWS
    with engine.strictly(), gpu_tiles.override(sizes):
        got = loss_and_gradients(masters, CROSS_ENTROPY, (), weights, dtype=BF16, impl=engine.impl, workspace=workspace)
    narrow = Problem(*(side.astype(BF16).astype(F32) for side in masters[:2]), masters.labels)
    right = exact_loss(*narrow, CROSS_ENTROPY, weights=weights, dtype=BF16)
    cases.assert_as_accurate_as_rounding(got.rows, right.rows)


# --- the rule of differentiation, which every engine shares ---


@pytest.mark.parametrize("engine", [*PLAIN, *(parameter(engine, nightly=True) for engine in (TPU_F32, GPU))])
@pytest.mark.parametrize("name", ["logprob", "lse", "entropy", "mean_logit"])
def test_the_statistics_beside_the_loss_have_their_gradient_too(engine: Engine, name: str) -> None:
    """A loss less a tenth of a statistic is the loss of an objective with that term, at the rows that count."""
    problem, weights = engine.problem(), sparse_weights(engine.shape[0])
    plain = lambda logprob, entropy, *, mean_logit: -logprob - 0.2 * mean_logit  # noqa: E731

    def beside(*sides: Any) -> jax.Array:
        loss, tokens = token_loss(*sides, problem.labels, plain, weights=weights, impl=engine.impl)
        return 2 * loss - 0.1 * jnp.vdot(weights, getattr(tokens, name))

    def within(logprob: Any, entropy: Any, *, lse: Any, mean_logit: Any) -> Any:
        known = {"logprob": logprob, "lse": lse, "entropy": entropy, "mean_logit": mean_logit}
        return 2 * plain(logprob, entropy, mean_logit=mean_logit) - 0.1 * known[name]

    with engine.strictly():
        got = jax.jit(jax.grad(beside, (0, 1)))(*problem[:2])
        want = loss_and_gradients(problem, within, (), weights, impl=engine.impl).rows
    assert_near(got, (want.hidden, want.weight), 2e-5 if engine.dtype == F32 else 2e-2)


def test_a_divergence_has_a_gradient_and_its_teacher_none() -> None:
    problem = XLA.problem()
    teacher = teacher_of(problem)

    def loss(hidden: Any, weight: Any, *theirs: Any, objective: Any = OBJECTIVES["teacher alone"]) -> Any:
        return token_loss(hidden, weight, problem.labels, objective, teacher_hidden=theirs[0], teacher_weight=theirs[1])

    gradients = jax.jit(jax.grad(lambda *sides: loss(*sides)[0], (0, 1, 2, 3)))(*problem[:2], *teacher[:2])
    assert not any(np.any(x) for x in gradients[2:])
    of_token = lambda *sides: loss(*sides, objective=lambda logprob, entropy: logprob)[1].divergence.sum()  # noqa: E731
    assert_near(jax.jit(jax.grad(of_token, (0, 1)))(*problem[:2], *teacher[:2]), gradients[:2])


def test_all_inputs_get_gradients_times_the_loss_cotangent() -> None:
    """With loss = sum_i w_i (a_i logprob_i + c b_i entropy_i), for floating a and c and integers b."""
    problem, w, c = XLA.problem(), sparse_weights(90), 0.5
    a, b = jnp.linspace(-1, 1, 90), jnp.arange(90) % 3

    @jax.jit
    def gradients(factor: jax.Array) -> Any:
        def total(hidden: jax.Array, weight: jax.Array, w: jax.Array, a: jax.Array, c: jax.Array) -> jax.Array:
            objective = lambda logprob, entropy, a, b: a * logprob + c * b * entropy  # noqa: E731
            loss, _ = token_loss(hidden, weight, problem.labels, objective, a, b, weights=w, impl="xla")
            return factor * loss + loss**2

        return jax.grad(total, argnums=(0, 1, 2, 3, 4))(*problem[:2], w, a, jnp.float32(c))

    right = exact_loss(*problem, lambda logprob, entropy, a, b: a * logprob + c * b * entropy, a, b, weights=w)
    rows = right.rows.answer
    by_weights = np.where(w != 0, a * rows.logprob + c * b * rows.entropy, 0)
    want = rows.hidden, rows.weight, by_weights, w * rows.logprob, np.sum(w * b * rows.entropy)
    for factor in (3.0, 0.0):
        assert_near(gradients(factor), jax.tree.map(lambda x: (factor + 2 * right.loss) * x, want))  # noqa: B023


SETTINGS = {
    "x64": lambda: jax.enable_x64(True),
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "debug_nans": lambda: jax.debug_nans(True),
}


@pytest.mark.parametrize(
    ("engine", "setting"),
    [
        *(parameter(engine, "x64", slow=engine is not XLA) for engine in PLAIN),
        *(parameter(XLA, setting, slow=True) for setting in ("strict promotion", "debug_nans")),
    ],
)
def test_label_and_teacher_match_float64_in_every_jax_setting(engine: Engine, setting: str) -> None:
    problem, weights = engine.problem(), np.linspace(-1, 2, engine.shape[0], dtype=np.float32)
    teacher, room = teacher_of(problem, temperature=3.5), np.int64(engine.bytes_of("some"))
    options: dict[str, Any] = {"temperature": 2.5, "vocabulary": np.int64(engine.shape[1]), "impl": engine.impl}
    with engine.strictly(), SETTINGS[setting]():
        objective: Objective = lambda logprob, entropy, *, divergence: 0.5 * entropy - logprob + 2 * divergence  # noqa: E731
        got = check_loss(problem, objective, weights, teacher=teacher, workspace=room, **options)
        assert {x.dtype for x in (got.loss, *got.rows[:3], got.rows.divergence)} == {jnp.dtype(F32)}


# --- Hopper: logits in float16, sums over waves and blocks, clusters ---


@engines.needs_interpreter
@pytest.mark.nightly
def test_rare_words_get_gradients_under_float16_logits() -> None:
    """Its probabilities are as small as 1e-20 of the largest, which in float16 would be 0."""
    problem, ones = GPU.problem(30.0), jnp.ones(N)
    with GPU.strictly():
        got = check_loss(problem, CROSS_ENTROPY, ones, impl="mosaic_gpu", workspace=ALL).rows.weight.astype(F32)
    want = exact_loss(*problem, CROSS_ENTROPY, weights=ones).rows.answer.weight
    size = np.linalg.norm(want, axis=1)
    rare = ~np.isin(np.arange(V), problem.labels) & (size < 1e-4 * size.max())
    assert rare.sum() > 5
    np.testing.assert_array_less(np.linalg.norm(got - want, axis=1)[rare], 0.05 * size[rare])


CLUSTERS = Sizes(Tiles(columns=256, slots=2, cluster=2), chunk=256)
BLOCKS_OF_ROWS = dataclasses.replace(engines.GPU_SIZES, most_rows=128, default_rows=128)


@engines.needs_interpreter
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("sizes", "shape", "objective", "workspace"),
    [
        pytest.param(engines.GPU_SIZES, (400, V, D), CLIPPED, SOME_ROWS + 4 * V * D, id="waves that add to one sum"),
        pytest.param(CLUSTERS, (300, 520, 128), CROSS_ENTROPY, 0, id="blocks that share a cluster"),
        pytest.param(BLOCKS_OF_ROWS, (290, 264, 128), CROSS_ENTROPY, 0, id="blocks of rows, none kept"),
        pytest.param(BLOCKS_OF_ROWS, (290, 264, 128), CROSS_ENTROPY, ALL, id="all kept"),
    ],
)
def test_waves_blocks_and_clusters_match_float64(sizes, shape, objective, workspace):
    from strict_gpu import strict_interpreter

    problem, weights = GPU._replace(shape=shape).problem(), sparse_weights(shape[0])
    with gpu_tiles.override(sizes), strict_interpreter(multiprocessors=2):
        check_loss(problem, objective, weights, impl="mosaic_gpu", workspace=workspace)


@engines.needs_interpreter
@pytest.mark.slow
def test_a_frozen_weight_has_waves_without_a_sum():
    """Room for the logits of 128 of 400 rows."""
    from strict_gpu import strict_interpreter

    problem, weights = GPU._replace(shape=(400, V, D)).problem(), sparse_weights(400)
    operands = cases.operands_for(problem, CLIPPED)

    def loss(hidden: jax.Array) -> jax.Array:
        options = {"weights": weights, "impl": "mosaic_gpu", "workspace": SOME_ROWS}
        return token_loss(hidden, *problem[1:], CLIPPED, *operands, **options)[0]

    with gpu_tiles.override(engines.GPU_SIZES), strict_interpreter(multiprocessors=2):
        program = jax.jit(jax.grad(loss))
        assert "lm_head_hidden" not in str(program.trace(problem.hidden).jaxpr)  # cuBLAS multiplies
        got = program(problem.hidden)
    want = exact_loss(*problem, CLIPPED, *operands, weights=weights).rows.answer.hidden
    np.testing.assert_allclose(np.float64(got), want, rtol=2**-7, atol=2**-8 * np.abs(want).max())
