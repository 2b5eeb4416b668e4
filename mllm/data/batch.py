"""Training data: sampled trajectories, and the batch of an update.

Position t of a row predicts `labels[t]`, the token at t + 1. `weights` and `inputs` at t belong to that label.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Int32

# Any: numpy's arrays from a source, JAX's within the step.
Ints = Int[Any, "B T"]
Floats = Float[Any, "B T"]
SIZES = sorted(size * 2**power for power in range(26) for size in (16, 24))
"""Lengths that rows and prompts are padded to. Few lengths mean few compiled programs. Each length is at least two
thirds of the next length, so at most a third is padding."""


class Trajectory(NamedTuple):
    """Token ids of a prompt and its completion, with log-probabilities and rewards."""

    tokens: Int32[np.ndarray, " T"]
    sampled: Bool[np.ndarray, " T"]
    """Which tokens were sampled; only sampled tokens count. The first token is never sampled."""
    logprobs: Float32[np.ndarray, " sampled"]
    """The sampler's log-probabilities, in nats: under the distribution before top-k, top-p and min-p."""
    kept: Float32[np.ndarray, " sampled"] | None = None
    """The probability mass that top-k, top-p and min-p kept at each sampled token; None if all three are off."""
    norms: Float32[np.ndarray, " sampled"] = np.empty(0, np.float32)
    """Each sampled token's squared gradient norm, of its log-probability with respect to the logits, for `baseline:
    token`."""
    finished: bool = True
    """Whether a stop token ended the completion; False if it was cut off."""
    prompt: str = ""
    """The text of the prompt's last message."""
    text: str = ""
    """The text of the completion, or of its last turn."""
    thinks: bool = False
    """Whether a thought was open before `text`."""
    rewards: Sequence[tuple[Any, ...]] = ()
    """The answer of each reward function, as in `mllm.rewards.scores.Answer`."""
    turns: Sequence[dict[str, Any]] = ()
    """The messages after the prompt, for samples.jsonl: `role` and `content`, and from an environment `reward` and
    `tool_errors`; empty with a single turn."""


class Batch(NamedTuple):
    """The rows of an update."""

    tokens: Ints
    positions: Ints
    """Rotary position within the token's own document."""
    segments: Ints
    """The index of the token's document in its row, from 1; 0 is padding. Tokens attend within their segment only."""
    labels: Ints
    """The next token; 0 where `weights` is 0."""
    weights: Floats
    """The label's weight in the loss, divided by the whole batch's denominator; 0 for prompts and padding. The loss of
    a step is a plain sum over tokens, for any split of the rows into micro-batches or over devices."""
    inputs: Any = None
    """Further inputs of the algorithm's loss: a NamedTuple of arrays [B, ...], or None."""


def bucket(count: int, sizes: Sequence[int] = SIZES) -> int:
    """The smallest of the ascending sizes that is at least `count`."""
    return next(size for size in sizes if size >= count)
