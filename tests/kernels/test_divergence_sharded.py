"""The divergences on meshes are those of one device, with equal vocabularies and with unequal ones.

Half of the tokens don't count and hold NaN: they fill whole shards, so that some devices have nothing to do. Only where
a mesh has Explicit axes, whose types allow nothing else, does it divide the vocabulary evenly.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import TPU_TILES, XLA
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lm_head_cases import assert_near

from lm_head import HeadSharding, divergence_loss, token_divergence
from lm_head.tpu import tiles

N, D, T, V = 80, 16, 24, 131
RNG = np.random.default_rng(0)
LIVE = (np.arange(N) >= N // 2) & (np.arange(N) % 13 != 0)
HIDDEN, TEACHER_HIDDEN = (np.where(LIVE[:, None], RNG.normal(size=(N, d)), np.nan).astype(np.float32) for d in (D, T))
WEIGHT, TEACHER_WEIGHT = (RNG.normal(size=(v, d)).astype(np.float32) for v, d in ((V, D), (V + 13, T)))
WEIGHTS = (LIVE * RNG.normal(size=N)).astype(np.float32)
JSD, REVERSE, FORWARD = {"kind": "jsd", "beta": 0.3}, {"kind": "reverse_kl"}, {"kind": "forward_kl"}


@pytest.fixture(autouse=True)
def small_tiles():
    with XLA.strictly():
        yield
    pltpu.reset_tpu_interpret_mode_state()  # where kernels of one device failed, those of others wait for it no longer


def arguments_of(words, teacher_words):
    return HIDDEN, WEIGHT[:words], TEACHER_HIDDEN, TEACHER_WEIGHT[:teacher_words], WEIGHTS


def by_divergences(*arguments, **options):
    values = token_divergence(*arguments[:4], where=arguments[4] != 0, **options)
    return jnp.sum(arguments[4] * values), values


def by_loss(*arguments, **options):
    return divergence_loss(*arguments[:4], weights=arguments[4], **options)


@functools.cache
def differentiated(function, sides=(0, 1, 4), **options):
    """Value, divergences and gradients by hidden states, weight and weights, jitted."""
    run = jax.value_and_grad(lambda *x: function(*x, **options), sides, has_aux=True)
    return jax.jit(run)


@functools.cache
def of_one_device(words, teacher_words, function, **options):
    return differentiated(function, **options)(*arguments_of(words, teacher_words))


def mesh_of(shape):
    return jax.make_mesh(shape, ("dp", "fsdp", "tp"), (AxisType.Auto,) * 3, devices=jax.devices()[: np.prod(shape)])


WAVES, NONE = {"workspace": 2**20}, {"workspace": 0}


@pytest.mark.parametrize(
    ("devices", "axes", "words", "function", "options"),
    [
        ((2, 2, 2), {}, (V, V), by_divergences, REVERSE),
        ((2, 2, 2), {}, (V, V + 13), by_loss, WAVES | JSD),
        ((2, 2, 2), {}, (V, 100), by_loss, NONE | JSD),  # the last rows of the student are beyond the teacher's
        ((2, 2, 2), {}, (128, 128), by_loss, WAVES | FORWARD | {"temperature": 0.6, "softcap": 2.0}),
        ((1, 1, 3), {}, (V, V + 13), by_divergences, JSD),
        ((1, 1, 3), {}, (V, V + 13), by_loss, NONE | REVERSE | {"teacher_vocabulary": 40}),  # one device has them all
        ((1, 1, 3), {}, (90, V), by_loss, WAVES | FORWARD),
        ((2, 2, 2), {"vocabulary": None}, (V, 100), by_loss, WAVES | JSD),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_divergences_and_gradients_are_those_of_one_device(devices, axes, words, function, options):
    mesh = mesh_of(devices)
    sharding = HeadSharding(mesh, **({"tokens": ("dp", "fsdp"), "vocabulary": "tp", "features": "fsdp"} | axes))
    got = differentiated(function, sharding=sharding, **options)(*arguments_of(*words))
    assert_near(got, of_one_device(*words, function, **options))


def test_kernels_for_tpus_give_what_one_device_gives():
    """Interpreted kernels wait for each other: four devices (XLA has no more threads), each with rows that count."""
    sharding = HeadSharding(mesh_of((1, 2, 2)), ("dp", "fsdp"), "tp", "fsdp")
    order, words, options = np.arange(N).reshape(2, -1).T.ravel(), (V, V + 13), JSD
    arguments = [x[order] if len(x) == N else x for x in arguments_of(*words)]
    with tiles.override(**TPU_TILES), pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        got = differentiated(by_loss, sharding=sharding, impl="mosaic_tpu", **options)(*arguments)
        jax.block_until_ready(got)
    assert_near(got, differentiated(by_loss, impl="xla", **options)(*arguments))


def test_equal_models_differ_by_exactly_nothing_on_a_mesh_too():
    sharding = HeadSharding(mesh_of((2, 2, 2)), ("dp", "fsdp"), "tp", "fsdp")
    got = differentiated(by_loss, (0, 1), sharding=sharding, **JSD)(HIDDEN, WEIGHT, HIDDEN, WEIGHT, WEIGHTS)
    assert not any(np.any(x) for x in jax.tree.leaves(got))


@pytest.mark.parametrize(
    ("weight", "function"), [(P("data"), by_loss), (P("model", "data"), by_divergences)], ids=["loss", "divergences"]
)
def test_on_explicit_axes_results_are_laid_out_like_the_arguments(weight, function):
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    tokens, words = P("data"), (128, 96)
    in_rows = [x.reshape(8, 10, *x.shape[1:]) if len(x) == N else x for x in arguments_of(*words)]
    specs = (tokens, weight, tokens, weight, tokens)
    arguments = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(in_rows, specs, strict=True)]
    (loss, values), gradients = differentiated(function, **JSD)(*arguments)
    (want_loss, want_values), want_gradients = of_one_device(*words, function, **JSD)
    shaped = [x.reshape(y.shape) for x, y in zip(want_gradients, gradients, strict=True)]
    assert_near(((loss, values), gradients), ((want_loss, want_values.reshape(8, 10)), shaped))
    assert values.sharding.is_equivalent_to(arguments[4].sharding, 2)
    for gradient, argument in zip(gradients, (arguments[0], arguments[1], arguments[4]), strict=True):
        assert gradient.sharding.is_equivalent_to(argument.sharding, gradient.ndim)


def test_a_teacher_laid_out_otherwise_than_the_sharding_says_is_refused():
    mesh = mesh_of((2, 2, 2))
    sharding = HeadSharding(mesh, ("dp", "fsdp"), "tp", "fsdp")
    for name, spec in (("teacher_hidden", P("tp")), ("teacher_weight", P("fsdp", "tp"))):
        models = dict(
            zip(("hidden", "weight", "teacher_hidden", "teacher_weight"), arguments_of(128, 128)[:4], strict=True)
        )
        models[name] = jax.device_put(models[name], NamedSharding(mesh, spec))
        with pytest.raises(ValueError, match=name):
            token_divergence(**models, sharding=sharding)
