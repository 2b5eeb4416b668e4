"""`python tools/bench head`: its table, what wasn't measured, a method's errors, and turns."""

import math
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from tools.bench import __main__ as bench
from tools.bench import head, measure, methods
from tools.bench.methods import Method, fused, value_and_gradients

ROUNDS = {"method": [9.0, 2.0, 3.0], "hW": [1.0, 1.0, 1.0], "gW": [2.0, 2.0, 2.0], "gh": [3.0, 3.0, 3.0]}
FLOPS = 2 * 12 * 16 * 130
FIGURES = {"live": 0.5, "errors": [0.0], "rounds": ROUNDS, "temp_bytes": 2**20}
FIGURES |= {"products": 3, "flops": FLOPS}
DEVICE = {"platform": "cpu", "kind": "cpu"}
METHOD = Method("any", 3, value_and_gradients(fused(impl="full_logits")))


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


# --- the command


@pytest.mark.nightly
def test_a_table_for_each_share_has_what_was_measured_and_names_what_could_not_be(monkeypatch, capsys):
    monkeypatch.setattr(head, "LEAST", 0.0)
    chosen = ["--methods", "optax", "mosaic_gpu, value", "--live", "0.25", "1", "--repeats", "2"]
    assert bench.main(["head", "--shape", "24,16,130", *chosen]) == 0
    said, progress = capsys.readouterr()
    about, first, second, last = said.split("\n\n")
    assert about.startswith(f"cpu cpu, jax {jax.__version__}, ")
    for table, share in ((first, "100%"), (second, "25%")):
        title, columns, _, three, four, optax, *absent = table.splitlines()
        assert title == f"N=24, D=16, V=130, float32, {share} of the rows count"
        assert cells(columns) == list(head.COLUMNS)
        names = ["3 bare products", "4 bare products", "optax on full logits"]
        assert [cells(line)[0] for line in (three, four, optax)] == names
        ms, to_three, to_four, _, temporaries, loss, dh, dw = map(float, cells(optax)[1:])
        assert ms > 0 < to_four < to_three
        assert temporaries >= 0
        assert max(loss, dh, dw) < 1e-5
        assert "not measured: needs a GPU: mosaic_gpu, value only" in absent
    of_all = [cells(table.splitlines()[5])[i] for table, i in ((first, 2), (second, 2), (first, 5))]
    assert cells(last.splitlines()[1]) == ["method", "/three, 100%", "/three, 25%", "temp MiB"]
    assert [cells(line) for line in last.splitlines()[3:]] == [["optax on full logits", *of_all]]
    rows = [cells(line)[0] for line in progress.splitlines() if line.startswith("|")]
    assert rows == ["optax on full logits, 100%", "optax on full logits, 25%"], "as they come"
    assert progress.count("N=24, D=16, V=130: ") == 2, "a line for each method"


@pytest.mark.parametrize(
    ("device", "method", "said"),
    [
        ([DEVICE], "optax", "--shape, --methods: nothing could be measured"),
        ([DEVICE], "nonsense", "--methods: no method has 'nonsense' in its name; there are: "),
        ([], "optax", "JAX finds no device to measure on: RuntimeError: no"),
    ],
)
def test_a_run_that_measures_nothing_fails(monkeypatch, capsys, device, method, said):
    failed = [], "RuntimeError: no"
    monkeypatch.setattr(head, "start", lambda _, task, *__: (device, "") if device and not task else failed)
    assert bench.main(["head", "--methods", method]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {said}")


# --- the table


# --- a method's figures


def wrong(hidden, weight, labels, weights, *rest):
    value, dh, dw = METHOD.call(hidden, weight, labels, weights, *rest)
    return value * 1.01, dh.at[3, 5].add(0.5 * jnp.abs(dh).max()), dw.at[-1].set(jnp.nan)


NONE = pytest.approx(0, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "options", "expected"),
    [
        pytest.param(
            value_and_gradients(methods.general()), {"general": True}, (NONE, NONE, NONE), id="right, any cotangents"
        ),
        pytest.param(methods.value_only(fused()), {}, (NONE,), id="right, value only"),
        pytest.param(methods.tokamax(None), {"transposed": True}, (NONE, NONE, NONE), id="right, rows as zeros"),
        pytest.param(wrong, {}, (pytest.approx(0.01, rel=1e-3), pytest.approx(0.5, rel=1e-3), "nan"), id="wrong"),
    ],
)
def test_a_method_s_errors_say_where_it_is_wrong_and_by_how_much(call, options, expected, monkeypatch):
    def tokamax(hidden, labels, weight, *, implementation):
        logits = hidden @ weight
        return jnp.sum(jax.nn.logsumexp(logits, axis=1) - logits[jnp.arange(len(labels)), labels])

    monkeypatch.setitem(sys.modules, "tokamax", types.SimpleNamespace(linear_softmax_cross_entropy_loss=tokamax))
    monkeypatch.setattr(measure, "methods", lambda _: [Method("any", 3, call, **options)])
    task = {"method": "any", "shape": [24, 16, 130], "dtype": "float32", "lives": [0.5], "rounds": 1, "least": 0.0}
    [found] = measure.main(task)
    assert tuple("nan" if math.isnan(x) else x for x in found["errors"]) == expected


@pytest.mark.parametrize("queue", [1, 2])
def test_a_turn_has_as_many_calls_as_fill_it_and_no_more_under_way_than_the_queue_takes(queue):
    now, calls, under_way = [0.0], [], []

    def call(name, seconds):
        calls.append(name)
        now[0] += seconds
        under_way.append(object())
        assert len(under_way) <= queue
        return under_way[-1]

    functions = {"short": lambda: call("short", 0.01), "long": lambda: call("long", 0.2)}
    found = measure.in_turns(functions, under_way.remove, rounds=3, least=0.0999, queue=queue, clock=lambda: now[0])
    assert found == {"short": pytest.approx([0.01] * 3), "long": pytest.approx([0.2] * 3)}
    assert (calls[4:], under_way) == ((["short"] * 10 + ["long"]) * 3, [])
