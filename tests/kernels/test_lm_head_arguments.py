"""Arguments that the LM head refuses: a ValueError names the one at fault, before anything is compiled."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kernels.lm_head import token_logprobs, token_loss

GOOD = {
    "hidden": jnp.zeros((4, 3)),
    "weight": jnp.zeros((5, 3)),
    "labels": jnp.array([0, 1, 2, 4]),
}


def call_token_logprobs(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    return token_logprobs(hidden, weight, labels, **options)


def call_token_loss(hidden: Any, weight: Any, labels: Any, operands: Any = (), **options: Any) -> Any:
    return token_loss(hidden, weight, labels, lambda logprob, entropy, *rest: -logprob, *operands, **options)


SHAPES_AND_DTYPES = {
    "labels of another rank": ("labels", {"labels": jnp.zeros((4, 1), int)}),
    "labels for other tokens": ("labels", {"labels": jnp.zeros(3, int)}),
    "labels that are no integers": ("labels", {"labels": jnp.zeros(4)}),
    "a weight of another hidden size": ("weight", {"weight": jnp.zeros((5, 4))}),
    "a weight that is no matrix": ("weight", {"weight": jnp.zeros((1, 5, 3))}),
    "hidden that is no floating point": ("hidden", {"hidden": jnp.zeros((4, 3), int)}),
}
VALUES = {
    "a label below zero": ("labels", {"labels": jnp.array([0, 1, -1, 2])}),
    "a label beyond the vocabulary": ("labels", {"labels": jnp.array([0, 1, 5, 2])}),
    "a temperature that is no number": ("temperature", {"temperature": math.nan}),
    "an unknown implementation": ("impl", {"impl": "warp"}),
}
ONLY_TOKEN_LOGPROBS = {"where of another shape": ("where", {"where": jnp.ones(3, bool)})}
ONLY_TOKEN_LOSS = {
    "weights of another shape": ("weights", {"weights": jnp.ones(3)}),
    "weights of another rank": ("weights", {"weights": jnp.ones((4, 1))}),
    "an operand of another shape": ("operand", {"operands": (jnp.ones(4), jnp.ones(5))}),
    "a workspace below zero": ("workspace", {"workspace": -1}),
}

each_for_both = pytest.mark.parametrize("call", [call_token_logprobs, call_token_loss])


def refuses(call: Any, argument: str, faults: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=argument):
        call(**(GOOD | faults))


@each_for_both
def test_good_arguments_are_taken(call: Any) -> None:
    jax.eval_shape(functools.partial(call, **GOOD))


@each_for_both
@pytest.mark.parametrize("fault", SHAPES_AND_DTYPES | VALUES)
def test_the_argument_at_fault_is_named(call: Any, fault: str) -> None:
    refuses(call, *(SHAPES_AND_DTYPES | VALUES)[fault])


@each_for_both
@pytest.mark.parametrize("fault", SHAPES_AND_DTYPES)
def test_wrong_shapes_and_dtypes_are_refused_while_tracing(call: Any, fault: str) -> None:
    argument, faults = SHAPES_AND_DTYPES[fault]
    with pytest.raises(ValueError, match=argument):
        jax.eval_shape(call, **(GOOD | faults))


@each_for_both
def test_a_label_out_of_range_is_refused_in_a_jitted_function_that_closes_over_it(call: Any) -> None:
    bad = GOOD | {"labels": jnp.array([0, 1, 5, 2])}
    with pytest.raises(ValueError, match="labels"):
        jax.jit(lambda hidden: call(**(bad | {"hidden": hidden})))(GOOD["hidden"])


@pytest.mark.parametrize("fault", ONLY_TOKEN_LOGPROBS)
def test_token_logprobs_names_its_own_arguments(fault: str) -> None:
    refuses(call_token_logprobs, *ONLY_TOKEN_LOGPROBS[fault])


@pytest.mark.parametrize("fault", ONLY_TOKEN_LOSS)
def test_token_loss_names_its_own_arguments(fault: str) -> None:
    refuses(call_token_loss, *ONLY_TOKEN_LOSS[fault])


@each_for_both
def test_an_unknown_implementation_is_told_which_there_are(call: Any) -> None:
    with pytest.raises(ValueError, match=r"one of full_logits, xla, mosaic_tpu, mosaic_gpu"):
        call(**GOOD, impl="warp")
