"""The inputs of GRPO's losses for each token of a batch, and how completions become a batch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from mllm.config.run import BatchShape
from mllm.data.batch import Batch, Floats, Trajectory
from mllm.data.packing import add_sequence, empty_batch, first_fit_decreasing, spread_rows


class PolicyInputs(NamedTuple):
    """`Batch.inputs` of GRPO and its kin: float32 [B, T]; an array that the settings don't need is None."""

    advantages: Floats
    sampler_logprobs: Floats | None = None
    """The sampler's log-probabilities, with the temperature and before top-k, top-p and min-p, in nats."""
    old_logprobs: Floats | None = None
    """Log-probabilities under the parameters before this rollout's first update; None: they haven't changed since."""
    is_current: Floats | None = None
    """1 where the parameters before the first update are the current ones, whatever `old_logprobs` has, else 0; None:
    0 everywhere."""
    reference_logprobs: Floats | None = None
    """Log-probabilities under the reference policy."""
    sequence_weights: Floats | None = None
    """The importance weight of the token's whole completion, which the update computes; a batch has none."""


def pack(
    trajectories: Sequence[Trajectory],
    weights: Float[np.ndarray, "B"],
    advantages: Sequence[Float[Any, "..."]],
    shape: BatchShape,
) -> Batch:
    """The batch of these trajectories, [shape.total, shape.length]; the rows that hold none are zeros.

    Every sampled token has its trajectory's weight, and its trajectory's advantage or one of its own. The last token of
    a trajectory is only ever a label, and fills no position of a row.
    """
    lengths = np.array([len(trajectory.tokens) - 1 for trajectory in trajectories], int)
    learned = np.array([len(trajectory.logprobs) for trajectory in trajectories], int)
    packed_rows = first_fit_decreasing(lengths, shape.length)
    row_numbers = spread_rows(np.bincount(packed_rows, learned), shape)[packed_rows]
    batch = empty_batch((shape.total, shape.length))
    token_advantages, logprobs = np.zeros((2, shape.total, shape.length), np.float32)
    for row, trajectory, weight, advantage in zip(
        row_numbers.tolist(), trajectories, weights.tolist(), advantages, strict=True
    ):
        predicts = add_sequence(batch, row, trajectory.tokens, trajectory.sampled, weight, len(trajectory.tokens) - 1)
        token_advantages[predicts] = advantage
        logprobs[predicts] = trajectory.logprobs
    return batch._replace(inputs=PolicyInputs(token_advantages, logprobs))
