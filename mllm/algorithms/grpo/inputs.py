"""The inputs of GRPO's losses for each token of a batch, and how completions become a batch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from mllm.config.run import BatchShape
from mllm.data.batch import Batch, Floats, Trajectory
from mllm.data.packing import add_sequence, empty_batch, first_fit_decreasing, spread_rows


class PolicyInputs(NamedTuple):
    """`Batch.inputs` of GRPO and its kin: float32 [B, T]; None for an array that the settings don't need."""

    advantages: Floats
    sampler_logprobs: Floats | None = None
    """The sampler's log-probabilities, with the temperature and before top-k, top-p and min-p, in nats."""
    old_logprobs: Floats | None = None
    """Log-probabilities under the old policy, before this rollout's first update; None: the policy hasn't changed."""
    is_current: Floats | None = None
    """1 if the old policy is the current policy, which overrides `old_logprobs`, else 0; None: 0 everywhere."""
    reference_logprobs: Floats | None = None
    """Log-probabilities under the reference policy."""
    sequence_weights: Floats | None = None
    """The importance weight of the token's completion. Computed in the update; None in a batch."""


def pack(
    trajectories: Sequence[Trajectory],
    weights: Float[np.ndarray, "B"],
    advantages: Sequence[Float[Any, "..."]],
    shape: BatchShape,
) -> Batch:
    """Pack trajectories into a batch, [shape.total, shape.length]; unused rows are zeros.

    `weights` has one number per trajectory, `advantages` one number per trajectory or per sampled token. The last token
    of a trajectory is only a label, and takes no position of a row.
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
