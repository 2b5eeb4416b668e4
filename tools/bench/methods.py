"""The methods that `python tools/bench head` compares: this project's engines, plain JAX, and libraries if installed.

Libraries run with their default options. tokamax takes no weights: rows that don't count are zeros there. Each such row
adds log V to the loss and nothing to a gradient. google-tunix stands for the head of its Qwen2 model with its trainer's
default loss.
"""

import importlib.util
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lm_head import token_logprobs, token_loss

Loss = Callable[..., tuple[Array, Array | None]]
"""(hidden [N, D], weight [V, D], labels [N], weights [N], by_logprob [N], by_lse [N]) -> a sum over rows, and the
log-probabilities [N], None where a library returns the sum alone."""
Call = Callable[..., tuple[Any, ...]]
"""(hidden, weight, labels, ...) -> (value, log-probabilities) or (value, log-probabilities, dh, dW)."""
WORKSPACE = 640 << 20


class Method(NamedTuple):
    call: Call
    general: bool = False
    """The value is the sum of logprob and lse times random cotangents; the gradients belong to that sum."""
    transposed: bool = False
    """The weight is [D, V]."""


def methods(platform: str) -> dict[str, Method]:
    """The methods for a `cpu`, `gpu` or `tpu`, in the order of the table."""
    full_logits, chunked = fused(impl="full_logits"), partial(fused, impl="chunked_logits")
    named = {} if platform == "cpu" else engine_methods(f"mosaic_{platform}")
    named |= {
        "full logits": Method(value_and_gradients(full_logits)),
        "full logits, float32 master": Method(gradients_of_master(impl="full_logits")),
        "chunked logits": Method(value_and_gradients(chunked())),
        "chunked logits, workspace 640 MiB": Method(value_and_gradients(chunked(workspace=WORKSPACE))),
        **engine_methods("xla"),
        "optax on full logits": Method(value_and_gradients(optax_on_logits(23))),
        "optax on logits in bfloat16": Method(value_and_gradients(optax_on_logits(7))),
        "full logits, value only": Method(value_only(full_logits)),
    }
    if importlib.util.find_spec("tokamax"):
        named["tokamax, its choice"] = Method(tokamax(None), transposed=True)
        named["tokamax, chunked_xla"] = Method(tokamax("chunked_xla"), transposed=True)
    if importlib.util.find_spec("tunix"):
        named["google-tunix, default loss"] = Method(value_and_gradients(tunix))
    return named


def engine_methods(impl: str) -> dict[str, Method]:
    calls = {
        # The trainer's case: a float32 master, a bfloat16 copy that is multiplied, a float32 dW.
        "float32 master": gradients_of_master(impl=impl),
        "float32 master, workspace 640 MiB": gradients_of_master(impl=impl, workspace=WORKSPACE),
        "workspace 640 MiB": value_and_gradients(fused(impl=impl, workspace=WORKSPACE)),
        "workspace 0": value_and_gradients(fused(impl=impl, workspace=0)),
        "workspace for all tokens": value_and_gradients(fused(impl=impl, workspace=1 << 40)),
        "default workspace": value_and_gradients(fused(impl=impl)),
        "value only": value_only(fused(impl=impl)),
        "general backward": value_and_gradients(general(impl=impl)),
        # On TPUs the gradient of the entropy takes kernels of its own, at any coefficient.
        "with entropy": value_and_gradients(fused(1e-9, impl=impl, workspace=0)),
    }
    return {f"{impl}, {name}": Method(call, name == "general backward") for name, call in calls.items()}


# --- losses


def fused(entropy: float = 0.0, **options: Any) -> Loss:
    """The cross-entropy less `entropy` times the entropy, by `token_loss` with these options."""

    def loss(hidden: Array, weight: Array, labels: Array, weights: Array, *_: Array) -> tuple[Array, Array]:
        objective = (lambda logprob, nats: -logprob - entropy * nats) if entropy else (lambda logprob, _: -logprob)
        value, result = token_loss(hidden, weight, labels, objective, weights=weights, **options)
        return value, result.logprob

    return loss


def general(**options: Any) -> Loss:
    """The sum of logprob and lse by `token_logprobs`, each times a cotangent."""

    def loss(hidden: Array, weight: Array, labels: Array, weights: Array, *slopes: Array) -> tuple[Array, Array]:
        values, (by_logprob, by_lse) = token_logprobs(hidden, weight, labels, where=weights != 0, **options), slopes
        return jnp.sum(by_logprob * values.logprob + by_lse * values.lse), values.logprob

    return loss


def optax_on_logits(mantissa: int) -> Loss:
    """The cross-entropy of logits with so many bits of mantissa; 7 are bfloat16's."""

    def loss(hidden: Array, weight: Array, labels: Array, weights: Array, *_: Array) -> tuple[Array, Array]:
        import optax

        logits = jnp.matmul(hidden, weight.T, preferred_element_type=jnp.float32)
        # XLA may leave out a mere conversion to bfloat16 and back.
        logits = jax.lax.reduce_precision(logits, exponent_bits=8, mantissa_bits=mantissa)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.sum(weights * losses), -losses

    return loss


def tunix(hidden: Array, weight: Array, labels: Array, weights: Array, *_: Array) -> tuple[Array, None]:
    """The mean that tunix's trainer minimizes, times the number of tokens that count."""
    from flax import nnx
    from tunix.models.qwen2.model import Embedder  # type: ignore[import-not-found]  # nothing here depends on it
    from tunix.sft.peft_trainer import _default_loss_fn  # type: ignore[import-not-found]

    vocabulary, features = weight.shape
    dtypes = {"dtype": weight.dtype, "param_dtype": weight.dtype}
    embedder = nnx.eval_shape(lambda: Embedder(vocabulary, features, rngs=nnx.Rngs(0), **dtypes))
    graphdef, state = nnx.split(embedder)
    head = nnx.merge(graphdef, jax.tree.map(lambda _: weight, state))
    tokens = jnp.pad(labels, (1, 0))[None]  # the loss compares each row with the next token
    mask, rows = jnp.pad(weights, (1, 0))[None], jnp.pad(hidden, ((0, 1), (0, 0)))[None]
    mean = _default_loss_fn(lambda *_: (head.decode(rows), None), tokens, mask, None, None)
    return (mean * jnp.sum(weights)).astype(jnp.float32), None


# --- calls


def value_and_gradients(loss: Loss) -> Call:
    def call(*arrays: Array) -> tuple[Any, ...]:
        values, gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(*arrays)
        return *values, *gradients

    return call


def gradients_of_master(**options: Any) -> Call:
    """The weight is the copy of a float32 master. The head doesn't read the master; its gradient is float32."""

    def call(hidden: Array, weight: Array, *per_token: Array) -> tuple[Any, ...]:
        loss = lambda hidden, master: fused(weight_copy=weight, **options)(hidden, master, *per_token)  # noqa: E731
        values, gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, weight.astype(jnp.float32))
        return *values, *gradients

    return call


def value_only(loss: Loss) -> Call:
    return loss


def tokamax(implementation: str | None) -> Call:
    def call(hidden: Array, weight: Array, labels: Array, weights: Array, *_: Array) -> tuple[Any, ...]:
        import tokamax  # type: ignore[import-not-found]  # nothing here depends on it

        def loss(hidden: Array, weight: Array) -> Array:
            return tokamax.linear_softmax_cross_entropy_loss(hidden, labels, weight, implementation=implementation)

        # The mask is applied outside of the differentiated function: gradients come back in a dtype of tokamax's
        # choice.
        live = weights[:, None].astype(hidden.dtype)
        total, (dh, dw) = jax.value_and_grad(loss, (0, 1))(hidden * live, weight)
        value = total - jnp.sum(weights == 0) * math.log(weight.shape[1])
        return value, None, live * dh.astype(hidden.dtype), dw.astype(weight.dtype)

    return call
