"""Token accuracy's maximum: a float64 oracle, ties, tails, rows that don't count, shards of the vocabulary, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import BF16, F32, XLA
from jax.sharding import AxisType

from kernels.lm_head import HeadSharding, label_is_likeliest

RNG = np.random.default_rng(0)
N, D, V = 80, 16, 301


@pytest.mark.parametrize(
    ("dtype", "devices"), [(F32, (1, 1, 1)), (BF16, (1, 1, 1)), (F32, (2, 2, 2)), (F32, (1, 1, 3))]
)
def test_it_is_the_oracle_s_answer_with_ties_tails_and_a_vocabulary_in_shards(dtype, devices):
    """Whole numbers tie often, and every dtype sums them exactly. 301 rows of the weight divide evenly over no mesh."""
    hidden, weight = (RNG.integers(-2, 3, shape).astype(dtype) for shape in ((N, D), (V, D)))
    where = RNG.random(N) < 0.7
    logits = hidden.astype(np.float64) @ weight.astype(np.float64).T
    wanted = np.array([RNG.choice(np.flatnonzero(row == row.max())) for row in logits])  # any of those that tie
    labels = np.where(RNG.random(N) < 0.5, wanted, RNG.integers(0, V, N))
    correct = where & (logits[np.arange(N), labels] == logits.max(1))
    labels[~where], hidden[~where] = -100, np.nan
    in_rows = [jnp.asarray(x.reshape(4, 20, *x.shape[1:])) for x in (hidden, labels, where)]
    mesh = jax.make_mesh(devices, ("dp", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3)
    layout = HeadSharding(mesh, ("dp", "fsdp"), "tp", "fsdp") if mesh.size > 1 else None
    answer = jax.jit(lambda h, w, y, live: label_is_likeliest(h, w, y, where=live, sharding=layout))
    with XLA.strictly():
        got = answer(in_rows[0], jnp.asarray(weight), *in_rows[1:])
    np.testing.assert_array_equal(got, correct.reshape(4, 20))


def test_no_array_of_all_logits_exists_and_no_sum_of_exponentials_is_made():
    hidden, weight = (jax.ShapeDtypeStruct((n, D), "float32") for n in (4096, 40_000))
    answer = jax.jit(lambda h, w, y: label_is_likeliest(h, w, y, where=y >= 0))
    compiled = answer.lower(hidden, weight, jax.ShapeDtypeStruct((4096,), "int32")).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 4096 * 40_000 / 20
    assert " exponential(" not in compiled.as_text()
