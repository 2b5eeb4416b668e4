"""logits_logprobs against float64, in each of its ways, under JAX's transformations, and what it takes of memory.

The head's oracle with the identity for a weight is one for logits: hidden states are then the logits. Tiles are small
here, so that 300 columns are several. The Pallas kernels run under the strict interpreter.
"""

import contextlib
import functools
import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P
from lm_head_cases import random_cotangents
from lm_head_oracle import Plain, assert_as_accurate_as_plain, exact
from strict_tpu import strict_interpreter

from kernels.lm_head import TokenLogprobs, logits_logprobs, logits_tpu, logits_xla

WAYS = ("tiles", "reduction", "kernels")
"""XLA's on a CPU, XLA's on accelerators, and the Pallas kernels."""

SMALL = (20, 300)
ACROSS = (120, 300)  # a TPU has the rows of these in its lanes
SCALES = {"near-uniform": 0.01, "peaked": 30.0, "saturated": 1e4}
V6E = AbstractMesh(
    (1,), ("chip",), (AxisType.Auto,), abstract_device=AbstractDevice("TPU v6 lite", num_cores=1, platform="tpu")
)

every_way = pytest.mark.parametrize("way", WAYS)
xla_s_ways = pytest.mark.parametrize("way", WAYS[:2])
every_dtype = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits_xla, "_COLUMNS", 128)
    monkeypatch.setattr(logits_tpu, "_TILE", {2: (16, 1024), 1: (128, 512)})
    monkeypatch.setattr(logits_tpu, "_AT_A_TIME", 1)
    monkeypatch.setattr(logits_tpu, "_IN_A_TURN", 2)


@contextlib.contextmanager
def taking(way: str, **strictness: Any) -> Iterator[str]:
    """The implementation's name; what is traced and run within goes that way."""
    if way == "kernels":
        with mock.patch.object(interpreter, "interpret_pallas_call", unpadded), strict_interpreter(**strictness):
            yield "mosaic_tpu"
    else:
        platform = {"tiles": "cpu", "reduction": "gpu"}[way]
        with mock.patch.object(logits_xla.target, "platform", return_value=platform):
            yield "xla"


def unpadded(*args: Any, out_avals: Any, **options: Any) -> list[jax.Array]:
    """JAX's interpreter pads an operand to whole blocks, and forgets that where a result takes its place."""
    results = interpret(*args, out_avals=out_avals, **options)
    return [x[tuple(map(slice, aval.shape))] for x, aval in zip(results, out_avals, strict=True)]


interpret = interpreter.interpret_pallas_call


def pulled_back(
    logits: jax.Array, labels: jax.Array, cotangents: TokenLogprobs, **options: Any
) -> tuple[TokenLogprobs, jax.Array]:
    """Values and gradient."""
    outputs, pull_back = jax.vjp(lambda logits: logits_logprobs(logits, labels, **options), logits)
    return outputs, pull_back(cotangents)[0]


@functools.cache
def jitted(function: Callable[..., Any], way: str) -> Callable[..., Any]:
    """To be traced within `taking`; once, since compiling takes most of the time."""
    return jax.jit(functools.partial(function, impl="mosaic_tpu" if way == "kernels" else "xla"))


def run(way: str, *args: Any, where: Any = None, temperature: float = 1.0) -> tuple[TokenLogprobs, jax.Array]:
    with taking(way):
        return jax.block_until_ready(jitted(pulled_back, way)(*args, where=where, temperature=temperature))


def problem(shape: tuple[int, int], scale: float = 3.0, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    """Logits, and labels of which the first is 0 and the last V-1."""
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=shape) * scale, rng.integers(0, shape[1], shape[0])
    labels[0], labels[-1] = 0, shape[1] - 1
    return jnp.asarray(logits, dtype), jnp.asarray(labels, jnp.int32)


@jax.jit
def plain(
    logits: jax.Array, labels: jax.Array, cotangents: TokenLogprobs, live: jax.Array, temperature: float
) -> tuple[TokenLogprobs, jax.Array]:
    """What anybody would write: the yardstick of accuracy."""

    def outputs(logits: jax.Array) -> TokenLogprobs:
        z = jnp.where(live[:, None], logits, 0).astype(jnp.float32) / temperature
        log_p = jax.nn.log_softmax(z)
        logprob = jnp.take_along_axis(log_p, labels[:, None], axis=1)[:, 0]
        found = TokenLogprobs(logprob, jax.nn.logsumexp(z, axis=1), -jnp.sum(jnp.exp(log_p) * log_p, axis=1))
        return TokenLogprobs(*(jnp.where(live, x, 0) for x in found))

    values, pull_back = jax.vjp(outputs, logits)
    return values, pull_back(cotangents)[0]


def judge(
    got: tuple[TokenLogprobs, jax.Array],
    logits: jax.Array,
    labels: jax.Array,
    cotangents: TokenLogprobs,
    live: np.ndarray | None = None,
    temperature: float = 1.0,
) -> None:
    """By the head's criterion: no less accurate than the plain program, plus a hair."""
    live = np.ones(len(labels), bool) if live is None else live
    safe = np.where(live, labels, 0)
    identity = np.eye(logits.shape[1])
    truth = exact(logits, identity, safe, lambda *_: cotangents, where=live, temperature=temperature)
    yardstick = plain(logits, jnp.asarray(safe), cotangents, live, temperature)
    nothing = np.zeros(1)  # for the gradient by the weight
    flat = (Plain(*outputs, gradient, nothing) for outputs, gradient in (got, yardstick))
    assert_as_accurate_as_plain(*flat, truth._replace(weight=nothing))


def check(
    way: str,
    logits: jax.Array,
    labels: jax.Array,
    cotangents: TokenLogprobs | None = None,
    live: np.ndarray | None = None,
    temperature: float = 1.0,
) -> tuple[TokenLogprobs, jax.Array]:
    """Judged; returns what came out."""
    cotangents = random_cotangents(len(labels)) if cotangents is None else cotangents
    got = run(way, logits, labels, cotangents, where=live, temperature=temperature)
    judge(got, logits, labels, cotangents, live, temperature)
    return got


# --- values and gradients ---


@every_way
@every_dtype
@pytest.mark.parametrize("shape", [SMALL, ACROSS, (7, 1009)], ids=str)
def test_any_size_is_as_accurate_as_plain_softmax(way: str, dtype: Any, shape: tuple[int, int]) -> None:
    check(way, *problem(shape, dtype=dtype))


@xla_s_ways
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (9, 2), (3, 2374), (1003, 5)], ids=str)
def test_any_odd_size_is_as_accurate_as_plain_softmax(way: str, shape: tuple[int, int]) -> None:
    check(way, *problem(shape, dtype=jnp.bfloat16))


@pytest.mark.parametrize("shape", [(1, 1), (16, 256), (128, 256), (3, 2374)], ids=str)
def test_the_kernels_take_any_odd_size(shape: tuple[int, int]) -> None:
    check("kernels", *problem(shape, dtype=jnp.bfloat16))


@every_way
@pytest.mark.parametrize("softmax", SCALES)
def test_any_softmax_is_as_accurate_as_plain_softmax(way: str, softmax: str) -> None:
    check(way, *problem(SMALL, SCALES[softmax], jnp.bfloat16))


@every_way
def test_a_certain_label_has_logprob_and_entropy_zero_and_no_gradient(way: str) -> None:
    _, labels = problem(SMALL)
    logits = jnp.where(jnp.arange(300) == labels[:, None], 1e4, 0.0)
    ones = jnp.ones(20)
    outputs, gradient = check(way, logits, labels, TokenLogprobs(ones, 0 * ones, ones))
    assert not np.any([outputs.logprob, outputs.entropy])
    np.testing.assert_array_equal(outputs.lse, 1e4)
    assert not np.any(gradient)


@every_way
def test_ties_share_their_probability(way: str) -> None:
    """Three columns in three tiles are the largest of every row, and one of them is the label of half of the rows."""
    logits, labels = problem(SMALL)
    logits = logits.at[:, jnp.array([5, 130, 299])].set(40.0)
    outputs, _ = check(way, logits, labels.at[::2].set(130))
    np.testing.assert_allclose(outputs.logprob[::2], -math.log(3), rtol=1e-6)
    np.testing.assert_allclose(outputs.entropy, math.log(3), rtol=1e-6)


@every_way
@pytest.mark.parametrize("cotangent", ["logprob", "lse", "entropy"])
def test_each_output_has_its_own_gradient(way: str, cotangent: str) -> None:
    check(way, *problem(SMALL), random_cotangents(20, cotangent))


@xla_s_ways
def test_float16_is_taken_by_xla(way: str) -> None:
    _, gradient = check(way, *problem(SMALL, dtype=jnp.float16))
    assert gradient.dtype == jnp.float16


@every_way
def test_a_temperature_divides_the_logits_and_may_be_traced(way: str) -> None:
    for temperature in (0.3, 1.7):
        check(way, *problem(SMALL), temperature=temperature)


# --- logits of -inf ---


@every_way
@every_dtype
def test_a_logit_of_minus_infinity_is_as_if_its_column_were_not_there(way: str, dtype: Any) -> None:
    """As of top-k sampling: each row keeps its own 20 columns, its label among them."""
    (logits, labels), cotangents = problem(SMALL, dtype=dtype), random_cotangents(20)
    kept = np.argsort(np.random.default_rng(1).random(SMALL))[:, :20]
    kept[~(kept == np.asarray(labels)[:, None]).any(axis=1), 0] = labels[~(kept == labels[:, None]).any(axis=1)]
    filtered = np.full(SMALL, -np.inf)
    np.put_along_axis(filtered, kept, np.take_along_axis(np.asarray(logits, np.float64), kept, axis=1), axis=1)
    outputs, gradient = run(way, jnp.asarray(filtered, dtype), labels, cotangents)

    of_kept = jnp.asarray(np.take_along_axis(np.asarray(logits, np.float64), kept, axis=1), dtype)
    places = jnp.asarray((kept == np.asarray(labels)[:, None]).argmax(axis=1))
    judge((outputs, jnp.take_along_axis(gradient, jnp.asarray(kept), axis=1)), of_kept, places, cotangents)
    assert not np.any(np.where(np.isinf(filtered), gradient, 0))


@every_way
def test_a_label_whose_logit_is_minus_infinity_has_no_probability_and_harms_no_other_number(way: str) -> None:
    (logits, labels), cotangents = problem(SMALL), random_cotangents(20)
    at_label = jnp.arange(300) == labels[:, None]
    outputs, gradient = run(way, jnp.where(at_label, -jnp.inf, logits), labels, cotangents)
    np.testing.assert_array_equal(outputs.logprob, -np.inf)
    assert np.all(np.isfinite([outputs.lse, outputs.entropy]))
    assert np.all(np.isfinite(gradient))
    np.testing.assert_array_equal(gradient[at_label], cotangents.logprob)


@every_way
def test_rows_without_a_distribution_are_nan_and_leave_the_others_alone(way: str) -> None:
    """All columns at -inf, a NaN, a +inf."""
    (logits, labels), cotangents = problem(SMALL), random_cotangents(20)
    sick = logits.at[3].set(-jnp.inf).at[7, 299].set(jnp.nan).at[19, 150].set(jnp.inf)
    (_, _, entropy), gradient = run(way, sick, labels, cotangents)
    healthy = ~np.isin(np.arange(20), [3, 7, 19])
    np.testing.assert_array_equal(np.isfinite(entropy), healthy)
    np.testing.assert_array_equal(np.isfinite(gradient).all(axis=1), healthy)


# --- labels, rows that don't count ---


@every_way
def test_a_traced_label_beyond_the_vocabulary_hits_nothing(way: str) -> None:
    logits, labels = problem(SMALL)
    outside = jnp.where(jnp.arange(20) % 2 == 0, 300, -1)
    outputs, gradient = run(way, logits, outside, random_cotangents(20, "logprob lse"))
    np.testing.assert_array_equal(outputs.logprob, -outputs.lse)
    _, hitting = run(way, logits, labels, random_cotangents(20, "logprob lse"))
    elsewhere = np.arange(300) != np.asarray(labels)[:, None]
    np.testing.assert_array_equal(np.asarray(gradient)[elsewhere], np.asarray(hitting)[elsewhere])


@xla_s_ways
def test_labels_may_be_narrow_unsigned_integers(way: str) -> None:
    logits, labels = problem(SMALL)
    got, want = (run(way, logits, y, random_cotangents(20)) for y in (labels.astype(jnp.uint16), labels))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@every_way
@pytest.mark.parametrize("live", ["none", "one", "scattered", "the last block's"])
def test_rows_left_out_give_zeros_and_leak_nothing(way: str, live: str) -> None:
    rows = np.arange(20)
    live_N = {
        "none": rows < 0,
        "one": rows == 17,
        "scattered": np.random.default_rng(5).random(20) < 0.4,
        "the last block's": rows >= 16,
    }[live]
    logits, labels = problem(SMALL)
    poison = jnp.asarray(np.resize([np.nan, np.inf, -np.inf], SMALL), logits.dtype)
    poisoned, labels = jnp.where(live_N[:, None], logits, poison), jnp.where(live_N, labels, -100)
    outputs, gradient = check(way, poisoned, labels, live=live_N)
    assert not np.any(np.asarray(outputs)[:, ~live_N])
    assert not np.any(np.asarray(gradient)[~live_N])


@every_way
@pytest.mark.parametrize("leading", [(2, 3, 4), (1, 24)], ids=str)
def test_leading_dims_are_any(way: str, leading: tuple[int, ...]) -> None:
    (logits, labels), cotangents = problem((24, 300)), random_cotangents(24)
    fold = functools.partial(jax.tree.map, lambda x: x.reshape(*leading, *x.shape[1:]))
    outputs, gradient = run(way, *fold((logits, labels, cotangents)), where=np.ones(leading, bool))
    assert gradient.shape == (*leading, 300)
    judge((TokenLogprobs(*(x.reshape(24) for x in outputs)), gradient.reshape(24, 300)), logits, labels, cotangents)


@xla_s_ways
def test_one_row_alone_and_no_row_at_all_are_taken(way: str) -> None:
    for leading in ((), (0,), (3, 0)):
        ones = jnp.ones(leading)
        outputs, gradient = run(
            way, jnp.zeros((*leading, 300)), jnp.zeros(leading, int), TokenLogprobs(ones, ones, ones)
        )
        assert [x.shape for x in outputs] == [leading] * 3
        assert gradient.shape == (*leading, 300)
        np.testing.assert_allclose(outputs.entropy, np.full(leading, math.log(300)), rtol=1e-6)


# --- transformations ---

WEIGHTS = np.where(np.arange(20) % 3 == 0, 0, np.linspace(-1, 1, 20)).astype(np.float32)


def scalar(logits: jax.Array, labels: jax.Array, weights: jax.Array, *, impl: str) -> jax.Array:
    outputs = logits_logprobs(logits, labels, where=weights != 0, impl=impl)
    return jnp.vdot(weights, outputs.logprob * outputs.entropy + jnp.sin(outputs.lse))


def gradient_of(function: Callable[..., jax.Array], impl: str) -> Callable[..., Any]:
    return jax.value_and_grad(functools.partial(function, impl=impl))


def transformed(way: str, transformation: Callable[[str], Callable[..., Any]], *args: Any, **strictness: Any) -> Any:
    with taking(way, **strictness) as impl:
        return jax.block_until_ready(transformation(impl)(*args))


def value_and_gradient(*args: Any, impl: str) -> Any:
    return gradient_of(scalar, impl)(*args)


def plainly(way: str, *args: Any) -> Any:
    return transformed(way, lambda _: jitted(value_and_gradient, way), *args)


def assert_near(got: Any, want: Any) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), got, want)


@every_way
def test_jit_changes_nothing_and_two_runs_agree_bit_for_bit(way: str) -> None:
    arguments = (*problem(SMALL), WEIGHTS)
    once, again = plainly(way, *arguments), plainly(way, *arguments)
    jax.tree.map(np.testing.assert_array_equal, once, again)
    assert_near(transformed(way, lambda impl: gradient_of(scalar, impl), *arguments), once)


@xla_s_ways  # JAX's interpreter can't be rematerialised
def test_rematerialisation_in_a_scan_changes_nothing(way: str) -> None:
    def halves(logits: jax.Array, *rest: jax.Array, impl: str) -> jax.Array:
        def step(total: jax.Array, half: Any) -> tuple[jax.Array, None]:
            return total + scalar(*half, impl=impl), None

        parts = (x.reshape(2, 10, *x.shape[1:]) for x in (logits, *rest))
        return jax.lax.scan(jax.checkpoint(step), 0.0, tuple(parts))[0]

    arguments = (*problem(SMALL), WEIGHTS)
    got = transformed(way, lambda impl: jax.jit(gradient_of(halves, impl)), *arguments)
    assert_near(got, plainly(way, *arguments))


@every_way
def test_vmap_is_a_python_loop(way: str) -> None:
    logits, labels = problem(SMALL)
    alone = [(logits, labels, WEIGHTS), (-logits, 299 - labels, 1 - WEIGHTS)]
    stacks = map(jnp.stack, zip(*alone, strict=True))
    got = transformed(way, lambda impl: jax.jit(jax.vmap(gradient_of(scalar, impl))), *stacks)
    for i, arguments in enumerate(alone):
        assert_near([x[i] for x in got], list(plainly(way, *arguments)))


@every_way
def test_shard_map_over_rows_gives_the_same(way: str) -> None:
    def sharded(logits: jax.Array, *rest: jax.Array, impl: str) -> jax.Array:
        @functools.partial(
            jax.shard_map, mesh=Mesh(np.array(jax.devices()[:2]), ("dp",)), in_specs=(P("dp"),) * 3, out_specs=P()
        )
        def shard(*args: jax.Array) -> jax.Array:
            return jax.lax.psum(scalar(*args, impl=impl), "dp")

        return shard(logits, *rest)

    arguments = (*problem(SMALL), jnp.asarray(WEIGHTS))
    got = transformed(way, lambda impl: jax.jit(gradient_of(sharded, impl)), *arguments)
    assert_near(got, plainly(way, *arguments))


@pytest.mark.parametrize("strictness", [{"cores": 2}, {"copies": "on_wait"}], ids=["two cores", "late copies"])
@pytest.mark.parametrize("shape", [SMALL, ACROSS], ids=str)
def test_the_kernels_wait_for_their_copies_and_may_run_on_two_cores(
    shape: tuple[int, int], strictness: dict[str, Any]
) -> None:
    arguments = (*problem(shape), jnp.resize(WEIGHTS, shape[0]))
    got = transformed("kernels", lambda impl: jax.jit(gradient_of(scalar, impl)), *arguments, **strictness)
    assert_near(got, plainly("kernels", *arguments))


# --- which implementation, and refusals ---

GOOD: dict[str, Any] = {"logits": jnp.zeros((4, 5)), "labels": jnp.array([0, 1, 2, 4])}
FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "logits that are no floating point": ("logits", {"logits": jnp.zeros((4, 5), int)}),
    "logits without columns": ("logits", {"logits": jnp.zeros((4, 0))}),
    "labels of another rank": ("labels", {"labels": jnp.zeros((4, 1), int)}),
    "labels for other rows": ("labels", {"labels": jnp.zeros(3, int)}),
    "labels that are no integers": ("labels", {"labels": jnp.zeros(4)}),
    "a label below zero": ("labels", {"labels": jnp.array([0, 1, -1, 2])}),
    "a label beyond the vocabulary": ("labels", {"labels": jnp.array([0, 1, 5, 2])}),
    "where of another shape": ("where", {"where": jnp.ones(3, bool)}),
    "where that is not boolean": ("where", {"where": jnp.ones(4)}),
    "a temperature that is no number": ("temperature", {"temperature": math.nan}),
    "a temperature of zero": ("temperature", {"temperature": 0.0}),
    "a temperature a row": ("temperature", {"temperature": jnp.ones(4)}),
    "an unknown implementation": ("impl", {"impl": "warp"}),
    "float16 for the kernels": ("float16", {"impl": "mosaic_tpu", "logits": jnp.zeros((4, 5), jnp.float16)}),
    "one row for the kernels": ("rows", {"impl": "mosaic_tpu", "logits": jnp.zeros(5), "labels": jnp.array(0)}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_argument_at_fault_is_named(fault: str) -> None:
    argument, faults = FAULTS[fault]
    arguments = GOOD | faults
    with pytest.raises(ValueError, match=argument):
        logits_logprobs(arguments.pop("logits"), arguments.pop("labels"), **arguments)


@pytest.mark.parametrize(
    ("shape", "dtype", "by_kernels"),
    [
        ((8, 256), jnp.float32, True),
        ((2, 8, 256), jnp.bfloat16, True),
        ((250, 300), jnp.float32, True),
        ((8, 128, 300), jnp.float32, False),  # lies [V, B, T]: XLA takes it so
        ((8, 256), jnp.float16, False),
        ((256,), jnp.float32, False),
    ],
    ids=str,
)
def test_a_program_for_tpus_has_the_kernels_where_they_fit_without_a_copy(
    shape: tuple[int, ...], dtype: Any, by_kernels: bool
) -> None:
    function = jax.jit(jax.grad(lambda logits, labels: logits_logprobs(logits, labels).logprob.sum()))
    with jax.sharding.use_abstract_mesh(V6E):
        program = jax.export.export(function, platforms=["tpu"])
        text = program(jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:-1], jnp.int32)).mlir_module()
    assert ("tpu_custom_call" in text) == by_kernels


# --- memory ---


def both_passes(logits: jax.Array, labels: jax.Array, cotangents: TokenLogprobs) -> Any:
    return pulled_back(logits, labels, cotangents)


@every_dtype
def test_on_a_cpu_the_gradient_takes_the_place_of_donated_logits(dtype: Any) -> None:
    logits, labels = problem((64, 20000), dtype=dtype)
    program = jax.jit(both_passes, donate_argnums=0).lower(logits, labels, random_cotangents(64)).compile()
    account = program.memory_analysis()
    assert account.alias_size_in_bytes == logits.nbytes
    assert account.temp_size_in_bytes < 0.05 * logits.nbytes


ON_A_CHIP = (1, 2048, 151643)
MIB = 2**20


def by_log_softmax(logits: jax.Array, labels: jax.Array, cotangents: TokenLogprobs) -> Any:
    """Log-probabilities alone."""

    def logprobs(logits: jax.Array) -> jax.Array:
        return jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]

    values, pull_back = jax.vjp(logprobs, logits)
    return values, pull_back(cotangents.logprob.astype(values.dtype))[0]


def values_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*args)[0]


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which make aot installs"
)


def account(function: Callable[..., Any], *shapes: Any) -> dict[str, int]:
    """The TPU compiler's, in bytes."""
    from kernels.aot import targets

    chip = targets.mesh("v6e")
    return targets.memory(targets.compiled(function, shapes, chip))


@pytest.mark.aot
@needs_libtpu
def test_on_a_tpu_temporaries_are_below_those_of_log_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, where log_softmax takes half of what it does in float32. `pytest -s` shows the figures."""
    monkeypatch.undo()  # tiles of a chip's size
    rows = jax.ShapeDtypeStruct(ON_A_CHIP[:-1], jnp.float32)
    shapes = (
        jax.ShapeDtypeStruct(ON_A_CHIP, jnp.bfloat16),
        jax.ShapeDtypeStruct(rows.shape, jnp.int32),
        TokenLogprobs(rows, rows, rows),
    )
    functions = {
        "log_softmax": by_log_softmax,
        **{impl: functools.partial(pulled_back, impl=impl) for impl in (None, "mosaic_tpu", "xla")},
    }
    temporaries = {}
    for name, function in functions.items():
        passes = {"forward": values_alone(function), "forward and backward": function}
        temporaries[name] = {which: account(one, *shapes)["temp"] for which, one in passes.items()}
        print(f"{name!s:12}", *(f"{which} {size / MIB:8.2f} MiB" for which, size in temporaries[name].items()))
    for name in (None, "mosaic_tpu", "xla"):
        for which, size in temporaries[name].items():
            assert size < min(MIB, temporaries["log_softmax"][which])


@pytest.mark.aot
@needs_libtpu
@pytest.mark.parametrize("vocabulary", [151643, 151936])
@pytest.mark.parametrize("impl", ["mosaic_tpu", "xla"])
def test_on_a_tpu_the_gradient_takes_the_place_of_logits_made_in_the_same_program(
    impl: str, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()

    def gradient(hidden: jax.Array, weight: jax.Array, labels: jax.Array, cotangents: TokenLogprobs) -> jax.Array:
        return pulled_back(hidden @ weight.T, labels, cotangents, impl=impl)[1]

    rows = jax.ShapeDtypeStruct((2048,), jnp.float32)
    hidden, weight = (jax.ShapeDtypeStruct((n, 128), jnp.bfloat16) for n in (2048, vocabulary))
    labels = jax.ShapeDtypeStruct((2048,), jnp.int32)
    found = account(gradient, hidden, weight, labels, TokenLogprobs(rows, rows, rows))
    assert found["output"] >= 2 * 2048 * vocabulary
    assert found["temp"] < 0.01 * found["output"]
