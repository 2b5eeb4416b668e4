"""The likeliest tokens against NumPy with full logits of whole numbers, which tie often.

88 rows and 301 columns make six blocks and three tiles. The columns divide evenly over no mesh.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import BF16, F32, XLA
from jax.sharding import AxisType

from lm_head import HeadSharding, likeliest_tokens

RNG = np.random.default_rng(0)
HIDDEN, WEIGHT, LIVE = RNG.integers(-2, 3, (88, 16)), RNG.integers(-2, 3, (301, 16)), RNG.random(88) < 0.8


@pytest.mark.parametrize(
    ("devices", "dtype", "vocabulary"),
    [(None, BF16, 140), ((1, 1, 3), F32, None), ((2, 2, 2), F32, 100)],
    ids=str,
)
def test_they_are_those_of_full_logits_ties_by_the_lower_id(devices, dtype, vocabulary):
    sharding = None
    if devices is not None:
        mesh = jax.make_mesh(devices, ("dp", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3)
        sharding = HeadSharding(mesh, ("dp", "fsdp"), "tp", "fsdp")
    sick = jnp.where(LIVE[:, None], jnp.asarray(HIDDEN, dtype), jnp.nan).reshape(4, 22, 16)
    options = {"where": LIVE.reshape(4, 22), "vocabulary": vocabulary, "sharding": sharding}
    with XLA.strictly():
        ids = jax.jit(lambda h, w: likeliest_tokens(h, w, **options))(sick, jnp.asarray(WEIGHT, dtype))
    logits = (HIDDEN @ WEIGHT.T)[:, :vocabulary]
    np.testing.assert_array_equal(ids.reshape(88), np.where(LIVE, logits.argmax(axis=1), 0))
