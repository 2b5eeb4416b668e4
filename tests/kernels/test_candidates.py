"""Log-probabilities of several ids a row: values and gradients against float64 NumPy, on one device and on meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import BF16, F32, FULL, GPU, TPU_F32, XLA, XLA_BF16, Engine, parameter
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lm_head_cases import SCALES, assert_near, equations, random_problem

from kernels.lm_head import HeadSharding, candidates, token_logprobs

RNG = np.random.default_rng(0)
K = 7


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(candidates, "_ELEMENTS", 24 * 16)


def asked_of(engine: Engine, scale: float = 3.0):
    """Arguments, with NaN and impossible ids at rows that don't count; some ids twice, and the label among them."""
    hidden, weight, labels = engine.problem(scale)
    live = engine.live("most")
    ids = RNG.integers(0, len(weight), (len(labels), K))
    ids[:, 1], ids[::2, 2], ids[::3, 3] = labels, ids[::2, 4], len(weight) - 1
    ids[~live] = -7
    return jnp.where(live[:, None], hidden, jnp.nan), weight, labels, jnp.asarray(ids), live


def in_float64(hidden, weight, labels, ids, live, slopes, temperature=1.0, softcap=None):
    """Log-probabilities of the ids, and both gradients of `sum slopes[0] * (those of ids) + slopes[1] * label's`."""
    h = np.where(live[:, None], np.asarray(hidden, np.float64), 0)
    w, ids = np.asarray(weight, np.float64), np.where(live[:, None], ids, 0)
    tanh = 0 if softcap is None else np.tanh(h @ w.T / softcap)
    z = (h @ w.T if softcap is None else softcap * tanh) / temperature
    log_p = z - z.max(1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
    slope, rows = np.zeros_like(z), np.arange(len(z))
    np.add.at(slope, (rows[:, None], ids), slopes[0] * live[:, None])
    np.add.at(slope, (rows, np.asarray(labels)), slopes[1] * live)
    dy = (slope - np.exp(log_p) * slope.sum(1, keepdims=True)) * (1 - np.square(tanh)) / temperature
    return np.take_along_axis(log_p, ids, 1) * live[:, None], dy @ w, dy.T @ h


def found(hidden, weight, labels, ids, live, slopes, **options):
    """The same by the head."""

    def total(hidden, weight):
        tokens = token_logprobs(hidden, weight, labels, where=live, candidates=ids, **options)
        terms = slopes[0] * tokens.candidates, slopes[1] * tokens.logprob
        mask = live[..., None]
        return jnp.sum(jnp.where(mask, terms[0], 0)) + jnp.sum(jnp.where(live, terms[1], 0)), tokens.candidates

    (_, values), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(hidden, weight)
    return values, *gradients


def slopes_for(live):
    return RNG.normal(size=(len(live), K)), RNG.normal(size=len(live))


def assert_right(got, want, tolerance):
    assert_near([x.astype(F32) for x in got], want, tolerance)


@pytest.mark.parametrize(
    ("engine", "softmax"),
    [
        *(parameter(engine, softmax) for engine in (XLA, XLA_BF16) for softmax in SCALES),
        *(parameter(engine, "peaked") for engine in (FULL, TPU_F32, GPU)),
    ],
)
def test_values_and_gradients_are_those_of_full_logits(engine: Engine, softmax: str):
    """Other engines than xla give the normaliser alone."""
    scale = SCALES[softmax]
    *given, live = asked_of(engine, scale)
    options = {"temperature": 0.7, "softcap": None if scale > 30 else 20.0}
    slopes = slopes_for(live)
    with engine.strictly():
        got = jax.jit(lambda *x: found(*x, impl=engine.impl, **options))(*given, live, slopes)
    want = in_float64(*given, live, slopes, **options)
    assert got[0].dtype == F32
    assert (got[1].dtype, got[2].dtype) == (engine.dtype, engine.dtype)
    assert not np.asarray(got[0])[~live].any()
    assert not np.asarray(got[1], F32)[~live].any()
    assert_right(got[:1], want[:1], 1e-6)
    rounded = max(2e-5, 5e-7 * scale)  # a large logit's rounding is that of log p
    assert_right(got[1:], want[1:], rounded if engine.dtype == F32 else 2e-2)


@pytest.mark.parametrize("devices", [(2, 2, 2), (1, 1, 3)])
def test_a_mesh_gives_what_one_device_gives(devices):
    """301 rows of the weight divide evenly over no mesh."""
    *given, live = asked_of(XLA._replace(shape=(88, 301, 16)))
    slopes = slopes_for(live)
    mesh = jax.make_mesh(devices, ("dp", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3)
    layout, one = HeadSharding(mesh, ("dp", "fsdp"), "tp", "fsdp"), {"temperature": 0.6, "softcap": 9.0}
    in_rows = jax.tree.map(lambda x: x.reshape(4, 22, *x.shape[1:]), (given[0], *given[2:], live, slopes))
    got = jax.jit(lambda h, *x: found(h, given[1], *x, sharding=layout, **one))(*in_rows)
    want = in_float64(*given, live, slopes, **one)
    assert_right([got[0].reshape(88, K), got[1].reshape(88, 16), got[2]], want, 2e-5)


def test_types_of_explicit_axes_say_the_layout():
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    *given, live = asked_of(XLA._replace(shape=(88, 300, 16)))
    slopes = slopes_for(live)
    specs = (P("data"), P("model", "data"), P("data"), P("data"), P("data"), (P("data"), P("data")))
    placed = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), (*given, live, slopes), specs)
    got = jax.jit(found)(*placed)
    assert_right(got, in_float64(*given, live, slopes), 2e-5)
    assert got[0].sharding.spec == P("data", None)
    assert got[2].sharding.spec == P("model", "data")


def test_a_copy_is_multiplied_in_the_products_dtype_and_the_weight_gets_its_gradient():
    hidden, weight, labels, ids, live = asked_of(XLA)
    slopes, unread = slopes_for(live), jnp.full_like(weight, jnp.nan)
    given = hidden, unread, labels, ids, live, slopes
    got = jax.jit(lambda *x: found(*x, weight_copy=weight / 2, dtype=BF16))(*given)
    rounded = [x.astype(BF16).astype(F32) for x in (hidden, weight / 2)]
    want = in_float64(*rounded, labels, ids, live, slopes)
    assert_right(got[:1], want[:1], 1e-6)
    assert_right(got[1:], want[1:], 1e-2)
    assert got[2].dtype == F32


def test_traced_ids_out_of_range_are_nan_alone_and_so_are_their_gradients():
    hidden, weight, labels = XLA.problem()
    ids = jnp.asarray(RNG.integers(0, 301, (90, K)))

    def run(ids, weight, counts):
        found = token_logprobs(hidden, weight, labels, candidates=ids, where=counts)
        return found.candidates.sum(), found

    differentiated = jax.jit(jax.value_and_grad(run, 1, has_aux=True))
    (_, right), _ = differentiated(ids, weight, jnp.ones(90, bool))
    for bad in (-1, 301):
        (_, got), dw = differentiated(ids.at[5, 2].set(bad), weight, jnp.ones(90, bool))
        assert_near(got._replace(candidates=got.candidates.at[5, 2].set(right.candidates[5, 2])), right)
        assert np.isnan(got.candidates[5, 2])
        assert np.isnan(dw.sum())
    (_, unseen), dw = differentiated(ids.at[5, 2].set(bad), weight, jnp.arange(90) != 5)
    assert not unseen.candidates[5].any()
    assert np.isfinite(dw).all()


def test_wrong_candidates_are_refused_by_name():
    hidden, weight, labels = XLA.problem()
    for wrong, message in [
        (jnp.zeros((90, 2)), "candidates must be integers"),
        (jnp.zeros((89, 2), int), r"candidates must be \[90\] and one dim more"),
        (jnp.full((90, 2), 301), r"candidates must be within \[0, 301\), where they count; one is 301"),
    ]:
        with pytest.raises(ValueError, match=message):
            token_logprobs(hidden, weight, labels, candidates=wrong)
    none = jax.eval_shape(lambda ids: token_logprobs(hidden, weight, labels, candidates=ids), jnp.zeros((90, 0), int))
    assert none.candidates.shape == (90, 0)


def test_no_array_of_rows_by_ids_by_features_is_made_nor_logits():
    hidden, weight, labels = random_problem((64, 500, 16))
    ids, live = jnp.zeros((64, 32), int), jnp.ones(64, bool)
    slopes = jnp.ones((64, 32)), jnp.ones(64)
    with XLA.strictly():
        program = jax.make_jaxpr(lambda *x: found(*x, live, slopes))(hidden, weight, labels, ids)
    assert max(x.aval.size for equation in equations(program.jaxpr) for x in equation.outvars) <= weight.size
