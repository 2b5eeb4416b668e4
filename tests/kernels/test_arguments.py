"""Arguments that the head refuses: a ValueError names the one at fault.

An engine that is named and can't run says why. Both come before anything is compiled.
"""

import contextlib
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import GPU_SIZES, KERNELS

from lm_head import HeadSharding, divergence_loss, token_logprobs, token_loss
from lm_head.gpu import tiles as gpu_tiles

GOOD = {"hidden": jnp.zeros((4, 3)), "weight": jnp.zeros((5, 3)), "labels": jnp.array([0, 1, 2, 4])}
TEACHER = {"teacher_hidden": jnp.zeros((4, 2)), "teacher_weight": jnp.zeros((6, 2))}


def call_token_loss(*, operands: Any = (), objective: Any = lambda logprob, *_: -logprob, **options: Any) -> Any:
    arguments = [options.pop(name) for name in GOOD]
    return token_loss(*arguments, objective, *operands, **options)


def call_divergence_loss(*, labels: Any, **options: Any) -> Any:
    return divergence_loss(**TEACHER | options)


FAULTS = [
    (token_logprobs, "labels", {"labels": jnp.zeros((4, 1), int)}),
    (token_logprobs, "labels must be within", {"labels": jnp.array([0, 1, -1, 2])}),
    (token_logprobs, "weight", {"weight": jnp.zeros((5, 4))}),
    (token_logprobs, "pass weight.T", {"weight": jnp.zeros((3, 5))}),
    # p times a weight of 2^-16 is 0 in float16 where the word is rare: dW was off by two thirds of its largest.
    (token_logprobs, "hidden must be one of bfloat16, float32,", {"hidden": jnp.zeros((4, 3), jnp.float16)}),
    (token_logprobs, "dtype must be None or one of bfloat16, float32,", {"dtype": jnp.float16}),
    (token_logprobs, "temperature", {"temperature": math.nan}),
    (token_logprobs, "temperature must be a scalar", {"temperature": jnp.ones(4)}),
    (token_logprobs, "softcap", {"softcap": 0.0}),
    (token_logprobs, "vocabulary", {"vocabulary": 0}),
    (token_logprobs, "weight_copy must have .* not", {"weight_copy": jnp.zeros((5, 4))}),
    (token_logprobs, "full_logits, chunked_logits, xla, mosaic_tpu, mosaic_gpu", {"impl": "warp"}),
    (call_token_loss, "where must be boolean", {"where": jnp.ones(4)}),
    (call_token_loss, "operand", {"operands": (jnp.ones(4), jnp.ones(5))}),
    (call_token_loss, "objective", {"objective": lambda *scalars: jnp.stack(scalars)}),
    (call_token_loss, "objective: .* gets logprob, entropy and 0 operands", {"objective": lambda logprob: -logprob}),
    (call_token_loss, "objective", {"operands": (jnp.ones(4),), "objective": lambda logprob, entropy: -logprob}),
    (call_token_loss, "objective", {"objective": lambda logprob, entropy, *, logits: -logprob}),
    (call_token_loss, "divergence needs a teacher", {"objective": lambda _, entropy, *, divergence=0.0: divergence}),
    (call_token_loss, "teacher_hidden and teacher_weight", {"teacher_hidden": jnp.zeros((4, 2))}),
    (call_token_loss, "workspace", {"workspace": -1}),
    (call_divergence_loss, "kind", {"kind": "kl"}),
    (call_divergence_loss, "beta", {"kind": "jsd", "beta": 1.1}),
    (call_divergence_loss, "teacher_hidden", {"teacher_hidden": jnp.zeros((3, 2))}),
    (call_divergence_loss, "teacher_weight", {"teacher_weight": jnp.zeros((6, 3))}),
    (call_divergence_loss, "vocabulary", {"vocabulary": 6}),
    *((call_divergence_loss, f"impl: {x} can't run here: it has no kernels", {"impl": x}) for x in KERNELS),
]


@pytest.mark.parametrize(("call", "named", "fault"), FAULTS)
def test_the_argument_at_fault_is_named(call, named, fault):
    with pytest.raises(ValueError, match=rf"\b{named}"):
        call(**(GOOD | fault))


HEADS = {
    "temperature": lambda t: token_logprobs(**GOOD, temperature=t).logprob.sum(),
    "teacher_temperature": lambda t: call_divergence_loss(**GOOD, teacher_temperature=t)[0],
    "collision": lambda t: token_logprobs(**GOOD | {"hidden": t * jnp.ones((4, 3))}, collision=True).collision.sum(),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_gradient_of_a_value_without_gradient_is_refused(name):
    head = HEADS[name]
    with pytest.raises(ValueError, match=rf"{name} has no gradient: wrap it in jax\.lax\.stop_gradient"):
        jax.jit(jax.grad(head))(0.7)
    if "temperature" in name:
        assert jax.jit(head)(0.7) == jax.jit(jax.value_and_grad(lambda t: head(jax.lax.stop_gradient(t))))(0.7)[0]


def test_a_bad_label_closed_over_by_jit_is_refused() -> None:
    bad = GOOD | {"labels": jnp.array([0, 1, 5, 2])}
    with pytest.raises(ValueError, match="labels"):
        jax.jit(lambda hidden: token_logprobs(**(bad | {"hidden": hidden})))(GOOD["hidden"])


# --- engines that are named and can't run ---

MESH = jax.make_mesh((2,), ("dp",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
ON_A_MESH = HeadSharding(MESH, tokens=("dp",))


@pytest.mark.parametrize(
    ("reason", "weight", "options"),
    [
        ("dtype is float32", (256, 64), {"dtype": jnp.float32}),
        ("weight is 257 x 64.* multiples of", (257, 64), {"sharding": ON_A_MESH}),
        ("(CPU|Hopper)", (256, 64), {}),
        ("it needs a TPU, and this is a cpu", (256, 64), {"impl": "mosaic_tpu"}),
    ],
)
def test_a_named_engine_that_can_not_run_says_why(reason, weight, options):
    arrays = [jax.ShapeDtypeStruct((n, weight[1]), "bfloat16") for n in (8, weight[0])]
    sizes: Any = gpu_tiles.override(GPU_SIZES) if "Hopper" not in reason else contextlib.nullcontext()
    options = {"impl": "mosaic_gpu"} | options
    call = functools.partial(token_logprobs, labels=np.zeros(8, int), **options)
    with sizes, pytest.raises(ValueError, match=f"impl: {options['impl']} can't run here: .*{reason}") as refusal:
        jax.eval_shape(call, *arrays)
    assert "\n" not in str(refusal.value)
