"""The likeliest tokens, and drawn ones, against float64 NumPy with full logits of whole numbers, which tie often.

88 rows and 301 columns make six blocks and three tiles. The columns divide evenly over no mesh.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import BF16, F32, XLA
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lm_head_cases import equations

from kernels.lm_head import HeadSharding, sample_tokens, top_k_logprobs

RNG = np.random.default_rng(0)
ODD, CUBE = (1, 1, 3), (2, 2, 2)
KEYS = jax.random.split(jax.random.key(7), 88)
NOISE = np.asarray(jax.vmap(lambda key: jax.random.gumbel(key, (301,)))(KEYS), np.float64)


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


def kept(log_p, top_k, top_p):
    """The columns that are drawn from, by definition."""
    likeliest = -np.sort(-log_p, axis=1)[:, :top_k]
    shares = np.exp(log_softmax(likeliest))
    least = np.where(np.cumsum(shares, axis=1) - shares < (top_p or 1), likeliest, np.inf).min(1, keepdims=True)
    return log_p >= least


@pytest.mark.parametrize(
    ("top_k", "top_p", "devices"),
    [
        *((None, None, devices) for devices in (None, ODD)),
        *((6, None, devices) for devices in (None, CUBE)),
        *((140, 0.7, devices) for devices in (None, ODD, "types")),
        *((None, 0.83, devices) for devices in (None, CUBE, "types")),
    ],
    ids=str,
)
def test_the_same_keys_draw_the_tokens_of_full_logits_whatever_tiles_and_devices(devices, top_k, top_p):
    hidden, weight, logits = whole_numbers()
    log_p, given = log_softmax(logits / 4), [hidden.reshape(4, 22, 16), weight, KEYS.reshape(4, 22)]
    options = {"temperature": 4.0, "top_k": top_k, "top_p": top_p}
    if devices == "types":  # of a mesh with Explicit axes
        mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
        given[:2] = (
            jax.device_put(x, NamedSharding(mesh, P(axis))) for x, axis in zip(given[:2], ("data", None), strict=True)
        )
    else:
        options["sharding"] = over(devices)
    with XLA.strictly():
        tokens, logprobs = jax.jit(lambda *x: sample_tokens(*x, **options))(*given)
    wanted = np.where(kept(log_p, top_k, top_p), log_p + NOISE, -np.inf).argmax(1)
    np.testing.assert_array_equal(tokens.reshape(-1), wanted)
    np.testing.assert_allclose(logprobs.reshape(-1), log_p[np.arange(88), wanted], rtol=1e-5, atol=2e-6)
    if devices is None:
        np.testing.assert_array_equal(
            jax.jit(lambda *x: sample_tokens(*x, **options))(*given)[0], tokens
        )  # in one tile


@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (5, None), (None, 0.8), (7, 0.9)])
def test_one_key_draws_tokens_as_often_as_the_distribution_says(top_k, top_p):
    draws, logits = 20_000, np.random.default_rng(1).normal(size=(1, 11))
    probability = np.exp(log_softmax(logits)) * kept(log_softmax(logits), top_k, top_p)
    hidden = jnp.ones((draws, 1))
    draw = jax.jit(lambda *x: sample_tokens(*x, top_k=top_k, top_p=top_p))
    tokens, _ = draw(hidden, jnp.asarray(logits.T, F32), jax.random.key(0))
    counts, expected = np.bincount(tokens, minlength=11), draws * (probability / probability.sum())[0]
    assert not counts[expected == 0].any()
    assert np.sum((counts - expected)[expected > 0] ** 2 / expected[expected > 0]) < 29.6  # once in a thousand


@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (3, None), (None, 0.9)])
def test_a_certain_token_is_drawn_with_log_probability_0(top_k, top_p):
    hidden = 1e11 * jax.random.normal(jax.random.key(0), (16, 301))
    draw = jax.jit(lambda *x: sample_tokens(*x, top_k=top_k, top_p=top_p))
    tokens, logprobs = draw(hidden, jnp.eye(301), KEYS[:16])
    np.testing.assert_array_equal(tokens, hidden.argmax(1))
    assert not logprobs.any()


def test_no_logits_are_made_and_one_product():
    hidden, weight, _ = whole_numbers()
    for run in (lambda h, w: top_k_logprobs(h, w, 5), lambda h, w: sample_tokens(h, w, KEYS, top_k=5, top_p=0.5)):
        with XLA.strictly():
            found = list(equations(jax.make_jaxpr(run)(hidden, weight).jaxpr))
        assert max(x.aval.size for equation in found for x in equation.outvars) <= weight.size
        assert sum(equation.primitive.name == "dot_general" for equation in found) == 1


def test_wrong_arguments_are_refused_by_name():
    hidden, weight, _ = whole_numbers()
    with pytest.raises(ValueError, match="k must be a number from 1 to the vocabulary's 301, not 302"):
        top_k_logprobs(hidden, weight, 302)
    for message, wrong in {"top_k must": {"top_k": 0}, "top_p must": {"top_p": 0.0}}.items():
        with pytest.raises(ValueError, match=message):
            sample_tokens(hidden, weight, KEYS, **wrong)
    with pytest.raises(
        ValueError, match=r"key must be made by jax.random.key with impl='threefry2x32', and is key<rbg>"
    ):
        sample_tokens(hidden, weight, jax.random.key(0, impl="rbg"))
