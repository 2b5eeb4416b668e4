"""logits_logprobs as a program: under JAX's transformations, by which implementation, and what it takes of memory."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from engines import V6E
from lm_head_cases import random_cotangents
from logits_cases import every_dtype, problem, pulled_back, small_tiles

from kernels.lm_head import TokenLogprobs
from kernels.logits import logits_logprobs


@pytest.fixture(autouse=True)
def tiles_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)


# --- which implementation, and refusals ---

GOOD: dict[str, Any] = {"logits": jnp.zeros((4, 5)), "labels": jnp.array([0, 1, 2, 4])}
FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "logits that are no floating point": ("logits", {"logits": jnp.zeros((4, 5), int)}),
    "logits without columns": ("logits", {"logits": jnp.zeros((4, 0))}),
    "labels for other rows": ("labels", {"labels": jnp.zeros(3, int)}),
    "a label beyond the vocabulary": ("labels", {"labels": jnp.array([0, 1, 5, 2])}),
    "where that is not boolean": ("where", {"where": jnp.ones(4)}),
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
