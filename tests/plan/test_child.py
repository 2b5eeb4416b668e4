"""The supervisor of child processes: answers, time limits, and nothing left running."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from mllm.plan import child


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, time\nfrom mllm.plan import child\n{code}", *arguments]


def assert_ends(pid: int) -> None:
    """Until pytest's time is up, if it doesn't. One that is dead may have a new parent that is slow."""
    while subprocess.getoutput(f"ps -o stat= -p {pid}")[:1] not in ("", "Z"):
        time.sleep(0.05)


TRACEBACKS = """log line\nTraceback (most recent call last):\n  File x\nErr: first\n\nDuring handling:\n
Traceback (most recent call last):\n  File y\njax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: 9 GiB
-----\nFor simplicity, JAX has removed its internal frames.\n"""


def test_a_failure_has_a_one_line_reason_the_error_without_remarks():
    reasons = [child.Ended(1, False, "", stderr).reason for stderr in (TRACEBACKS, "error: --shape: bad\n")]
    assert reasons == ["jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: 9 GiB", "error: --shape: bad"]


@pytest.mark.parametrize("end", ["late", "until", "exit"])
def test_what_the_child_started_ends_with_it(end, tmp_path, monkeypatch):
    """A grandchild that holds the pipes neither survives nor delays the answer; what else is printed is none."""
    code = "import subprocess\nprint('noise')\nprint(7)\n"
    code += "child.answer({'pid': subprocess.Popen(['sleep', '3600']).pid})\n"
    code += "open(sys.argv[2], 'w').close()\nsys.exit() if sys.argv[1] == 'exit' else time.sleep(3600)"
    started = tmp_path / "started"
    monkeypatch.setattr(child, "time", SimpleNamespace(monotonic=lambda: 60.0 * started.exists()))
    limit = {"late": {"seconds": 60.0}, "until": {"until": started.exists}, "exit": {}}[end]
    ended = child.run(python(code, end, str(started)), **limit)
    assert (ended.code, ended.late) == (0 if end == "exit" else None, end == "late")
    if end == "late":
        assert ended.reason == "the time limit was reached"
    assert_ends(ended.answers[-1]["pid"])


def test_a_child_that_asks_for_it_dies_with_a_killed_parent_and_all_of_its_session(tmp_path):
    place = tmp_path / "pids"
    code = f"child.end_with_parent(); os.fork(); print(os.getpid(), file=open({str(place)!r}, 'a'), flush=True)"
    process = subprocess.Popen(python(f"child.run({python(code + '; time.sleep(3600)')!r})"))
    while not place.exists() or place.read_text().count("\n") < 2:
        time.sleep(0.05)
    process.kill()
    process.wait()
    for pid in map(int, place.read_text().split()):
        assert_ends(pid)
