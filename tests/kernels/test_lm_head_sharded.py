"""The sharded head gives what one device gives, on every mesh of eight; and what its devices exchange for it.

Half of the tokens don't count and hold NaN: they fill whole shards, so that some devices have nothing to do. The labels
are those at the edges of the vocabulary's shards, and no mesh divides the vocabulary evenly. Tiles are made small, so
that there are several of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import XLA
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from cases import assert_near, equations

from lm_head import HeadSharding, token_logprobs, token_loss, xla
from lm_head.tpu import tiles

N, D, V = 80, 16, 131
EDGES = [0, *(k * size + side for size in (17, 33, 66) for k in range(1, 8) for side in (-1, 0)), V - 1]
RNG = np.random.default_rng(0)
LIVE = (np.arange(N) >= N // 2) & (np.arange(N) % 13 != 0)
HIDDEN = np.where(LIVE[:, None], RNG.normal(size=(N, D)), np.nan).astype(np.float32)
WEIGHT = RNG.normal(size=(V, D)).astype(np.float32)
LABELS = np.full(N, -100)
LABELS[LIVE] = np.resize([label for label in EDGES if label < V], LIVE.sum())
OPERAND = np.where(LIVE, RNG.normal(size=N), np.inf).astype(np.float32)
WEIGHTS = (LIVE * RNG.normal(size=N)).astype(np.float32)
ARGUMENTS = (HIDDEN, WEIGHT, OPERAND, WEIGHTS, np.float32(0.7))

CUBE = (2, 2, 2)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(xla, "_MOST_WAVE", 8)
    with XLA.strictly():
        yield
    pltpu.reset_tpu_interpret_mode_state()  # where kernels of one device failed, those of others wait for it no longer


def over(shape, **axes):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    layout = {"tokens": ("dp", "fsdp"), "vocabulary": "tp", "features": "fsdp"} | axes
    return HeadSharding(Mesh(devices, ("dp", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3), **layout)


def general(hidden, weight, operand, weights, scale, labels=LABELS, entropy=True, **options):
    """A function of log-probability, normaliser and, with `entropy`, the entropy."""
    live = weights != 0
    tokens = token_logprobs(hidden, weight, jnp.asarray(labels), where=live, **options)
    product = tokens.logprob * (tokens.entropy if entropy else 1)
    return jnp.sum(weights * (jnp.where(live, operand, 0) * product + jnp.sin(scale * tokens.lse))), tokens


def loss(hidden, weight, operand, weights, scale, labels=LABELS, entropy=True, smooth=False, **options):
    def objective(logprob, entropy_, operand):
        by_entropy = 0.1 * jnp.clip(entropy_, 0, 4) ** 2 if entropy else 0
        return -operand * jnp.exp(scale * 0.1 * logprob) + by_entropy

    def smoothed(logprob, entropy_, operand, *, mean_logit):
        return objective(logprob, entropy_, operand) + operand * mean_logit

    chosen = smoothed if smooth else objective
    return token_loss(hidden, weight, labels, chosen, operand, weights=weights, **options)


def of_a_copy(hidden, weight, *arguments, **options):
    """Half as large as the weight, and in bfloat16: its gradient is the weight's all the same."""
    copy = (jax.lax.stop_gradient(weight) / 2).astype(jnp.bfloat16)
    return loss(hidden, weight, *arguments, weight_copy=copy, **options)


TEACHER = np.where(LIVE[:, None], RNG.normal(size=(N, 24)), np.nan).astype(np.float32)
TEACHER_WEIGHT = RNG.normal(size=(V + 13, 24)).astype(np.float32)


def with_teacher(hidden, weight, operand, weights, scale, labels=LABELS, words=V + 13, order=None, **options):
    """Label and teacher in one pass; with fewer `words` the last rows of the student's weight are no tokens."""

    def objective(logprob, entropy, operand, *, divergence, mean_logit):
        return scale * divergence - operand * (logprob - mean_logit)

    states, labels = (
        TEACHER[np.arange(N) if order is None else np.array(order)].reshape(*hidden.shape[:-1], -1),
        jnp.minimum(jnp.asarray(labels), words - 1),
    )
    teacher = {"teacher_hidden": states, "teacher_weight": TEACHER_WEIGHT[:words], "kind": "jsd", "beta": 0.3}
    return token_loss(hidden, weight, labels, objective, operand, weights=weights, **teacher, **options)


WAYS = {
    "general": (general, {}),
    "recomputed": (loss, {"workspace": 0}),
    "in waves": (loss, {"workspace": 2**20}),
    "a copy": (of_a_copy, {}),
    "a teacher": (with_teacher, {"workspace": 2**20}),
    "a teacher, recomputed": (with_teacher, {"workspace": 0}),
}


@functools.cache
def differentiated(way, argnums=(0, 1, 2, 3, 4), **options):
    """Value, tokens and gradients, jitted; compiled once for all tests."""
    function, settings = WAYS[way]
    return jax.jit(jax.value_and_grad(lambda *args: function(*args, **settings, **options), argnums, has_aux=True))


@functools.cache
def of_one_device(way, **options):
    return differentiated(way, **options)(*ARGUMENTS)


# --- what comes out ---

SCALED = {"temperature": 0.6, "softcap": 2.0}
ALL = (0, 1, 2, 3, 4)
CASES = [
    (CUBE, {}, "general", {"collision": True}, ALL),
    (CUBE, {}, "recomputed", SCALED, ALL),
    (CUBE, {}, "in waves", {}, ALL),
    (CUBE, {}, "general", {}, (0,)),  # the other side is frozen
    (CUBE, {}, "in waves", {"smooth": True}, ALL),
    (CUBE, {}, "in waves", {}, (1,)),
    (CUBE, {}, "a copy", {}, ALL),
    (CUBE, {}, "a teacher", {}, ALL),
    (CUBE, {}, "a teacher, recomputed", SCALED | {"words": 100}, ALL),
    (CUBE, {"vocabulary": None}, "a teacher", {"words": 100}, ALL),
    ((1, 1, 3), {}, "a teacher", {"vocabulary": 40, "words": 40}, ALL),  # one device has all tokens
    (CUBE, {"tokens": ("dp",), "vocabulary": ("tp", "fsdp"), "features": None}, "in waves", {}, ALL),
    ((8, 1, 1), {}, "in waves", {}, ALL),
    ((1, 1, 8), {}, "in waves", {}, ALL),
    (CUBE, {"tokens": ("dp",)}, "in waves", {}, ALL),
    (CUBE, {"tokens": (), "vocabulary": "dp"}, "in waves", {}, ALL),
    (CUBE, {"tokens": ("tp", "dp"), "vocabulary": "fsdp", "features": "tp"}, "in waves", {}, ALL),
]


@pytest.mark.parametrize(("shape", "axes", "way", "options", "sides"), CASES, ids=str)
def test_values_and_gradients_are_those_of_one_device(shape, axes, way, options, sides):
    got, gradients = differentiated(way, sides, sharding=over(shape, **axes), **options)(*ARGUMENTS)
    want, by_all = of_one_device(way, **options)
    assert_near((got, gradients), (want, tuple(by_all[i] for i in sides)))


KERNELS = [
    pytest.param((2, 1, 2), "general", {"entropy": True, "collision": True}, marks=pytest.mark.nightly),
    pytest.param((1, 4, 1), "general", {"entropy": False}, marks=pytest.mark.nightly),
    ((1, 2, 2), "in waves", {"entropy": False, "smooth": True}),
    pytest.param((1, 2, 2), "a teacher", {}, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("shape", "way", "options"), KERNELS, ids=str)
def test_kernels_for_tpus_give_what_one_device_gives(shape, way, options):
    """On four devices: interpreted kernels wait for each other, and eight would take all threads that XLA has here."""
    arguments, options = ARGUMENTS, dict(options)
    if way in ("general", "a teacher"):
        # For the same reason each device needs a token that counts, unless all go through the blocks in step.
        order = np.arange(N).reshape(2, -1).T.ravel()
        options["labels"] = tuple(LABELS[order])
        options |= {"order": tuple(order)} if way == "a teacher" else {}
        arguments = [x[order] if len(np.shape(x)) and len(x) == N else x for x in ARGUMENTS]
    with tiles.override(rows=128, columns=256, step=128), pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        got = differentiated(way, sharding=over(shape), impl="mosaic_tpu", **options)(*arguments)
        jax.block_until_ready(got)
    assert_near(got, differentiated(way, impl="xla", **options)(*arguments))


@pytest.mark.parametrize("way", ["general", "in waves"])
def test_where_no_token_counts_on_any_device_all_is_zero(way):
    weights = np.zeros(N, np.float32)
    got = differentiated(way, sharding=over(CUBE))(HIDDEN, WEIGHT, OPERAND, weights, np.float32(1))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(got))


# --- what is exchanged ---

ROWS, WORDS = N // 4, 144 // 2  # a device's, on the cube, of a vocabulary that is divisible
GATHER_W = ("all_gather", "fsdp", (WORDS, D), "bfloat16")
MERGE = [("pmax", "tp", (ROWS,), "float32"), *[("psum", "tp", (ROWS,), "float32")] * 3]
MERGE_A_WAVE = [(name, axes, (8,), dtype) for name, axes, _, dtype in MERGE]
AGREE_ON_WAVES = ("pmax", "dp, fsdp", (), "int32")
SUMS = [
    ("psum", "tp", (ROWS, D), "float32"),
    ("reduce_scatter", "fsdp", (WORDS // 2, D), "float32"),
    ("psum", "dp", (WORDS // 2, D), "float32"),
]
EXCHANGED = {
    "general": [GATHER_W, *MERGE, GATHER_W, *SUMS],
    "recomputed": [GATHER_W, *MERGE, *SUMS],
    "in waves": [GATHER_W, AGREE_ON_WAVES, *MERGE_A_WAVE, *SUMS],
}


@pytest.mark.parametrize("weight", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("way", EXCHANGED)
def test_devices_exchange_weights_once_a_pass_a_few_numbers_a_token_and_sums_of_gradients(way, weight):
    """What devices add up is float32 also where dW is bfloat16: only the sum is rounded."""
    function = differentiated(way, (0, 1), sharding=over(CUBE), dtype=jnp.bfloat16)
    arguments = HIDDEN, jax.ShapeDtypeStruct((2 * WORDS, D), weight), *ARGUMENTS[2:]
    found = []
    for equation in equations(jax.make_jaxpr(function)(*arguments).jaxpr):
        axes = equation.params.get("axis_name", equation.params.get("axes"))
        if equation.primitive.name in ("all_gather", "pmax", "psum", "reduce_scatter", "all_to_all"):
            names = axes if isinstance(axes, str) else ", ".join(axes)
            found += [(equation.primitive.name, names, x.aval.shape, str(x.aval.dtype)) for x in equation.outvars]
    whole = ("all_to_all", "fsdp", (WORDS, D // 2), jnp.dtype(weight).name)
    assert sorted(found) == sorted([*EXCHANGED[way], whole])


def test_a_mesh_of_one_device_needs_no_map_over_devices():
    text = str(jax.make_jaxpr(differentiated("general", sharding=over((1, 1, 1))))(*ARGUMENTS))
    assert "while" in text
    assert "shard_map" not in text


# --- JAX's default mesh, whose axes are Explicit: the layout comes from types, or from `HeadSharding` ---

EXPLICIT = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
IN_ROWS = (
    *(HIDDEN.reshape(8, 10, D), WEIGHT[:128], OPERAND.reshape(8, 10), WEIGHTS.reshape(8, 10), ARGUMENTS[-1]),
    LABELS.reshape(8, 10) % 128,
)


def laid_out(tokens, weight):
    specs = (tokens, weight, tokens, tokens, P(), tokens)
    return [jax.device_put(x, NamedSharding(EXPLICIT, spec)) for x, spec in zip(IN_ROWS, specs, strict=True)]


@functools.cache
def on_one_device(way):
    return differentiated(way)(*IN_ROWS)


@pytest.mark.parametrize(
    ("way", "tokens", "weight"),
    [
        pytest.param("in waves", P("data"), P("data"), id="vocabulary over the tokens' axis"),
        pytest.param("general", P("data"), P("model", "data"), id="vocabulary and features"),
        pytest.param("a copy", P("data"), P("model", "data"), id="a copy"),
    ],
)
def test_results_are_those_of_one_device_laid_out_like_the_arguments(way, tokens, weight):
    arguments = laid_out(tokens, weight)
    got = differentiated(way)(*arguments)
    assert_near(got, on_one_device(way))
    (_, outputs), gradients = got
    assert all(x.sharding.is_equivalent_to(arguments[5].sharding, 2) for x in outputs[:4])
    for gradient, argument in zip(gradients, arguments[:5], strict=True):
        assert gradient.sharding.is_equivalent_to(argument.sharding, gradient.ndim)


def test_the_mesh_may_be_set_and_a_sharding_may_name_its_axes():
    sharding = HeadSharding(EXPLICIT, tokens=("data",), vocabulary="model")
    with jax.set_mesh(EXPLICIT):
        assert_near(differentiated("general")(*laid_out(P("data"), P("model"))), on_one_device("general"))
        assert_near(differentiated("in waves", sharding=sharding)(*IN_ROWS), on_one_device("in waves"))


@pytest.mark.parametrize(("impl", "rows"), [("full_logits", 40), ("chunked_logits", 24)])
def test_with_full_logits_a_device_multiplies_its_own_tokens_with_its_own_rows_of_the_weight(impl, rows):
    function, arguments = differentiated("general", impl=impl), laid_out(P("data"), P("model"))
    assert_near(function(*arguments), on_one_device("general"))
    text = function.lower(*arguments).as_text()
    assert f"tensor<{rows}x64xf32>" in text
    assert "tensor<80x128xf32>" not in text


# --- what is refused ---


def refused(message, arguments=ARGUMENTS[:2], **axes):
    hidden, weight = arguments
    for impl in (None, "full_logits"):
        with pytest.raises(ValueError, match=message):
            token_logprobs(hidden, weight, np.zeros(len(hidden), int), sharding=over(CUBE, **axes), impl=impl)


def test_a_sharding_that_does_not_fit_mesh_or_arrays_is_refused():
    refused("sharding: 'model' is none of the mesh's axes dp, fsdp, tp", vocabulary="model")
    for axes in ({"vocabulary": "dp"}, {"features": "tp"}):
        refused("can't be another's axis as well", **axes)
    refused("hidden: 78 tokens don't make 4 shards over dp, fsdp", (HIDDEN[:78], WEIGHT))
    refused("weight: 15 features don't make 2 shards over fsdp", (HIDDEN[:, :15], WEIGHT[:, :15]))
    for spec in (P(), P("fsdp", "tp")):
        misplaced = [jax.device_put(x, NamedSharding(over(CUBE).mesh, spec)) for x in (HIDDEN, WEIGHT[:128])]
        refused("hidden must be laid out as sharding says", (misplaced[0], WEIGHT[:128]))
        refused("weight must be laid out as sharding says", (HIDDEN, misplaced[1]))


def test_axes_that_are_no_tuple_are_named():
    mesh = over(CUBE).mesh
    with pytest.raises(ValueError, match=r"sharding: tokens must be a tuple of axes: \('dp',\), not 'dp'"):
        HeadSharding(mesh, "dp")
    with pytest.raises(ValueError, match=r"sharding: features must be an axis or None, not \('dp',\)"):
        HeadSharding(mesh, (), None, ("dp",))


def test_on_an_explicit_mesh_the_vocabulary_may_lie_on_two_axes():
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"))
    specs = (P(), P(("b", "c"), "a"), P(), P(), P())
    given = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(IN_ROWS[:5], specs, strict=True)]
    got = differentiated("in waves")(*given, IN_ROWS[5])
    assert_near(got, on_one_device("in waves"))
    assert got[1][1].sharding.is_equivalent_to(given[1].sharding, 2)


def test_a_sharding_on_another_mesh_than_the_arguments_is_refused():
    other = HeadSharding(jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]), tokens=("data",))
    with pytest.raises(ValueError, match=r"sharding: its mesh .* is not the arguments'"):
        differentiated("general", sharding=other)(*laid_out(P("data"), P("model")))


def test_a_sequence_that_is_spread_is_refused():
    with pytest.raises(ValueError, match="hidden must be spread over its first dim alone"):
        differentiated("general")(*laid_out(P("data", "model"), P()))
