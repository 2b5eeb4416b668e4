"""token_logprobs and token_loss under JAX's transformations: each gives what plain calls give."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from lm_head_cases import OBJECTIVES, SMALL, assert_near, operands_for, random_problem, sparse_weights

from kernels.lm_head import TokenLogprobs, token_logprobs, token_loss

OBJECTIVE = OBJECTIVES["nonlinear in both"]
PROBLEM = random_problem(SMALL, scale=2.0)
OPERAND = operands_for(PROBLEM, OBJECTIVE)[0]
ARGUMENTS = (*PROBLEM, sparse_weights(24))


def scalar_of_token_loss(
    hidden: jax.Array, weight: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, TokenLogprobs]:
    return token_loss(hidden, weight, labels, OBJECTIVE.in_jax, OPERAND, weights=weights, impl="xla")


def scalar_of_token_logprobs(
    hidden: jax.Array, weight: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, TokenLogprobs]:
    outputs = token_logprobs(hidden, weight, labels, where=weights != 0, impl="xla")
    return jnp.vdot(weights, outputs.logprob * outputs.entropy + jnp.sin(outputs.lse)), outputs


every_entry_point = pytest.mark.parametrize("scalar", [scalar_of_token_logprobs, scalar_of_token_loss])


def gradients_of(scalar: Callable[..., Any]) -> Callable[..., Any]:
    """(hidden, weight, labels, weights) to ((scalar, outputs), gradients in hidden and weight)."""
    return jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)


@functools.cache
def jitted(scalar: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(gradients_of(scalar))


def in_a_checkpoint(scalar: Callable[..., Any]) -> Any:
    return jax.jit(gradients_of(jax.checkpoint(scalar)))(*ARGUMENTS)


def exported(scalar: Callable[..., Any]) -> Any:
    program = export.export(jax.jit(lambda *args: jax.tree.leaves(gradients_of(scalar)(*args))))
    return program(*ARGUMENTS).call(*ARGUMENTS)


def with_64_bit_types(scalar: Callable[..., Any]) -> Any:
    with jax.enable_x64(True):
        got = jax.jit(gradients_of(scalar))(*ARGUMENTS)
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.float32)}
    return got


@every_entry_point
@pytest.mark.parametrize("transformed", [in_a_checkpoint, exported, with_64_bit_types])
def test_results_and_gradients_are_the_same(transformed: Callable[..., Any], scalar: Callable[..., Any]) -> None:
    assert_near(transformed(scalar), jitted(scalar)(*ARGUMENTS))


@every_entry_point
def test_vmap_is_a_python_loop(scalar: Callable[..., Any]) -> None:
    hidden, weight, labels, weights = ARGUMENTS
    stacks = (
        jnp.stack([hidden, hidden[::-1]]),
        jnp.stack([weight, -weight]),
        jnp.stack([labels, 130 - labels]),
        jnp.stack([weights, 0 * weights]),
    )
    got = jax.jit(jax.vmap(gradients_of(scalar)))(*stacks)
    for i in range(2):
        assert_near([x[i] for x in jax.tree.leaves(got)], jitted(scalar)(*(x[i] for x in stacks)))
