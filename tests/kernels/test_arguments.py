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
from engines import GPU_SIZES, V6E

from lm_head import HeadSharding, divergence_loss, token_logprobs, token_loss
from lm_head.gpu import tiles as gpu_tiles

GOOD = {"hidden": jnp.zeros((4, 3)), "weight": jnp.zeros((5, 3)), "labels": jnp.array([0, 1, 2, 4])}
TEACHER = {"teacher_hidden": jnp.zeros((4, 2)), "teacher_weight": jnp.zeros((6, 2))}


def call_token_loss(*, operands: Any = (), objective: Any = lambda logprob, *_: -logprob, **options: Any) -> Any:
    arguments = [options.pop(name) for name in GOOD]
    return token_loss(*arguments, objective, *operands, **options)


def call_divergence_loss(*, labels: Any, **options: Any) -> Any:
    return divergence_loss(**TEACHER | options)


FAULTS = {
    token_logprobs: {
        "labels of another rank": ("labels", {"labels": jnp.zeros((4, 1), int)}),
        "a label below zero": ("labels", {"labels": jnp.array([0, 1, -1, 2])}),
        "a weight of another hidden size": ("weight", {"weight": jnp.zeros((5, 4))}),
        "a kernel [D, V]": ("pass weight.T", {"weight": jnp.zeros((3, 5))}),
        "a weight that is no matrix": ("weight", {"weight": jnp.zeros((1, 5, 3))}),
        # p times a weight of 2^-16 is 0 in float16 where the word is rare: dW was off by two thirds of its largest.
        "float16 hidden states": (
            "hidden must be one of bfloat16, float32,",
            {"hidden": jnp.zeros((4, 3), jnp.float16)},
        ),
        "a float16 weight": ("weight must be one of bfloat16, float32,", {"weight": jnp.zeros((5, 3), jnp.float16)}),
        "float16 products": ("dtype must be None or one of bfloat16, float32,", {"dtype": jnp.float16}),
        "a temperature that is no number": ("temperature", {"temperature": math.nan}),
        "a temperature for each token": ("temperature", {"temperature": jnp.ones(4)}),
        "a softcap of zero": ("softcap", {"softcap": 0.0}),
        "a vocabulary of no token": ("vocabulary", {"vocabulary": 0}),
        "a copy of another shape": ("weight_copy must have .* not", {"weight_copy": jnp.zeros((5, 4))}),
        "where of another shape": ("where", {"where": jnp.ones(3, bool)}),
        "an unknown implementation": ("full_logits, chunked_logits, xla, mosaic_tpu, mosaic_gpu", {"impl": "warp"}),
    },
    call_token_loss: {
        "where that is not boolean": ("where", {"where": jnp.ones(4)}),
        "an operand of another shape": ("operand", {"operands": (jnp.ones(4), jnp.ones(5))}),
        "an objective of two numbers": ("objective", {"objective": lambda *scalars: jnp.stack(scalars)}),
        "a divergence without a teacher": (
            "divergence needs a teacher",
            {"objective": lambda logprob, entropy, *, divergence=0.0: divergence},
        ),
        "a teacher's half": ("teacher_hidden and teacher_weight", {"teacher_hidden": jnp.zeros((4, 2))}),
        "a workspace below zero": ("workspace", {"workspace": -1}),
    },
    call_divergence_loss: {
        "an unknown kind": ("kind", {"kind": "kl"}),
        "a beta above 1": ("beta", {"kind": "jsd", "beta": 1.1}),
        "a beta that is no number": ("beta", {"kind": "jsd", "beta": math.nan}),
        "another model's tokens": ("teacher_hidden", {"teacher_hidden": jnp.zeros((3, 2))}),
        "a teacher's weight of another width": ("teacher_weight", {"teacher_weight": jnp.zeros((6, 3))}),
        "a float16 teacher": ("teacher_hidden", {"teacher_hidden": jnp.zeros((4, 2), jnp.float16)}),
        "a vocabulary larger than the student's": ("vocabulary", {"vocabulary": 6}),
        "a teacher's temperature of 0": ("teacher_temperature", {"teacher_temperature": 0.0}),
        "a teacher's softcap below 0": ("teacher_softcap", {"teacher_softcap": -1.0}),
        "an engine without a teacher": ("impl: mosaic_gpu can't run", {"impl": "mosaic_gpu"}),
    },
}


@pytest.mark.parametrize(("call", "fault"), [(call, fault) for call, faults in FAULTS.items() for fault in faults])
def test_the_argument_at_fault_is_named(call: Any, fault: str) -> None:
    argument, faults = FAULTS[call][fault]
    with pytest.raises(ValueError, match=rf"\b{argument}"):
        call(**(GOOD | faults))


def test_a_label_out_of_range_is_refused_in_a_jitted_function_that_closes_over_it() -> None:
    bad = GOOD | {"labels": jnp.array([0, 1, 5, 2])}
    with pytest.raises(ValueError, match="labels"):
        jax.jit(lambda hidden: token_logprobs(**(bad | {"hidden": hidden})))(GOOD["hidden"])


# --- engines that are named and can't run ---

BF16 = "bfloat16"
MESH = jax.make_mesh((2,), ("dp",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
ON_A_MESH = HeadSharding(MESH, tokens=("dp",))


@pytest.mark.parametrize(
    ("impl", "reason", "words", "features", "dtypes", "options"),
    [
        ("mosaic_gpu", "dtype is float32", 256, 64, ("float32", BF16), {}),
        ("mosaic_gpu", "dtype is float32", 256, 64, (BF16, BF16), {"dtype": jnp.float32}),
        ("mosaic_gpu", "weight is 256 x 72.* multiples of", 256, 72, (BF16, BF16), {}),
        ("mosaic_gpu", "weight is 257 x 64.* multiples of", 257, 64, (BF16, BF16), {"sharding": ON_A_MESH}),
        ("mosaic_gpu", "(CPU|Hopper)", 256, 64, (BF16, BF16), {}),
        ("mosaic_tpu", r"MiB of VMEM, \d+ of them for its \w+", 256, 1 << 22, ("float32", "float32"), {}),
    ],
)
def test_an_engine_that_is_named_and_can_not_run_says_why_in_one_line(impl, reason, words, features, dtypes, options):
    arrays = [jax.ShapeDtypeStruct((n, features), dtype) for n, dtype in zip((8, words), dtypes, strict=True)]
    device: Any = jax.sharding.use_abstract_mesh(V6E) if "VMEM" in reason else contextlib.nullcontext()
    sizes: Any = gpu_tiles.override(GPU_SIZES) if "Hopper" not in reason else contextlib.nullcontext()
    call = functools.partial(token_logprobs, labels=np.zeros(8, int), impl=impl, **options)
    with device, sizes, pytest.raises(ValueError, match=f"impl: {impl} can't run here: .*{reason}") as refusal:
        jax.eval_shape(call, *arrays)
    assert "\n" not in str(refusal.value)
