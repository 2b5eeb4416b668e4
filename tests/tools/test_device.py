"""tools/device.py: what becomes of jobs that end well, fail, die or hang, and what the next call does.

These jobs are made up. The real ones need a device: their settings are valid.
"""

import json
import signal
import subprocess
import sys
import time

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
HANGS = "import subprocess, time\nsubprocess.Popen(['sleep', '97.531'])\ntime.sleep(99)"
JOBS = [
    python("wrong", "sys.exit('ValueError: no')"),
    python("dies", "os.kill(os.getpid(), 11)"),
    python("hangs", HANGS, seconds=1),
    python("lacks a module", "", obstacle=device.absent("no_such_module", "json")),
    python("good", GOOD, shows=r"^\|"),
]


def call(folder, jobs, minutes=9.0, kind="cpu"):
    deadline = time.monotonic() + 60 * minutes
    return device.measure(folder, DEVICE | {"kind": kind}, jobs, device.read_results(folder), deadline)


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
    assert subprocess.run(["pgrep", "-f", "sleep 97.531"], check=False).returncode == 1
    table = (out / "table.md").read_text()
    assert "| good | 0 | done |" in table
    assert "| dies | 0 | failed: killed by SIGSEGV" in table
    assert "good\n```\n| a table\n```" in table
    mended = [python("wrong", GOOD), *JOBS[3:], python("new", GOOD)]
    assert call(out, mended) == 0
    assert (out / "jobs" / "ran").read_text().split() == ["wrong", "dies", "hangs", "good", "new", "wrong"]
    assert "| a table" in (out / "jobs" / "wrong" / "log.txt").read_text()
    assert call(out, [*mended, python("late", GOOD)], minutes=0) == 1
    assert "| late | 0 | to come |" in (out / "table.md").read_text()
    with pytest.raises(UserError, match="has results of a cpu, and this is a H100"):
        call(out, [], kind="H100")
    (out / "results.jsonl").write_text("[1]\n")
    with pytest.raises(UserError, match="can't be gone on with"):
        call(out, [])


def test_at_sigterm_the_job_ends_and_what_was_done_is_written(tmp_path):
    code = f"""from tools.device import *
folder = Path({str(tmp_path)!r})
jobs = [Job("good", ["-c", {GOOD!r}]), Job("hangs", ["-c", {HANGS.replace("97", "98")!r}])]
measure(folder, {DEVICE}, jobs, read_results(folder), math.inf)"""
    runner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert runner.stdout is not None
    for line in runner.stdout:
        if line == "hangs ...\n":
            break
    time.sleep(0.5)
    runner.send_signal(signal.SIGTERM)
    assert runner.wait(20) == 143
    assert "| good | 0 | done |" in (tmp_path / "table.md").read_text()
    assert statuses(tmp_path) == {"good": ("done", "")}
    assert subprocess.run(["pgrep", "-f", "sleep 98.531"], check=False).returncode == 1


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_jobs_have_valid_settings_and_names_of_their_own(platform):
    jobs = list(make_jobs(DEVICE | {"platform": platform, "devices": 8}))
    assert len({job.name for job in jobs}) == len(jobs)
    trained = [job.command[job.command.index("--config") :] for job in jobs if "--config" in job.command]
    assert len(trained) == 6
    for command in trained:
        configs.load(command[1], [part for part in command[2:] if part != "--plan"])
    flags = ["--xla_gpu_deterministic_ops=true"] if platform == "gpu" else []
    assert [job.xla_flags for job in jobs if job.xla_flags] == flags
