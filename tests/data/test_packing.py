"""Sequences packed into rows: nothing is lost, no row is too long, few rows are taken, and devices have equal work."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import sequences

from mllm.algorithms.grpo.inputs import pack
from mllm.config.run import BatchShape
from mllm.data.batch import Trajectory
from mllm.data.packing import first_fit_decreasing, spread_rows


def random_trajectories(lengths, seed=0):
    """Trajectories with these numbers of tokens. Any token but the first may be sampled, and at least one token is."""
    rng = np.random.default_rng(seed)
    made = []
    for length in lengths:
        tokens = rng.integers(1, 2**31, length).astype(np.int32)
        sampled = rng.random(length) < rng.random()
        sampled[0], sampled[rng.integers(1, length)] = False, True
        made.append(Trajectory(tokens, sampled, rng.normal(size=np.count_nonzero(sampled)).astype(np.float32)))
    return made, rng.random(len(lengths)), [*rng.normal(size=len(lengths))]


@settings(max_examples=50)
@given(lengths=st.lists(st.integers(2, 21), max_size=40), micro=st.integers(1, 5), shards=st.sampled_from([1, 2, 8]))
def test_each_sequence_stands_whole_in_one_row(lengths, micro, shards):
    micro *= shards
    rows = BatchShape(length=20, micro=micro, total=-(-len(lengths) // micro) * micro or micro, shards=shards)
    given = random_trajectories(lengths)
    batch = pack(*given, rows)
    assert {field.shape for field in jax.tree.leaves(batch)} == {(rows.total, rows.length)}
    packed = sequences(batch)
    assert len(packed) == len(lengths)
    for (tokens, sampled, logprobs, *_), weight, advantage in zip(*given, strict=True):
        expected = np.where(sampled, tokens, 0)[1:]  # position t predicts token t + 1
        fields = packed[*tokens[:-1].tolist(), int(expected[-1])]
        _, positions, _, labels, weights, advantages, sampler = fields
        learned = sampled[1:]
        assert positions.tolist() == list(range(len(tokens) - 1))
        np.testing.assert_array_equal(labels, expected)
        np.testing.assert_array_equal(sampler[learned], logprobs)
        np.testing.assert_array_equal(weights, learned * np.float32(weight))
        np.testing.assert_array_equal(advantages, learned * np.float32(advantage))
    assert np.count_nonzero(batch.segments) == sum(lengths) - len(lengths)


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60), row_length=st.integers(50, 120))
def test_no_row_is_too_long_and_no_two_rows_would_fit_together(lengths, row_length):
    row = first_fit_decreasing(np.array(lengths), row_length)
    filled = np.sort(np.bincount(row, lengths))
    assert set(row) == set(range(len(filled)))
    assert filled[-1] <= row_length
    assert sum(filled[:2]) > row_length or len(filled) == 1
    # The room that the configuration makes.
    assert len(filled) <= -(-len(lengths) // (row_length // max(lengths)))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=64), st.integers(1, 4), st.sampled_from([1, 2, 4, 8]))
def test_the_devices_have_equal_shares_of_every_micro_batch(work, micro, shards):
    micro *= shards
    rows = BatchShape(1000, micro, -(-len(work) // micro) * micro, shards)
    places = spread_rows(np.array(work), rows)
    assert len({*places}) == len(work)
    batch = np.zeros(rows.total)
    batch[places] = work
    # The rows of a device and of a micro-batch, in the order of the train step.
    shares = batch.reshape(shards, micro // shards, -1).transpose(2, 0, 1)  # micro-batch, device, row
    used = -(-len(work) // micro)
    assert not shares[used:].any()
    shares = shares[:used]
    assert np.ptp(np.count_nonzero(shares, axis=-1)) <= 1
    assert np.ptp(shares.sum(axis=-1)) <= max(work)
