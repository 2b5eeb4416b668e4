"""What tools/bench/head.py finds of a method: inputs, errors beside float32, times and memory."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tools.bench import child as bench_child
from tools.bench import timing as bench_timing
from tools.bench import torch_methods as bench_torch
from tools.bench.head_losses import full_logits, fused
from tools.bench.methods import Method, by_tokamax, general_backward, value_and_gradients, value_only
from tools.bench.problem import Problem, write_answer, write_inputs

SHAPE = (24, 16, 130)
LIVES = [1.0, 0.5]


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    """Its inputs, and the answers at all rows and at half of them."""
    found = Problem(SHAPE, "float32", 0, str(tmp_path_factory.mktemp("problem")))
    write_inputs(found)
    arrays = [jnp.asarray(x) for x in (found.read("hidden"), found.read("weight"), found.labels())]
    for general in (False, True):
        for live in LIVES:
            write_answer(found, general, live, *arrays)
    return found


def errors(problem, call, live=1.0, **options):
    method = Method("any", 3, call, **options)
    return next(bench_child.measure(method, problem, [live], rounds=1, least=0.0))["errors"]


# --- inputs


def made(folder, *about):
    """Hidden states, weight and labels of a problem."""
    folder.mkdir()
    problem = Problem((256, 64, 5000), *about[:1], 7, str(folder), *about[1:])
    write_inputs(problem)
    return problem.read("hidden"), problem.read("weight"), problem.labels()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("peak", [0, 14])
def test_inputs_are_random_and_the_same_for_a_seed(tmp_path, dtype, peak):
    hidden, weight, labels = one = made(tmp_path / "one", dtype, peak)
    for array, again in zip(one, made(tmp_path / "other", dtype, peak), strict=True):
        np.testing.assert_array_equal(array, again)
    assert hidden.dtype == weight.dtype == jnp.dtype(dtype)
    assert not np.array_equal(weight[:64, 1:], weight[4096:4160, 1:])  # of another block
    assert len(set(labels)) > 100


def test_rows_that_count_are_as_many_as_their_share():
    assert Problem((256, 64, 5000), "float32", 7, "").weights(0.25).sum() == 64


def test_logits_are_normal_of_unit_variance(tmp_path):
    hidden, weight, _ = made(tmp_path / "normal", "float32")
    assert np.std(hidden @ weight.T) == pytest.approx(1, rel=0.05)


def test_with_a_peak_few_words_are_likely_the_label_most_and_the_first_more_often_than_the_last(tmp_path):
    hidden, weight, labels = made(tmp_path / "peaked", "float32", 14.0)
    p = jax.nn.softmax(hidden @ weight.T)
    assert np.mean(p < 2**-12) > 0.95
    assert np.mean(p.argmax(1) == labels) > 0.5
    assert p[:, :500].mean() > 10 * p[:, -500:].mean()
    assert np.median(labels) < 5000**0.6


def test_an_answer_tells_how_large_the_largest_probability_is_on_average(problem):
    arrays = [jnp.asarray(x) for x in (problem.read("hidden"), problem.read("weight"), problem.labels())]
    p = jax.nn.softmax(arrays[0] @ arrays[1].T)
    assert write_answer(problem, False, 1.0, *arrays) == pytest.approx(float(p.max(1).mean()), rel=1e-5)


# --- errors


@pytest.mark.parametrize("live", [1.0, 0.5])
def test_a_right_method_shows_no_error(problem, live):
    assert max(errors(problem, value_and_gradients(full_logits), live).values()) < 1e-5
    assert max(errors(problem, value_and_gradients(fused()), live).values()) < 1e-5
    assert max(errors(problem, general_backward(), live, general=True).values()) < 1e-5
    assert errors(problem, value_only(fused()), live).keys() == {"value"}


def test_a_wrong_method_shows_where_it_is_wrong_and_by_how_much(problem):
    right = value_and_gradients(full_logits)

    def spoilt(*arguments):
        value, dh, dw = right(*arguments)
        return value * 1.01, dh.at[3, 5].add(0.5 * jnp.abs(dh).max()), dw.at[-1].set(jnp.nan)

    found = errors(problem, spoilt)
    assert found["value"] == pytest.approx(0.01, rel=1e-3)
    assert found["dh"] == pytest.approx(0.5, rel=1e-3)
    assert np.isnan(found["dW"])


def test_a_method_that_takes_rows_that_do_not_count_shows_errors(problem):
    def all_rows(hidden, weight, labels, weights, *rest):
        return value_and_gradients(full_logits)(hidden, weight, labels, jnp.ones_like(weights), *rest)

    assert max(errors(problem, all_rows).values()) < 1e-5
    assert min(errors(problem, all_rows, live=0.5).values()) > 0.01


def test_tokamax_which_has_no_weights_is_given_zeros_and_its_result_corrected(problem, monkeypatch):
    def loss(hidden, labels, weight, *, implementation):
        logits = hidden @ weight
        return jnp.sum(jax.nn.logsumexp(logits, axis=1) - logits[jnp.arange(len(labels)), labels])

    fake = types.SimpleNamespace(linear_softmax_cross_entropy_loss=loss)
    monkeypatch.setitem(sys.modules, "tokamax", fake)
    for live in LIVES:
        assert max(errors(problem, by_tokamax(None), live, transposed=True).values()) < 1e-5


def test_methods_through_torch_are_measured_by_its_own_means(problem):
    pytest.importorskip("torch")
    method = Method("full logits in torch", 3)
    found = list(bench_torch.measure(method, problem, LIVES, rounds=2, least=0.0))
    assert [figures["through"] for figures in found] == ["torch", "torch"]
    assert max(max(figures["errors"].values()) for figures in found) < 1e-5


# --- times and memory


def test_the_bare_products_are_those_of_the_rows_that_count_in_their_dtype():
    hidden = jax.random.normal(jax.random.key(1), (6, 16), jnp.bfloat16)
    weight = jax.random.normal(jax.random.key(2), (130, 16), jnp.bfloat16)
    found = {name: call() for name, call in bench_child.bare_products(hidden, weight).items()}
    assert {name: x.shape for name, x in found.items()} == {"hW": (6, 130), "gW": (6, 16), "gh": (130, 16)}
    assert {x.dtype for x in found.values()} == {jnp.dtype(jnp.bfloat16)}
    slopes = bench_child.random_slopes(6, 130, jnp.bfloat16).astype(jnp.float32)
    assert float(slopes.std()) == pytest.approx(1, abs=0.1)
    wide = hidden.astype(jnp.float32), weight.astype(jnp.float32)
    for name, expected in {"hW": wide[0] @ wide[1].T, "gW": slopes @ wide[1], "gh": slopes.T @ wide[0]}.items():
        np.testing.assert_allclose(found[name].astype(jnp.float32), expected, atol=0.2)


def test_a_turn_is_as_many_calls_as_fill_it_and_its_figure_is_of_one():
    now, calls = [0.0], []

    def function(name, seconds):
        def call():
            calls.append(name)
            now[0] += seconds

        return call

    functions = {"short": function("short", 0.01), "long": function("long", 0.2)}
    found = bench_timing.in_turns(functions, lambda _: None, rounds=3, least=0.0999, queue=1, clock=lambda: now[0])
    assert found == {"short": pytest.approx([0.01] * 3), "long": pytest.approx([0.2] * 3)}
    assert calls[4:] == (["short"] * 10 + ["long"]) * 3


@pytest.mark.parametrize(("queue", "most"), [(1, 1), (2, 2)])
def test_no_more_calls_are_under_way_than_the_queue_takes_and_all_are_waited_for(queue, most):
    under_way, highest = [], [0]

    def call():
        under_way.append(object())
        highest[0] = max(highest[0], len(under_way))
        return under_way[-1]

    ticks = iter(range(10**6))
    bench_timing.in_turns(
        {"one": call}, under_way.remove, rounds=2, least=5.0, queue=queue, clock=lambda: float(next(ticks))
    )
    assert highest == [most]
    assert under_way == []


@pytest.mark.parametrize(("before", "is_bound"), [(900, False), (1700, True)])
def test_memory_is_the_device_s_own_count_and_only_a_bound_where_the_compiler_took_as_much(
    monkeypatch, before, is_bound
):
    monkeypatch.setattr(bench_child, "peak", lambda: 1700)
    program = jax.jit(lambda x: x + 1).lower(jnp.zeros(100)).compile()
    found = bench_child.memory_of(program, [jnp.zeros(100)], (jnp.zeros(50),), before)
    assert (found["peak_bytes"], found["peak_is_bound"]) == (1700, is_bound)
    assert found["temp_bytes"] == 1700 - 400 - 200
