"""`python tools/bench head`: its table and JSON, errors and memory of a method, and methods that fail."""

import json
import math
import re
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from tools.bench import __main__ as bench
from tools.bench import head, measure, methods, report
from tools.bench.head import Outcome
from tools.bench.measure import Problem
from tools.bench.methods import Method, fused, value_and_gradients

PROBLEM = Problem(24, 16, 130, "float32", 0)
SHAPE = (24, 16, 130)
LIVES = [1.0, 0.5]
ROUNDS = {"method": [9.0, 2.0, 3.0], "hW": [1.0, 1.0, 1.0], "gW": [2.0, 2.0, 2.0], "gh": [3.0, 3.0, 3.0]}
FIGURES = {"live": 1.0, "through": "XLA", "errors": {"value": 0.0}, "rounds": ROUNDS, "peak_bytes": None}
FIGURES |= {"temp_bytes": 2**20, "peak_is_bound": False}
METHOD = Method("any", 3, value_and_gradients(fused(impl="full_logits")))


@pytest.fixture(scope="module", autouse=True)
def reference_once():
    """The reference's results, found once for each share of rows that count."""
    found, expected = {}, Problem.expected
    with pytest.MonkeyPatch.context() as patch:

        def cached(problem, general, live):
            if (problem, general, live) not in found:
                found[problem, general, live] = expected(problem, general, live)
            return found[problem, general, live]

        patch.setattr(Problem, "expected", cached)
        yield


def errors(call, live=1.0, **options):
    method = Method("any", 3, call, **options)
    return next(measure.measure(method, PROBLEM, [live], rounds=1, least=0.0))["errors"]


def child(monkeypatch, code):
    """Let every process that is started run this code."""
    monkeypatch.setattr(head, "COMMAND", (sys.executable, "-c", f"from mllm import child_process\n{code}"))


def rows(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line]


# --- a run


def test_the_table_and_the_json_tell_the_same(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(head, "LEAST", 0.0)
    file = tmp_path / "found.json"
    chosen = ["--methods", "optax", "liger", "tunix", "--live", "0.25", "1", "--repeats", "2"]
    assert bench.main(["head", "--shape", "24,16,130", *chosen, "--json", str(file)]) == 0
    said, progress = capsys.readouterr()
    content = json.loads(file.read_text())
    assert [(table["live"], table["rows"]) for table in content["results"]] == [(1.0, 24), (0.25, 6)]
    for table in content["results"]:
        assert "\n".join(report.lines(table)) in said
        by_name = {row["method"]: row for row in table["methods"]}
        assert by_name["Liger, fused linear"]["status"] == "skipped"
        assert set(by_name) == {"Liger, fused linear", "google-tunix, default loss", "optax on full logits"}
        row = by_name["optax on full logits"]
        assert set(row["errors"]) == {"value", "dh", "dW"}
        assert max(row["errors"].values()) < 1e-5
        assert row["temp_bytes"] == row["compiled_temp_bytes"] > 0
        assert len(row["rounds"]["method"]) == 2
    assert content["device"]["platform"] == "cpu"
    assert content["versions"]["jax"] == jax.__version__
    assert re.match(r"\d{4}-\d\d-\d\dT", content["date"])
    assert progress == ""  # without a terminal there is no bar
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_a_method_that_fails_is_a_row_with_the_reason_and_the_others_are_measured(monkeypatch, capsys):
    code = f"""
import json, sys
task = json.loads(sys.argv[1])
if task["task"] == "device":
    child_process.answer({{"platform": "cpu", "kind": "cpu"}})
elif "optax" in task["method"]:
    child_process.answer({FIGURES!r})
    raise MemoryError
else:
    child_process.answer({{"skipped": "impl: it can't run here"}})
"""
    child(monkeypatch, code)
    assert head.main(["--methods", "optax", "scan", "liger", "--shape", "24,16,130", "--live", "1", "0.5"]) == 0
    said = rows(capsys)
    assert sum(line.startswith("optax on full logits") for line in said) == 1  # measured at one share
    assert "failed: optax on full logits: MemoryError" in said
    assert said.count("skipped: scan over 256 tokens, recomputed: impl: it can't run here") == 2
    assert sum(line.startswith("skipped: Liger, fused linear: ") for line in said) == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--methods", "nonsense"], "--methods: no method has 'nonsense' in its name; there are: "),
        (["--live", "0"], "--live: 0 is not a number above 0, at most 1"),
        (["--target", "v6e", "--live", "1"], "--live: has no meaning with --target, which times nothing"),
    ],
)
def test_a_bad_argument_is_refused_in_one_line(monkeypatch, capsys, arguments, reason):
    device = Outcome([{"platform": "cpu", "kind": "cpu"}])
    monkeypatch.setattr(head, "start", lambda *_: device)
    assert bench.main(["head", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {reason}")
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError('no device')", "JAX finds no device to measure on: RuntimeError: no device\n"),
        (
            "import sys; '\"device\"' in sys.argv[1] or sys.exit('MemoryError')\n"
            "child_process.answer({'platform': 'cpu', 'kind': 'cpu'})",
            "--shape, --methods: nothing could be measured; optax on full logits: MemoryError\n",
        ),
    ],
)
def test_a_run_that_measures_nothing_fails(monkeypatch, capsys, code, message):
    child(monkeypatch, code)
    assert head.main(["--methods", "optax"]) == 2
    assert capsys.readouterr().err.endswith(f"error: {message}")


# --- the table


def test_ratios_compare_with_three_or_four_products_in_the_same_round():
    table = report.empty_table(SHAPE, "float32", 0.5)
    row = report.row(METHOD, table, Outcome([{**FIGURES, "live": 0.5}]))
    assert (row["seconds"], row["ratio_to_three"], row["ratio_to_four"]) == (3, 3 / 6, 3 / 7)
    assert row["tflops"] == pytest.approx(3 * 2 * 12 * 16 * 130 / 3 / 1e12)
    table["methods"] = [row]
    _, _, three, four, _ = report.lines(table)
    assert three.split() == ["three", "bare", "products,", "XLA", "6000.00", f"{3 * 2 * 12 * 16 * 130 / 6e12:.3g}"]
    assert four.split() == ["four", "bare", "products,", "XLA", "7000.00", f"{4 * 2 * 12 * 16 * 130 / 7e12:.3g}"]


def test_a_bound_and_a_number_that_is_not_finite_are_marked():
    figures = {**FIGURES, "peak_bytes": 1700 << 20, "peak_is_bound": True}
    figures["errors"] = {"value": 1e-3, "dh": math.nan, "dW": math.inf}
    table = report.empty_table(SHAPE, "float32", 1.0)
    table["methods"] = [report.row(METHOD, table, Outcome([figures]))]
    assert report.lines(table)[-1].split()[-5:] == ["≤1700", "1.0", "1.0e-03", "nan", "nan"]
    assert "NaN" not in json.dumps(table)


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


@pytest.mark.parametrize("live", LIVES)
def test_a_correct_method_shows_no_error(live):
    assert max(errors(METHOD.call, live).values()) < 1e-5
    assert max(errors(methods.general_backward(), live, general=True).values()) < 1e-5
    assert errors(methods.value_only(fused()), live).keys() == {"value"}


def test_a_wrong_method_shows_where_it_is_wrong_and_by_how_much():
    def wrong(*arguments):
        value, dh, dw = METHOD.call(*arguments)
        return value * 1.01, dh.at[3, 5].add(0.5 * jnp.abs(dh).max()), dw.at[-1].set(jnp.nan)

    found = errors(wrong)
    assert found["value"] == pytest.approx(0.01, rel=1e-3)
    assert found["dh"] == pytest.approx(0.5, rel=1e-3)
    assert math.isnan(found["dW"])


def test_a_method_that_counts_all_rows_shows_errors_where_half_of_them_count():
    def all_rows(hidden, weight, labels, weights, *rest):
        return METHOD.call(hidden, weight, labels, jnp.ones_like(weights), *rest)

    assert min(errors(all_rows, live=0.5).values()) > 0.01


@pytest.mark.parametrize("live", LIVES)
def test_tokamax_without_weights_gets_zeros_and_its_result_is_corrected(live, monkeypatch):
    def loss(hidden, labels, weight, *, implementation):
        logits = hidden @ weight
        return jnp.sum(jax.nn.logsumexp(logits, axis=1) - logits[jnp.arange(len(labels)), labels])

    monkeypatch.setitem(sys.modules, "tokamax", types.SimpleNamespace(linear_softmax_cross_entropy_loss=loss))
    assert max(errors(methods.tokamax(None), live, transposed=True).values()) < 1e-5


@pytest.mark.parametrize(
    ("module", "name"), [("torch", "full logits in torch"), ("tunix", "google-tunix, default loss")]
)
def test_an_installed_library_agrees_with_the_reference(module, name):
    pytest.importorskip(module)
    [method] = [method for method in methods.methods("cpu") if method.name == name]
    for figures in measure.measure(method, PROBLEM, LIVES, rounds=1, least=0.0):
        assert max(figures["errors"].values()) < 1e-5


def test_bare_products_take_the_rows_that_count_in_the_arrays_dtype():
    hidden, weight = jnp.ones((6, 16), jnp.bfloat16), jnp.ones((130, 16), jnp.bfloat16)
    found = {name: call() for name, call in measure.bare_products(hidden, weight).items()}
    assert {name: x.shape for name, x in found.items()} == {"hW": (6, 130), "gW": (6, 16), "gh": (130, 16)}
    assert {x.dtype for x in found.values()} == {jnp.dtype(jnp.bfloat16)}


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
    found = measure.in_turns(functions, under_way.remove, rounds=3, least=0.0999, queue=queue, clock=lambda: now[0])
    assert found == {"short": pytest.approx([0.01] * 3), "long": pytest.approx([0.2] * 3)}
    assert calls[4:] == (["short"] * 10 + ["long"]) * 3
    assert (most, under_way) == ([queue], [])


@pytest.mark.parametrize(("before", "is_bound"), [(900, False), (1700, True)])
def test_the_device_s_own_count_is_a_bound_where_the_compiler_took_as_much(before, is_bound):
    found = measure.memory_of([jnp.zeros(100)], [jnp.zeros(50)], 10, before, 1700)
    assert (found["peak_bytes"], found["peak_is_bound"], found["temp_bytes"]) == (1700, is_bound, 1100)
