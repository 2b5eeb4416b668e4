"""A loss with a teacher, by every engine in plain XLA, against float64; `divergence_loss`; and the
likeliest tokens.

The teacher is half as wide again as the student. A token that only one model has would be by far the likeliest.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import OBJECTIVES, SCALES, Problem, check_loss, teacher_of
from engines import BF16, CHUNKED, F32, FULL, XLA, XLA_BF16, Engine, every
from jax.sharding import AxisType

from lm_head import HeadSharding, divergence_loss, likeliest_tokens, token_logprobs, token_loss

KINDS = ("jsd", "forward_kl", "reverse_kl")
WAYS = [(FULL, "all"), (CHUNKED, "some"), (XLA_BF16, "some"), *((XLA, way) for way in ("none", "some", "all"))]
TEACHERS = [
    *((kind, "peaked", "a block and one", "entropy and teacher", {"temperature": 0.6}) for kind in KINDS),
    *((kind, "saturated", "few", "teacher alone", {}) for kind in KINDS),  # where the two disagree
    ("jsd", "near-uniform", "none", "teacher alone", {}),
]


def run(engine: Engine, way: str, problem: Problem, rows: str, *, teacher: Any, objective: str, **options: Any) -> Any:
    live = engine.live(rows)
    weights = np.where(live, np.random.default_rng(3).normal(size=len(live)), 0).astype(F32)
    options = {"temperature": 1.0, "workspace": engine.bytes_of(way), "impl": engine.impl} | options
    largest = 0 if engine.dtype == BF16 else 1.25
    with engine.strictly():
        return check_loss(problem, OBJECTIVES[objective], weights, teacher=teacher, largest=largest, **options).rows


@pytest.mark.parametrize(("engine", "way", "kind", "softmax", "rows", "objective", "options"), every(WAYS, *TEACHERS))
def test_any_two_softmaxes_of_any_rows_match_float64(engine, way, kind, softmax, rows, objective, options):
    problem = engine.problem(SCALES[softmax])
    teacher = teacher_of(problem, SCALES[softmax], kind=kind)
    run(engine, way, problem, rows, teacher=teacher, objective=objective, **options)


VOCABULARIES = [("forward_kl", -16, None), ("jsd", 40, 130), ("reverse_kl", 8, 1)]


@pytest.mark.parametrize(("engine", "kind", "more", "vocabulary"), every((XLA, FULL), *VOCABULARIES))
def test_only_tokens_of_both_vocabularies_exist(engine: Engine, kind: str, more: int, vocabulary: int | None) -> None:
    """The smaller number of rows, or `vocabulary`. Rows beyond it get no gradient. The teacher has no softcap."""
    problem, common = engine.problem(30.0), vocabulary or engine.shape[1] + min(more, 0)
    problem = problem._replace(labels=problem.labels % common, weight=problem.weight.at[common:].multiply(30))
    teacher = teacher_of(problem, 30.0, more, kind=kind, softcap=None, temperature=2.0)
    options: dict[str, Any] = {"vocabulary": vocabulary, "softcap": 20.0, "temperature": 0.6}
    got = run(engine, "some", problem, "most", teacher=teacher, objective="label and teacher", **options)
    assert not np.any(got.weight[common:])


@pytest.mark.parametrize("beta", [0.001, 0.9])
@pytest.mark.slow
def test_any_mixture_of_student_and_teacher_is_float64_s(beta: float) -> None:
    problem = XLA.problem(30.0)
    run(XLA, "some", problem, "every", teacher=teacher_of(problem, 30.0, beta=beta), objective="teacher alone")


@pytest.mark.parametrize(("engine", "kind"), every((XLA,), *((kind,) for kind in KINDS)))
def test_equal_models_differ_by_exactly_nothing(engine: Engine, kind: Any) -> None:
    """In softmaxes of all scales."""
    hidden, weight, _ = engine.problem(1.0)
    hidden *= jnp.resize(jnp.asarray(list(SCALES.values()), engine.dtype), len(hidden))[:, None]

    @jax.jit
    def of_teacher(hidden: jax.Array, teacher: jax.Array) -> Any:
        loss = lambda *sides: divergence_loss(*sides, teacher, jnp.array(weight), kind=kind, impl=engine.impl)  # noqa: E731
        return jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, weight)

    with engine.strictly():
        assert not any(np.any(x.astype(F32)) for x in jax.tree.leaves(of_teacher(hidden, hidden)))


@pytest.mark.parametrize(("beta", "kind"), [(0, "forward_kl"), (1, "reverse_kl")])
def test_jsd_at_its_ends_is_the_limiting_kl_divergence(beta: float, kind: Any) -> None:
    """As in TRL's GKD."""
    models = *XLA.problem()[:2], *teacher_of(XLA.problem())[:2]
    run = jax.jit(lambda *x: (divergence_loss(*x, kind="jsd", beta=beta), divergence_loss(*x, kind=kind)))
    jax.tree.map(np.testing.assert_array_equal, *run(*models))


def test_without_tokens_every_function_gives_nothing() -> None:
    hidden, weight, teacher = jnp.zeros((0, 4)), jnp.ones((9, 4)), (jnp.zeros((0, 6)), jnp.ones((11, 6)))
    given = hidden, weight, np.zeros(0, np.int32)

    @jax.jit
    def run(weight: jax.Array) -> Any:
        zeros = jax.value_and_grad(lambda w: divergence_loss(hidden, w, *teacher, kind="jsd")[0])(weight)
        loss, tokens = token_loss(*given, OBJECTIVES["cross-entropy"])
        empty = divergence_loss(hidden, weight, *teacher)[1], token_logprobs(*given), likeliest_tokens(hidden, weight)
        return (*zeros, loss), (*empty, tokens)

    zeros, empty = run(weight)
    assert not any(np.any(x) for x in zeros)
    assert {x.shape for x in jax.tree.leaves(empty)} == {(0,)}


# --- the likeliest tokens ---


@pytest.mark.parametrize(
    ("devices", "dtype", "vocabulary"), [(None, BF16, 140), ((1, 1, 3), F32, None), ((2, 2, 2), F32, 100)], ids=str
)
def test_likeliest_tokens_match_full_logits_with_low_ids_first(devices, dtype, vocabulary):
    """Whole numbers tie often. 301 columns divide evenly over no mesh."""
    sharding, rng = None, np.random.default_rng(0)
    hidden, weight, live = rng.integers(-2, 3, (88, 16)), rng.integers(-2, 3, (301, 16)), rng.random(88) < 0.8
    if devices is not None:
        mesh = jax.make_mesh(devices, ("dp", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3)
        sharding = HeadSharding(mesh, ("dp", "fsdp"), "tp", "fsdp")
    sick = jnp.where(live[:, None], jnp.asarray(hidden, dtype), jnp.nan).reshape(4, 22, 16)
    options = {"where": live.reshape(4, 22), "vocabulary": vocabulary, "sharding": sharding}
    with XLA.strictly():
        ids = jax.jit(lambda h, w: likeliest_tokens(h, w, **options))(sick, jnp.asarray(weight, dtype))
    logits = (hidden @ weight.T)[:, :vocabulary]
    np.testing.assert_array_equal(ids.reshape(88), np.where(live, logits.argmax(axis=1), 0))


def test_likeliest_tokens_are_multiplied_in_the_given_dtype() -> None:
    """Two tokens that are equal in bfloat16: of equal tokens the lower id is the likeliest."""
    hidden, weight = jnp.ones((1, 2)), jnp.array([[1.0, 1.0], [1.0, 1.001]])
    tokens = jax.jit(lambda *x: [likeliest_tokens(*x, dtype=dtype) for dtype in (None, BF16)])(hidden, weight)
    np.testing.assert_array_equal(tokens, [[1], [0]])
