"""logits_logprobs against float64, in each of its ways, and what its programs take of memory."""

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import V6E
from lm_head_cases import random_cotangents
from logits_cases import (
    ACROSS,
    SMALL,
    assert_accurate,
    check,
    every_dtype,
    every_way,
    problem,
    pulled_back,
    run,
    small_tiles,
)

from kernels.lm_head import TokenLogprobs
from kernels.logits import logits_logprobs

SCALES = {"near-uniform": 0.01, "peaked": 30.0, "saturated": 1e4}


@pytest.fixture(autouse=True)
def tiles_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)


# --- values and gradients ---


SIZES = {
    "tiles": [SMALL, (1, 1), (9, 2), (3, 2374), (1003, 5)],
    "reduction": [SMALL, (1, 1), (3, 2374)],
    "kernels": [SMALL, ACROSS, (16, 256), (128, 256), (3, 2374)],
}


@pytest.mark.parametrize(("way", "shape"), [(way, shape) for way, shapes in SIZES.items() for shape in shapes], ids=str)
def test_any_size_is_as_accurate_as_plain_softmax(way: str, shape: tuple[int, int]) -> None:
    check(way, *problem(shape, dtype=jnp.bfloat16))


@every_way
@every_dtype
@pytest.mark.parametrize("softmax", SCALES)
def test_any_softmax_is_as_accurate_as_plain_softmax(way: str, softmax: str, dtype: Any) -> None:
    check(way, *problem(SMALL, SCALES[softmax], dtype))


@every_way
def test_ties_share_their_probability(way: str) -> None:
    """Three columns in three tiles are the largest of every row, and one of them is the label of half of the rows."""
    logits, labels = problem(SMALL)
    logits = logits.at[:, jnp.array([5, 130, 299])].set(40.0)
    outputs, _ = check(way, logits, labels.at[::2].set(130))
    np.testing.assert_allclose(outputs.logprob[::2], -math.log(3), rtol=1e-6)
    np.testing.assert_allclose(outputs.entropy, math.log(3), rtol=1e-6)


@every_way
def test_a_temperature_divides_the_logits_and_may_be_traced(way: str) -> None:
    for temperature in (0.3, 1.7):
        check(way, *problem(SMALL), temperature=temperature)


# --- logits of -inf ---


@every_way
def test_a_logit_of_minus_infinity_is_as_if_its_column_were_not_there(way: str) -> None:
    """Each row keeps its own 20 columns, its label among them, as in top-k sampling."""
    (logits, labels), cotangents, dtype = problem(SMALL), random_cotangents(20), jnp.float32
    kept = np.argsort(np.random.default_rng(1).random(SMALL))[:, :20]
    kept[~(kept == np.asarray(labels)[:, None]).any(axis=1), 0] = labels[~(kept == labels[:, None]).any(axis=1)]
    filtered = np.full(SMALL, -np.inf)
    np.put_along_axis(filtered, kept, np.take_along_axis(np.asarray(logits, np.float64), kept, axis=1), axis=1)
    outputs, gradient = run(way, jnp.asarray(filtered, dtype), labels, cotangents)

    of_kept = jnp.asarray(np.take_along_axis(np.asarray(logits, np.float64), kept, axis=1), dtype)
    places = jnp.asarray((kept == np.asarray(labels)[:, None]).argmax(axis=1))
    assert_accurate((outputs, jnp.take_along_axis(gradient, jnp.asarray(kept), axis=1)), of_kept, places, cotangents)
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
def test_leading_dims_are_any(way: str) -> None:
    (logits, labels), cotangents = problem((24, 300)), random_cotangents(24)
    fold = functools.partial(jax.tree.map, lambda x: x.reshape(2, 3, 4, *x.shape[1:]))
    outputs, gradient = run(way, *fold((logits, labels, cotangents)), where=np.ones((2, 3, 4), bool))
    assert gradient.shape == (2, 3, 4, 300)
    flat = TokenLogprobs(*(x.reshape(24) for x in outputs)), gradient.reshape(24, 300)
    assert_accurate(flat, logits, labels, cotangents)


@pytest.mark.parametrize("way", ["tiles", "reduction"])
def test_one_row_alone_and_no_row_at_all_are_taken(way: str) -> None:
    for leading in ((), (0,), (3, 0)):
        ones = jnp.ones(leading)
        outputs, gradient = run(
            way, jnp.zeros((*leading, 300)), jnp.zeros(leading, int), TokenLogprobs(ones, ones, ones)
        )
        assert [x.shape for x in outputs] == [leading] * 3
        assert gradient.shape == (*leading, 300)
        np.testing.assert_allclose(outputs.entropy, np.full(leading, math.log(300)), rtol=1e-6)


# --- programs and memory ---


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


@every_dtype
def test_on_a_cpu_the_gradient_takes_the_place_of_donated_logits(dtype: Any) -> None:
    logits, labels = problem((64, 20000), dtype=dtype)
    program = jax.jit(pulled_back, donate_argnums=0).lower(logits, labels, random_cotangents(64)).compile()
    account = program.memory_analysis()
    assert account.alias_size_in_bytes == logits.nbytes
    assert account.temp_size_in_bytes < 0.05 * logits.nbytes


ON_A_CHIP = (1, 2048, 151643)


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which make aot installs"
)


def account(function: Callable[..., Any], *shapes: Any) -> dict[str, int]:
    """The TPU compiler's account of memory, in bytes."""
    from mllm.plan import targets

    chip = targets.mesh("v6e")
    return targets.memory(targets.compiled(function, shapes, chip))


@pytest.mark.aot
@needs_libtpu
@pytest.mark.parametrize("impl", [None, "mosaic_tpu", "xla"])
def test_on_a_tpu_temporaries_are_below_a_mebibyte(impl: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # tiles of a chip's size
    rows = jax.ShapeDtypeStruct(ON_A_CHIP[:-1], jnp.float32)
    logits, labels = jax.ShapeDtypeStruct(ON_A_CHIP, jnp.bfloat16), jax.ShapeDtypeStruct(rows.shape, jnp.int32)
    both = functools.partial(pulled_back, impl=impl)
    for passes in (lambda *args: both(*args)[0], both):
        assert account(passes, logits, labels, TokenLogprobs(rows, rows, rows))["temp"] < 2**20


@pytest.mark.aot
@needs_libtpu
def test_on_a_tpu_the_blocks_of_many_short_sequences_fit_scalar_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    *floats, labels = (jax.ShapeDtypeStruct((4096, 16), dtype) for dtype in (*[jnp.float32] * 3, jnp.int32))
    logits = jax.ShapeDtypeStruct((4096, 16, 2048), jnp.float32)
    both = functools.partial(pulled_back, impl="mosaic_tpu")
    assert account(both, logits, labels, TokenLogprobs(*floats))["output"] >= logits.size * 4


@pytest.mark.aot
@needs_libtpu
@pytest.mark.parametrize("impl", ["mosaic_tpu", "xla"])
def test_on_a_tpu_the_gradient_takes_the_place_of_logits_made_in_the_same_program(
    impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()

    def gradient(hidden: jax.Array, weight: jax.Array, labels: jax.Array, cotangents: TokenLogprobs) -> jax.Array:
        return pulled_back(hidden @ weight.T, labels, cotangents, impl=impl)[1]

    rows = jax.ShapeDtypeStruct((2048,), jnp.float32)
    hidden, weight = (jax.ShapeDtypeStruct((n, 128), jnp.bfloat16) for n in (2048, 151643))
    labels = jax.ShapeDtypeStruct((2048,), jnp.int32)
    found = account(gradient, hidden, weight, labels, TokenLogprobs(rows, rows, rows))
    assert found["output"] >= 2 * 2048 * 151643
    assert found["temp"] < 0.01 * found["output"]
