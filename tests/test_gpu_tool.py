"""tools/gpu.py: what runs, for how long, what is told of what fails, and what the next call does.

Programs are made up, but for a few that print and end.
"""

import json
import sys
import time
from pathlib import Path

import pytest

from tools import gpu, gpu_process, gpu_results, gpu_smoke
from tools.gpu_process import Outcome

DEVICE = {"platform": "gpu", "kind": "H100", "capability": "9.0", "driver": "1", "runtime": "cuda", "versions": {}}
RIGHT = {"value": 1e-6, "loss": 1e-6, "dh": 1e-3, "dW": 1e-3}
SHAPE = (8192, 2048, 151936)


def says(*lines, code=0, seconds=1.0):
    return Outcome(
        code, "".join(f"{json.dumps(line) if isinstance(line, dict) else line}\n" for line in lines), seconds
    )


def report(*rows, live=1.0, shape=SHAPE, peak=0):
    """Of the bench; rows are (method, status)."""
    methods = [{"method": name, "status": status, "reason": "why"} for name, status in rows]
    table = {**dict(zip("NDV", shape, strict=True)), "dtype": "bfloat16", "peak": peak, "live": live, "rows": 1}
    table["largest_probability"] = None
    about = {"device": {"kind": "H100"}, "versions": {"jax": "1"}, "dtype": "bfloat16", "date": "2000-01-01T00"}
    return {**about, "results": [table | {"methods": methods}]}


class Machine:
    """Runs nothing; remembers what it was to run, and answers by the name of the tool."""

    def __init__(self, **answers):
        self.answers, self.commands, self.given, self.environment = answers, [], [], {}

    def run(self, command, environment, seconds, log):
        name = "smoke" if "tools.gpu_smoke" in command else "tests" if "pytest" in command else Path(command[1]).stem
        self.commands.append(command)
        self.given.append((command, seconds))
        self.environment[name] = environment
        if name == "bench" and "bench" not in self.answers:
            Path(command[command.index("--json") + 1]).write_text(json.dumps(report(("ours", "failed"))))
        found = self.answers.get(name, says(DEVICE, RIGHT) if name == "smoke" else says("23 passed in 90 s"))
        return found(command) if callable(found) else found

    def of(self, *words):
        return [command for command in self.commands if all(word in " ".join(command) for word in words)]


@pytest.fixture(autouse=True)
def tiles(tmp_path, monkeypatch):
    """The repository's table, a copy; everything is installed."""
    monkeypatch.setattr(gpu, "TILES", tmp_path / "repository" / "gpu_tiles.json")
    gpu.TILES.parent.mkdir()
    gpu.TILES.write_text("[]")
    monkeypatch.setattr(gpu, "absent", lambda step: "")
    return gpu.TILES


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def call(machine, out, *arguments):
    return gpu.main(["--out", str(out), *arguments], machine.run)


def states(out):
    return {name: job["status"] for name, job in json.loads((out / "gpu.json").read_text())["jobs"].items()}


# A call


def test_the_smoke_test_is_the_first_and_all_steps_follow(out, capsys):
    machine = Machine()
    assert call(machine, out, "--limit", "100000") == 0
    assert set(states(out).values()) == {"done"}
    assert list(states(out)) == ["smoke", *(job.name for job in gpu.jobs())]
    assert machine.commands[0][-1] == "tools.gpu_smoke"
    assert [len(machine.of(name)) for name in ("pytest -m gpu", "tune.py", "bench.py", "bench_train.py")] == [
        1,
        3,
        7,
        1,
    ]
    assert all("--write" in command for command in machine.of("tune.py"))
    printed = capsys.readouterr().out
    assert "H100, compute capability 9.0; driver 1" in printed
    assert "missing" not in printed


def test_only_the_steps_that_are_asked_for_run(out):
    machine = Machine()
    call(machine, out, "--steps", "tune", "--limit", "100000")
    assert len(machine.commands) == 1 + len(machine.of("tune.py")) == 4


def test_the_tests_are_those_with_a_gpus_marker_and_see_the_gpu(out):
    machine = Machine()
    call(machine, out, "--steps", "tests")
    [command] = machine.of("pytest")
    assert "tests/test_gpu.py" in command
    assert "tests/test_lm_head.py" not in command
    assert machine.environment["tests"]["JAX_PLATFORMS"] == "cuda,cpu"


def test_every_program_ends_by_itself_ahead_of_its_time_and_no_time_is_beyond_the_limit(out):
    machine = Machine()
    call(machine, out, "--limit", "200")
    limited = [(command, seconds) for command, seconds in machine.given if "--limit" in command]
    assert len(limited) == len(gpu.jobs()) - 1
    for command, seconds in limited:
        own = float(command[command.index("--limit") + 1])
        assert 0 < own <= seconds - gpu.MARGIN + 1 <= 200 - 2 * gpu.MARGIN + 1


def test_a_relative_folder_is_the_callers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    machine = Machine()
    call(machine, Path("out"), "--steps", "bench", "--limit", "100000")
    assert machine.of("bench.py", f"--json {tmp_path}/out/bench/")


def test_what_has_too_little_time_is_not_begun_and_named_as_missing(out, capsys):
    machine = Machine()
    assert call(machine, out, "--limit", "70") == 0
    assert [command[-1] for command in machine.commands] == ["tools.gpu_smoke"]
    assert set(states(out).values()) == {"done", "to come"}
    assert "missing: tests; tune 2048; bench 8192,2048; train; tune 3584; tune 896; " in capsys.readouterr().out


def test_one_step_that_fails_is_told_and_the_others_go_on(out, capsys):
    machine = Machine(tests=says("collected", "3 failed, 20 passed in 90 s", code=1))
    assert call(machine, out, "--limit", "100000") == 1
    assert [name for name, status in states(out).items() if status != "done"] == ["tests"]
    assert "3 failed, 20 passed in 90 s" in capsys.readouterr().out


def test_tests_that_are_all_skipped_are_not_done(out, capsys):
    call(Machine(tests=says("29 skipped, 34 deselected in 6.49s")), out, "--steps", "tests")
    assert states(out)["tests"] == "to come"
    assert "no test ran" in capsys.readouterr().out


def test_one_that_hangs_is_told(out, capsys):
    assert call(Machine(tests=Outcome(None, "...", 300.0)), out, "--limit", "100000") == 1
    assert "stopped after 300 s" in capsys.readouterr().out


def test_a_package_that_is_missing_leaves_one_step_out_and_is_named(out, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "absent", lambda step: "pydantic: not installed" if step == "train" else "")
    machine = Machine()
    assert call(machine, out, "--limit", "100000") == 0
    assert machine.of("bench_train.py") == []
    assert states(out)["train"] == "left out"
    assert "pydantic: not installed" in capsys.readouterr().out


# The smoke test


@pytest.mark.parametrize(
    ("smoke", "said"),
    [
        (says(DEVICE, "CUDA_ERROR_ILLEGAL_ADDRESS", code=-6), "failed: ended by SIGABRT: CUDA_ERROR_ILLEGAL_ADDRESS"),
        (Outcome(None, json.dumps(DEVICE), 120.0), "failed: it was ended in its time"),
        (says(DEVICE, RIGHT | {"dW": 0.5}), "failed: WRONG beside full logits: {'dW': 0.5}"),
        (says(DEVICE, RIGHT | {"dh": float("nan")}), "failed: WRONG beside full logits: {'dh': nan}"),
    ],
)
def test_a_fault_of_the_kernels_is_told_at_once_and_the_steps_run_all_the_same(smoke, said, out, capsys):
    machine = Machine(smoke=smoke)
    assert call(machine, out, "--limit", "100000") == 1
    assert f"smoke test of the kernels: {said}" in capsys.readouterr().out
    assert len(machine.commands) == 1 + len(gpu.jobs())


@pytest.mark.parametrize(
    ("smoke", "said"),
    [
        (says({**DEVICE, "platform": "cpu"}), "JAX's device here is a cpu, and this is for a Hopper GPU"),
        (says("RuntimeError: no driver", code=1), "JAX finds no device: RuntimeError: no driver"),
    ],
)
def test_without_a_gpu_a_line_says_so_and_nothing_is_made(smoke, said, out, capsys):
    assert call(Machine(smoke=smoke), out) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: {said}")
    assert errors.count("\n") == 1
    assert not out.exists()


def test_on_this_machine_the_smoke_test_tells_its_device_and_finds_what_is_right_right(monkeypatch):
    monkeypatch.setattr(gpu_smoke, "SHAPE", (20, 16, 50))
    assert gpu_smoke.about()["platform"] == "cpu"
    errors = gpu_smoke.errors("streaming")
    assert set(errors) == set(RIGHT)
    assert max(errors.values()) < 0.01


# The next call


def test_what_is_done_is_not_done_again_and_what_was_cut_off_goes_on(out):
    late = Machine(bench_train=says("--limit: 300 s are over; with --json the same command goes on"))
    call(late, out, "--limit", "100000")
    assert states(out)["train"] == "to come"
    machine = Machine()
    assert call(machine, out, "--limit", "100000") == 0
    assert len(machine.commands) == 2
    assert str(out / "train.json") in machine.of("bench_train.py")[0]
    assert set(states(out).values()) == {"done"}


def test_what_failed_is_tried_again_after_the_others(out):
    call(Machine(tests=says("1 failed", code=1)), out, "--steps", "tests")
    machine = Machine()
    assert call(machine, out, "--limit", "100000") == 0
    assert "pytest" in machine.commands[-1]


def test_methods_that_a_limit_left_out_of_the_bench_are_measured_by_the_next_call(out):
    def cut(command):
        rows = [("ours", "measured"), ("theirs", "left out"), ("absent", "skipped")]
        Path(command[command.index("--json") + 1]).write_text(json.dumps(report(*rows)))
        return says("done")

    def rest(command):
        Path(command[command.index("--json") + 1]).write_text(json.dumps(report(("theirs", "measured"))))
        return says("done")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "jobs", lambda: [gpu.bench_job(8192, 2048)])
        patch.setattr(gpu_results, "gather", lambda folder: [])
        call(Machine(bench=cut), out, "--steps", "bench")
        assert states(out)["bench 8192,2048"] == "to come"
        machine = Machine(bench=rest)
        call(machine, out, "--steps", "bench")
    assert machine.of("bench.py")[0][-2:] == ["--methods", "theirs"]
    assert states(out)["bench 8192,2048"] == "done"
    [table] = gpu_results.tables(out, "8192_2048")
    assert [(row["method"], row["status"]) for row in table["methods"]] == [
        ("ours", "measured"),
        ("theirs", "measured"),
        ("absent", "skipped"),
    ]


def test_a_fresh_copy_of_the_repository_learns_the_tiles_that_were_found_before(out, tiles):
    noted = {"engine": "mosaic_gpu", "device": "H100", "features": 2048, "by": "time"}

    def found(command):
        tiles.write_text(json.dumps([noted]))
        return says("done")

    call(Machine(tune=found), out, "--steps", "tune", "--limit", "100000")
    tiles.write_text("[]")
    call(Machine(), out, "--steps", "tests")
    assert json.loads(tiles.read_text()) == [noted]


def test_a_folder_that_tells_of_another_gpu_is_refused(out, capsys):
    call(Machine(), out, "--steps", "tests")
    capsys.readouterr()
    assert call(Machine(smoke=says({**DEVICE, "kind": "H200"}, RIGHT)), out) == 2
    assert capsys.readouterr().err == f"error: --out: {out} tells of H100, and this is H200: give another folder\n"


# Results


def test_all_runs_of_the_bench_become_one_table_one_file_and_one_plot(out):
    (out / "bench").mkdir(parents=True)
    for shape, peak in ((SHAPE, 0), (SHAPE, 14), ((64, 8, 300), 0)):
        file = gpu_results.next_file(out, f"{shape[0]}_{peak}")
        file.write_text(json.dumps(report(("ours", "failed"), shape=shape, peak=peak)))
    assert list(gpu_results.gather(out)) == []
    assert (out / "bench.txt").read_text().count("failed: ours: why") == 3
    found = json.loads((out / "bench.json").read_text())["results"]
    assert [(table["N"], table["peak"]) for table in found] == [(8192, 0), (8192, 14), (64, 0)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: --out"),
        (["--limit", "-1"], "--limit: -1.0 is no number of seconds above 0"),
        (["--steps", "all"], "argument --steps: invalid choice: 'all'"),
    ],
)
def test_a_bad_argument_is_named_in_one_line(arguments, said, out, capsys):
    assert gpu.main([*(["--out", str(out)] if arguments else []), *arguments], Machine().run) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: {said}")
    assert errors.count("\n") == 1


def test_a_folder_of_something_else_is_left_alone(out, capsys):
    out.mkdir()
    (out / "gpu.json").write_text('{"jobs": 1}')
    assert call(Machine(), out) == 2
    assert f"{out / 'gpu.json'} was not written by this tool" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["gpu.json"]


def test_without_jax_nothing_runs(out, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "absent", lambda step: f"{gpu.NEEDS[step][0]}: not installed")
    assert call(Machine(), out) == 2
    assert capsys.readouterr().err == f"error: jax: not installed for {sys.executable}, and nothing here runs without\n"


# Programs


def python(code, seconds=60.0, log=None):
    return gpu_process.run([sys.executable, "-c", code], {"MINE": "yes"}, seconds, log)


def test_what_a_program_says_is_shown_and_logged(tmp_path, capfd):
    outcome = python("import os; print(os.environ['MINE'], os.getcwd())", log=tmp_path / "log")
    assert (outcome.code, outcome.reason) == (0, "")
    assert outcome.said == f"yes {gpu_process.ROOT}\n" == (tmp_path / "log").read_text() == capfd.readouterr().out


def test_of_a_failure_the_line_of_the_error_is_the_reason():
    assert python("print(1); raise ValueError('what it was')").reason == "ValueError: what it was"
    assert python("import os; os.abort()").reason == "ended by SIGABRT: it said nothing"


def test_a_program_is_ended_in_its_time_with_all_that_it_started():
    start = time.monotonic()
    code = "import subprocess; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    outcome = python(code, seconds=0.5)
    assert outcome.code is None
    assert outcome.said.startswith("begun")
    assert time.monotonic() - start < 10
