"""`token_divergence` and `divergence_loss` by every engine: what they give, what they never read, and what they cost.

What is right is divergence_oracle.py, and near enough is as near as the ordinary JAX program with full logits comes.
"""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from divergence_cases import (
    F32,
    GENERAL,
    KINDS,
    WAYS,
    Models,
    alike,
    check,
    cotangents_of,
    models_of,
    run,
    values_of,
)
from divergence_oracle import exact_divergences
from engines import TPU, TPU_F32, TPU_TILES, XLA, XLA_BF16, parameter
from jax.extend.core.primitives import dot_general_p
from lm_head_cases import SCALES, assert_near, blocks_visited, equations

from lm_head import divergence_loss, token_divergence

FEWER = [(TPU_F32, kind) for kind in ("forward_kl", "reverse_kl")]  # interpreted: one dtype a kind, and both for jsd
VOCABULARIES = (
    ("forward_kl", -16, None),
    ("reverse_kl", 40, None),
    ("jsd", 40, 130),
    ("jsd", 0, None),
    ("forward_kl", 8, 1),
)
"""A kind, how many more words the teacher has than the student, and `teacher_vocabulary`."""
NARROW = ((XLA_BF16, "some"), (TPU, "none"))

WAYS_AND_KINDS = [parameter(x, way, k) for x in WAYS for way in WAYS[x] for k in KINDS if (x, k) not in FEWER]
every_way_and_kind = pytest.mark.parametrize(("engine", "way", "kind"), WAYS_AND_KINDS)
OF_EACH_ENGINE = [parameter(XLA, way, kind) for way in WAYS[XLA] for kind in KINDS]
OF_EACH_ENGINE += [parameter(*narrow, "jsd") for narrow in NARROW]
every_way_of_each_engine = pytest.mark.parametrize(("engine", "way", "kind"), OF_EACH_ENGINE)
every_kind = pytest.mark.parametrize("kind", KINDS)


# --- the oracle itself ---


@every_kind
@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"softcap": 2.0, "temperature": 1.3}, {"more": -50}])
def test_the_oracle_is_what_jax_makes_of_a_plain_program_in_float64(kind, options):
    models = models_of(XLA, more=options.pop("more", 40))
    live, cotangents, options = XLA.live("most"), cotangents_of(models), {"kind": kind} | KINDS[kind] | options
    common = min(len(models.weight), len(models.teacher_weight))
    with jax.enable_x64(True):
        h, w, teacher_h, teacher_w = (jnp.asarray(np.asarray(x, np.float64)) for x in models)

        def values(h, w):
            return jnp.where(live, values_of(h @ w[:common].T, teacher_h @ teacher_w[:common].T, **options), 0)

        want = (values(h, w), *jax.grad(lambda *x: jnp.vdot(cotangents, values(*x)), (0, 1))(h, w))
    assert_near(exact_divergences(*models, cotangents, where=live, **options)[:3], want, 1e-12)


def test_the_oracle_knows_coins_and_certainties():
    fair, three_of_four = np.zeros((2, 1)), np.log([[3.0], [1.0]])
    coins = functools.partial(exact_divergences, [[1.0]], fair, [[1.0]], three_of_four, [1.0])
    np.testing.assert_allclose(coins(kind="forward_kl").values, 0.75 * np.log(1.5) + 0.25 * np.log(0.5))
    np.testing.assert_allclose(coins(kind="reverse_kl").values, -0.5 * np.log(0.75))
    heads, tails = np.eye(2)[:, :1], np.eye(2)[:, 1:]
    certain = functools.partial(exact_divergences, [[1000.0]], heads, [[1000.0]], tails, [1.0])
    for kind, value in {"forward_kl": 1000, "reverse_kl": 1000, "jsd": -0.3 * np.log(0.3) - 0.7 * np.log(0.7)}.items():
        np.testing.assert_allclose(certain(kind=kind, beta=0.3).values, value)


# --- values and gradients ---


@every_way_and_kind
def test_any_softmaxes_of_any_rows_are_as_accurate_as_full_logits(engine, way, kind):
    """Student and teacher disagree where they are saturated."""
    check(engine, way, models_of(engine, SCALES["near-uniform"]), kind)
    check(engine, way, models_of(engine, SCALES["peaked"]), kind, "a block and one", temperature=0.6)
    check(engine, way, models_of(engine, SCALES["saturated"]), kind, "few")
    assert not np.any(check(engine, way, models_of(engine), kind, "none").weight)


@pytest.mark.parametrize(
    ("engine", "way", "kind", "more", "common"),
    [
        *(parameter(XLA, "some", *x) for x in VOCABULARIES),
        parameter(XLA, GENERAL, "reverse_kl", -16, 130),
        *(parameter(engine, way, *x) for engine, way in NARROW for x in VOCABULARIES[:3:2]),
    ],
)
def test_only_tokens_of_both_vocabularies_exist(engine, way, kind, more, common):
    """The smaller number of rows, or `teacher_vocabulary`; other rows get no gradient.

    The softcap comes before the temperature on both sides.
    """
    models = models_of(engine, 30.0, more=more, common=common)
    got = check(engine, way, models, kind, "most", teacher_vocabulary=common, softcap=20.0, temperature=0.6)
    smaller = min(len(models.weight), len(models.teacher_weight))
    assert not np.any(got.weight.astype(F32)[common or smaller :])


@pytest.mark.parametrize("beta", [0.001, 0.9])
def test_any_mixture_of_student_and_teacher_is_as_accurate_as_full_logits(beta):
    check(XLA, "some", models_of(XLA, 30.0), "jsd", beta=beta)


@pytest.mark.parametrize(
    ("engine", "way", "kind"),
    [
        parameter(XLA_BF16, "all", "reverse_kl"),
        parameter(TPU, "none", "jsd"),
    ],
)
def test_float32_masters_with_bfloat16_products_get_float32_gradients(engine, way, kind):
    narrow = models_of(engine)
    _, want = run(engine, way, narrow, kind)
    _, got = run(engine, way, Models(*(x.astype(F32) for x in narrow)), kind, dtype=jnp.bfloat16)
    assert_near(got.values, want.values, 1e-5)
    assert_near(got[1:], [x.astype(F32) for x in want[1:]], 2**-7)
    assert all(np.any(x != x.astype(jnp.bfloat16).astype(F32)) for x in got[1:])


@every_way_of_each_engine
def test_equal_models_differ_by_exactly_nothing_and_near_ones_never_by_less(engine, way, kind):
    """In softmaxes of all scales."""
    total, got = run(engine, way, alike(engine), kind)
    assert total == 0
    assert not any(np.any(x.astype(F32)) for x in got)
    differences = np.repeat([1e-6, 1e-4, 1e-2], -(-engine.shape[0] // 3))[: engine.shape[0]]
    assert np.min(run(engine, way, alike(engine, differences), kind)[1].values) >= -1e-6


@every_way_of_each_engine
def test_a_nan_in_a_row_that_counts_is_not_hidden_and_harms_no_other(engine, way, kind):
    models = models_of(engine)
    hidden, teacher = models.hidden.at[5].set(jnp.nan), models.teacher_hidden.at[9].set(jnp.nan)
    total, got = run(engine, way, models._replace(hidden=hidden, teacher_hidden=teacher), kind)
    assert np.isnan(total)
    assert np.isnan(got.weight.astype(F32)).any()
    for x in (got.values, got.hidden.astype(F32).sum(axis=1)):
        np.testing.assert_array_equal(np.isnan(x), np.isin(np.arange(len(hidden)), [5, 9]))


# --- the rule of differentiation, transformations: which every engine shares ---


def loss_of(way, **options):
    """(hidden, weight, teacher_hidden, teacher_weight, weights) to loss and divergences."""

    def by_divergences(*arguments):
        values = token_divergence(*arguments[:4], where=arguments[4] != 0, **options)
        return jnp.vdot(arguments[4], values), values

    def by_loss(*arguments):
        return divergence_loss(*arguments[:4], weights=arguments[4], workspace=XLA.bytes_of(way), **options)

    return by_divergences if way == GENERAL else by_loss


def test_student_and_weights_get_gradients_teacher_and_the_divergences_beside_get_none():
    models = models_of(XLA)
    weights = jnp.where(XLA.live("most"), cotangents_of(models), 0)

    @jax.jit
    def gradients(*arguments):
        run = jax.value_and_grad(loss_of("some"), (0, 1, 2, 3, 4), has_aux=True)
        scaled = jax.grad(lambda *x: 3 * loss_of("some")(*x)[0] + loss_of("some")(*x)[0] ** 2, (0, 1))
        beside = jax.grad(lambda *x: loss_of("some")(*x)[1].sum(), (0, 1, 2, 3, 4))
        teacher = jax.grad(lambda *x: loss_of(GENERAL)(*x)[0], (2, 3))
        return run(*arguments), scaled(*arguments), (beside(*arguments), teacher(*arguments))

    with XLA.strictly():
        ((loss, values), once), scaled, nothing = gradients(*models, weights)
    live = weights != 0
    np.testing.assert_allclose(np.where(live, once[4], 0), values, rtol=1e-6)
    assert_near(scaled, [(3 + 2 * loss) * x for x in once[:2]])
    assert not any(np.any(x) for x in (*jax.tree.leaves(nothing), *once[2:4]))


@pytest.mark.parametrize("way", [GENERAL, "some"])
def test_transformations_and_leading_dims_give_the_same(way):
    models = models_of(XLA)
    arguments, loss = (*models, jnp.where(XLA.live("most"), cotangents_of(models), 0)), loss_of(way)

    def differentiated(function, sides=(0, 1)):
        return jax.value_and_grad(function, sides, has_aux=True)

    def in_two_dims(h, w, th, tw, weights):
        total, values = loss(h.reshape(9, 10, -1), w, th.reshape(9, 10, -1), tw, weights.reshape(9, 10))
        assert values.shape == (9, 10)
        return total, values.reshape(-1)

    with XLA.strictly():
        want = jax.jit(differentiated(loss))(*arguments)
        for function in (differentiated(jax.checkpoint(loss)), differentiated(in_two_dims)):
            assert_near(jax.jit(function)(*arguments), want)
        for side in (0, 1) if way != GENERAL else ():  # the other side is frozen
            assert_near(jax.jit(differentiated(loss, side))(*arguments)[1], want[1][side])


def test_rows_count_where_the_mask_and_their_weight_say_so_and_weigh_1_without_one():
    models = models_of(XLA)
    live, weights = XLA.live("most"), jnp.arange(90) % 3.0
    sick = jnp.where(live, weights, jnp.nan)

    @jax.jit
    def found(models):
        ways = {"where": live, "weights": sick}, {"weights": weights * live}, {"where": live}, {}
        ways = [divergence_loss(*models, **each) for each in (*ways, {"weights": live.astype(F32)})]
        return ways, token_divergence(*models, kind="reverse_kl", beta=0.5)

    (by_both, by_weights, by_where, by_default, by_ones), alone = found(models)
    assert_near((by_both, by_where, by_default[1]), (by_weights, by_ones, alone))


# --- what it costs ---

N, V, D, T = 96, 384, 20, 28
"""Whole tiles and blocks, and widths that no other dim has."""
VALUE = "the value alone"


def shapes_of(n, v, d, t, dtype=F32):
    return tuple(jax.ShapeDtypeStruct(*x) for x in (((n, d), dtype), ((v, d), dtype), ((n, t), dtype), ((v, t), dtype)))


def function_of(way, kind, sides=(0, 1)):
    """The value alone, or with gradients, as a function of the models and weights."""
    function = loss_of(GENERAL if way == VALUE else way, kind=kind, impl="xla")
    return function if way == VALUE else jax.value_and_grad(function, sides, has_aux=True)


def products(way, kind, sides=(0, 1)):
    """How many products of 2·N·V·D flops, of the student's width and of the teacher's: they stand there once a tile."""
    with XLA.strictly():
        arguments = *shapes_of(N, V, D, T), jax.ShapeDtypeStruct((N,), F32)
        found = list(equations(jax.make_jaxpr(function_of(way, kind, sides))(*arguments).jaxpr))
    operands = [e.invars[0].aval.shape + e.invars[1].aval.shape for e in found if e.primitive.name == "dot_general"]
    return np.array([sum(width in shape for shape in operands) for width in (D, T)])


@every_kind
@pytest.mark.parametrize("way", [VALUE, GENERAL, "none", "all"])
def test_it_takes_as_few_products_as_documented(way, kind):
    """1 + r for the value, r being the teacher's width over the student's; with gradients 3 + r where logits are kept.

    Without room for them 4 + 2r, and 5 + 3r for the jsd; one less without the gradient of a side.
    """
    least = np.array((1, 1) if way == VALUE else (3, 1))
    kept = way in ("all", VALUE)
    most = least if kept else np.array((5, 3) if kind == "jsd" else (4, 2))
    found = products(way, kind)
    assert np.all((found >= least) & (found <= most)), found
    for side in (0, 1) if way in ("all", "none") else ():
        assert products(way, kind, sides=(side,))[0] <= most[0] - 1


@every_kind
@pytest.mark.parametrize("way", [VALUE, GENERAL, "none", "all"])
def test_on_tpus_it_takes_the_same_products_with_any_workspace(way, kind):
    """4 + 2r, for the jsd 5 + 3r: logits are computed in the kernels, a step at a time, and once more for gradients."""
    found, n, v, d, t = collections.Counter(), 256, 512, 128, 384
    with TPU_F32.strictly():
        function = loss_of(GENERAL if way == VALUE else way, kind=kind, impl="mosaic_tpu")
        function = function if way == VALUE else jax.value_and_grad(function, (0, 1), has_aux=True)
        jaxpr = jax.make_jaxpr(function)(*shapes_of(n, v, d, t), jax.ShapeDtypeStruct((n,), F32)).jaxpr
    steps = TPU_TILES["columns"] // TPU_TILES["step"]  # of a kernel's tile
    for equation in equations(jaxpr):
        if equation.primitive is dot_general_p and equation.outvars[0].aval.ndim == 2:
            left, ((dim,), _) = equation.invars[0].aval.shape, equation.params["dimension_numbers"][0]
            width = left[dim]
            found["teacher" if width == t else "student"] += 1 / steps if width in (d, t) else 1
    passes = (1 + (kind == "jsd")) + (way != VALUE)
    assert found == {"student": passes + 2 * (way != VALUE), "teacher": passes}


@every_kind
@pytest.mark.parametrize("way", [VALUE, GENERAL, "none"])
def test_blocks_visited_follow_the_rows_that_count(way, kind):
    models, function = [jnp.ones(x.shape) for x in shapes_of(N, V, D, T)], jax.jit(function_of(way, kind))
    with XLA.strictly():
        none, few, every = blocks_visited(lambda live: function(*models, jnp.where(jnp.arange(N) < live, 0.5, 0)), N)
    assert (none, few < every) == (0, True)
    assert few <= (17 + 2 * 15) / N * every


# --- what is refused ---

GOOD = dict(zip(Models._fields, map(jnp.zeros, ((4, 3), (5, 3), (4, 2), (6, 2))), strict=True))
GOOD["teacher_vocabulary"] = 5
FAULTS = {
    "an unknown kind": ("kind", {"kind": "kl"}),
    "a beta of 0": ("beta", {"kind": "jsd", "beta": 0.0}),
    "a beta of 1": ("beta", {"kind": "jsd", "beta": 1.0}),
    "a beta that is no number": ("beta", {"kind": "jsd", "beta": math.nan}),
    "another model's tokens": ("teacher_hidden", {"teacher_hidden": jnp.zeros((3, 2))}),
    "a teacher's weight of another width": ("teacher_weight", {"teacher_weight": jnp.zeros((6, 3))}),
    "a teacher's weight that is no matrix": ("teacher_weight", {"teacher_weight": jnp.zeros((1, 6, 2))}),
    "a float16 teacher": ("teacher_hidden", {"teacher_hidden": jnp.zeros((4, 2), jnp.float16)}),
    "a teacher's weight of integers": ("teacher_weight", {"teacher_weight": jnp.zeros((6, 2), int)}),
    "a vocabulary larger than the student's": ("teacher_vocabulary", {"teacher_vocabulary": 6}),
    "a vocabulary larger than the teacher's": ("teacher_vocabulary", {"teacher_weight": jnp.zeros((4, 2))}),
    "no vocabulary": ("teacher_vocabulary", {"teacher_vocabulary": 0}),
    "a weight of another width": ("weight", {"weight": jnp.zeros((5, 4))}),
    "float16 hidden states": ("hidden", {"hidden": jnp.zeros((4, 3), jnp.float16)}),
    "where of another shape": ("where", {"where": jnp.ones(3, bool)}),
    "where that is not boolean": ("where", {"where": jnp.ones(4)}),
    "a temperature of 0": ("temperature", {"temperature": 0.0}),
    "a softcap below 0": ("softcap", {"softcap": -1.0}),
    "float16 products": ("dtype", {"dtype": jnp.float16}),
    "an unknown implementation": ("impl", {"impl": "warp"}),
}
OF_THE_LOSS = {
    "weights of another shape": ("weights", {"weights": jnp.ones(3)}),
    "a workspace below zero": ("workspace", {"workspace": -1}),
}


@pytest.mark.parametrize(
    ("function", "fault"),
    [*((token_divergence, x) for x in FAULTS), *((divergence_loss, x) for x in FAULTS | OF_THE_LOSS)],
)
def test_the_argument_at_fault_is_named(function, fault):
    jax.eval_shape(functools.partial(function, **GOOD))
    argument, faults = (FAULTS | OF_THE_LOSS)[fault]
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        function(**(GOOD | faults))
