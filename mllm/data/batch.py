"""What flows from a source of data into the train step: one record, one row a sequence.

Position t of a row predicts `labels[t]`, the token at t + 1; whatever is known of that token (its weight in the
loss, its advantage, its log-probability under another policy) stands at t too.
"""

from typing import Any, NamedTuple

from jaxtyping import Float, Int

# Any: numpy's arrays from a source, JAX's within the step.
Ints = Int[Any, "B T"]
Floats = Float[Any, "B T"]


class Batch(NamedTuple):
    """The last four are None under SFT, or where nothing needs them."""

    tokens: Ints
    positions: Ints
    """Rotary position within the token's own document."""
    segments: Ints
    """Which document of the row a token belongs to, from 1; 0 is padding. Tokens attend within their segment only."""
    labels: Ints
    """The next token; 0 where `weights` is 0."""
    weights: Floats
    """Each token's share of the loss, already divided by the whole batch's denominator; 0 for prompts and padding.
    The loss of a step is a plain sum over tokens, however the rows are split into micro-batches or over devices."""
    advantages: Floats | None = None
    sampler_logprobs: Floats | None = None
    """Under the distribution that the token was sampled from (temperature, top-k and top-p applied), nats."""
    old_logprobs: Floats | None = None
    """Under the trainer's parameters before this rollout's first update; None: they are the current ones."""
    reference_logprobs: Floats | None = None


def padded_length(length: int, longest: int) -> int:
    """The length that rows of `length` tokens are padded to: few different ones, so that little is compiled.

    A power of two, or the one between two of them: at most a third is padding beyond 16. Never more than `longest`.
    """
    power = 16
    while power < length:
        power *= 2
    return min(power * 3 // 4 if power > 16 and length <= power * 3 // 4 else power, longest)
