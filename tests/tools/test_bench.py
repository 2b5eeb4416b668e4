"""The benchmark of the head: its table, and that a missing, dying or slow method is told as such."""

import json
import re
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import pytest

from mllm.errors import UserError
from tools.bench import child as bench_child
from tools.bench import head as bench
from tools.bench import methods as bench_methods
from tools.bench import plot as bench_plot
from tools.bench import report as bench_report
from tools.bench import run as bench_run
from tools.bench.head_losses import full_logits, fused
from tools.bench.methods import Method, value_and_gradients
from tools.bench.problem import PRESETS, Problem, shapes_of
from tools.bench.run import Children, Outcome, Settings

SHAPE = (24, 16, 130)
SETTINGS = Settings(dtype="float32", lives=[1.0, 0.5], rounds=2, least=0.0, seed=0)
ROUNDS = {"method": [9.0, 2.0, 3.0], "hW": [1.0, 1.0, 1.0], "gW": [2.0, 2.0, 2.0], "gh": [3.0, 3.0, 3.0]}
FOUND = {"through": "XLA", "errors": {"value": 0.0}, "rounds": ROUNDS, "peak_bytes": None, "temp_bytes": 2**20}
FOUND |= {"peak_is_bound": False}
PREPARED = {"obstacles": {}, "largest_probability": None}
METHOD = Method("any", 3, value_and_gradients(full_logits))


@pytest.fixture
def problem():
    return Problem(SHAPE, "float32", 0, "")


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
        return self.found.get(name, Outcome(PREPARED))


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


# --- the table


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


@pytest.mark.parametrize("is_bound", [False, True])
def test_a_peak_that_is_only_a_bound_is_marked_as_one(problem, is_bound):
    figures = {**FOUND, "live": 1.0, "peak_bytes": 1700 << 20, "peak_is_bound": is_bound}
    row = bench_report.row(METHOD, bench_report.table(problem, 1.0), Outcome([figures]))
    assert ("≤1700" in bench_report.cells(row)) == is_bound


def test_inputs_with_a_peak_are_told_in_the_table_s_title(problem):
    assert "peak" not in bench_report.lines(bench_report.table(problem, 1.0))[0]
    table = bench_report.table(problem._replace(peak=14.0), 1.0) | {"largest_probability": 0.812}
    [title] = bench_report.lines(table)
    assert title.startswith("N=24, D=16, V=130, peak 14, float32, 100% of the rows count: 24")
    assert title.endswith("; largest probability 0.81 on average")


def test_a_number_that_is_not_finite_is_said_to_be_so_in_table_and_json(problem):
    found = [{**FOUND, "live": 1.0, "errors": {"value": 1e-3, "dh": float("nan"), "dW": float("inf")}}]
    table = bench_report.table(problem, 1.0)
    table["methods"] = [bench_report.row(METHOD, table, Outcome(found))]
    assert bench_report.lines(table)[-1].split()[-3:] == ["1.0e-03", "nan", "nan"]
    assert "NaN" not in json.dumps(table)


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
    prepared = Outcome({**PREPARED, "obstacles": {"unknown": "impl: it can't"}})
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
    first, late = Outcome(PREPARED), Outcome(None, "left out", "--limit: the time was used up")

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
