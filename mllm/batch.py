"""What flows from a source of data into the train step: one record, one row a sequence.

Position t of a row predicts `labels[t]`, the token at t + 1; whatever is known of that token (its weight in the
loss, its advantage, its log-probability under another policy) stands at t too.
"""

from typing import NamedTuple

import jax
from jaxtyping import Float, Int


class Batch(NamedTuple):
    """The fields hold numpy or JAX arrays; the last four are None under SFT, or where nothing needs them."""

    tokens: Int[jax.Array, "B T"]
    positions: Int[jax.Array, "B T"]
    """Rotary position within the token's own document."""
    segments: Int[jax.Array, "B T"]
    """Which document of the row a token belongs to, from 1; 0 is padding. Tokens attend within their segment only."""
    labels: Int[jax.Array, "B T"]
    """The next token; 0 where `weights` is 0."""
    weights: Float[jax.Array, "B T"]
    """Each token's share of the loss, already divided by the whole batch's denominator; 0 for prompts and padding.
    The loss of a step is a plain sum over tokens, however the rows are split into micro-batches or over devices."""
    advantages: Float[jax.Array, "B T"] | None = None
    sampler_logprobs: Float[jax.Array, "B T"] | None = None
    """Under the distribution that the token was sampled from (temperature, top-k and top-p applied), nats."""
    old_logprobs: Float[jax.Array, "B T"] | None = None
    """Under the trainer's parameters before this rollout's first update; None: they are the current ones."""
    reference_logprobs: Float[jax.Array, "B T"] | None = None
