"""The dithered cast from float32 to bfloat16, against NumPy: 16 bits that belong to a weight are added, 16 cut off.

Nothing here says how the bits are made: they are found by bisection, from the copies alone.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from mllm.model.compute_copy import Rounding, compute_copy

SHAPE = (192, 256)
DITHERED, NEAREST = (Rounding(jnp.dtype("bfloat16"), dithered) for dithered in (True, False))
RNG = np.random.default_rng(0)


def copied(values, name="embed", rounding=DITHERED, **options):
    """The compute copy in bfloat16, as float32."""
    found = compute_copy(jnp.asarray(values, jnp.float32), rounding, name, **options)
    assert found.dtype == jnp.bfloat16
    return np.asarray(found).astype(np.float32)


def bits_of(name, shape=SHAPE, **options):
    """The threshold of each weight: among the 2^16 numbers from 1 to its neighbour, how many are rounded up."""
    kept = np.zeros(shape, np.uint32)
    for bit in reversed(range(16)):
        higher = kept | np.uint32(1 << bit)
        kept = np.where(copied((higher + np.uint32(0x3F800000)).view(np.float32), name, **options) == 1, higher, kept)
    return 65535 - kept


@pytest.fixture(scope="module")
def bits():
    return bits_of("embed")


def cut(values, bits):
    return ((values.view(np.uint32) + bits) & np.uint32(0xFFFF0000)).view(np.float32)


def assert_same_bits(one, other):
    np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def test_what_bfloat16_holds_stays_as_it_is():
    """All its numbers: both zeros, subnormal ones, the largest, and infinities; NaN stays NaN."""
    every = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32).reshape(256, 256)
    found, number = copied(every), ~np.isnan(every)
    assert_same_bits(found[number], every[number])
    assert np.isnan(found[~number]).all()
    assert np.isnan(copied(np.array([[0x7FC00001, 0x7FFFFFFF, 0xFFFFFFFF]], np.uint32).view(np.float32))).all()


def test_other_numbers_become_a_neighbour_the_farther_one_where_their_last_bits_and_the_weight_s_carry(bits):
    values = (RNG.normal(size=SHAPE) * 10.0 ** RNG.integers(-36, 37, SHAPE)).astype(np.float32)
    assert_same_bits(copied(values), cut(values, bits))
    assert_same_bits(copied(-values), -cut(values, bits))
    assert ((copied(values) == cut(values, 0)) | (copied(values) == cut(values, 0xFFFF))).all()


@pytest.mark.slow
def test_thresholds_are_uniform_and_independent_over_layers_rows_columns_and_parameters(bits):
    """49,152 draws from 65,536 numbers are expected to bring up 52.8 % of these."""
    assert 0.51 < len(np.unique(bits)) / 65536 < 0.55
    np.testing.assert_allclose(np.histogram(bits, 16, (0, 65536))[0] / bits.size, 1 / 16, rtol=0.1)
    others = [bits_of(name) for name in ("head", "layers.q_weight", "layers.k_weight")]
    shifted = [np.roll(bits, by, (0, 1)) for by in ((1, 0), (0, 1), (1, 1), (1, -1), (64, 0))]
    for other in (*others, *shifted, *(bits_of("embed", layer=layer) for layer in (1, 2, 35))):
        assert abs(np.corrcoef(bits.ravel(), other.ravel())[0, 1]) < 0.03
        assert (bits == other).mean() < 0.001


@pytest.mark.nightly
def test_thresholds_are_the_same_in_every_process_version_and_shape(bits):
    """What a run was trained with, another one resumes, samples or exports."""
    assert bits[[0, 0, 1, 191], [0, 1, 0, 255]].tolist() == [36794, 12080, 62708, 48799]
    np.testing.assert_array_equal(bits_of("embed", (7, 300))[:, :256], bits[:7])


def test_rows_that_are_looked_up_are_those_of_the_matrix():
    values, tokens = RNG.normal(size=SHAPE).astype(np.float32), RNG.integers(0, SHAPE[0], (3, 50))
    assert_same_bits(copied(values[tokens], rows=jnp.asarray(tokens)[..., None]), copied(values)[tokens])
