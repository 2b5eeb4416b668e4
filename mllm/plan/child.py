"""Runs a command in a session of its own, with a time limit: compilers and benchmarks, which hang or are killed.

    ended = child.run([sys.executable, "-m", "package.module", argument], seconds=60)
    ended.answers    # the JSON objects and arrays on lines of its stdout: the child calls `answer(value)`
    ended.reason     # "" or one line that says why the child failed

This module needs only the standard library.
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
from typing import Any

PAUSE, LONGEST = 0.05, 300
LATE = "the time limit was reached"


@dataclass(frozen=True)
class Ended:
    """The result of a child process."""

    code: int | None
    """The exit code, negative for a signal; None: `run` killed the child."""
    late: bool
    """The time limit was reached."""
    stdout: str
    stderr: str

    @property
    def answers(self) -> list[Any]:
        """The JSON objects and arrays that stood on lines of its stdout, in order; other lines don't count."""
        values = []
        for line in self.stdout.splitlines():
            with suppress(ValueError):
                values.append(json.loads(line))
        return [value for value in values if isinstance(value, dict | list)]

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
        message = (errors or lines or ["it said nothing"])[-1][:LONGEST]
        code = self.code or 0
        return f"killed by {signal.Signals(-code).name}: {message}" if code < 0 else message


def run(
    command: Sequence[str],
    *,
    seconds: float | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    until: Callable[[], bool] | None = None,
) -> Ended:
    """Run a command to its end or its time limit, then kill what it has left running in its session.

    The child is killed, too, once `until` returns True.
    """
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
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
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # it is stuck in the kernel
                process.wait(1)
        assert process.stdin is not None
        process.stdin.close()
        stdout.seek(0)
        stderr.seek(0)
        return Ended(code, late, *(file.read().decode(errors="replace") for file in (stdout, stderr)))


def answer(value: Any) -> None:
    """In the child: hand a JSON object or array to the parent."""
    print(json.dumps(value), flush=True)


def end_with_parent(clean_up: Callable[[], None] = lambda: None) -> None:
    """In the child: from now on, die as soon as the parent has ended, after `clean_up`, and so does all its session."""

    def wait() -> None:
        os.read(0, 1)  # returns when nobody can write to stdin any more
        clean_up()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
