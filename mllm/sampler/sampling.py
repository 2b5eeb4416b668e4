"""Sampling of the next token: temperature, top-k, top-p, min-p, and a random key for every token of every sequence.

The noise of a token is a function of (seed, step, sequence, position) alone. Gumbel-max, argmax(logits + noise):
Maddison et al. 2014, A* sampling, section 2. top-k: Fan et al. 2018, Hierarchical neural story generation, section 5.3.
top-p: Holtzman et al. 2020, The curious case of neural text degeneration, section 3.1. min-p: Nguyen et al. 2024,
arXiv:2407.01082. Each as in transformers.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Key, UInt32

from mllm.config.rollout import RolloutConfig
from mllm.errors import StepError


class Draw(NamedTuple):
    """A token for each row, or for each row and decode step; float32 log-probabilities in nats."""

    tokens: Int[Any, "B *C"]
    logprobs: Float[Any, "B *C"]
    """Under the distribution over the whole vocabulary, before top-k, top-p and min-p; NaN where logits are NaN."""
    kept: Float[Any, "B *C"] | None
    """The probability mass that top-k, top-p and min-p keep; None if all three are off."""
    norms: Float[Any, "B *C"]
    """The squared norm of the log-probability's gradient by the logits, 1 - 2 p + sum_v p_v^2: 0 where p is 1."""


def sequence_keys(
    seed: Int[jax.Array, ""] | int, step: Int[jax.Array, ""] | int, sequences: Int[jax.Array, "B"]
) -> Key[jax.Array, "B"]:
    """One random key for each sequence, from its number in the step."""
    # The generator is named because the default is a setting of the process.
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, sequences)


def draw(
    logits: Float[jax.Array, "B V"],
    keys: Key[jax.Array, "B"],
    positions: Int[jax.Array, "B"],
    likeliest: Bool[jax.Array, ""],
    options: RolloutConfig,
) -> Draw:
    """The next token of each row: `greedy` or `sample`, by the flag `likeliest`.

    One program has both branches, so evaluation reuses the programs that training has compiled. A GPU computes both
    branches, because its host would wait for the choice at every token.
    """
    run: tuple[Callable[[jax.Array], Draw], ...] = (
        lambda logits: greedy(logits, options),
        lambda logits: sample(logits, keys, positions, options),
    )
    return jax.lax.platform_dependent(
        logits,
        cuda=lambda logits: jax.tree.map(partial(jnp.where, likeliest), *(one(logits) for one in run)),
        default=lambda logits: jax.lax.cond(likeliest, *run, logits),
    )


def sample(
    logits: Float[jax.Array, "B V"], keys: Key[jax.Array, "B"], positions: Int[jax.Array, "B"], options: RolloutConfig
) -> Draw:
    """One token for each row; `positions` are the places in completions.

    The temperature divides the logits. Then `top_k` keeps the k likeliest tokens; 0 keeps every token. Then `top_p`
    keeps the fewest likeliest tokens with this probability together; 1 keeps every token. Then `min_p` keeps tokens
    with at least this share of the largest probability.
    """
    logits = logits / options.temperature
    kept = exclude(logits, options.top_k, options.top_p)
    if options.min_p is not None:
        kept = jnp.where(kept < kept.max(-1, keepdims=True) + math.log(options.min_p), -jnp.inf, kept)
    keys = jax.vmap(jax.random.fold_in)(keys, positions)
    bits = jax.vmap(lambda key: jax.random.bits(key, kept.shape[1:], jnp.uint32))(keys)
    token = jnp.argmax(kept + gumbel_noise(bits), axis=-1)
    chosen = jnp.take_along_axis(kept, token[:, None], axis=-1)[:, 0]
    mass = jax.nn.logsumexp(kept, axis=-1)
    total = jax.nn.logsumexp(logits, axis=-1) if options.truncates else mass
    collision = jnp.sum(jnp.exp(2 * (logits - total[:, None])), axis=-1)
    norms = jnp.maximum(1 - 2 * jnp.exp(chosen - total) + collision, 0.0)  # rounding
    return Draw(token.astype(jnp.int32), chosen - total, jnp.exp(mass - total) if options.truncates else None, norms)


def check_logprobs(logprobs: Float[np.ndarray, "..."]) -> None:
    """Raise StepError where a log-probability is NaN, since argmax takes token 0 where all logits are NaN."""
    if np.isnan(logprobs).any():
        raise StepError("rollout: the model's logits are no numbers: parameters have diverged, or overflow model.dtype")


def gumbel_noise(bits: UInt32[jax.Array, "*V"]) -> Float32[jax.Array, "*V"]:
    """-log(-log(u)) with u = (bits + 1/2) / 2^32, up to 22.9.

    `jax.random.gumbel` takes u from 23 of the 32 bits, and its noise ends at 16. It draws a token of probability p with
    probability p exp(-2^-23 / p) only. Here 1 - u is computed, which keeps all bits where noise is large.
    """
    beyond = (jnp.invert(bits).astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(beyond, 1 - 2.0**-24)))


def greedy(logits: Float[jax.Array, "B V"], options: RolloutConfig) -> Draw:
    """The likeliest token of each row; its log-probability is 0, since no other could have been drawn.

    The log-probability is NaN if the logits have a NaN: argmax takes the first NaN.
    """
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    largest = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    zeros = jnp.zeros(tokens.shape)
    logprobs = jnp.where(jnp.isfinite(largest), zeros, jnp.nan)
    return Draw(tokens, logprobs, zeros + 1 if options.truncates else None, zeros)


def exclude(logits: Float[jax.Array, "B V"], top_k: int, top_p: float) -> Float[jax.Array, "B V"]:
    """The logits, -inf where top-k or top-p excludes the token.

    The token that reaches `top_p` is kept, as in transformers; so are tokens as likely as the last one kept.
    """
    if not 0 < top_k < logits.shape[-1]:
        return logits if top_p == 1 else jnp.where(kept_by_top_p(logits, top_p), logits, -jnp.inf)
    likeliest = jax.lax.top_k(logits, top_k)[0]
    if top_p < 1:
        probability = jax.nn.softmax(likeliest, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        likeliest = jnp.where(before < top_p, likeliest, jnp.inf)
    return jnp.where(logits >= likeliest.min(-1, keepdims=True), logits, -jnp.inf)


def kept_by_top_p(z_NV: Float[jax.Array, "N V"], top_p: float) -> Bool[jax.Array, "N V"]:
    """Which logits top-p keeps: a logit is kept if all larger logits have less than `top_p` of the probability in sum.

    The search takes 30 sums over the logits. Logits that differ by less than 1e-7 may count as equal.
    """

    def mass(kept_NV: jax.Array | bool) -> Float[jax.Array, "N 1"]:
        return jnp.sum(jnp.where(kept_NV, jnp.exp(z_NV - top_N1), 0), axis=1, keepdims=True)

    def halve(_: jax.Array, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_N1, high_N1 = ends  # the least logit that is kept is above `low_N1`, and at most `high_N1`
        middle_N1 = low_N1 + (high_N1 - low_N1) / 2
        is_kept_N1 = mass(z_NV > middle_N1) < wanted_N1
        return jnp.where(is_kept_N1, low_N1, middle_N1), jnp.where(is_kept_N1, middle_N1, high_N1)

    top_N1 = z_NV.max(axis=1, keepdims=True)
    wanted_N1 = top_p * mass(True)
    # All tokens below this depth have less than 1 - top_p together. Near 1e9, logits are further apart than that.
    depth = 1 + math.log(z_NV.shape[1] / (1 - top_p))
    low_N1 = jnp.minimum(top_N1 - depth, jnp.nextafter(top_N1, -jnp.inf))
    return z_NV > jax.lax.fori_loop(0, 30, halve, (low_N1, top_N1))[0]
