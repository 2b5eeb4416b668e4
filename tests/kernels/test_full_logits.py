"""impl="full_logits" is a strong baseline, without a second softmax; and which engine is chosen for which reason.

Its values and gradients are held against float64 with those of the other engines, in test_head_values.py.
"""

import re

import jax
import jax.numpy as jnp
import pytest

from kernels.lm_head import choose_impl, target, token_loss

N, D, V = 64, 16, 4096
LOGITS = 4 * N * V


def cross_entropy(logprob, entropy):
    return -logprob


def compiled(function, dtype=jnp.float32):
    arguments = ((N, D), dtype), ((V, D), dtype), ((N,), jnp.int32)
    return jax.jit(function).lower(*(jax.ShapeDtypeStruct(*x) for x in arguments)).compile()


def gradients():
    def loss(hidden, weight, labels):
        return token_loss(hidden, weight, labels, cross_entropy, impl="full_logits")[0]

    return jax.value_and_grad(loss, (0, 1))


def operations(program, name):
    """How often an operation appears on arrays of [N, V] in the optimised program."""
    text = program.as_text()
    result = {"reduce": rf"\w+\[{N}\]\S* reduce\(", "any": rf"\w+\[{N},{V}\]\S* {name}\("}
    return len(re.findall(result.get(name, result["any"]), text))


def test_a_loss_takes_two_exponentials_and_two_reductions():
    program = compiled(gradients())
    assert operations(program, "exponential") == 2, "forward's and backward's"
    assert operations(program, "log") == 0
    assert operations(program, "reduce") == 2, "the maximum, and the sum of exponentials"


@pytest.mark.parametrize(("dtype", "arrays"), [(jnp.float32, 2.1), (jnp.bfloat16, 2.6)])
def test_temporaries_are_the_logits_and_their_derivative(dtype, arrays):
    assert compiled(gradients(), dtype).memory_analysis().temp_size_in_bytes <= arrays * LOGITS


@pytest.mark.parametrize(
    ("platform", "dtype", "impl", "reason"),
    [
        ("cpu", "float32", "xla", "no TPU or Hopper GPU here"),
        ("tpu", "bfloat16", "mosaic_tpu", "the faster one by the compiler's schedule"),
        ("tpu", "float16", "xla", "mosaic_tpu can't run: hidden is float16"),
        ("gpu", "bfloat16", "xla", "mosaic_gpu has not been timed on a device"),
    ],
)
def test_the_choice_of_an_engine_comes_with_its_reason(platform, dtype, impl, reason, monkeypatch):
    monkeypatch.setattr(target, "platform", lambda mesh=None: platform)
    choice = choose_impl(jax.ShapeDtypeStruct((2, 32, 256), dtype), jax.ShapeDtypeStruct((1024, 256), dtype))
    assert choice.impl == impl
    assert choice.reason.startswith(reason)
