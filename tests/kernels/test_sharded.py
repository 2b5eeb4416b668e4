"""The head over a mesh of devices against float64, and the exchanges between its devices.

Half of the tokens don't count: they fill whole shards, so that some devices have nothing to do. The labels are those at
the edges of the vocabulary's shards, and no mesh divides the vocabulary evenly. Tiles are made small, so that there are
several of them.
"""

import functools
from typing import Any, NamedTuple

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import OBJECTIVES, Problem, assert_near, check, check_loss, random_cotangents, teacher_of
from engines import BF16, F32, XLA
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import exact

from lm_head import HeadSharding, sharded, token_logprobs, token_loss, xla
from lm_head.tpu import tiles

N, V, D = 80, 131, 16
EDGES = [0, *(k * size + side for size in (17, 33, 66) for k in range(1, 8) for side in (-1, 0)), V - 1]
LIVE = (np.arange(N) >= N // 2) & (np.arange(N) % 13 != 0)
PROBLEM = cases.random_problem((N, V, D))._replace(labels=jnp.resize(jnp.array([x for x in EDGES if x < V]), N))
WEIGHTS = jnp.where(LIVE, jnp.linspace(-1, 2, N), 0)
CLIPPED, CUBE = OBJECTIVES["clipped ratio"], (2, 2, 2)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(xla, "_MOST_WAVE", 8)
    monkeypatch.setattr(sharded, "_MOST_GATHERED", 16)  # on the cube three blocks, the last with a row of padding
    with XLA.strictly():
        yield
    pltpu.reset_tpu_interpret_mode_state()  # kernels stop waiting for a device that failed


def over(shape: tuple[int, ...] = CUBE, **axes: Any) -> HeadSharding:
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    layout = {"tokens": ("dp", "fsdp"), "vocabulary": "tp", "features": "fsdp"} | axes
    return HeadSharding(Mesh(devices, ("dp", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3), **layout)


# --- what comes out ---

SCALED = {"temperature": 0.6, "softcap": 2.0}
WAVES, RECOMPUTED = {"workspace": 2**20}, {"workspace": 0}
LAYOUTS = [
    ((8, 1, 1), {}),
    ((1, 1, 8), {}),
    ((1, 2, 4), {}),  # fewer words a device than tokens: the devices gather words, not tokens
    (CUBE, {"tokens": ("dp",)}),
    (CUBE, {"tokens": (), "vocabulary": "dp"}),
    (CUBE, {"tokens": ("dp",), "vocabulary": ("tp", "fsdp"), "features": None}),
    (CUBE, {"tokens": ("tp", "dp"), "vocabulary": "fsdp", "features": "tp"}),
]
LOSSES = [
    (CUBE, {}, "smoothed label, entropy", None, WAVES | {"vocabulary": 100}),
    (CUBE, {}, "label and teacher", -31, SCALED | RECOMPUTED),
    ((1, 1, 3), {}, "label and teacher", -91, WAVES),  # one device has all tokens
]
OTHERS = [
    *((shape, axes, "clipped ratio", None, WAVES) for shape, axes in LAYOUTS),
    (CUBE, {}, "clipped ratio", None, SCALED | RECOMPUTED),
    (CUBE, {}, "label and teacher", 13, WAVES),
    (CUBE, {"vocabulary": None}, "label and teacher", 13, WAVES),
    *((CUBE, {}, "label and teacher", 13, {"impl": impl}) for impl in ("full_logits", "chunked_logits")),
]


@pytest.mark.parametrize(
    ("shape", "axes", "objective", "more", "options"),
    [*LOSSES, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)],
    ids=str,
)
def test_a_loss_over_a_mesh_matches_float64(shape, axes, objective, more, options):
    """With a teacher of `more` tokens than the student's."""
    common = min(V + min(more or 0, 0), options.get("vocabulary", V))
    teacher = None if more is None else teacher_of(PROBLEM, more=more)
    problem = PROBLEM._replace(labels=PROBLEM.labels % common)
    options = {"impl": "xla", "teacher": teacher, "sharding": over(shape, **axes), **options}
    check_loss(problem, OBJECTIVES[objective], WEIGHTS, **options)


@pytest.mark.parametrize("shape", [CUBE, pytest.param((1, 2, 4), marks=pytest.mark.slow)])
def test_any_cotangents_over_a_mesh_match_float64_gradients(shape: tuple[int, ...]) -> None:
    check(PROBLEM, random_cotangents(N), live=LIVE, impl="xla", sharding=over(shape), collision=True)


def test_an_undivided_vocabulary_gains_no_words_when_gathered() -> None:
    few = cases.random_problem((N, 37, D))
    check_loss(few, OBJECTIVES["smoothed label"], WEIGHTS, impl="xla", sharding=over((1, 8, 1)), **WAVES)


@pytest.mark.parametrize(("side", "shape"), [("hidden", (1, 1, 8)), ("weight", (4, 2, 1))])
def test_gradients_are_summed_over_devices_before_narrowing(side: str, shape: tuple[int, ...]) -> None:
    """The devices' parts of a sum are as large as numbers near 1, and the sum is 0."""
    rows = {"hidden": (N, D), "weight": (V, D)}
    problem = Problem(*(jnp.full(rows[name], 0.3, BF16) for name in rows), jnp.zeros(N, jnp.int32))
    weights = jnp.asarray(np.random.default_rng(6).normal(size=N), F32)
    weights = weights - weights.mean() if side == "weight" else weights
    options: dict[str, Any] = {"impl": "xla", "dtype": F32, "sharding": over(shape)}
    got = cases.loss_and_gradients(problem, OBJECTIVES["cross-entropy"], (), weights, **options).rows
    assert np.abs(np.asarray(getattr(got, side), np.float32)).max() < 1e-5


def of_all(hidden: Any, weight: Any, weights: Any, operand: Any, scale: Any, sharding: HeadSharding | None) -> Any:
    """A loss of every argument that may have a gradient, by a copy of the weight."""
    objective = lambda logprob, entropy, a: scale * a * logprob + entropy  # noqa: E731
    options: dict[str, Any] = {"weight_copy": (PROBLEM.weight / 2).astype(BF16), "sharding": sharding}
    return token_loss(hidden, weight, PROBLEM.labels, objective, operand, weights=weights, **options)[0]


ARGUMENTS = (*PROBLEM[:2], WEIGHTS, jnp.linspace(-1, 1, N), jnp.float32(0.7))


@pytest.mark.parametrize("argnums", [(2, 3, 4), *(pytest.param(side, marks=pytest.mark.slow) for side in (0, 1))])
def test_all_sharded_inputs_get_their_gradients(argnums) -> None:
    """Inputs are weights, operands, closed-over arrays of the objective, and either side alone."""
    losses = (functools.partial(of_all, sharding=x) for x in (over(), None))
    got, want = (jax.jit(jax.value_and_grad(loss, argnums))(*ARGUMENTS) for loss in losses)
    assert_near(got, want)


def test_where_no_token_counts_on_any_device_all_is_zero() -> None:
    check_loss(PROBLEM, CLIPPED, jnp.zeros(N), impl="xla", sharding=over(), **WAVES)


@pytest.fixture
def interpreted():
    with tiles.override(rows=128, columns=256, step=128), pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        yield


@pytest.mark.parametrize(
    ("shape", "objective"),
    [
        pytest.param((1, 2, 2), "smoothed label", marks=pytest.mark.slow),
        pytest.param((2, 1, 2), "entropy bonus", marks=pytest.mark.nightly),
        pytest.param((1, 4, 1), "clipped ratio", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_kernels_for_tpus_match_float64(shape, objective, interpreted):
    """On four devices: interpreted kernels wait for each other, and eight would take all threads that XLA has here.

    For the same reason each device has a token that counts.
    """
    weights = WEIGHTS[np.arange(N).reshape(2, -1).T.ravel()]
    check_loss(PROBLEM, OBJECTIVES[objective], weights, impl="mosaic_tpu", sharding=over(shape), **WAVES)


@pytest.mark.slow
def test_collision_over_tpus_sums_over_all_shards(interpreted: None) -> None:
    ask = functools.partial(token_logprobs, impl="mosaic_tpu", collision=True, sharding=over((1, 2, 2)))
    np.testing.assert_allclose(jax.jit(ask)(*PROBLEM).collision, exact(*PROBLEM).answer.collision, rtol=1e-4)


# --- what is exchanged ---

ROWS, WORDS = N // 4, 144 // 2  # a device's, on the cube, of a vocabulary that is divisible


class Exchange(NamedTuple):
    """The exchanges of devices along fsdp, except numbers of tokens."""

    words: int  # a device's rows of W
    side: list[Any]  # the gathered arrays
    merged: str  # the axes over which a token's softmax is spread
    in_step: list[Any]  # before waves
    sums: list[Any]


TOKENS = Exchange(
    WORDS // 2,
    [("all_to_all", "fsdp", (WORDS // 2, D), "bfloat16"), ("all_gather", "fsdp", (2 * ROWS, D), "float32")],
    "tp, fsdp",
    [("pmax", "dp", (), "int32")],
    [
        ("reduce_scatter", "fsdp", (ROWS, D), "float32"),
        ("psum", "tp", (ROWS, D), "float32"),
        ("psum", "dp", (WORDS // 2, D), "float32"),
    ],
)
FEW = 24 // 2  # words a device, fewer than tokens
WEIGHT = Exchange(
    FEW,
    [("all_to_all", "fsdp", (FEW // 2, D), "bfloat16"), ("all_gather", "fsdp", (FEW, D), "bfloat16")],
    "tp",
    [("pmax", "dp, fsdp", (), "int32")],
    [
        ("psum", "tp", (ROWS, D), "float32"),
        ("reduce_scatter", "fsdp", (FEW // 2, D), "float32"),
        ("psum", "dp", (FEW // 2, D), "float32"),
    ],
)


@pytest.mark.parametrize("exchange", [TOKENS, WEIGHT], ids=["tokens", "weight"])
@pytest.mark.parametrize(
    ("way", "weight"), [("any cotangents", F32), ("recomputed", BF16), ("in waves", F32), ("in waves", BF16)]
)
def test_devices_exchange_tokens_or_weights_once_a_pass(way, weight, exchange, monkeypatch):
    """The devices exchange the side of fewer bytes, and a few numbers a token.

    The devices add up float32 numbers even where dW is bfloat16: only the sum is rounded.
    """
    monkeypatch.setattr(sharded, "_MOST_GATHERED", 2**14)
    words = 2 * WORDS if exchange is TOKENS else 2 * FEW
    problem = PROBLEM._replace(weight=jnp.zeros((words, D), weight), labels=PROBLEM.labels % words)
    options: dict[str, Any] = {"dtype": BF16, "sharding": over()}

    def run(problem: Problem) -> Any:
        if way == "any cotangents":
            return cases.values_and_gradients(problem, random_cotangents(N), where=LIVE, **options)
        operands = cases.operands_for(PROBLEM, CLIPPED)
        room = 2**20 if way == "in waves" else 0
        return cases.loss_and_gradients(problem, CLIPPED, operands, WEIGHTS, workspace=room, **options)

    collectives = []
    for equation in cases.equations(jax.make_jaxpr(run)(problem).jaxpr):
        axes = equation.params.get("axis_name", equation.params.get("axes"))
        if equation.primitive.name in ("all_gather", "pmax", "psum", "reduce_scatter", "all_to_all"):
            names = axes if isinstance(axes, str) else ", ".join(axes)
            collectives += [(equation.primitive.name, names, x.aval.shape, str(x.aval.dtype)) for x in equation.outvars]
    collectives = [x for x in collectives if (x[0], len(x[2])) != ("all_gather", 1)]  # a few numbers a token
    tokens = 8 if way == "in waves" else ROWS if exchange is WEIGHT else 2 * ROWS
    merge = [("pmax", exchange.merged, (tokens,), "float32"), *[("psum", exchange.merged, (tokens,), "float32")] * 3]
    passes = 2 if way == "any cotangents" else 1
    in_step = exchange.in_step if way == "in waves" else []
    whole = ("all_to_all", "fsdp", (words // 2, D // 2), jnp.dtype(weight).name)
    assert sorted(collectives) == sorted([*exchange.side * passes, *merge, *in_step, *exchange.sums, whole])


def test_a_gathered_weight_gradient_is_summed_before_dh() -> None:
    """XLA for TPUs would hold all of a device's dW until the backward pass of the layers ends."""
    few = Problem(PROBLEM.hidden, jnp.zeros((2 * FEW, D)), PROBLEM.labels % (2 * FEW))
    given = {"objective": OBJECTIVES["cross-entropy"], "weights": WEIGHTS, "sharding": over()}
    run = functools.partial(cases.loss_and_gradients, **given)
    fences = [x for x in cases.equations(jax.make_jaxpr(run)(few).jaxpr) if x.primitive.name == "optimization_barrier"]
    assert [(ROWS, D), (2 * FEW // 2, D // 2)] in [[x.aval.shape for x in equation.outvars] for equation in fences]


# --- JAX's default mesh has Explicit axes: the layout comes from types, or from `HeadSharding` ---

EXPLICIT = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
IN_ROWS = (PROBLEM.hidden.reshape(8, 10, D), PROBLEM.weight[:128], PROBLEM.labels.reshape(8, 10) % 128)


def laid_out(mesh: Mesh, tokens: P, weight: P) -> Any:
    specs = (NamedSharding(mesh, spec) for spec in (tokens, weight, tokens))
    return [jax.device_put(x, spec) for x, spec in zip(IN_ROWS, specs, strict=True)]


@functools.partial(jax.jit, static_argnames="sharding")
def differentiated(hidden: Any, weight: Any, labels: Any, sharding: HeadSharding | None = None) -> Any:
    """A loss in one pass, and beside it any cotangents; value, tokens and gradients of the sum."""

    def total(hidden: Any, weight: Any) -> Any:
        options = {"weight_copy": weight / 2, "sharding": sharding}
        loss, _ = token_loss(hidden, weight, labels, OBJECTIVES["cross-entropy"], **options)
        tokens = token_logprobs(hidden, weight, labels, sharding=sharding)
        return loss + jnp.sum(jnp.sin(tokens.logprob) * tokens.entropy), tokens

    return jax.value_and_grad(total, (0, 1), has_aux=True)(hidden, weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "tokens", "weight"),
    [
        pytest.param((2, 2), P("data"), P("data"), id="vocabulary over the tokens' axis"),
        pytest.param((2, 2), P("data"), P("model", "data"), id="vocabulary and features"),
        pytest.param((2, 2, 2), P(), P(("model", "more"), "data"), id="vocabulary over two axes"),
    ],
)
def test_results_match_one_device_laid_out_like_the_arguments(sizes: Any, tokens: P, weight: P) -> None:
    mesh = jax.make_mesh(sizes, ("data", "model", "more")[: len(sizes)], devices=jax.devices()[: np.prod(sizes)])
    arguments = laid_out(mesh, tokens, weight)
    got = differentiated(*arguments)
    assert_near(got, differentiated(*IN_ROWS))
    (_, outputs), gradients = got
    assert all(x.sharding.is_equivalent_to(arguments[2].sharding, 2) for x in outputs[:4])
    for gradient, argument in zip(gradients, arguments, strict=False):
        assert gradient.sharding.is_equivalent_to(argument.sharding, gradient.ndim)


def test_the_mesh_may_be_set_and_a_sharding_may_name_its_axes() -> None:
    with jax.set_mesh(EXPLICIT):
        named = differentiated(*IN_ROWS, sharding=HeadSharding(EXPLICIT, tokens=("data",), vocabulary="model"))
    assert_near(named, differentiated(*IN_ROWS))


def test_arrays_on_other_devices_are_spread_as_the_sharding_says() -> None:
    labels, mesh = np.zeros(len(HIDDEN), int), over().mesh
    specs = {P("fsdp", "tp"): HIDDEN, P(None, "dp"): EVEN}
    sides = [jax.device_put(side, NamedSharding(mesh, spec)) for spec, side in specs.items()]
    assert_near(token_logprobs(*sides, labels, sharding=over()), token_logprobs(HIDDEN, EVEN, labels))


# --- what is refused ---


HIDDEN, EVEN = PROBLEM.hidden, PROBLEM.weight[:128]
REFUSED = [
    ("sharding: 'model' is none of the mesh's axes dp, fsdp, tp", HIDDEN, EVEN, {"vocabulary": "model"}),
    ("can't be another's axis as well", HIDDEN, EVEN, {"vocabulary": "dp"}),
    ("sharding: tokens must be a tuple of axes: \\('dp',\\), not 'dp'", HIDDEN, EVEN, {"tokens": "dp"}),
    ("hidden: 78 tokens don't make 4 shards over dp, fsdp", HIDDEN[:78], EVEN, {}),
    ("weight: 15 features don't make 2 shards over fsdp", HIDDEN[:, :15], EVEN[:, :15], {}),
]


@pytest.mark.parametrize(("message", "hidden", "weight", "axes"), REFUSED, ids=[message for message, *_ in REFUSED])
def test_a_sharding_that_does_not_fit_mesh_or_arrays_is_refused(message, hidden, weight, axes) -> None:
    for impl in (None, "full_logits"):
        with pytest.raises(ValueError, match=message):
            token_logprobs(hidden, weight, np.zeros(len(hidden), int), sharding=over(**axes), impl=impl)


def test_layouts_unlike_the_argument_types_are_refused() -> None:
    other = HeadSharding(jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]), tokens=("data",))
    with pytest.raises(ValueError, match=r"sharding: its mesh .* is not the arguments'"):
        token_logprobs(*laid_out(EXPLICIT, P("data"), P("model")), sharding=other)
    with pytest.raises(ValueError, match="hidden must be spread over its first dim alone"):
        token_logprobs(*laid_out(EXPLICIT, P("data", "model"), P()))
