"""`divergence_loss` by every engine: what it gives, what it never reads, and what it costs.

What is right is divergence_oracle.py. The teacher is half as wide again as the student. A token that one of the two has
alone would be by far the likeliest.
"""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from divergence_oracle import exact_divergences
from engines import CHUNKED, F32, FULL, TPU, TPU_TILES, XLA, XLA_BF16, parameter
from jax.extend.core.primitives import dot_general_p
from lm_head_cases import SCALES, assert_near, blocks_visited, equations

from lm_head import divergence_loss, token_divergence

KINDS = {"forward_kl": {}, "reverse_kl": {}, "jsd": {"beta": 0.3}}
WAYS = [(XLA, way) for way in ("none", "some", "all")] + [(FULL, "all"), (CHUNKED, "some"), (XLA_BF16, "some")]
"""An engine, and how much workspace it is given."""
nightly = {"marks": pytest.mark.nightly}
ON_TPU = [parameter(TPU, "none", "jsd"), *(pytest.param(TPU, "none", kind, **nightly) for kind in list(KINDS)[:2])]
every_way_and_kind = pytest.mark.parametrize(
    ("engine", "way", "kind"), [*(parameter(*way, kind) for way in WAYS for kind in KINDS), *ON_TPU]
)
every_kind = pytest.mark.parametrize("kind", KINDS)


def models_of(engine, scale=3.0, more=40, common=None):
    """Logits with a standard deviation of `scale`, a number or one a row; the teacher has `more` rows of the weight."""
    (n, v, d), rng = engine.shape, np.random.default_rng(1)
    t, common = 3 * d // 2, min(v, v + more) if common is None else common
    arrays = [rng.normal(size=size) for size in ((n, d), (v, d), (n, t), (v + more, t))]
    for hidden, weight in (arrays[:2], arrays[2:]):
        hidden *= np.broadcast_to(scale, n)[:, None] / math.sqrt(hidden.shape[1])
        weight[common:] *= 30
    return [jnp.asarray(x, engine.dtype) for x in arrays]


@functools.partial(jax.jit, static_argnames=("kind", "beta", "softcap", "vocabulary", "workspace", "impl", "dtype"))
def answer(models, weights, **options):
    """The loss, the divergences, and the gradients by hidden states and weight."""
    loss = jax.value_and_grad(lambda h, w: divergence_loss(h, w, *models[2:], weights=weights, **options), (0, 1), True)
    (total, values), gradients = loss(*models[:2])
    return total, values, *gradients


def run(engine, way, models, kind, weights=None, **options):
    weights = np.ones(len(models[0]), F32) if weights is None else weights
    options = {"temperature": 1.0, "workspace": engine.bytes_of(way)} | KINDS[kind] | options  # one program for all
    with engine.strictly():
        return answer(models, weights, kind=kind, impl=engine.impl, **options)


def check(engine, way, models, kind, rows="every", **options):
    """Results, which are float64's to the rounding of logits and products. Rows that don't count hold poison."""
    live, n = engine.live(rows), len(models[0])
    weights = np.where(live, np.random.default_rng(3).normal(size=n), 0).astype(F32)
    poison = jnp.where(np.arange(n) % 2, jnp.nan, jnp.inf)[:, None].astype(engine.dtype)
    sick = [jnp.where(live[:, None], x, poison) if i in (0, 2) else x for i, x in enumerate(models)]
    total, *found = run(engine, way, sick, kind, weights, **options)
    truth = exact_divergences(*models, weights, where=live, kind=kind, **KINDS[kind] | options)
    narrow = 0 if engine.dtype == F32 else 2**-7
    for got, want, resolution in zip(found, truth[:3], truth.resolution, strict=True):
        rounding = narrow * np.abs(want).max(initial=0) if got is not found[0] else 0
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=16 * resolution + rounding)
    terms = weights * np.asarray(found[0], np.float64)
    np.testing.assert_allclose(total, terms.sum(), rtol=0, atol=1e-6 * np.abs(terms).sum())
    assert found[0].dtype == total.dtype == F32
    assert [x.dtype for x in found[1:]] == [engine.dtype] * 2
    assert not np.any(found[0][~live])
    assert not np.any(found[1].astype(F32)[~live])
    return found


# --- the oracle itself ---


@every_kind
def test_the_oracle_s_gradients_are_its_values_central_differences(kind):
    models = [np.asarray(x[:6, :4], np.float64) for x in models_of(XLA)]
    weights, options = np.linspace(-1, 2, 6), {"kind": kind, "temperature": 0.7, "softcap": 2.0, **KINDS[kind]}
    truth = exact_divergences(*models, weights, **options)
    for side in (0, 1):
        for index in ((0, 0), (3, 2), (5, 3)):
            changed = [[x.copy() for x in models] for _ in range(2)]
            for step, arrays in zip((1e-5, -1e-5), changed, strict=True):
                arrays[side][index] += step
            up, down = (np.vdot(weights, exact_divergences(*x, weights, **options).values) for x in changed)
            np.testing.assert_allclose(truth[1 + side][index], (up - down) / 2e-5, rtol=1e-6, atol=1e-8)


def test_the_oracle_knows_a_coin():
    coin = functools.partial(exact_divergences, [[1.0]], np.zeros((2, 1)), [[1.0]], np.log([[3.0], [1.0]]), [1.0])
    forward, reverse = 0.75 * np.log(1.5) + 0.25 * np.log(0.5), 0.5 * np.log(2 / 3) + 0.5 * np.log(2)
    np.testing.assert_allclose([coin(kind="forward_kl").values, coin(kind="reverse_kl").values], [[forward], [reverse]])


# --- values and gradients ---


@every_way_and_kind
def test_any_softmaxes_of_any_rows_are_float64_s(engine, way, kind):
    """Student and teacher disagree where they are saturated."""
    check(engine, way, models_of(engine, SCALES["peaked"]), kind, "a block and one", temperature=0.6)
    check(engine, way, models_of(engine, SCALES["saturated"]), kind, "few")
    if engine is not TPU:
        check(engine, way, models_of(engine), kind)
        assert not np.any(check(engine, way, models_of(engine), kind, "none")[2])


@pytest.mark.parametrize(
    ("engine", "way", "kind", "more", "common"),
    [
        *(parameter(XLA, "some", *x) for x in (("forward_kl", -16, None), ("jsd", 40, 130), ("reverse_kl", 8, 1))),
        pytest.param(TPU, "none", "jsd", 40, 130, **nightly),
    ],
)
def test_only_tokens_of_both_vocabularies_exist(engine, way, kind, more, common):
    """The smaller number of rows, or `vocabulary`; other rows get no gradient. The softcap precedes the temperature."""
    models = models_of(engine, 30.0, more=more, common=common)
    got = check(engine, way, models, kind, "most", vocabulary=common, softcap=20.0, temperature=0.6)
    assert not np.any(got[2].astype(F32)[common or min(len(models[1]), len(models[3])) :])


@pytest.mark.parametrize("beta", [0.001, 0.9])
def test_any_mixture_of_student_and_teacher_is_float64_s(beta):
    check(XLA, "some", models_of(XLA, 30.0), "jsd", beta=beta)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", [parameter(XLA), pytest.param(FULL, **nightly), pytest.param(TPU, **nightly)])
def test_equal_models_differ_by_exactly_nothing_and_near_ones_never_by_less(engine, kind):
    """In softmaxes of all scales."""
    n = engine.shape[0]
    hidden, weight, *_ = models_of(engine, np.resize(list(SCALES.values()), n))
    total, *got = run(engine, "none", [hidden, weight, hidden, jnp.array(weight)], kind)
    assert total == 0
    assert not any(np.any(x.astype(F32)) for x in got)
    noise = np.resize([1e-6, 1e-4, 1e-2], n)[:, None] * np.random.default_rng(2).normal(size=hidden.shape)
    near = (hidden * (1 + noise)).astype(hidden.dtype)
    assert np.min(run(engine, "none", [hidden, weight, near, weight], kind)[1]) >= -1e-6


@pytest.mark.parametrize(("engine", "way"), [*(parameter(*way) for way in WAYS), pytest.param(TPU, "none", **nightly)])
def test_a_nan_in_a_row_that_counts_is_not_hidden_and_harms_no_other(engine, way):
    hidden, weight, teacher, other = models_of(engine)
    models = hidden.at[5].set(jnp.nan), weight, teacher.at[9].set(jnp.nan), other
    total, values, dh, dw = run(engine, way, models, "jsd")
    assert np.isnan(total)
    assert np.isnan(dw.astype(F32)).any()
    for x in (values, dh.astype(F32).sum(axis=1)):
        np.testing.assert_array_equal(np.isnan(x), np.isin(np.arange(len(hidden)), [5, 9]))


def test_values_alone_have_no_gradient_and_say_so():
    models = models_of(XLA)
    assert_near(token_divergence(*models, kind="jsd"), divergence_loss(*models, kind="jsd")[1], 1e-6)
    with pytest.raises(ValueError, match="token_divergence has no gradient: differentiate divergence_loss"):
        jax.grad(lambda hidden: token_divergence(hidden, *models[1:]).sum())(models[0])


def test_the_student_and_the_weights_get_gradients_the_teacher_and_the_divergences_get_none():
    arguments = *models_of(XLA), jnp.linspace(-1, 2, 90)

    def loss(*given):
        return divergence_loss(*given[:4], weights=given[4])

    gradients = jax.jit(jax.grad(lambda *x: loss(*x)[0], (0, 1, 2, 3, 4)))(*arguments)
    assert_near(gradients[4], loss(*arguments)[1])
    assert not any(np.any(x) for x in (*gradients[2:4], *jax.jit(jax.grad(lambda *x: loss(*x)[1].sum()))(*arguments)))


# --- what it costs ---

N, V, D, T = 96, 384, 20, 28
"""Whole tiles and blocks, and widths that no other dim has."""
VALUE = "the value alone"


def function_of(engine, way, kind, sides=(0, 1)):
    """The value alone, or with gradients, as a function of the models and weights."""

    def loss(*given):
        options = {"kind": kind, "impl": engine.impl, "workspace": engine.bytes_of("all" if way == VALUE else way)}
        return divergence_loss(*given[:4], weights=given[4], **options)

    return loss if way == VALUE else jax.value_and_grad(loss, sides, has_aux=True)


def shapes_of(n, v, d, t):
    return [jax.ShapeDtypeStruct(shape, F32) for shape in ((n, d), (v, d), (n, t), (v, t), (n,))]


@every_kind
@pytest.mark.parametrize("way", [VALUE, "none", "all"])
def test_it_takes_as_few_products_as_documented(way, kind):
    """1 + r for the value, r being the teacher's width over the student's; with gradients 3 + r where logits are kept.

    Without room for them 4 + 2r, and 5 + 3r for the jsd; one less without the gradient of a side.
    """

    def products(sides=(0, 1)):
        with XLA.strictly():
            jaxpr = jax.make_jaxpr(function_of(XLA, way, kind, sides))(*shapes_of(N, V, D, T)).jaxpr
        found = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
        shapes = [e.invars[0].aval.shape + e.invars[1].aval.shape for e in found]
        return [sum(width in shape for shape in shapes) for width in (D, T)]

    kept = {VALUE: [1, 1], "all": [3, 1]}
    most = kept.get(way, [5, 3] if kind == "jsd" else [4, 2])
    assert products() == most
    for side in (0, 1) if way != VALUE else ():
        assert products((side,))[0] == most[0] - 1


@every_kind
@pytest.mark.parametrize("way", [VALUE, "none", "all"])
def test_on_tpus_it_takes_the_same_products_with_any_workspace(way, kind):
    """4 + 2r, for the jsd 5 + 3r: logits are computed in the kernels, a step at a time, and once more for gradients."""
    found, n, v, d, t = collections.Counter(), 256, 512, 128, 384
    with TPU.strictly():
        jaxpr = jax.make_jaxpr(function_of(TPU, way, kind))(*shapes_of(n, v, d, t)).jaxpr
    steps = TPU_TILES["columns"] // TPU_TILES["step"]  # of a kernel's tile
    for equation in equations(jaxpr):
        if equation.primitive is dot_general_p and equation.outvars[0].aval.ndim == 2:
            left, ((dim,), _) = equation.invars[0].aval.shape, equation.params["dimension_numbers"][0]
            found["teacher" if left[dim] == t else "student"] += 1 / steps if left[dim] in (d, t) else 1
    passes = (1 + (kind == "jsd")) + (way != VALUE)
    assert found == {"student": passes + 2 * (way != VALUE), "teacher": passes}


@pytest.mark.parametrize("way", [VALUE, "none"])
def test_blocks_visited_follow_the_rows_that_count(way):
    models, function = (
        [jnp.ones(x.shape) for x in shapes_of(N, V, D, T)[:4]],
        jax.jit(function_of(XLA, way, "reverse_kl")),
    )
    with XLA.strictly():
        none, few, every = blocks_visited(lambda live: function(*models, jnp.where(jnp.arange(N) < live, 0.5, 0)), N)
    assert (none, few < every) == (0, True)
    assert few <= (17 + 2 * 15) / N * every


# --- what is refused ---

GOOD = dict(
    zip(
        ("hidden", "weight", "teacher_hidden", "teacher_weight"),
        map(jnp.zeros, ((4, 3), (5, 3), (4, 2), (6, 2))),
        strict=True,
    )
)
FAULTS = {
    "an unknown kind": ("kind", {"kind": "kl"}),
    "a beta above 1": ("beta", {"kind": "jsd", "beta": 1.1}),
    "a beta that is no number": ("beta", {"kind": "jsd", "beta": math.nan}),
    "another model's tokens": ("teacher_hidden", {"teacher_hidden": jnp.zeros((3, 2))}),
    "a teacher's weight of another width": ("teacher_weight", {"teacher_weight": jnp.zeros((6, 3))}),
    "a float16 teacher": ("teacher_hidden", {"teacher_hidden": jnp.zeros((4, 2), jnp.float16)}),
    "a vocabulary larger than the student's": ("vocabulary", {"vocabulary": 6}),
    "no vocabulary": ("vocabulary", {"vocabulary": 0}),
    "a teacher's temperature of 0": ("teacher_temperature", {"teacher_temperature": 0.0}),
    "a teacher's softcap below 0": ("teacher_softcap", {"teacher_softcap": -1.0}),
    "an engine without a teacher": ("impl: mosaic_gpu can't run", {"impl": "mosaic_gpu"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_argument_at_fault_is_named(fault):
    argument, faults = FAULTS[fault]
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        divergence_loss(**(GOOD | faults))
