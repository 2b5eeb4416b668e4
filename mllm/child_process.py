"""Runs a command as a child process: in a session of its own, with a time limit, and ends all that it started.

    ended = child_process.run([sys.executable, "-m", "package.module", argument], seconds=60)
    ended.answer    # the last JSON object or array on a line of its stdout: the child calls `answer(value)`
    ended.reason    # "" or one line that says why the child failed

A child that also calls `end_with_parent` dies with its parent, even when the parent is killed. This module needs only
the standard library.
"""

import json
import math
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mllm.orphans import adopt, children, end_children

PAUSE = 0.05
LONGEST = 300
LATE = "the time limit was reached"


@dataclass(frozen=True)
class Ended:
    """What a child process left behind."""

    code: int | None
    """The exit code, negative for a signal; None: `run` killed the child."""
    late: bool
    """The time limit was reached."""
    stdout: str
    stderr: str

    @property
    def answers(self) -> list[Any]:
        """The JSON objects and arrays that stood on lines of its stdout, in order; others are whatever it printed."""
        found = []
        for line in self.stdout.splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
        return [value for value in found if isinstance(value, dict | list)]

    @property
    def answer(self) -> Any:
        """The last answer, or None."""
        return self.answers[-1] if self.answers else None

    @property
    def reason(self) -> str:
        """One line that says why the child failed, the last error on its stderr; "" if it ended with exit code 0."""
        if self.code == 0:
            return ""
        if self.late:
            return LATE
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        # JAX's remarks come after the error.
        errors = [line for line in lines if re.match(r"\S*(Error|Exception|EXHAUSTED)\b", line)]
        said = (errors or lines or ["it said nothing"])[-1][:LONGEST]
        return (
            f"killed by {signal.Signals(-self.code).name}: {said}" if self.code is not None and self.code < 0 else said
        )


def run(
    command: Sequence[str],
    *,
    seconds: float | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    until: Callable[[], bool] | None = None,
    folder: Path | None = None,
) -> Ended:
    """Run a command to its end or its time limit, then kill whatever it started and left running.

    The child is killed, too, once `until` returns True. What it prints stands in stdout.txt and stderr.txt of `folder`
    as it comes.
    """
    deadline = math.inf if seconds is None else time.monotonic() + seconds

    def file(name: str) -> IO[bytes]:
        return (folder / name).open("w+b") if folder else tempfile.TemporaryFile()

    with file("stdout.txt") as stdout, file("stderr.txt") as stderr:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.PIPE,  # closes when the parent ends, however it ends: see `end_with_parent`
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        late = False
        try:
            while process.poll() is None and not late and not (until and until()):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(PAUSE)
                late = process.returncode is None and time.monotonic() >= deadline
        finally:
            code = process.returncode
            kill_session(process)
        assert process.stdin is not None
        process.stdin.close()
        stdout.seek(0)
        stderr.seek(0)
        return Ended(code, late, *(file.read().decode(errors="replace") for file in (stdout, stderr)))


def kill_session(process: subprocess.Popen[Any]) -> None:
    """Kill a process that was started in a session of its own, and all that it started, and wait for its end.

    Processes that have left the session are found on Linux only, and only while their parent lives. A process that
    is stuck in the kernel is waited for no longer than a second.
    """
    started = descendants(process.pid) if process.poll() is None else []
    for pid in started:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(1)
    for pid in started:
        with suppress(OSError):
            os.waitpid(pid, os.WNOHANG)  # orphans become children of process 1, which may be this one in a container


def descendants(pid: int) -> list[int]:
    """The ids of a process's children and of theirs, in whatever session, as Linux lists them; elsewhere none."""
    return [found for child in children(pid) for found in (child, *descendants(child))]


def answer(value: Any) -> None:
    """In the child: hand a JSON object or array to the parent."""
    print(json.dumps(value), flush=True)


def end_with_parent(clean_up: Callable[[], None] | None = None) -> None:
    """In the child: from now on, die as soon as the parent has ended, after `clean_up`, with all that was started."""
    adopt()

    def wait() -> None:
        os.read(0, 1)  # returns when nobody can write to stdin any more
        if clean_up is not None:
            clean_up()
        end_children()
        if os.getsid(0) == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
