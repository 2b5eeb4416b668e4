"""The cross-entropy of a head, fused and as one would write it without: what the benchmarks compare."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from kernels.lm_head import token_loss

CHUNK = 256

Loss = Callable[[Float[Array, "N D"], Float[Array, "V D"], Int[Array, "N"], Float[Array, "N"]], Float[Array, ""]]


def full_logits(hidden: Array, weight: Array, labels: Array, weights: Array) -> Array:
    logits = jnp.matmul(hidden, weight.T, preferred_element_type=jnp.float32)
    label = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.sum(weights * (jax.nn.logsumexp(logits, axis=1) - label))


def optax_on_logits(hidden: Array, weight: Array, labels: Array, weights: Array) -> Array:
    logits = jnp.matmul(hidden, weight.T, preferred_element_type=jnp.float32)
    return jnp.sum(weights * optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def chunked(size: int = CHUNK) -> Loss:
    """Full logits of `size` tokens at a time, computed again for the gradients.

    Raises:
        ValueError: more tokens than that, and not a multiple.
    """

    def loss(hidden: Array, weight: Array, labels: Array, weights: Array) -> Array:
        if len(hidden) > size and len(hidden) % size:
            raise ValueError(f"{len(hidden)} tokens are no multiple of {size}")

        @jax.checkpoint
        def step(total: Array, rows: tuple[Array, ...]) -> tuple[Array, None]:
            return total + full_logits(rows[0], weight, *rows[1:]), None

        rows = (x.reshape(-1, min(size, len(hidden)), *x.shape[1:]) for x in (hidden, labels, weights))
        return jax.lax.scan(step, jnp.float32(0), tuple(rows))[0]

    return loss


def fused(**options: Any) -> Loss:
    def loss(hidden: Array, weight: Array, labels: Array, weights: Array) -> Array:
        return token_loss(hidden, weight, labels, negative_logprob, weights=weights, **options)[0]

    return loss


def negative_logprob(logprob: Array, entropy: Array) -> Array:
    return -logprob
