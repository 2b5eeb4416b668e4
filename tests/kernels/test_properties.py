"""What holds for every argument that is allowed, by every engine: one table, and float64 as the judge.

Hidden states and weights are whole numbers, so that every dtype and every order of sums gives the same products: an
error is that of the softmax alone, whose bound is float32's epsilon times the size of the logits.
"""

import contextlib
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from divergence_oracle import exact_divergences
from engines import BF16, CHUNKED, F32, FULL, GPU, TPU, TPU_F32, XLA, Engine, engines, parameter
from oracle import exact

from lm_head import divergence_loss, likeliest_tokens, token_divergence, token_logprobs, token_loss

EPS = float(np.finfo(np.float32).eps)
PLAIN = (XLA, FULL, CHUNKED)
RNG = np.random.default_rng(0)


def whole(*shape: int, most: int = 3) -> np.ndarray:
    return RNG.integers(-most, most + 1, shape).astype(np.float32)


def problem_of(n: int, v: int, d: int, most: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The label is the likeliest in every other row."""
    hidden, weight = whole(n, d, most=most), whole(v, d)
    likeliest = (hidden.astype(np.float64) @ weight.T).argmax(axis=1)
    return hidden, weight, np.where(np.arange(n) % 2, likeliest, RNG.integers(0, v, n))


def near(found: Any, right: Any, size: Any) -> None:
    """Asserts that the error is at most that of a few roundings of numbers as large as `size`."""
    np.testing.assert_array_less(np.abs(np.asarray(found, np.float64) - right), 8 * EPS * (1 + np.abs(size)))


def called(function: Any, jitted: bool, *arguments: Any) -> Any:
    return (jax.jit(function) if jitted else function)(*arguments)


# --- temperatures and softcaps ---

TEMPERATURES = [
    *((engine, t, cap) for engine in PLAIN for t in (1e-9, 1e-6, 0.7, 1e3) for cap in (None, 20.0)),
    *((engine, t, cap) for engine in (TPU_F32, GPU) for t, cap in ((1e-6, None), (0.7, 20.0))),
]


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize(("engine", "temperature", "softcap"), [parameter(*x) for x in TEMPERATURES])
def test_logits_of_any_size_lose_nothing_to_the_temperature(
    engine: Engine, temperature: float, softcap: float | None, jitted: bool
) -> None:
    """Products to 10,000 and a little. The label's own logit is off by what tanh is: it has no other rounding."""
    if not jitted and engine not in PLAIN:
        jitted = True
    n, v, d = engine.shape
    hidden, weight, labels = problem_of(n, v, d, most=400)
    hidden, weight = jnp.asarray(hidden, engine.dtype), jnp.asarray(weight, engine.dtype)
    options = {"temperature": temperature, "softcap": softcap}
    with engine.strictly():
        got = called(lambda *x: token_logprobs(*x, impl=engine.impl, **options), jitted, hidden, weight, labels)
    options["temperature"] = float(np.float32(temperature))
    right = exact(hidden, weight, labels, lambda *_: np.zeros((3, n)), **options)
    assert np.max(got.logprob) <= 0
    top = np.abs(right.lse).max() if softcap else 0  # tanh's rounding, of the label and of the likeliest
    near(got.logprob, right.logprob, np.abs(right.logprob) + top)
    near(got.lse, right.lse, right.lse)
    near(got.entropy, right.entropy, right.entropy + top)


@engines(*PLAIN)
def test_gradients_at_tiny_temperatures_are_float64_s(engine: Engine) -> None:
    """Where one token has all of the probability, the label's slope is 0 or 1 over the temperature."""
    hidden, weight, labels = problem_of(90, 301, 16)
    for temperature in (1e-6, 0.7):
        cotangents = np.ones(90), np.zeros(90), np.zeros(90)

        def total(hidden: Any, weight: Any, temperature: float = temperature) -> jax.Array:
            return token_logprobs(hidden, weight, labels, temperature=temperature, impl=engine.impl).logprob.sum()

        with engine.strictly():
            found = jax.jit(jax.grad(total, (0, 1)))(hidden, weight)
        options = {"temperature": float(np.float32(temperature))}
        right = exact(hidden, weight, labels, lambda *_, given=cotangents: given, **options)
        for got, want in zip(found, (right.hidden, right.weight), strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=64 * EPS * np.abs(want).max())


# --- labels ---


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("engine", [parameter(x) for x in (*PLAIN, TPU)])
def test_labels_of_every_integer_dtype_are_the_same_labels(engine: Engine, dtype: str) -> None:
    """The vocabulary is larger than some of the dtypes reach; 64 bits are NumPy's own."""
    n, v, d = engine.shape
    hidden, weight, _ = problem_of(n, v, d)
    labels = RNG.integers(0, min(v, np.iinfo(dtype).max + 1), n)
    labels[0] = min(v - 1, np.iinfo(dtype).max)
    arguments = jnp.asarray(hidden, engine.dtype), jnp.asarray(weight, engine.dtype)
    with engine.strictly():
        run = jax.jit(lambda labels: token_logprobs(*arguments, labels, impl=engine.impl))
        np.testing.assert_array_equal(run(labels.astype(dtype)).logprob, run(labels.astype(np.int32)).logprob)


def test_labels_beyond_32_bits_are_out_of_range_and_what_a_dtype_can_not_hold_is_ignored_nowhere() -> None:
    hidden, weight, labels = problem_of(8, 300, 4)
    for bad in (np.int64(2**32 + 5), np.int64(-(2**40))):
        with pytest.raises(ValueError, match=f"one is {bad}"):
            token_logprobs(hidden, weight, np.full(8, bad))
    narrow = np.resize([156, 3, 7], 8).astype(np.uint8)  # 156 is -100 in eight bits
    cross_entropy = lambda logprob, entropy: -logprob  # noqa: E731
    every, ignored = (token_loss(hidden, weight, narrow, cross_entropy, ignore_index=x)[0] for x in (None, -100))
    assert every == ignored
    assert token_loss(hidden, weight, narrow, cross_entropy, ignore_index=156)[0] < every
    signed = np.where(labels % 2, labels, -100).astype(np.int16)
    live = token_logprobs(hidden, weight, signed, ignore_index=-100).lse != 0
    np.testing.assert_array_equal(live, labels % 2 == 1)


# --- sizes, configurations of JAX, lists ---


@contextlib.contextmanager
def configured(setting: str) -> Any:
    contexts = {
        "plain": contextlib.nullcontext,
        "x64": lambda: jax.enable_x64(True),
        "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
        "debug_nans": lambda: jax.debug_nans(True),
    }
    with contexts[setting]():
        yield


SETTINGS = ("plain", "x64", "strict promotion", "debug_nans")


@pytest.mark.parametrize(
    ("engine", "setting"), [*(parameter(x, y) for x in PLAIN for y in SETTINGS), parameter(TPU_F32, "plain")]
)
def test_label_and_teacher_in_one_loss_are_float64_s_under_every_setting_of_jax(engine: Engine, setting: str) -> None:
    """Student and teacher have their own temperature, and the vocabulary is smaller than both weights."""
    n, v, d = engine.shape
    hidden, weight, labels = problem_of(n, v, d, most=1)
    teacher, common = (whole(n, 2 * d, most=1), whole(v + 9, 2 * d)), v - 7
    weights, live = np.linspace(-1, 1, n).astype(np.float32), np.arange(n) % 5 > 0
    labels, temperatures = labels % common, (np.float32(2.5), np.float32(3.5))
    given = dict(zip(("temperature", "teacher_temperature"), temperatures, strict=True))
    shared = {"vocabulary": np.int64(common), "workspace": np.int64(engine.waves), "impl": engine.impl}

    def loss(hidden: Any, weight: Any, kind: Any) -> Any:
        objective = lambda logprob, entropy, *, divergence: 0.5 * entropy - logprob + 2 * divergence  # noqa: E731
        of = dict(zip(("teacher_hidden", "teacher_weight"), teacher, strict=True))
        how = {"kind": kind, "beta": 0.25, "where": live, "weights": weights, **of, **given, **shared}
        return token_loss(hidden, weight, labels, objective, **how)

    for kind in ("jsd",) if engine is TPU_F32 else ("forward_kl", "reverse_kl", "jsd"):
        with engine.strictly(), configured(setting):
            run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
            (value, tokens), gradients = run(jnp.asarray(hidden), jnp.asarray(weight), kind)
            assert tokens.divergence.dtype == value.dtype == F32
        by_token = np.where(live, weights, 0).astype(np.float64)
        head = exact(
            hidden,
            weight[:common],
            labels,
            lambda *_, g=by_token: (-g, 0 * g, 0.5 * g),
            where=live,
            temperature=float(temperatures[0]),
        )
        both = exact_divergences(
            hidden,
            weight[:common],
            *teacher,
            2 * by_token,
            kind=kind,
            beta=0.25,
            where=live,
            temperature=float(temperatures[0]),
            teacher_temperature=float(temperatures[1]),
        )
        size = np.abs(head.lse).max()
        near(tokens.divergence, both.values, size)
        terms = by_token * (0.5 * head.entropy - head.logprob + 2 * both.values)
        near(value, terms.sum(), size * np.abs(by_token).sum())
        padded = np.pad(head.weight + both.weight, ((0, v - common), (0, 0)))
        for got, want in zip(gradients, (head.hidden + both.hidden, padded), strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=64 * EPS * size * np.abs(want).max())
        assert not np.any(gradients[1][common:])


@engines(*PLAIN)
@pytest.mark.parametrize("shape", [(3, 1, 1), (1, 1, 4), (2, 5, 1)], ids=str)
def test_a_vocabulary_of_one_and_a_width_of_one_work(engine: Engine, shape: tuple[int, int, int]) -> None:
    n = shape[0]
    hidden, weight, labels = problem_of(*shape)
    got = token_logprobs(hidden, weight, labels, impl=engine.impl)
    right = exact(hidden, weight, labels, lambda *_: np.zeros((3, n)))
    for found, want in zip(got[:3], right[:3], strict=True):
        near(found, want, right.lse)
    assert not np.any(divergence_loss(hidden, weight, hidden, weight, impl=engine.impl)[1])


def test_without_tokens_every_function_gives_nothing() -> None:
    hidden, weight = jnp.zeros((0, 4)), jnp.ones((9, 4))
    labels, teacher = np.zeros(0, np.int32), (jnp.zeros((0, 6)), jnp.ones((11, 6)))
    loss, gradient = jax.value_and_grad(lambda w: divergence_loss(hidden, w, *teacher, kind="jsd")[0])(weight)
    assert loss == 0
    assert not np.any(gradient)
    assert token_divergence(hidden, weight, *teacher).shape == (0,)
    assert token_logprobs(hidden, weight, labels).logprob.shape == (0,)
    assert token_loss(hidden, weight, labels, lambda logprob, entropy: -logprob)[0] == 0
    assert likeliest_tokens(hidden, weight).shape == (0,)


def test_lists_count_as_arrays() -> None:
    hidden, weight, labels = problem_of(4, 9, 4)
    objective = lambda logprob, entropy, a: -a * logprob  # noqa: E731
    weights, operand, where = [1.0, 0.5, 0.0, 2.0], [1.0, 2.0, 3.0, 4.0], [True, True, True, False]
    found = token_loss(hidden, weight, labels.tolist(), objective, operand, weights=weights, where=where)[0]
    as_arrays = {"weights": np.asarray(weights, np.float32), "where": np.asarray(where)}
    assert found == token_loss(hidden, weight, labels, objective, np.asarray(operand, np.float32), **as_arrays)[0]


@pytest.mark.parametrize(("beta", "kind"), [(0, "forward_kl"), (1, "reverse_kl"), (0.0, "forward_kl")])
def test_jsd_at_its_ends_is_the_kl_divergence_that_it_tends_to(beta: float, kind: Any) -> None:
    """As in TRL's GKD."""
    models = whole(9, 4), whole(20, 4), whole(9, 4), whole(20, 4)
    ends = divergence_loss(*models, kind="jsd", beta=beta)
    np.testing.assert_array_equal(ends[1], divergence_loss(*models, kind=kind)[1])


# --- what an objective gets by name ---


def test_an_objective_gets_what_it_names_with_a_default_or_without() -> None:
    hidden, weight, labels = problem_of(9, 30, 4)

    def required(logprob: Any, entropy: Any, *, lse: Any) -> Any:
        return -logprob + 0.01 * lse**2

    def optional(logprob: Any, entropy: Any, *, lse: Any = 0.0) -> Any:
        return -logprob + 0.01 * lse**2

    assert inspect.signature(optional).parameters["lse"].default == 0
    found, want = (token_loss(hidden, weight, labels, x)[0] for x in (optional, required))
    assert found == want
    with pytest.raises(ValueError, match="divergence needs a teacher"):
        token_loss(hidden, weight, labels, lambda logprob, entropy, *, divergence=0.0: divergence)


NAMED = [
    *((engine, way, cap) for engine in (*PLAIN, TPU_F32, TPU, GPU) for way in ("none", "all") for cap in (None, 20.0)),
    *((engine, "some", None) for engine in (XLA, TPU_F32, GPU)),
]


@pytest.mark.parametrize(("engine", "way", "softcap"), [parameter(*x) for x in NAMED])
def test_the_mean_logit_has_its_value_and_gradients_of_the_rows_that_are_tokens(
    engine: Engine, way: str, softcap: float | None
) -> None:
    """Label smoothing, beside the entropy or without. Rows of the weight past the vocabulary hold large numbers."""
    (n, v, d), temperature, common = engine.shape, 2.5, engine.shape[1] - 90
    hidden, weight, labels = problem_of(n, v, d, most=1)
    weight[common:], labels, live = 100, labels % common, np.arange(n) % 5 > 0
    weights = np.where(live, np.linspace(-1, 1, n), 0)
    arrays = jnp.asarray(hidden, engine.dtype), jnp.asarray(weight, engine.dtype)
    y = hidden.astype(np.float64) @ weight[:common].T.astype(np.float64)
    tanh = 0 * y if softcap is None else np.tanh(y / softcap)
    by_entropy = 0.5 if softcap is not None and way == "none" else 0

    def objective(logprob: Any, entropy: Any, *, mean_logit: Any, lse: Any) -> Any:
        smoothed = -0.5 * logprob - 4 * (mean_logit - lse)
        return smoothed + by_entropy * entropy if by_entropy else smoothed

    def loss(h: Any, w: Any) -> Any:
        options = {"temperature": temperature, "softcap": softcap, "vocabulary": common, "impl": engine.impl}
        options |= {"workspace": engine.bytes_of(way), "weights": jnp.asarray(weights, F32)}
        return token_loss(h, w, labels, objective, **options)

    with engine.strictly():
        (value, tokens), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*arrays)
    z = y / temperature if softcap is None else softcap * tanh / temperature
    top = z.max(axis=1, keepdims=True)
    lse = top + np.log(np.exp(z - top).sum(axis=1, keepdims=True))
    p, mean, hit = np.exp(z - lse), z.mean(axis=1), np.arange(common) == labels[:, None]
    entropy = -(p * (z - lse)).sum(axis=1)
    size = 1 + np.abs(z).max()
    near(np.asarray(tokens.mean_logit)[live], mean[live], size)
    assert not np.any(np.asarray(tokens.mean_logit)[~live])
    values = -0.5 * (z - lse)[hit] - 4 * (mean - lse[:, 0]) + by_entropy * entropy
    near(value, (weights * values).sum(), 20 * size * np.abs(weights).sum())
    # A derivative's terms. A product rounds their sum to its dtype; p is off by the rounding of the logits.
    terms = -0.5 * hit, 4.5 * p, -4.0 / common, -by_entropy * p * (z - lse + entropy[:, None])
    factor = weights[:, None] * (1 - tanh**2) / temperature
    dy, parts = factor * sum(terms), np.abs(factor) * sum(map(np.abs, terms))
    within, others = 16 * EPS * size + (2**-7 if engine.dtype == BF16 else 0), (weight[:common], hidden)
    for got, left, part, right in zip(gradients, (dy, dy.T), (parts, parts.T), others, strict=True):
        found = np.asarray(got, np.float64)[: len(left)]
        np.testing.assert_array_less(np.abs(found - left @ right), within * (part @ np.abs(right)) + 1e-30)
    assert not np.any(gradients[1][common:])


@engines(*PLAIN, TPU_F32, TPU, GPU)
@pytest.mark.parametrize(("temperature", "softcap"), [(1e-6, None), (2.5, None), (0.7, 20.0)])
def test_the_collision_is_the_sum_of_squared_probabilities(
    engine: Engine, temperature: float, softcap: float | None
) -> None:
    (n, v, d), common = engine.shape, engine.shape[1] - 90
    hidden, weight, labels = problem_of(n, v, d, most=1)
    weight[common:], labels, live = 100, labels % common, np.arange(n) % 5 > 0
    arrays = jnp.asarray(hidden, engine.dtype), jnp.asarray(weight, engine.dtype), labels
    options = {"temperature": temperature, "softcap": softcap, "vocabulary": common, "where": live}
    with engine.strictly():
        run = jax.jit(lambda *x: token_logprobs(*x, collision=True, impl=engine.impl, **options))
        found = run(*arrays)
    y = hidden.astype(np.float64) @ weight[:common].T.astype(np.float64)
    z = (y if softcap is None else softcap * np.tanh(y / softcap)) / np.float64(np.float32(temperature))
    p = np.exp(z - z.max(axis=1, keepdims=True))
    right = np.where(live, ((p / p.sum(axis=1, keepdims=True)) ** 2).sum(axis=1), 0)
    near(found.collision, right, 0 if softcap is None else np.abs(z).max())
    assert token_logprobs(*arrays, impl="xla").collision is None


@pytest.mark.parametrize("way", ["none", "all"])
@engines(*PLAIN, TPU_F32, TPU, GPU)
def test_rows_of_the_weight_that_are_no_tokens_get_no_gradient_and_have_no_effect(engine: Engine, way: str) -> None:
    """They are so large that their exponentials overflow."""
    (n, v, d), common = engine.shape, engine.shape[1] - 90
    hidden, weight, labels = problem_of(n, v, d)
    hidden, options = jnp.asarray(hidden, engine.dtype), {"workspace": engine.bytes_of(way), "impl": engine.impl}

    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(h: Any, w: Any) -> Any:
        objective = lambda logprob, entropy: -logprob  # noqa: E731
        return token_loss(h, w, labels % common, objective, vocabulary=common, **options)[0]

    with engine.strictly():
        run = jax.jit(lambda padding: gradients(hidden, jnp.asarray(weight, engine.dtype).at[common:].set(padding)))
        large, none = run(100.0), run(0.0)
    jax.tree.map(np.testing.assert_array_equal, large, none)
    assert not np.any(large[1][common:])
