"""`python tools/bench head`: its table, its errors in a line, a method's figures, and methods that fail."""

import math
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from tools.bench import __main__ as bench
from tools.bench import frame, head, measure, methods
from tools.bench.frame import Outcome
from tools.bench.measure import Problem
from tools.bench.methods import Method, fused, value_and_gradients

PROBLEM = Problem(24, 16, 130, "float32", 0)
SHAPE = (24, 16, 130)
LIVES = [1.0, 0.5]
ROUNDS = {"method": [9.0, 2.0, 3.0], "hW": [1.0, 1.0, 1.0], "gW": [2.0, 2.0, 2.0], "gh": [3.0, 3.0, 3.0]}
FIGURES = {"live": 0.5, "through": "XLA", "errors": {"value": 0.0}, "rounds": ROUNDS, "peak_bytes": None}
FIGURES |= {"temp_bytes": 2**20, "peak_is_bound": False}
METHOD = Method("any", 3, value_and_gradients(fused(impl="full_logits")))


def errors(call, live=1.0, **options):
    method = Method("any", 3, call, **options)
    return next(measure.measure(method, PROBLEM, [live], rounds=1, least=0.0))["errors"]


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


# --- the command


def test_a_table_for_each_share_has_what_was_measured_and_names_what_could_not_be(monkeypatch, capsys):
    monkeypatch.setattr(head, "LEAST", 0.0)
    chosen = ["--methods", "optax", "liger", "general backward", "--live", "0.25", "1", "--repeats", "2"]
    assert bench.main(["head", "--shape", "24,16,130", *chosen]) == 0
    said, progress = capsys.readouterr()
    about, first, second = said.split("\n\n")
    assert about.startswith(f"cpu cpu, jax {jax.__version__}, ")
    for table, share in ((first, "100%"), (second, "25%")):
        title, columns, _, three, four, general, optax, *skipped = table.splitlines()
        assert title == f"N=24, D=16, V=130, float32, {share} of the rows count"
        assert cells(columns) == list(head.COLUMNS)
        names = ["3 bare products, XLA", "4 bare products, XLA", "xla, general backward", "optax on full logits"]
        assert [cells(line)[0] for line in (three, four, general, optax)] == names
        for line in (general, optax):
            ms, to_three, to_four, *_, peak, temporaries, loss, dh, dw = cells(line)[1:]
            assert float(ms) > 0 < float(to_four) < float(to_three)
            assert (peak, float(temporaries) >= 0) == ("-", True)
            assert max(map(float, (loss, dh, dw))) < 1e-5
        assert "skipped: torch and liger_kernel are not installed: Liger, fused linear" in skipped
    assert progress.count("\n") == 4  # a line for each method


def test_a_method_that_fails_dies_or_refuses_is_a_line_with_the_reason_and_the_others_are_measured(monkeypatch, capsys):
    def start(module, task, *_):
        if "method" not in task:
            return Outcome([{"platform": "cpu", "kind": "cpu"}])
        if "optax" in task["method"]:
            return Outcome([FIGURES], "failed", "MemoryError")  # measured at one share
        return Outcome([], "skipped", "impl: it can't run here")

    monkeypatch.setattr(head, "start", start)
    assert head.main(["--methods", "optax", "scan", "--shape", "24,16,130", "--live", "1", "0.5"]) == 0
    whole, half = capsys.readouterr().out.split("\n\n")[1:]
    assert "failed: MemoryError: optax on full logits" in whole.splitlines()
    assert [cells(line)[0] for line in half.splitlines()].count("optax on full logits") == 1
    for table in (whole, half):
        assert "skipped: impl: it can't run here: scan over 256 tokens, recomputed" in table.splitlines()


@pytest.mark.parametrize(
    ("finds_a_device", "method", "said"),
    [
        (True, "optax", "--shape, --methods: nothing could be measured; optax on full logits: RuntimeError: no"),
        (True, "nonsense", "--methods: no method has 'nonsense' in its name; there are: "),
        (False, "optax", "JAX finds no device to measure on: RuntimeError: no"),
    ],
)
def test_a_run_that_measures_nothing_fails(monkeypatch, capsys, finds_a_device, method, said):
    device = Outcome([{"platform": "cpu", "kind": "cpu"}])
    failed = Outcome([], "failed", "RuntimeError: no")
    monkeypatch.setattr(head, "start", lambda _, task, *__: device if finds_a_device and not task else failed)
    assert bench.main(["head", "--methods", method]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {said}")


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("frame.answer(lambda: iter([{'a': 1}]))", Outcome([{"a": 1}])),
        ("child_process.answer({'a': 1}); raise MemoryError", Outcome([{"a": 1}], "failed", "MemoryError")),
        ("time.sleep(60)", Outcome([], "failed", "stopped after 3 s")),
        ("def no():\n  yield {}\n  raise frame.SkippedError('no')\nframe.answer(no)", Outcome([], "skipped", "no")),
    ],
)
def test_what_came_of_a_process(tmp_path, monkeypatch, code, outcome):
    monkeypatch.setattr(frame, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(bench.Path(bench.__file__).parent.parent.parent))
    imports = "import time\nfrom mllm import child_process\nfrom tools.bench import frame\n"
    (tmp_path / "method.py").write_text(imports + code)
    assert frame.start("method", {}, 3.0) == outcome


# --- the table


def test_ratios_compare_with_three_or_four_products_in_the_same_round_and_what_is_not_finite_shows():
    errors = {"value": 1e-3, "dh": math.nan, "dW": math.inf}
    outcome = Outcome([{**FIGURES, "errors": errors, "peak_bytes": 1700 << 20, "peak_is_bound": True}])
    *_, three, four, row = head.text(SHAPE, 0.5, {"any": 3}, {"any": outcome}).splitlines()
    flops = 2 * 12 * 16 * 130
    assert cells(three)[:5] == ["3 bare products, XLA", "6000.00", "", "", f"{3 * flops / 6e12:.3g}"]
    assert cells(four)[:5] == ["4 bare products, XLA", "7000.00", "", "", f"{4 * flops / 7e12:.3g}"]
    times = ["3000.00", f"{3 / 6:.2f}", f"{3 / 7:.2f}", f"{3 * flops / 3e12:.3g}"]
    assert cells(row) == ["any", *times, "≤1700", "1.0", "1.0e-03", "nan", "inf"]


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_methods_have_different_names_and_kernels_run_on_their_platform_only(platform):
    found = methods.methods(platform)
    assert len({method.name for method in found}) == len(found)
    kernels = "mosaic_tpu" if platform == "tpu" else "mosaic_gpu"
    for kind in ("workspace 0", "workspace 640 MiB", "default workspace", "value only", "general backward"):
        by_name = {method.name: method.obstacle(platform) for method in found}
        assert by_name[f"xla, {kind}"] is None
        assert (by_name[f"{kernels}, {kind}"] is None) == (platform != "cpu")


# --- a method's figures


def wrong(hidden, weight, labels, weights, *rest):
    value, dh, dw = METHOD.call(hidden, weight, labels, weights, *rest)
    return value * 1.01, dh.at[3, 5].add(0.5 * jnp.abs(dh).max()), dw.at[-1].set(jnp.nan)


def of_all_rows(hidden, weight, labels, weights, *rest):
    return METHOD.call(hidden, weight, labels, jnp.ones_like(weights), *rest)


NONE = pytest.approx(0, abs=1e-5)
SOME = pytest.approx(1, abs=0.99)


@pytest.mark.parametrize("live", LIVES)
@pytest.mark.parametrize(
    ("call", "options", "expected"),
    [
        pytest.param(METHOD.call, {}, (NONE, NONE, NONE), id="right"),
        pytest.param(methods.general_backward(), {"general": True}, (NONE, NONE, NONE), id="right, any cotangents"),
        pytest.param(methods.value_only(fused()), {}, (NONE,), id="right, value only"),
        pytest.param(methods.tokamax(None), {"transposed": True}, (NONE, NONE, NONE), id="right, rows as zeros"),
        pytest.param(wrong, {}, (pytest.approx(0.01, rel=1e-3), pytest.approx(0.5, rel=1e-3), "nan"), id="wrong"),
        pytest.param(of_all_rows, {}, (SOME, SOME, SOME), id="all rows"),
    ],
)
def test_a_method_s_errors_say_where_it_is_wrong_and_by_how_much(live, call, options, expected, monkeypatch):
    def tokamax(hidden, labels, weight, *, implementation):
        logits = hidden @ weight
        return jnp.sum(jax.nn.logsumexp(logits, axis=1) - logits[jnp.arange(len(labels)), labels])

    monkeypatch.setitem(sys.modules, "tokamax", types.SimpleNamespace(linear_softmax_cross_entropy_loss=tokamax))
    found = errors(call, live, **options)
    assert list(found) == ["value", "dh", "dW"][: len(expected)]
    if call is of_all_rows and live == 1:
        expected = (NONE, NONE, NONE)
    assert tuple("nan" if math.isnan(x) else x for x in found.values()) == expected


def test_a_method_whose_tracing_refuses_is_skipped_with_its_words():
    with pytest.raises(measure.SkippedError, match=r"^24 tokens are no multiple of 5$"):
        errors(value_and_gradients(methods.chunked(5)))


@pytest.mark.parametrize(("before", "is_bound"), [(900, False), (1700, True)])
def test_the_device_s_own_count_is_a_bound_where_the_compiler_took_as_much(before, is_bound):
    found = measure.memory_of([jnp.zeros(100)], [jnp.zeros(50)], 1700, 10, before)
    assert found == {"peak_bytes": 1700, "temp_bytes": 1100, "peak_is_bound": is_bound}


@pytest.mark.parametrize("queue", [1, 2])
def test_a_turn_has_as_many_calls_as_fill_it_and_no_more_under_way_than_the_queue_takes(queue):
    now, calls, under_way, most = [0.0], [], [], [0]

    def function(name, seconds):
        def call():
            calls.append(name)
            now[0] += seconds
            under_way.append(object())
            most[0] = max(most[0], len(under_way))
            return under_way[-1]

        return call

    functions = {"short": function("short", 0.01), "long": function("long", 0.2)}
    found = frame.in_turns(functions, under_way.remove, rounds=3, least=0.0999, queue=queue, clock=lambda: now[0])
    assert found == {"short": pytest.approx([0.01] * 3), "long": pytest.approx([0.2] * 3)}
    assert calls[4:] == (["short"] * 10 + ["long"]) * 3
    assert (most, under_way) == ([queue], [])
