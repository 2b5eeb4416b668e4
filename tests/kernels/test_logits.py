"""Statistics of logits that exist, against float64: every engine, masks, dtypes, a vocabulary over a mesh axis.

Logits are products with the identity, so that the head's oracle judges them. 300 rows and 700 columns are off every
tile.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import POISON
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from oracle import EPS, Slopes, exact
from strict_tpu import strict_interpreter

from lm_head import logits_logprobs

N, V = 300, 700
RNG = np.random.default_rng(0)
COTANGENTS = RNG.normal(size=(3, N)).astype(np.float32)
SLOPES = Slopes(*COTANGENTS)
NARROW, EXTREME = (30, jnp.bfloat16, 1.0), (1e4, jnp.float32, 1e-3)
LABELS = np.r_[0, V - 1, RNG.integers(0, V, N - 2)]


def logits_of(scale: float, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(RNG.normal(size=(N, V)) * scale, dtype)


def run(logits: Any, labels: Any = LABELS, **options: Any) -> Any:
    """Statistics, and the gradient under the cotangents, which are poison in rows that don't count; jitted."""
    cotangents = jnp.where(options.get("where", True), COTANGENTS, jnp.resize(POISON, COTANGENTS.shape))

    @jax.jit
    def statistics_and_gradient(logits: Any) -> Any:
        tokens, pull = jax.vjp(lambda x: logits_logprobs(x, labels, **options)[:3], logits)
        return tokens, pull((*cotangents,))[0]

    return statistics_and_gradient(logits)


@pytest.mark.parametrize(
    ("impl", "scale", "dtype", "temperature"),
    [
        ("xla", 3, jnp.float32, 0.7),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("xla", *NARROW), ("mosaic_tpu", *EXTREME))),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in (("mosaic_tpu", *NARROW), ("xla", *EXTREME))),
    ],
)
def test_statistics_and_gradient_match_float64(impl: Any, scale: float, dtype: Any, temperature: float) -> None:
    """Rows that don't count hold NaN. Some blocks have no row that counts. A logit of -inf excludes its column."""
    live, labels, columns = (np.arange(N) < 60) & (np.arange(N) % 7 > 0), LABELS % (V - 50), np.arange(V)
    logits = logits_of(scale, dtype).at[:, V - 50 :].set(-jnp.inf)
    sick = jnp.where(live[:, None], logits, jnp.nan)
    with strict_interpreter():
        tokens, gradient = run(sick, labels, where=live, temperature=temperature, impl=impl, block=32)
    given = {"where": live, "temperature": float(np.float32(temperature)), "vocabulary": V - 50}
    right = exact(jnp.where(columns < V - 50, logits, 0), np.eye(V), labels, lambda _: SLOPES, **given).answer
    for got, want in zip(tokens, right[:3], strict=True):
        np.testing.assert_array_less(np.abs(got - want), 16 * EPS * (1 + np.abs(want)))
    assert gradient.dtype == dtype
    largest = np.abs(right.hidden).max()
    rounding = float(jnp.finfo(dtype).eps) + 64 * EPS * (1 + (scale / temperature if scale < 1e4 else 0))
    np.testing.assert_allclose(np.asarray(gradient, np.float64), right.hidden, rtol=0, atol=rounding * largest)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["xla", pytest.param("mosaic_tpu", marks=pytest.mark.nightly)])
def test_a_sharded_vocabulary_gives_the_same_as_one_device(impl: Any) -> None:
    mesh = jax.make_mesh((2,), ("tp",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    logits, columns = logits_of(3), P(None, "tp")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=columns, out_specs=(P(), columns), check_vma=False)
    def sharded(logits: Any) -> Any:
        """Each device has the whole of each statistic. Cotangents from the devices are not summed."""
        tokens, pull = jax.vjp(lambda x: logits_logprobs(x, LABELS, vocabulary_axis="tp", impl=impl)[:3], logits)
        return tokens, pull(tuple(map(jnp.asarray, COTANGENTS)))[0]

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        statistics, gradient = jax.block_until_ready(jax.jit(sharded)(logits))
    tokens, right = run(logits, impl="xla")
    for x, y in zip((*statistics, gradient), (*tokens, right), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_leading_dims_labels_out_of_range_and_faults() -> None:
    logits, labels = logits_of(3).reshape(2, 150, V), LABELS.reshape(2, 150)
    bad = jax.jit(logits_logprobs)(logits, jnp.asarray(labels, np.uint16).at[0, 3].set(V))
    np.testing.assert_array_equal(np.argwhere(np.isnan(bad.logprob)), [[0, 3]])
    for name, options in {
        "labels": {"labels": np.full((2, 150), V)},
        "where": {"where": np.ones(3, bool)},
        "impl": {"impl": "warp"},
        "temperature": {"temperature": 0.0},
        "logits must be one of bfloat16, float32": {"logits": np.zeros(logits.shape, np.float16)},
    }.items():
        with pytest.raises(ValueError, match=name):
            logits_logprobs(**({"logits": logits, "labels": labels} | options))


@pytest.mark.parametrize("impl", ["xla", "mosaic_tpu"])
def test_no_rows_at_all_have_no_statistics(impl: Any) -> None:
    gradient = jax.grad(lambda logits: logits_logprobs(logits, LABELS[:0], impl=impl).logprob.sum())
    assert gradient(jnp.zeros((0, V))).shape == (0, V)
