"""Arguments that the LM head refuses: a ValueError names the one at fault, before anything is compiled."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kernels.lm_head import label_is_likeliest, token_logprobs, token_loss

GOOD = {
    "hidden": jnp.zeros((4, 3)),
    "weight": jnp.zeros((5, 3)),
    "labels": jnp.array([0, 1, 2, 4]),
}


def cross_entropy(logprob: jax.Array, entropy: jax.Array, *operands: jax.Array) -> jax.Array:
    return -logprob


def call_token_loss(
    hidden: Any, weight: Any, labels: Any, operands: Any = (), objective: Any = cross_entropy, **options: Any
) -> Any:
    return token_loss(hidden, weight, labels, objective, *operands, **options)


def call_label_is_likeliest(hidden: Any, weight: Any, labels: Any) -> Any:
    return label_is_likeliest(hidden, weight, labels, where=jnp.ones(4, bool))


SHAPES_AND_DTYPES = {
    "labels of another rank": ("labels", {"labels": jnp.zeros((4, 1), int)}),
    "labels that are no integers": ("labels", {"labels": jnp.zeros(4)}),
    "a weight of another hidden size": ("weight", {"weight": jnp.zeros((5, 4))}),
    "a weight that is no matrix": ("weight", {"weight": jnp.zeros((1, 5, 3))}),
    "hidden that is no floating point": ("hidden", {"hidden": jnp.zeros((4, 3), int)}),
}
VALUES = {
    "a label below zero": ("labels", {"labels": jnp.array([0, 1, -1, 2])}),
    "a label beyond the vocabulary": ("labels", {"labels": jnp.array([0, 1, 5, 2])}),
    "a temperature that is no number": ("temperature", {"temperature": math.nan}),
    "a softcap of zero": ("softcap", {"softcap": 0.0}),
    "a dtype of integers": ("dtype", {"dtype": jnp.int8}),
    "an unknown implementation": ("one of full_logits, xla, mosaic_tpu, mosaic_gpu", {"impl": "warp"}),
}
OF_TOKEN_LOSS = {
    "weights of another rank": ("weights", {"weights": jnp.ones((4, 1))}),
    "an operand of another shape": ("operand", {"operands": (jnp.ones(4), jnp.ones(5))}),
    "an objective of two numbers": ("objective", {"objective": lambda *scalars: jnp.stack(scalars)}),
    "a workspace below zero": ("workspace", {"workspace": -1}),
}
FAULTS = {
    token_logprobs: SHAPES_AND_DTYPES | VALUES | {"where of another shape": ("where", {"where": jnp.ones(3, bool)})},
    call_token_loss: SHAPES_AND_DTYPES | VALUES | OF_TOKEN_LOSS,
    call_label_is_likeliest: SHAPES_AND_DTYPES | {"a label below zero": VALUES["a label below zero"]},
}
both = pytest.mark.parametrize("call", [token_logprobs, call_token_loss])


@pytest.mark.parametrize(("call", "fault"), [(call, fault) for call, faults in FAULTS.items() for fault in faults])
def test_the_argument_at_fault_is_named(call: Any, fault: str) -> None:
    jax.eval_shape(functools.partial(call, **GOOD))
    argument, faults = FAULTS[call][fault]
    with pytest.raises(ValueError, match=argument):
        call(**(GOOD | faults))


@both
def test_a_label_out_of_range_is_refused_in_a_jitted_function_that_closes_over_it(call: Any) -> None:
    bad = GOOD | {"labels": jnp.array([0, 1, 5, 2])}
    with pytest.raises(ValueError, match="labels"):
        jax.jit(lambda hidden: call(**(bad | {"hidden": hidden})))(GOOD["hidden"])
