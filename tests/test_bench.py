"""The benchmark of the head: what it measures, and that a wrong, missing, dying or slow method is told as such."""

import json
import re
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest

from mllm.errors import UserError
from tools import bench, bench_child, bench_methods, bench_plot, bench_report, bench_run, bench_timing, bench_torch
from tools.bench_methods import Method, by_tokamax, general_backward, value_and_gradients, value_only
from tools.bench_problem import PRESETS, Problem, shapes_of, write_answer, write_inputs
from tools.bench_run import Children, Outcome, Settings
from tools.head_losses import full_logits, fused

SHAPE = (24, 16, 130)
SETTINGS = Settings(dtype="float32", lives=[1.0, 0.5], rounds=2, least=0.0, seed=0)
ROUNDS = {"method": [9.0, 2.0, 3.0], "hW": [1.0, 1.0, 1.0], "gW": [2.0, 2.0, 2.0], "gh": [3.0, 3.0, 3.0]}
FOUND = {"through": "XLA", "errors": {"value": 0.0}, "rounds": ROUNDS, "peak_bytes": None, "temp_bytes": 2**20}
FOUND |= {"peak_is_bound": False}
METHOD = Method("any", 3, value_and_gradients(full_logits))


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    """Its inputs, and the answers at all rows and at half of them."""
    found = Problem(SHAPE, "float32", 0, str(tmp_path_factory.mktemp("problem")))
    write_inputs(found)
    arrays = [jnp.asarray(x) for x in (found.read("hidden"), found.read("weight"), found.labels())]
    for general in (False, True):
        for live in SETTINGS.lives:
            write_answer(found, general, live, *arrays)
    return found


def errors(problem, call, live=1.0, **options):
    method = Method("any", 3, call, **options)
    return next(bench_child.measure(method, problem, [live], rounds=1, least=0.0))["errors"]


def child(monkeypatch, code):
    """Let every process that is started be this one."""
    monkeypatch.setattr(bench_run, "COMMAND", (sys.executable, "-c", code))


class Canned:
    """Processes that find what they are told to, by method; time passes by one with each."""

    def __init__(self, found):
        self.found, self.environment, self.started = found, {}, []

    def start(self, task):
        name = "inputs" if task["task"] == "prepare" else task["methods"][0]
        self.started.append(name)
        return self.found.get(name, Outcome({"obstacles": {}}))


def tables(found, methods, shapes=(SHAPE,)):
    """The last tables of each shape."""
    children = Canned(found)
    seen = [t for t, complete in bench_run.bench(shapes, methods, "cpu", SETTINGS, children) if complete]
    return [table for shape in seen for table in shape], children


# --- a run of it


def test_a_run_tells_the_same_in_its_table_and_its_json_and_draws_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "LEAST", 0.002)
    file, picture = tmp_path / "found.json", tmp_path / "found.png"
    chosen = ["--methods", "optax", "liger", "--live", "0.25", "1"]
    arguments = ["--shape", "24,16,130", *chosen, "--repeats", "2", "--json", str(file), "--plot", str(picture)]
    assert bench.main(arguments) == 0
    said, progress = capsys.readouterr()
    report = json.loads(file.read_text())
    assert [(table["live"], table["rows"]) for table in report["results"]] == [(1.0, 24), (0.25, 6)]
    for table in report["results"]:
        assert "\n".join(bench_report.lines(table)) in said
        rows = {row["method"]: row for row in table["methods"]}
        assert {name: row["status"] for name, row in rows.items()} == {
            "Liger, fused linear": "skipped",
            "optax on full logits": "measured",
        }
        row = rows["optax on full logits"]
        assert set(row["errors"]) == {"value", "dh", "dW"}
        assert max(row["errors"].values()) < 1e-5
        assert row["temp_bytes"] == row["compiled_temp_bytes"] > 0
        assert len(row["rounds"]["method"]) == 2
    assert report["device"]["platform"] == "cpu"
    assert report["versions"]["jax"] == jax.__version__
    assert report["command"].startswith("python ")
    assert re.match(r"\d{4}-\d\d-\d\dT", report["date"])
    assert "N=24, D=16, V=130: optax on full logits" in progress
    assert plt.imread(picture)[..., :3].std() > 0.01


@pytest.mark.parametrize(("dtype", "spread"), [("float32", 1.0), ("bfloat16", 1.0), ("float32", 8.0)])
def test_inputs_are_random_have_logits_of_that_spread_and_are_the_same_for_a_seed(tmp_path, dtype, spread):
    folders = [tmp_path / "one", tmp_path / "other"]
    read = []
    for folder in folders:
        folder.mkdir()
        problem = Problem((256, 64, 5000), dtype, 7, str(folder), spread)
        write_inputs(problem)
        read.append([problem.read(name) for name in ("hidden", "weight")])
    (hidden, weight), again = read
    assert hidden.dtype == weight.dtype == jnp.dtype(dtype)
    for one, other in zip(read[0], again, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.std(hidden.astype(np.float32) @ weight.astype(np.float32).T) == pytest.approx(spread, rel=0.05)
    assert not np.array_equal(weight[:64], weight[4096:4160])  # of another block
    assert problem.weights(0.25).sum() == 64
    assert len(set(problem.labels())) > 200


# --- is a method right?


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


def test_a_number_that_is_not_finite_is_said_to_be_so_in_table_and_json(problem):
    found = [{**FOUND, "live": 1.0, "errors": {"value": 1e-3, "dh": float("nan"), "dW": float("inf")}}]
    table = bench_report.table(problem, 1.0)
    table["methods"] = [bench_report.row(METHOD, table, Outcome(found))]
    assert bench_report.lines(table)[-1].split()[-3:] == ["1.0e-03", "nan", "nan"]
    assert "NaN" not in json.dumps(table)


def test_tokamax_which_has_no_weights_is_given_zeros_and_its_result_corrected(problem, monkeypatch):
    def loss(hidden, labels, weight, *, implementation):
        logits = hidden @ weight
        return jnp.sum(jax.nn.logsumexp(logits, axis=1) - logits[jnp.arange(len(labels)), labels])

    fake = types.SimpleNamespace(linear_softmax_cross_entropy_loss=loss)
    monkeypatch.setitem(sys.modules, "tokamax", fake)
    for live in SETTINGS.lives:
        assert max(errors(problem, by_tokamax(None), live, transposed=True).values()) < 1e-5


def test_methods_through_torch_are_measured_by_its_own_means(problem):
    pytest.importorskip("torch")
    method = Method("full logits in torch", 3)
    found = list(bench_torch.measure(method, problem, SETTINGS.lives, rounds=2, least=0.0))
    assert [figures["through"] for figures in found] == ["torch", "torch"]
    assert max(max(figures["errors"].values()) for figures in found) < 1e-5


# --- times


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


def test_three_products_are_each_once_four_have_the_logits_twice_and_ratios_are_of_the_same_round(problem):
    table = bench_report.table(problem, 0.5)
    row = bench_report.row(METHOD, table, Outcome([{**FOUND, "live": 0.5}]))
    assert row["three_products_seconds"] == 6
    assert row["four_products_seconds"] == 7
    assert (row["seconds"], row["ratio_to_three"], row["ratio_to_four"]) == (3, 3 / 6, 3 / 7)
    assert row["tflops"] == pytest.approx(3 * 2 * 12 * 16 * 130 / 3 / 1e12)
    table["methods"] = [row]
    lines = bench_report.lines(table)
    assert lines[2].split() == ["three", "bare", "products,", "XLA", "6000.00", f"{3 * 2 * 12 * 16 * 130 / 6e12:.3g}"]
    assert lines[3].split() == ["four", "bare", "products,", "XLA", "7000.00", f"{4 * 2 * 12 * 16 * 130 / 7e12:.3g}"]


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
    figures = {**FOUND, "live": 1.0, **found}
    table = bench_report.table(Problem(SHAPE, "float32", 0, ""), 1.0)
    row = bench_report.row(METHOD, table, Outcome([{**figures, "peak_bytes": 1700 << 20}]))
    assert ("≤1700" in bench_report.cells(row)) == is_bound


# --- what can't be measured


def test_a_peer_that_is_not_installed_is_named_with_the_reason_and_not_started():
    peer = Method("a peer", 3, needs=("json", "no_such_module"))
    (all_rows, half), children = tables(
        {"any": Outcome([{**FOUND, "live": 1.0}, {**FOUND, "live": 0.5}])}, [peer, METHOD]
    )
    assert children.started == ["inputs", "any"]
    for table in (all_rows, half):
        assert [row["status"] for row in table["methods"]] == ["skipped", "measured"]
        assert bench_report.lines(table)[-1] == "skipped: a peer: no_such_module is not installed"


def test_a_method_that_says_that_it_can_not_run_here_is_skipped_in_its_words(problem):
    unknown = Method("unknown", 3, value_and_gradients(fused(impl="none")))
    assert bench_methods.obstacle(unknown, problem).startswith("impl must be None or one of")
    assert bench_methods.obstacle(METHOD, problem) is None
    faulty = Method("faulty", 3, value_and_gradients(lambda hidden, *_: hidden @ hidden))
    with pytest.raises(TypeError):
        faulty.call(*[jnp.ones((2, 3))] * 4)
    assert bench_methods.obstacle(faulty, problem) is None
    wrong = Method("wrong", 3, value_and_gradients(fused(workspace=-1)))
    assert bench_methods.obstacle(wrong, problem) is None  # a ValueError, and none that says that it can't run here
    prepared = Outcome({"obstacles": {"unknown": "impl: it can't"}})
    (table, _), children = tables({"inputs": prepared, "any": Outcome([{**FOUND, "live": 1.0}])}, [unknown, METHOD])
    assert children.started == ["inputs", "any"]
    assert "skipped: unknown: impl: it can't" in bench_report.lines(table)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise MemoryError", "out of memory: MemoryError"),
        (
            "raise SystemError('RESOURCE_EXHAUSTED: no 5 GiB')",
            "out of memory: SystemError: RESOURCE_EXHAUSTED: no 5 GiB",
        ),
        ("import os; os.kill(os.getpid(), 11)", "ended by SIGSEGV: it said nothing"),
        ("raise ValueError('shapes')", "ValueError: shapes"),
        ("import time; time.sleep(60)", "stopped after 0.2 s (--timeout)"),
    ],
)
def test_a_process_that_dies_or_hangs_fails_with_a_reason(monkeypatch, code, reason):
    child(monkeypatch, code)
    timeout = 0.2 if "sleep" in code else 60
    assert Children(limit=60, timeout=timeout).start({}) == Outcome(None, "failed", reason)


def test_what_a_process_found_before_it_died_is_kept_and_the_next_one_is_started(monkeypatch):
    child(monkeypatch, "import sys; open(sys.argv[2], 'w').write('[{\"live\": 1.0}]'); raise MemoryError")
    assert Children(limit=60, timeout=60).start({}).found == [{"live": 1.0}]
    died = Outcome([{**FOUND, "live": 1.0}], "failed", "out of memory: MemoryError")
    whole = Outcome([{**FOUND, "live": 1.0}, {**FOUND, "live": 0.5}])
    first = Method("first", 3, METHOD.call)
    (all_rows, half), _ = tables({"first": died, "any": whole}, [first, METHOD])
    assert [row["status"] for row in all_rows["methods"]] == ["measured", "measured"]
    assert [row["status"] for row in half["methods"]] == ["failed", "measured"]
    assert bench_report.lines(half)[-1] == "failed: first: out of memory: MemoryError"


def test_a_limit_stops_what_runs_and_starts_nothing_more(monkeypatch):
    child(monkeypatch, "import time; time.sleep(60)")
    children, start = Children(limit=0.3, timeout=60), time.monotonic()
    assert children.start({}) == Outcome(None, "left out", "--limit: the time was used up before it ended")
    assert children.start({}) == Outcome(None, "left out", "--limit: the time was used up")
    assert time.monotonic() - start < 5


def test_shapes_that_a_limit_leaves_out_are_told_and_earlier_ones_kept():
    found = {"any": Outcome([{**FOUND, "live": 1.0}, {**FOUND, "live": 0.5}])}
    first, late = Outcome({"obstacles": {}}), Outcome(None, "left out", "--limit: the time was used up")

    class Late(Canned):
        def start(self, task):
            self.found["inputs"] = late if "any" in self.started else first
            return super().start(task)

    seen = [t for t, done in bench_run.bench([SHAPE, (8, 16, 130)], [METHOD], "cpu", SETTINGS, Late(found)) if done]
    statuses = [[row["status"] for row in table["methods"]] for shape in seen for table in shape]
    assert statuses == [["measured"]] * 2 + [["left out"]] * 2
    assert bench_report.lines(seen[1][0])[-1] == "left out: any: inputs: --limit: the time was used up"


def test_a_process_ends_with_what_started_it(monkeypatch, tmp_path):
    ended = []
    monkeypatch.setattr(bench_child.os, "read", lambda handle, size: b"")
    monkeypatch.setattr(bench_child.os, "_exit", ended.append)
    bench_child.end_with_parent()
    assert ended == [1]


# --- the command line


def test_a_model_s_name_stands_for_its_sizes():
    assert shapes_of("8192,3B") == [(8192, 2048, 151936)]
    assert shapes_of("7B") == [(1024 << i, 3584, 151936) for i in range(7)]
    assert shapes_of("2048,512,32768") == [(2048, 512, 32768)]


def test_the_preset_for_hopper_has_every_shape_once_what_matters_most_first():
    shapes = PRESETS["hopper"]
    assert shapes[0] == (8192, 2048, 151936)
    assert sorted(shapes) == sorted(shape for model in ("0.5B", "3B", "7B") for shape in shapes_of(model))


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_methods_have_names_of_their_own_on_every_device(platform):
    names = [method.name for method in bench_methods.methods(platform)]
    assert len(set(names)) == len(names)
    kernels = "mosaic_tpu" if platform == "tpu" else "mosaic_gpu"
    for kind in ("workspace 0", "workspace 640 MiB", "default workspace", "value only", "general backward"):
        assert {f"{kernels}, {kind}", f"streaming, {kind}"} <= set(names)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--methods", "nonsense"], "--methods: no method has 'nonsense' in its name; there are: "),
        (["--live", "0"], "argument --live: '0' is not a number above 0, at most 1"),
        (["--limit", "-1"], "argument --limit: '-1' is not a number above 0"),
        (["--preset", "hopper", "--shape", "8,8,8"], "--preset: is a list of shapes, as --shape is; give one of them"),
        (["--plot", "curves"], "--plot: curves doesn't say what it is; end it in .png, .svg or .pdf"),
        (["--plot", "nowhere/a.png"], "--plot: nowhere/a.png can't be written: nowhere is no folder"),
        (["--target", "v6e", "--limit", "9"], "--limit: has no meaning with --target, which times nothing"),
    ],
)
def test_a_wrong_command_line_is_answered_in_a_line(monkeypatch, capsys, arguments, reason):
    monkeypatch.setattr(Children, "start", lambda self, task: Outcome({"platform": "cpu", "kind": "cpu"}))
    assert bench.main(arguments) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: {reason}")
    assert errors.count("\n") == 1


def test_a_device_that_can_not_be_had_is_said_to_be_so(monkeypatch, capsys):
    child(monkeypatch, "raise RuntimeError('no device')")
    assert bench.main([]) == 2
    assert capsys.readouterr().err == "error: JAX finds no device to measure on: RuntimeError: no device\n"


def test_a_run_that_measures_nothing_fails(monkeypatch, capsys):
    child(
        monkeypatch,
        "import sys; '\"device\"' in sys.argv[1] or exit('MemoryError'); "
        'open(sys.argv[2], \'w\').write(\'{"platform": "cpu", "kind": "cpu"}\')',
    )
    assert bench.main(["--methods", "optax"]) == 2
    assert "nothing could be measured; of optax on full logits: inputs: out of memory" in capsys.readouterr().err


# --- the picture


def test_the_picture_has_a_point_for_each_implementation_of_loss_and_gradients(problem, tmp_path):
    value = Method("value", 1, METHOD.call, gradients=False)
    general = Method("general", 4, METHOD.call, general=True)
    table = bench_report.table(problem, 1.0)
    figures = Outcome([{**FOUND, "live": 1.0}])
    table["methods"] = [bench_report.row(method, table, figures) for method in (METHOD, value, general)]
    table["methods"].append(bench_report.row(Method("late", 3), table, Outcome(None, "failed", "why")))
    assert bench_plot.points(table) == {"any": (1.0, 3000.0)}
    assert bench_plot.draw([table], "heading", tmp_path / "a.svg")
    assert not bench_plot.draw([{**table, "methods": []}], "heading", tmp_path / "b.svg")
    drawn = (tmp_path / "a.svg").read_text()
    assert "<svg" in drawn
    assert not (tmp_path / "b.svg").exists()


def test_a_picture_that_can_not_be_written_is_said(problem, tmp_path):
    table = bench_report.table(problem, 1.0)
    table["methods"] = [bench_report.row(METHOD, table, Outcome([{**FOUND, "live": 1.0}]))]
    with pytest.raises(UserError, match=r"--plot: .* can't be written"):
        bench_plot.draw([table], "heading", Path(tmp_path / "nowhere" / "a.png"))
