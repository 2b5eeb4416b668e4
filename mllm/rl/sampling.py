"""Sampling of the next token: temperature, top-k, top-p, min-p, and a random key for every token of every sequence.

The noise of a token is a function of (seed, step, sequence, position) alone. Gumbel-max, argmax(logits + noise):
Maddison et al. 2014, A* sampling, section 2. top-k: Fan et al. 2018, Hierarchical neural story generation, section 5.3.
top-p: Holtzman et al. 2020, The curious case of neural text degeneration, section 3.1. min-p: Nguyen et al. 2024,
arXiv:2407.01082. The penalty of repetitions: Keskar et al. 2019, arXiv:1909.05858, section 4.1. All as in transformers.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Key

from kernels.lm_head.sampling import kept_by_top_p
from mllm.config.grpo import RolloutConfig


class Draw(NamedTuple):
    """A token for each row, or for each row and decode step; float32 log-probabilities in nats."""

    tokens: Int[Any, "B *C"]
    logprobs: Float[Any, "B *C"]
    """Under the distribution over the whole vocabulary, with a penalty, before top-k, top-p and min-p."""
    kept: Float[Any, "B *C"] | None
    """The probability of all tokens that these keep, by which they divide; None with none of them."""


def sequence_keys(
    seed: Int[jax.Array, ""] | int, step: Int[jax.Array, ""] | int, sequences: Int[jax.Array, "B"]
) -> Key[jax.Array, "B"]:
    """One random key for each sequence, from its number among those of the step."""
    # The generator is named because the default one is a setting of the process.
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, sequences)


def sample(
    logits: Float[jax.Array, "B V"], keys: Key[jax.Array, "B"], positions: Int[jax.Array, "B"], options: RolloutConfig
) -> Draw:
    """One token for each row; `positions` are the places in completions.

    The temperature divides the logits. `top_k` keeps the k likeliest tokens, 0 all; among those `top_p` keeps the
    fewest likeliest that have this probability together, 1 all; among those `min_p` keeps the ones with at least this
    share of the largest probability.
    """
    logits = logits / options.temperature
    kept = exclude(logits, options.top_k, options.top_p)
    if options.min_p is not None:
        kept = jnp.where(kept < kept.max(-1, keepdims=True) + math.log(options.min_p), -jnp.inf, kept)
    keys = jax.vmap(jax.random.fold_in)(keys, positions)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, kept.shape[1:]))(keys)
    token = jnp.argmax(kept + noise, axis=-1)
    chosen = jnp.take_along_axis(kept, token[:, None], axis=-1)[:, 0]
    mass = jax.nn.logsumexp(kept, axis=-1)
    if not options.truncates:
        return Draw(token.astype(jnp.int32), chosen - mass, None)
    whole = jax.nn.logsumexp(logits, axis=-1)
    return Draw(token.astype(jnp.int32), chosen - whole, jnp.exp(mass - whole))


def greedy(logits: Float[jax.Array, "B V"], options: RolloutConfig) -> Draw:
    """The likeliest token of each row; its log-probability is 0, since no other could have been drawn."""
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return Draw(tokens, jnp.zeros(tokens.shape), jnp.ones(tokens.shape) if options.truncates else None)


def penalize(logits: Float[jax.Array, "B V"], seen: Bool[jax.Array, "B V"], penalty: float) -> Float[jax.Array, "B V"]:
    """The logits, those of tokens that were seen divided by the penalty if positive, and multiplied if negative."""
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


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
