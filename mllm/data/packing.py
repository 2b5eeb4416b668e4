"""Packs sequences of all lengths into the rows of a batch, and spreads the rows over micro-batches and devices.

First-fit decreasing (Johnson 1973, Near-optimal bin packing algorithms) needs at most 11/9 of the smallest number of
rows, plus one. The layers' cost per row is constant; the head's cost grows with the tokens that count.
"""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool, Int, Num

from mllm.config.run import BatchShape
from mllm.data.batch import Batch


def empty_batch(shape: tuple[int, int]) -> Batch:
    """A batch of padding, for `add_sequence`."""
    tokens, positions, segments, labels = np.zeros((4, *shape), np.int32)
    return Batch(tokens, positions, segments, labels, np.zeros(shape, np.float32))


def add_sequence(
    batch: Batch,
    row: int,
    tokens: Int[np.ndarray, " T"],
    counts: Bool[np.ndarray, " T"],
    weight: float | np.floating,
    length: int,
) -> tuple[int, Int[np.ndarray, " counted"]]:
    """Append the first `length` tokens to the row. Returns the positions that predict the tokens that count.

    These positions have the weight. The first token never counts.
    """
    start = np.count_nonzero(batch.segments[row])
    span = row, slice(start, start + length)
    batch.tokens[span] = tokens[:length]
    batch.positions[span] = np.arange(length)
    batch.segments[span] = batch.segments[row].max() + 1
    predicts = row, start + np.flatnonzero(counts) - 1
    batch.labels[predicts] = tokens[counts]
    batch.weights[predicts] = weight
    return predicts


def first_fit(lengths: Iterable[int], row_length: int, rows: int) -> list[int]:
    """The row of each sequence: the first row with room. The result ends before a sequence that fits in no row."""
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
    """The row of each sequence, placed in order of decreasing length. Rows are numbered as they are opened."""
    order = np.argsort(-lengths, kind="stable")
    row = np.zeros(lengths.shape, int)
    row[order] = first_fit(lengths[order].tolist(), row_length, len(lengths))
    return row


def spread_rows(work: Num[np.ndarray, "R"], shape: BatchShape) -> Int[np.ndarray, "R"]:
    """The index of each packed row in a batch that the train step splits into micro-batches over the devices.

    The rows fill as few micro-batches as possible, from the first. Rows go to the devices in order of decreasing work,
    back and forth. Two devices thus differ by at most one row and its work.
    """
    shares = max(1, -(-len(work) // shape.micro)) * shape.shards
    turn, share = np.divmod(np.arange(len(work)), shares)
    share = np.where(turn % 2, shares - 1 - share, share)
    micro, shard = np.divmod(share, shape.shards)
    # `loop` in mllm/training/step.py takes a micro-batch's rows at equal distances, some from each device's block.
    indices = (shard * (shape.micro // shape.shards) + turn) * (shape.total // shape.micro) + micro
    return indices[np.argsort(np.argsort(-work, kind="stable"))]
