"""Packs sequences of all lengths into the rows of a batch, and spreads the rows over micro-batches and devices.

First-fit decreasing (Johnson 1973, Near-optimal bin packing algorithms) takes at most 11/9 of the fewest rows and one
more. Every row costs the model the same, whatever is in it; the head's work follows the tokens that are learned.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float, Int, Num

from mllm.config.schema import Rows
from mllm.data.batch import Batch, Trajectory


def pack(
    trajectories: Sequence[Trajectory],
    weights: Float[np.ndarray, "B"],
    advantages: Float[np.ndarray, "B"],
    rows: Rows,
) -> Batch:
    """The batch of these trajectories, [rows.total, rows.length]; the rows that hold none are zeros.

    Every sampled token has its trajectory's weight and advantage. The last token of a trajectory is only ever a label,
    and takes no place.
    """
    lengths = np.array([len(trajectory.tokens) - 1 for trajectory in trajectories], int)
    learned = np.array([len(trajectory.logprobs) for trajectory in trajectories], int)
    row = first_fit_decreasing(lengths, rows.length)
    places = spread_rows(np.bincount(row, learned), rows)[row]
    shape = (rows.total, rows.length)
    tokens, positions, segments, labels = np.zeros((4, *shape), np.int32)
    token_weights, token_advantages, logprobs = np.zeros((3, *shape), np.float32)
    for place, length, trajectory, weight, advantage in zip(
        places, lengths, trajectories, weights, advantages, strict=True
    ):
        start = np.count_nonzero(segments[place])
        whole = place, slice(start, start + length)
        tokens[whole] = trajectory.tokens[:-1]
        positions[whole] = np.arange(length)
        segments[whole] = segments[place].max() + 1
        predicts = place, start + np.flatnonzero(trajectory.sampled) - 1
        labels[predicts] = trajectory.tokens[trajectory.sampled]
        token_weights[predicts] = weight
        token_advantages[predicts] = advantage
        logprobs[predicts] = trajectory.logprobs
    return Batch(tokens, positions, segments, labels, token_weights, token_advantages, logprobs)


def first_fit(lengths: Iterable[int], row_length: int, rows: int) -> list[int]:
    """The row of each sequence: the first one with room. The result ends before a sequence that fits in none."""
    room, chosen = np.full(rows, row_length), []
    for length in lengths:
        fits = room >= length
        row = int(fits.argmax())
        if not fits[row]:
            break
        room[row] -= length
        chosen.append(row)
    return chosen


def first_fit_decreasing(lengths: Int[np.ndarray, "B"], row_length: int) -> Int[np.ndarray, "B"]:
    """The row of each sequence, the longest chosen first. Rows are numbered as they are opened."""
    order = np.argsort(-lengths, kind="stable")
    row = np.zeros(lengths.shape, int)
    row[order] = first_fit(lengths[order].tolist(), row_length, len(lengths))
    return row


def spread_rows(work: Num[np.ndarray, "R"], rows: Rows) -> Int[np.ndarray, "R"]:
    """The place of each packed row in a batch that the train step splits into micro-batches over the devices.

    The rows fill the first micro-batches, as few as can hold them. Within these, the numbers of rows of two devices
    differ by at most one, and their work differs by at most the work of one row: the rows go to the devices in the
    order of their work, the largest first, forth and back.
    """
    shares = max(1, -(-len(work) // rows.micro)) * rows.shards
    turn, share = np.divmod(np.arange(len(work)), shares)
    share = np.where(turn % 2, shares - 1 - share, share)
    micro, shard = np.divmod(share, rows.shards)
    # `loop` in mllm/train/step.py takes a micro-batch's rows at equal distances, some from each device's block.
    places = (shard * (rows.micro // rows.shards) + turn) * (rows.total // rows.micro) + micro
    return places[np.argsort(np.argsort(-work, kind="stable"))]
