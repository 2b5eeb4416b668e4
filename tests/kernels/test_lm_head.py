"""token_logprobs and its gradients against float64: any softmax, size, mask, label and dtype."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lm_head_cases import (
    MANY_TOKENS,
    MANY_WORDS,
    MASKS,
    OBJECTIVES,
    ONE_TOKEN,
    SCALES,
    SMALL,
    TWO_WORDS,
    UNALIGNED,
    Plain,
    Problem,
    assert_as_accurate_as_plain,
    check,
    every_dtype,
    every_impl,
    every_mask,
    loss_and_gradients,
    operands_for,
    plain_values_and_gradients,
    planted_problem,
    poisoned,
    pulled_back,
    random_cotangents,
    random_problem,
    sparse_weights,
    tied_problem,
    values_and_gradients,
)
from oracle import exact

from kernels.lm_head import TokenLogprobs, token_logprobs


@every_impl
@every_dtype
@pytest.mark.parametrize(
    ("softmax", "cotangents"),
    [*((softmax, "logprob lse entropy") for softmax in SCALES), *(("peaked", name) for name in TokenLogprobs._fields)],
)
def test_values_and_gradients_are_as_accurate_as_full_logits(
    impl: str, dtype: Any, softmax: str, cotangents: str
) -> None:
    check(random_problem(UNALIGNED, SCALES[softmax], dtype), random_cotangents(252, cotangents), impl=impl)


@every_impl
@every_dtype
@pytest.mark.parametrize("make", [planted_problem, tied_problem])
def test_exact_matches_and_ties_are_as_accurate_as_full_logits(impl: str, dtype: Any, make: Any) -> None:
    check(make(dtype, 1e4), random_cotangents(252), impl=impl)


@pytest.mark.parametrize("shape", [ONE_TOKEN, TWO_WORDS, MANY_WORDS, MANY_TOKENS], ids=str)
def test_any_size_is_as_accurate_as_full_logits(shape: tuple[int, int, int]) -> None:
    problem, cotangents = random_problem(shape, 3.0, jnp.bfloat16), random_cotangents(shape[0])
    check(problem, cotangents, impl="xla")


@every_impl
def test_a_certain_label_has_logprob_and_entropy_zero_and_no_gradient(impl: str) -> None:
    eye = jnp.eye(16, dtype=jnp.float32)
    labels = jnp.arange(24, dtype=jnp.int32) % 16
    problem = Problem(1e4 * eye[labels], jnp.zeros((131, 16)).at[:16].set(eye), labels)
    ones = jnp.ones(24)
    got = check(problem, TokenLogprobs(ones, 0 * ones, ones), impl=impl)
    assert not np.any([got.logprob, got.entropy])
    np.testing.assert_array_equal(got.lse, 1e4)
    assert not np.any(got.hidden)
    assert not np.any(got.weight)


@every_impl
def test_a_traced_label_beyond_the_vocabulary_hits_nothing(impl: str) -> None:
    """It may belong to another shard of the vocabulary: its own logit counts as zero."""
    problem = random_problem(SMALL)._replace(labels=jnp.full(24, 131, jnp.int32))
    got = values_and_gradients(*problem, random_cotangents(24), impl=impl, where=jnp.ones(24, bool))
    np.testing.assert_array_equal(got.logprob, -got.lse)


@every_impl
def test_labels_may_be_narrow_unsigned_integers(impl: str) -> None:
    problem = random_problem(MANY_WORDS)
    narrow = problem.labels.astype(jnp.uint16)
    got = jax.jit(functools.partial(token_logprobs, impl=impl))(problem.hidden, problem.weight, narrow)
    want = exact(*problem, lambda *_: np.zeros((3, 5)))
    np.testing.assert_allclose(got.logprob, want.logprob, rtol=1e-5)


@every_impl
def test_the_softcap_comes_first_then_the_temperature_which_may_be_traced(impl: str) -> None:
    problem, cotangents = random_problem(SMALL, 30.0), random_cotangents(24)
    capped = functools.partial(pulled_back, *problem, cotangents, impl=impl, softcap=20.0)
    traced = jax.jit(lambda temperature: capped(temperature=temperature))
    for temperature in (0.6, 2.5):
        options = {"temperature": temperature, "softcap": 20.0}
        truth = exact(*problem, lambda *_: cotangents, **options)
        yardstick = plain_values_and_gradients(*problem, cotangents, **options)
        assert_as_accurate_as_plain(traced(jnp.float32(temperature)), yardstick, truth)


@every_impl
@every_mask
def test_rows_left_out_give_zeros_and_leak_nothing(impl: str, mask: str) -> None:
    live = MASKS[mask]
    got = check(poisoned(random_problem(SMALL), ~live), random_cotangents(24), impl=impl, where=jnp.asarray(live))
    assert not np.any([np.asarray(x)[~live] for x in got[:3]])
    assert not np.any(np.asarray(got.hidden)[~live])


@every_impl
def test_a_nan_in_a_row_that_counts_is_not_hidden(impl: str) -> None:
    problem = random_problem(SMALL)
    sick = np.arange(24) == 5
    problem = problem._replace(hidden=jnp.where(sick[:, None], jnp.nan, problem.hidden))
    got = values_and_gradients(*problem, random_cotangents(24), impl=impl, where=jnp.ones(24, bool))
    for x in got[:3]:
        np.testing.assert_array_equal(np.isnan(x), sick)
    np.testing.assert_array_equal(np.isnan(got.hidden).any(axis=1), sick)
    loss = loss_and_gradients(problem, OBJECTIVES["cross-entropy"], (), jnp.ones(24), impl=impl)
    assert np.isnan(loss.loss)
    assert np.isnan(loss.rows.weight).any()


def test_leading_dims_are_flattened_and_given_back() -> None:
    def fold(x: jax.Array) -> jax.Array:
        return x.reshape(2, 3, 4, *x.shape[1:])

    problem, cotangents, weights = random_problem(SMALL), random_cotangents(24), sparse_weights(24)
    folded_problem = Problem(fold(problem.hidden), problem.weight, fold(problem.labels))
    objective = OBJECTIVES["nonlinear in both"]
    operands = operands_for(problem, objective)

    def near(got: Plain, flat: Plain) -> None:
        want = Plain(*(x if x is flat.weight else fold(x) for x in flat))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)

    near(
        values_and_gradients(*folded_problem, jax.tree.map(fold, cotangents), impl="xla", where=fold(weights) != 0),
        values_and_gradients(*problem, cotangents, impl="xla", where=weights != 0),
    )
    flat = loss_and_gradients(problem, objective, operands, weights, impl="xla")
    got = loss_and_gradients(folded_problem, objective, [fold(x) for x in operands], fold(weights), impl="xla")
    np.testing.assert_allclose(got.loss, flat.loss, rtol=1e-5)
    near(got.rows, flat.rows)


@every_dtype
@pytest.mark.parametrize("leading", [(24, 1), (), (0,)], ids=str)
def test_outputs_are_float32_and_gradients_have_their_input_s_shape_and_dtype(
    dtype: Any, leading: tuple[int, ...]
) -> None:
    hidden, weight = jnp.zeros((*leading, 16), dtype), jnp.zeros((131, 16))
    problem, row = Problem(hidden, weight, jnp.zeros(leading, int)), jnp.zeros(leading)
    want = [((*leading,), jnp.float32)] * 3 + [(hidden.shape, dtype), (weight.shape, jnp.float32)]
    rows = values_and_gradients.eval_shape(*problem, TokenLogprobs(row, row, row))
    assert [(x.shape, x.dtype) for x in rows] == want
    loss, rows = loss_and_gradients.eval_shape(problem, OBJECTIVES["cross-entropy"], (), row)
    assert [(x.shape, x.dtype) for x in rows] == want
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


@every_impl
def test_float32_masters_with_bfloat16_products_get_float32_gradients(impl: str) -> None:
    """They are as exact as those of bfloat16 inputs, but not rounded to bfloat16 at the end."""
    problem, cotangents = random_problem(SMALL), random_cotangents(24)
    rounded = Problem(*(x.astype(jnp.bfloat16) for x in problem[:2]), problem.labels)
    got = values_and_gradients(*problem, cotangents, impl=impl, dtype=jnp.bfloat16)
    yardstick = plain_values_and_gradients(*rounded, cotangents)
    assert_as_accurate_as_plain(got, yardstick, exact(*rounded, lambda *_: cotangents))
    loss = loss_and_gradients(problem, OBJECTIVES["cross-entropy"], (), jnp.ones(24), impl=impl, dtype=jnp.bfloat16)
    for gradient in (got.hidden, got.weight, loss.rows.hidden, loss.rows.weight):
        assert np.any(gradient != gradient.astype(jnp.bfloat16).astype(jnp.float32))
