"""tools/device.py: what becomes of jobs that end well, fail, die or hang, and what the next call does.

These jobs are made up. The real ones need a device: their order is right, their tests exist, and their settings are
valid.
"""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from types import SimpleNamespace

import pytest

from mllm.config import load as configs
from mllm.errors import UserError
from tools import device
from tools.device import Job, make_jobs

DEVICE = {"platform": "cpu", "kind": "cpu", "devices": 1, "jax": "0.12.0"}


def python(name, code, **more):
    """A job that runs `code`, and notes in the file `ran` that it did."""
    return Job(name, ["-c", f"import os, sys, time\nprint({name!r}, file=open('{{own}}/../ran', 'a'))\n{code}"], **more)


GOOD = "print('| a table')"
SLEEP = f"{3600 + os.getpid()}.531"
HANGS = f"""import subprocess, time
print('its test', flush=True)
subprocess.Popen(['sleep', '{SLEEP}'])
open('{{own}}/hung', 'x')
time.sleep(3600)"""
JOBS = [
    python("wrong", "sys.exit('ValueError: no')"),
    python("dies", "os.kill(os.getpid(), 11)"),
    python("hangs", HANGS),
    python("lacks a module", "", obstacle=device.absent("no_such_module", "json")),
    python("good", GOOD, shows=r"^\|"),
]


@pytest.fixture(autouse=True)
def clocks(tmp_path, monkeypatch):
    """No time passes for the jobs, but for one that hangs: a day."""
    monkeypatch.setattr(device, "time", SimpleNamespace(monotonic=lambda: 0.0))
    hung = SimpleNamespace(monotonic=lambda: 86400.0 * any(tmp_path.rglob("hung")))
    monkeypatch.setattr(device.child, "time", hung)


def call(folder, jobs, deadline=600.0, kind="cpu", platform="cpu"):
    described = DEVICE | {"kind": kind, "platform": platform}
    return device.measure(folder, described, jobs, device.read_results(folder), deadline)


def wait_until_killed():
    """Until pytest's time is up, if a process that a job has started stays."""
    while subprocess.run(["pgrep", "-f", f"sleep {SLEEP}"], check=False).returncode == 0:
        time.sleep(0.05)


def statuses(folder):
    records = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    return {record["job"]: (record["status"], record.get("reason", "")) for record in records}


def test_a_job_that_fails_dies_or_hangs_costs_only_itself_and_the_next_call_tries_it_last(tmp_path):
    out = tmp_path / "out"
    assert call(out, JOBS) == 1
    assert statuses(out) == {
        "wrong": ("failed", "ValueError: no"),
        "dies": ("failed", "killed by SIGSEGV: it said nothing"),
        "hangs": ("failed", "the time limit was reached"),
        "lacks a module": ("left out", "no_such_module: not installed"),
        "good": ("done", ""),
    }
    wait_until_killed()
    table = (out / "table.md").read_text()
    assert "| good | 0 | done |" in table
    assert "| dies | 0 | failed: killed by SIGSEGV" in table
    assert "good\n```\n| a table\n```" in table
    mended = [python("wrong", GOOD), *JOBS[3:], python("new", GOOD)]
    assert call(out, mended) == 0
    assert (out / "jobs" / "ran").read_text().split() == ["wrong", "dies", "hangs", "good", "new", "wrong"]
    assert "| a table" in (out / "jobs" / "wrong" / "stdout.txt").read_text()
    with pytest.raises(UserError, match="has results of a cpu, and this is a H100"):
        call(out, [], kind="H100")
    (out / "results.jsonl").write_text("[1]\n")
    with pytest.raises(UserError, match="can't be gone on with"):
        call(out, [])


def test_at_sigterm_the_job_ends_and_what_was_done_is_written(tmp_path):
    code = f"""from tools.device import *
folder = Path({str(tmp_path)!r})
jobs = [Job("good", ["-c", {GOOD!r}]), Job("hangs", ["-c", {HANGS!r}])]
measure(folder, {DEVICE}, jobs, read_results(folder), math.inf)"""
    runner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert runner.stdout is not None
    for line in runner.stdout:
        if line == "hangs ...\n":
            break
    while not (tmp_path / "jobs" / "hangs" / "hung").exists():
        time.sleep(0.05)
    assert (tmp_path / "jobs" / "hangs" / "stdout.txt").read_text() == "its test\n"
    runner.send_signal(signal.SIGTERM)
    assert runner.wait() == 143
    assert "| good | 0 | done |" in (tmp_path / "table.md").read_text()
    assert statuses(tmp_path) == {"good": ("done", "")}
    wait_until_killed()


# --- time


@pytest.mark.parametrize(("left", "limit"), [(1000, "380"), (300, "280"), (200, "180"), (199, "")])
def test_a_job_starts_if_half_of_its_limit_is_left_and_knows_what_it_has(left, limit, tmp_path):
    shown = Job("tune", ["-c", "import sys; print(sys.argv[1])", "{limit}"], 400, "^")
    call(tmp_path, [shown], deadline=left)
    record = json.loads((tmp_path / "results.jsonl").read_text())
    assert (record["status"], record.get("shown")) == (("done", [limit]) if limit else ("to come", None))


def late(after):
    return "late", f"{after!r} hung, and a device that hangs once isn't trusted"


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_after_a_job_that_hangs_the_others_are_late_and_the_next_call_begins_with_them(platform, tmp_path):
    hangs = python("hangs", HANGS)
    absent = python("absent", "", obstacle="a reason")
    assert call(tmp_path, [python("first", GOOD), hangs, absent, python("last", GOOD)], platform=platform) == 1
    found = statuses(tmp_path)
    assert found["first"] == ("done", "")
    assert found["hangs"] == ("failed", "the time limit was reached")
    assert "hangs\n```\nits test\n```" in (tmp_path / "table.md").read_text()
    assert found["absent"] == ("left out", "a reason")
    assert found["last"] == (("done", "") if platform == "cpu" else late("hangs"))
    mended = python("hangs", GOOD)
    assert call(tmp_path, [python("first", GOOD), mended, python("last", GOOD)], platform=platform) == 0
    again = ["last", "hangs"]  # what failed is tried last
    assert (tmp_path / "jobs" / "ran").read_text().split() == ["first", "hangs", *again]


def test_a_part_of_a_job_that_hangs_makes_the_others_late_and_a_job_that_the_call_s_end_cuts_off_does_not(tmp_path):
    part = python("tune", "print('refused: slots=4: the time limit was reached')")
    call(tmp_path / "part", [part, python("last", GOOD)], platform="gpu")
    assert statuses(tmp_path / "part") == {"tune": ("done", ""), "last": late("tune")}
    call(tmp_path / "cut", [python("cut", HANGS), python("last", "", seconds=2000)], 300.0, platform="gpu")
    assert statuses(tmp_path / "cut") == {"cut": ("failed", "the time limit was reached"), "last": ("to come", "")}


def test_the_first_jobs_run_four_at_a_time_and_all_others_alone(tmp_path):
    meet = """import glob
open('{own}/../here' + str(os.getpid()), 'w').close()
while len(glob.glob('{own}/../here*')) < 4: time.sleep(0.02)"""
    jobs = [python(str(i), meet, beside=True) for i in range(4)]
    slow = "open('{own}/../busy', 'x'); time.sleep(0.3); os.remove('{own}/../busy')"
    assert call(tmp_path, [*jobs, python("one", slow), python("two", slow)]) == 0


# --- the real ones


ON_DEVICE = device.ROOT / "tests" / "kernels" / "test_on_device.py"  # its tests are marked all at once
ORDER = ["forward", "dh", "dW", "workspaces", "values and gradients", "full size", "head", "races", "tune"]


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_kernels_are_checked_before_they_are_timed_and_tiles_come_before_the_trainer(platform):
    jobs = list(make_jobs(DEVICE | {"platform": platform}))
    names = [job.name for job in jobs]
    assert names[: len(ORDER)] == ORDER
    assert names[len(ORDER) :].index("trainer") < names[len(ORDER) :].index("full logits")
    assert [job.name for job in jobs if job.beside] == (ORDER[:6] if platform == "gpu" else [])
    tests = {job.name for job in jobs if "pytest" in job.command}
    assert tests == {*ORDER[:6], "races", "attention"}
    assert all(job.obstacle for job in jobs if job.name in tests) == (platform == "cpu")


@pytest.mark.slow
def test_every_test_that_needs_a_gpu_is_in_a_job_and_every_job_has_one():
    named = [job.command[-1] for job in make_jobs(DEVICE | {"platform": "gpu"}) if "pytest" in job.command]
    marked = [path for path in device.ROOT.glob("tests/*/test_*.py") if "pytest.mark.gpu\n" in path.read_text()]
    files = sorted(str(path.relative_to(device.ROOT)) for path in [*marked, ON_DEVICE])
    assert files == sorted({name.partition("::")[0] for name in named})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "gpu", *files]
    ended = subprocess.run(command, cwd=device.ROOT, capture_output=True, text=True, check=False)
    found = [line for line in ended.stdout.splitlines() if "::" in line]
    assert {name for test in found for name in named if test.startswith(name)} == {*named}
    assert all(test.startswith(tuple(named)) for test in found)


def uses_the_trainer(job):
    return "--config" in job.command or job.name in ("decode", "attention")


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_jobs_have_valid_settings_and_names_of_their_own(platform):
    jobs = list(make_jobs(DEVICE | {"platform": platform, "devices": 8}, "wheels"))
    assert len({job.name for job in jobs}) == len(jobs)
    trained = [job.command[job.command.index("--config") :] for job in jobs if "--config" in job.command]
    assert len(trained) == 6
    assert not [job.name for job in jobs if job.packages != ("wheels" if uses_the_trainer(job) else "")]
    for command in trained:
        configs.load(command[1], [part for part in command[2:] if part != "--plan"])
    flags = ["--xla_gpu_deterministic_ops=true"] if platform == "gpu" else []
    assert [job.xla_flags for job in jobs if job.xla_flags] == flags


# --- what they find there


def wheel(folder, text):
    """A wheel of the module `carried`, which has the name `text`."""
    about = {"METADATA": "Metadata-Version: 2.1\nName: carried\nVersion: 1\n", "RECORD": ""}
    about["WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / "carried-1-py3-none-any.whl", "w") as file:
        file.writestr("carried.py", f"name = {text!r}\n")
        for name, content in about.items():
            file.writestr(f"carried-1.dist-info/{name}", content)


def test_the_trainer_s_jobs_alone_have_the_packages_that_are_carried_there_as_wheels(tmp_path, monkeypatch, capfd):
    (tmp_path / "wheels").mkdir()
    out, wheels = tmp_path / "out", ["--wheels", str(tmp_path / "wheels")]
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(device, "start", lambda *_: ([DEVICE], ""))

    def make(found, packages):
        obstacle = device.absent("carried")
        yield python("trainer", "import carried; print(carried.name)", obstacle=obstacle, packages=packages, shows="^")
        yield python("kernels", "import carried")

    monkeypatch.setattr(device, "make_jobs", make)
    assert device.main(["--out", str(out), *wheels]) == 2
    assert "wheels: it has no *.whl" in capfd.readouterr().err
    (tmp_path / "wheels" / "broken-1-py3-none-any.whl").write_text("no zip")
    assert device.main(["--out", str(out), *wheels]) == 2
    assert "error: --wheels: " in capfd.readouterr().err
    (tmp_path / "wheels" / "broken-1-py3-none-any.whl").unlink()
    assert device.main(["--out", str(out)]) == 1
    assert statuses(out)["trainer"] == ("left out", "carried: not installed")
    wheel(tmp_path / "wheels", "of the wheel")
    assert device.main(["--out", str(out), *wheels]) == 1
    assert statuses(out) == {
        "trainer": ("done", ""),
        "kernels": ("failed", "ModuleNotFoundError: No module named 'carried'"),
    }
    assert "trainer\n```\nof the wheel\n```" in (out / "table.md").read_text()


def test_a_program_that_a_job_has_compiled_comes_back_with_the_results_and_the_next_call_has_it(tmp_path):
    code = """import jax, logging
logging.basicConfig(level=logging.DEBUG)
print(jax.jit(lambda x: x * 3 + 1)(2.0))"""
    for number in (1, 2):
        call(tmp_path, [Job(f"job {number}", ["-c", code])])
        said = (tmp_path / "jobs" / f"job_{number}" / "stderr.txt").read_text()
        assert ("Persistent compilation cache hit" in said) == (number == 2)
    assert [*(tmp_path / "cache").iterdir()]
