"""logits_logprobs: logits of -inf, any leading dims, and what its programs take of memory.

Values and gradients of other logits are in test_head_values.py.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import LOGITS, LOGITS_ON_GPU, OF_LOGITS, V6E, Engine, engines
from lm_head_cases import assert_near, random_cotangents, values_and_gradients
from oracle import Rows

from kernels.lm_head.softmax import Slopes
from kernels.logits import logits_logprobs

HIDDEN, IDENTITY, LABELS = LOGITS.problem()
"""Hidden states are the logits."""
AT_LABEL = jnp.arange(300) == LABELS[:, None]
GIVEN = random_cotangents(20)


def run(engine: Engine, logits: jax.Array, labels: jax.Array = LABELS, given: Slopes = GIVEN) -> Rows:
    where = jnp.ones(labels.shape, bool)
    with engine.strictly():
        return values_and_gradients(logits, IDENTITY, labels, given, impl=engine.impl, where=where)


# --- logits of -inf ---


@engines(*OF_LOGITS)
def test_a_logit_of_minus_infinity_is_as_if_its_column_were_not_there(engine: Engine) -> None:
    """Each row keeps its own 20 columns, its label among them, as in top-k sampling."""
    kept = np.argsort(np.random.default_rng(1).random(HIDDEN.shape) - 2 * np.asarray(AT_LABEL))[:, :20]
    filtered = np.full(HIDDEN.shape, -np.inf, np.float32)
    np.put_along_axis(filtered, kept, np.take_along_axis(np.asarray(HIDDEN), kept, axis=1), axis=1)
    got = run(engine, jnp.asarray(filtered))
    want = run(LOGITS, jnp.take_along_axis(HIDDEN, jnp.asarray(kept), axis=1), jnp.zeros(20, int))
    of_kept = jnp.take_along_axis(got.hidden, jnp.asarray(kept), axis=1)
    assert_near((*got[:3], of_kept), want[:4])
    assert not np.any(np.where(np.isinf(filtered), got.hidden, 0))


@engines(*OF_LOGITS)
def test_a_label_whose_logit_is_minus_infinity_has_no_probability_and_harms_no_other_number(engine: Engine) -> None:
    got = run(engine, jnp.where(AT_LABEL, -jnp.inf, HIDDEN))
    np.testing.assert_array_equal(got.logprob, -np.inf)
    assert np.all(np.isfinite([got.lse, got.entropy]))
    assert np.all(np.isfinite(got.hidden))
    np.testing.assert_array_equal(got.hidden[AT_LABEL], GIVEN.logprob)


@engines(*OF_LOGITS)
def test_rows_without_a_distribution_are_nan_and_leave_the_others_alone(engine: Engine) -> None:
    """All columns at -inf, a NaN, a +inf."""
    got = run(engine, HIDDEN.at[3].set(-jnp.inf).at[7, 299].set(jnp.nan).at[19, 150].set(jnp.inf))
    healthy = ~np.isin(np.arange(20), [3, 7, 19])
    np.testing.assert_array_equal(np.isfinite(got.entropy), healthy)
    np.testing.assert_array_equal(np.isfinite(got.hidden).all(axis=1), healthy)


@engines(LOGITS, LOGITS_ON_GPU)
@pytest.mark.parametrize("leading", [(), (0,), (3, 0)], ids=str)
def test_one_row_alone_and_no_row_at_all_are_taken(engine: Engine, leading: tuple[int, ...]) -> None:
    ones = jnp.ones(leading)
    got = run(engine, jnp.zeros((*leading, 300)), jnp.zeros(leading, int), Slopes(ones, ones, ones))
    assert [x.shape for x in got[:4]] == [leading] * 3 + [(*leading, 300)]
    np.testing.assert_allclose(got.entropy, np.full(leading, math.log(300)), rtol=1e-6)


# --- programs and memory ---


@pytest.mark.parametrize(
    ("shape", "dtype", "by_kernels"),
    [
        ((8, 256), jnp.float32, True),
        ((2, 8, 256), jnp.bfloat16, True),
        ((3, 4, 256), jnp.float32, False),  # a sequence's rows are padded to 8
        ((250, 300), jnp.float32, False),  # lies [V, N]: XLA takes it so
        ((8, 128, 300), jnp.float32, False),  # [V, B, T]
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


def gradient(impl: str | None, logits: Any, labels: Any, cotangents: Any) -> tuple[Slopes, jax.Array]:
    """Values and gradient."""
    values, pull_back = jax.vjp(lambda logits: Slopes(*logits_logprobs(logits, labels, impl=impl)[:3]), logits)
    return values, pull_back(cotangents)[0]


def shapes(leading: tuple[int, ...], columns: int, dtype: Any) -> list[Any]:
    """Logits, labels and cotangents."""
    rows = jax.ShapeDtypeStruct(leading, jnp.float32)
    labels = jax.ShapeDtypeStruct(leading, jnp.int32)
    return [jax.ShapeDtypeStruct((*leading, columns), dtype), labels, Slopes(rows, rows, rows)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_on_a_cpu_the_gradient_takes_the_place_of_donated_logits(dtype: Any) -> None:
    program = jax.jit(functools.partial(gradient, None), donate_argnums=0).lower(*shapes((640,), 20000, dtype))
    account = program.compile().memory_analysis()
    size = 640 * 20000 * jnp.dtype(dtype).itemsize
    assert account.alias_size_in_bytes == size
    assert account.temp_size_in_bytes < 0.05 * size


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which make aot installs")
@pytest.mark.parametrize(("impl", "vocabulary"), [(None, 151643), ("mosaic_tpu", 151936)])
def test_on_a_tpu_nothing_of_the_size_of_logits_is_added_to_them(impl: str | None, vocabulary: int) -> None:
    """By the compiler's account: given logits, logits made in the same program, and many short sequences."""
    from mllm.plan import targets

    def account(function: Callable[..., Any], *arguments: Any) -> dict[str, int]:
        return targets.memory(targets.compiled(function, arguments, targets.mesh("v6e")))

    both = functools.partial(gradient, impl)
    for passes in (lambda *args: both(*args)[0], both):
        assert account(passes, *shapes((1, 2048), vocabulary, jnp.bfloat16))["temp"] < 2**20
    hidden, weight = (jax.ShapeDtypeStruct((n, 128), jnp.bfloat16) for n in (2048, vocabulary))
    of_product = lambda hidden, weight, *others: both(hidden @ weight.T, *others)[1]  # noqa: E731
    found = account(of_product, hidden, weight, *shapes((2048,), vocabulary, jnp.bfloat16)[1:])
    assert found["output"] >= 2 * 2048 * vocabulary
    assert found["temp"] < 0.01 * found["output"]
    if impl == "mosaic_tpu":  # their numbers of rows have to fit scalar memory
        account(both, *shapes((4096, 16), 2048, jnp.float32))
