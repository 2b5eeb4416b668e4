"""What every implementation of the head takes and returns, and the one definition of the loss that they share."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer, Shaped

Objective = Callable[..., jax.Array]
"""(logprob, entropy, *operands) -> the loss of one token, all scalars; differentiable in the floating ones."""


class Inputs(NamedTuple):
    """What the statistics are made of; `live` are the rows that count."""

    hidden: Float[Array, "N D"]
    weight: Float[Array, "V D"]
    labels: Integer[Array, "N"]
    live: Bool[Array, "N"]
    temperature: Float[Array, ""]


class TokenLogprobs(NamedTuple):
    """Of each token's distribution `p = softmax(z)` over the vocabulary; float32, nats; 0 at rows that don't count."""

    logprob: Float[Array, "*N"]
    """`log p[label]`."""
    lse: Float[Array, "*N"]
    """`log sum exp z`, the normaliser."""
    entropy: Float[Array, "*N"]
    """`-sum p log p`."""


class Terms(NamedTuple):
    """What a loss is made of beside the tokens' statistics."""

    weights: Float[Array, "N"]
    operands: tuple[Shaped[Array, "N"], ...]
    shared: tuple[Array, ...] = ()
    """More arguments of the objective, the same for every row."""


def weighted_sum(
    objective: Objective,
    live: Bool[Array, "N"],
    logprob: Float[Array, "N"],
    entropy: Float[Array, "N"],
    terms: Terms,
) -> Float[Array, ""]:
    """`sum_i weights_i * objective(logprob_i, entropy_i, *operands_i)` over the rows that count.

    An objective may be infinite or NaN at a row that doesn't count (its operands are anybody's guess): neither the
    sum nor a gradient sees it. That takes a `where` before the objective as well as after it.
    """

    def guard(x: jax.Array) -> jax.Array:
        return jnp.where(live, x, jax.lax.stop_gradient(x))

    def of_token(*scalars: jax.Array) -> jax.Array:
        return objective(*scalars, *terms.shared)

    values = jax.vmap(of_token)(guard(logprob), guard(entropy), *map(guard, terms.operands))
    return jnp.sum(jnp.where(live, guard(terms.weights) * values.astype(jnp.float32), 0))
