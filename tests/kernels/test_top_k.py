"""The likeliest tokens against float64 NumPy with full logits of whole numbers, which tie often.

88 rows and 301 columns make six blocks and three tiles. The columns divide evenly over no mesh.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import BF16, F32, XLA
from jax.sharding import AxisType
from lm_head_cases import equations

from lm_head import HeadSharding, top_k_logprobs

RNG = np.random.default_rng(0)
ODD, CUBE = (1, 1, 3), (2, 2, 2)


def whole_numbers(dtype=F32, scale=1):
    hidden, weight = RNG.integers(-2, 3, (88, 16)), scale * RNG.integers(-2, 3, (301, 16))
    return jnp.asarray(hidden, dtype), jnp.asarray(weight, dtype), (hidden @ weight.T).astype(np.float64)


def log_softmax(z):
    below = z - z.max(1, keepdims=True)
    return below - np.log(np.exp(below).sum(1, keepdims=True))


def over(devices):
    if devices is None:
        return None
    mesh = jax.make_mesh(devices, ("dp", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3)
    return HeadSharding(mesh, ("dp", "fsdp"), "tp", "fsdp")


@pytest.mark.parametrize(
    ("devices", "k", "dtype", "scale"),
    [
        *((devices, 9, BF16, 1) for devices in (None, CUBE)),
        *((devices, 140, F32, 1000) for devices in (None, ODD)),
        *((devices, k, F32, 1) for k, devices in ((1, None), (1, ODD), (301, None), (301, CUBE))),
    ],
    ids=str,
)
def test_the_likeliest_tokens_are_those_of_full_logits_ties_by_the_lower_id(devices, k, dtype, scale):
    hidden, weight, logits = whole_numbers(dtype, scale)
    live, log_p = RNG.random(88) < 0.8, log_softmax(logits / 2)
    sick = jnp.where(live[:, None], hidden, jnp.nan).reshape(4, 22, 16)
    options = {"where": live.reshape(4, 22), "temperature": 2.0, "sharding": over(devices)}
    with XLA.strictly():
        values, ids = jax.jit(lambda h, w: top_k_logprobs(h, w, k, **options))(sick, weight)
    wanted = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(ids.reshape(88, k), np.where(live[:, None], wanted, 0))
    found = np.where(live[:, None], np.take_along_axis(log_p, wanted, 1), 0)
    np.testing.assert_allclose(values.reshape(88, k), found, rtol=1e-6, atol=2e-6)


def test_no_logits_are_made_and_one_product():
    hidden, weight, _ = whole_numbers()
    with XLA.strictly():
        found = list(equations(jax.make_jaxpr(lambda h, w: top_k_logprobs(h, w, 5))(hidden, weight).jaxpr))
    assert max(x.aval.size for equation in found for x in equation.outvars) <= weight.size
    assert sum(equation.primitive.name == "dot_general" for equation in found) == 1


def test_a_wrong_k_is_refused_by_name():
    hidden, weight, _ = whole_numbers()
    with pytest.raises(ValueError, match="k must be a number from 1 to the vocabulary's 301, not 302"):
        top_k_logprobs(hidden, weight, 302)
