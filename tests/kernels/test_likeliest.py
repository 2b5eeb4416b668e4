"""Token accuracy's maximum: a float64 oracle, ties, tails, rows that don't count, shards of the vocabulary, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import XLA
from jax.sharding import AxisType, Mesh

from kernels.lm_head import HeadSharding, label_is_likeliest

RNG = np.random.default_rng(0)
N, D, V = 80, 16, 301


@pytest.fixture
def small_tiles():
    with XLA.strictly():
        yield


def problem(dtype=np.float32):
    """Hidden states, weight, labels and rows that count. Whole numbers tie often, and every dtype sums them exactly."""
    hidden, weight = (RNG.integers(-2, 3, shape).astype(dtype) for shape in ((N, D), (V, D)))
    where = RNG.random(N) < 0.7
    logits = hidden.astype(np.float64) @ weight.astype(np.float64).T
    wanted = np.array([RNG.choice(np.flatnonzero(row == row.max())) for row in logits])  # any of those that tie
    labels = np.where(RNG.random(N) < 0.5, wanted, RNG.integers(0, V, N))
    correct = where & (logits[np.arange(N), labels] == logits.max(1))
    labels[~where], hidden[~where] = -100, np.nan
    return (*map(jnp.asarray, (hidden, weight, labels)), jnp.asarray(where)), correct


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_it_is_the_oracles_answer_with_ties_and_tails(small_tiles, dtype):
    (hidden, weight, labels, where), expected = problem(dtype)
    np.testing.assert_array_equal(label_is_likeliest(hidden, weight, labels, where=where), expected)
    in_rows = [x.reshape(4, 20, *x.shape[1:]) for x in (hidden, labels, where)]
    folded = label_is_likeliest(in_rows[0], weight, in_rows[1], where=in_rows[2])
    np.testing.assert_array_equal(folded, expected.reshape(4, 20))


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 1, 3)])
def test_a_vocabulary_in_shards_gives_the_same(small_tiles, shape):
    """301 rows divide evenly over neither."""
    mesh = Mesh(
        np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("dp", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3
    )
    (hidden, weight, labels, where), expected = problem()
    layout = HeadSharding(mesh, ("dp", "fsdp"), "tp", "fsdp")
    answer = jax.jit(lambda *args: label_is_likeliest(*args[:3], where=args[3], sharding=layout))
    np.testing.assert_array_equal(answer(hidden, weight, labels, where), expected)


def test_no_array_of_all_logits_exists_and_no_sum_of_exponentials_is_made():
    hidden, weight = (jax.ShapeDtypeStruct((n, D), "float32") for n in (4096, 40_000))
    answer = jax.jit(lambda h, w, y: label_is_likeliest(h, w, y, where=y >= 0))
    compiled = answer.lower(hidden, weight, jax.ShapeDtypeStruct((4096,), "int32")).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 4096 * 40_000 / 20
    assert " exponential(" not in compiled.as_text()
