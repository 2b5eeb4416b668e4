"""token_logprobs and token_loss under JAX's transformations: each gives what plain calls give.

`full_logits` shares its rules of differentiation with `xla`, so it stands beside it only where that costs little.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import Mesh, PartitionSpec
from lm_head_cases import (
    OBJECTIVES,
    SMALL,
    every_impl,
    operands_for,
    random_problem,
    sparse_weights,
)

from kernels.lm_head import TokenLogprobs, token_logprobs, token_loss

OBJECTIVE = OBJECTIVES["nonlinear in both"]
PROBLEM = random_problem(SMALL, scale=2.0)
OPERAND = operands_for(PROBLEM, OBJECTIVE)[0]
ARGUMENTS = (*PROBLEM, sparse_weights(24))


def scalar_of_token_loss(
    hidden: jax.Array, weight: jax.Array, labels: jax.Array, weights: jax.Array, *, impl: str
) -> tuple[jax.Array, TokenLogprobs]:
    return token_loss(hidden, weight, labels, OBJECTIVE.in_jax, OPERAND, weights=weights, impl=impl)


def scalar_of_token_logprobs(
    hidden: jax.Array, weight: jax.Array, labels: jax.Array, weights: jax.Array, *, impl: str
) -> tuple[jax.Array, TokenLogprobs]:
    outputs = token_logprobs(hidden, weight, labels, where=weights != 0, impl=impl)
    return jnp.vdot(weights, outputs.logprob * outputs.entropy + jnp.sin(outputs.lse)), outputs


every_entry_point = pytest.mark.parametrize("scalar", [scalar_of_token_logprobs, scalar_of_token_loss])


def gradients_of(scalar: Callable[..., Any], impl: str) -> Callable[..., Any]:
    """(hidden, weight, labels, weights) to ((scalar, outputs), gradients in hidden and weight)."""
    return jax.value_and_grad(functools.partial(scalar, impl=impl), argnums=(0, 1), has_aux=True)


@functools.cache
def jitted(scalar: Callable[..., Any], impl: str) -> Callable[..., Any]:
    return jax.jit(gradients_of(scalar, impl))


def assert_near(got: Any, want: Any) -> None:
    """Asserts agreement within 1 part in 50,000 of an array's largest number: another order of the same sums."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.max(np.abs(y), initial=1.0))


@every_impl
@every_entry_point
def test_two_runs_agree_bit_for_bit(impl: str, scalar: Callable[..., Any]) -> None:
    once, again = jitted(scalar, impl)(*ARGUMENTS), jitted(scalar, impl)(*ARGUMENTS)
    jax.tree.map(np.testing.assert_array_equal, once, again)


@every_entry_point
def test_jit_changes_nothing(scalar: Callable[..., Any]) -> None:
    eager = gradients_of(scalar, "xla")(*ARGUMENTS)
    assert_near(jitted(scalar, "xla")(*ARGUMENTS), eager)


@every_entry_point
def test_rematerialisation_changes_nothing(scalar: Callable[..., Any]) -> None:
    def checkpointed(*args: jax.Array, impl: str) -> Any:
        return jax.checkpoint(functools.partial(scalar, impl=impl))(*args)

    got = jax.jit(gradients_of(checkpointed, "xla"))(*ARGUMENTS)
    assert_near(got, jitted(scalar, "xla")(*ARGUMENTS))


@every_entry_point
@pytest.mark.parametrize(("impl", "over"), [("xla", "hidden"), ("full_logits", "everything")])
def test_vmap_is_a_python_loop(impl: str, over: str, scalar: Callable[..., Any]) -> None:
    hidden, weight, labels, weights = ARGUMENTS
    stacks = (
        jnp.stack([hidden, hidden[::-1], 0 * hidden]),
        jnp.stack([weight, -weight, weight[::-1]]),
        jnp.stack([labels, 130 - labels, labels[::-1]]),
        jnp.stack([weights, 1 - weights, 0 * weights]),
    )
    axes = (0, None, None, None) if over == "hidden" else (0, 0, 0, 0)
    batched = [stack if axis == 0 else x for stack, x, axis in zip(stacks, ARGUMENTS, axes, strict=True)]
    got = jax.jit(jax.vmap(gradients_of(scalar, impl), in_axes=axes))(*batched)
    for i in range(3):
        alone = [x if axis is None else x[i] for x, axis in zip(batched, axes, strict=True)]
        assert_near([x[i] for x in jax.tree.leaves(got)], jitted(scalar, impl)(*alone))


@every_entry_point
def test_an_exported_program_gives_the_same(scalar: Callable[..., Any]) -> None:
    program = export.export(jax.jit(lambda *args: jax.tree.leaves(gradients_of(scalar, "xla")(*args))))
    assert_near(program(*ARGUMENTS).call(*ARGUMENTS), jitted(scalar, "xla")(*ARGUMENTS))


@every_entry_point
def test_shard_map_over_tokens_gives_the_same(scalar: Callable[..., Any]) -> None:
    """Each shard's scalar is summed over the mesh; the weight and its gradient are replicated."""
    tokens, everywhere = PartitionSpec("dp"), PartitionSpec()

    @functools.partial(
        jax.shard_map,
        mesh=Mesh(np.array(jax.devices()[:1]), ("dp",)),
        in_specs=(tokens, everywhere, tokens, tokens),
        out_specs=(everywhere, tokens),
    )
    def sharded(*args: jax.Array) -> tuple[jax.Array, TokenLogprobs]:
        value, outputs = scalar(*args, impl="xla")
        return jax.lax.psum(value, "dp"), outputs

    got = jax.jit(jax.value_and_grad(sharded, argnums=(0, 1), has_aux=True))(*ARGUMENTS)
    assert_near(got, jitted(scalar, "xla")(*ARGUMENTS))


def test_with_64_bit_types_enabled_dtypes_and_values_stay() -> None:
    with jax.enable_x64(True):
        got = jax.jit(gradients_of(scalar_of_token_loss, "xla"))(*ARGUMENTS)
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.float32)}
    assert_near(got, jitted(scalar_of_token_loss, "xla")(*ARGUMENTS))
