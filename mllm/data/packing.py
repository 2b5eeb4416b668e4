"""Packs prompts and completions of all lengths into the rows of an update, and deals the rows to devices.

First-fit decreasing (Johnson 1973, Near-optimal bin packing algorithms) takes at most 11/9 of the fewest rows and one
more. Every row costs the model the same, whatever is in it; the head's work follows the tokens that are learned.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int, Int32, Num

from mllm.config.schema import Rows
from mllm.data.batch import Batch


class Sequence(NamedTuple):
    """A prompt with its completion, and what the completion's tokens have in common."""

    tokens: Int32[np.ndarray, " tokens"]
    logprobs: Float32[np.ndarray, " completion"]
    """The sampler's, of the completion's tokens."""
    weight: float
    advantage: float


def pack(sequences: list[Sequence], rows: Rows) -> Batch:
    """The batch of these sequences, [rows.total, rows.length]; the rows that hold none are zeros.

    The last token of a sequence is only ever a label, and takes no place.
    """
    lengths = np.array([len(sequence.tokens) - 1 for sequence in sequences], int)
    learned = np.array([len(sequence.logprobs) for sequence in sequences], int)
    row = first_fit_decreasing(lengths, rows.length)
    places = deal(np.bincount(row, learned), rows)[row]
    shape = (rows.total, rows.length)
    tokens, positions, segments, labels = (np.zeros(shape, np.int32) for _ in range(4))
    weights, advantages, logprobs = (np.zeros(shape, np.float32) for _ in range(3))
    for place, length, sequence in zip(places, lengths, sequences, strict=True):
        start = np.count_nonzero(segments[place])
        whole = place, slice(start, start + length)
        tokens[whole] = sequence.tokens[:-1]
        positions[whole] = np.arange(length)
        segments[whole] = segments[place].max() + 1
        predicts = place, slice(start + length - len(sequence.logprobs), start + length)
        labels[predicts] = sequence.tokens[len(sequence.tokens) - len(sequence.logprobs) :]
        weights[predicts] = sequence.weight
        advantages[predicts] = sequence.advantage
        logprobs[predicts] = sequence.logprobs
    return Batch(tokens, positions, segments, labels, weights, advantages, logprobs)


def first_fit_decreasing(lengths: Int[np.ndarray, "B"], row_length: int) -> Int[np.ndarray, "B"]:
    """The row of each sequence: longest first, into the first row with room. Rows are numbered as they are opened."""
    row, room = np.zeros(lengths.shape, int), np.full(lengths.shape, row_length)
    for sequence in np.argsort(-lengths, kind="stable"):
        row[sequence] = np.argmax(room >= lengths[sequence])
        room[row[sequence]] -= lengths[sequence]
    return row


def deal(work: Num[np.ndarray, "R"], rows: Rows) -> Int[np.ndarray, "R"]:
    """The place of each packed row in a batch that the train step splits into micro-batches over the devices.

    As few micro-batches as can hold the rows come first; in these, two devices' shares differ in rows by at most one,
    and in work by at most the largest row's: the rows are dealt by falling work, there and back.
    """
    shares = max(1, -(-len(work) // rows.micro)) * rows.shards
    turn, share = np.divmod(np.arange(len(work)), shares)
    share = np.where(turn % 2, shares - 1 - share, share)
    micro, shard = np.divmod(share, rows.shards)
    # `loop` in mllm/train/step.py takes a micro-batch's rows at equal distances, some from each device's block.
    places = (shard * (rows.micro // rows.shards) + turn) * (rows.total // rows.micro) + micro
    return places[np.argsort(np.argsort(-work, kind="stable"))]
