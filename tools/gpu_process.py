"""Programs that tools/gpu.py starts: shown as they speak, logged, and ended in time with all that they started."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Outcome(NamedTuple):
    code: int | None
    """None: it was ended, as its time was over."""
    said: str
    seconds: float

    @property
    def reason(self) -> str:
        """A line, if it didn't end well."""
        if self.code == 0:
            return ""
        lines = [line.strip() for line in re.split("[\r\n]+", self.said) if line.strip()]
        errors = [line for line in lines if re.match(r"(error:|\S*(Error|Exception)\b)", line)]
        by = "it was ended in its time" if self.code is None else ""
        by = f"ended by {signal.Signals(-self.code).name}" if self.code is not None and self.code < 0 else by
        return ": ".join(part for part in (by, (errors or lines or ["it said nothing"])[-1][:300]) if part)


Run = Callable[[Sequence[str], Mapping[str, str], float, Path | None], Outcome]
"""(command, environment beside this process's, seconds, log) -> what came of it."""


def run(command: Sequence[str], environment: Mapping[str, str], seconds: float, log: Path | None) -> Outcome:
    """What is said goes to the log and, as it comes, to this program's output; without a log it is only kept."""
    start, said = time.monotonic(), bytearray()
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    late = threading.Event()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**environment, **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:

        def end(by: int) -> None:
            late.set()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, by)

        # First it may tidy up.
        timers = [threading.Timer(seconds, end, [signal.SIGTERM]), threading.Timer(seconds + 5, end, [signal.SIGKILL])]
        for timer in timers:
            timer.daemon = True
            timer.start()
        try:
            assert process.stdout is not None
            while part := os.read(process.stdout.fileno(), 1 << 16):
                said += part
                if log is not None:
                    with log.open("ab") as file:
                        file.write(part)
                    sys.stdout.write(part.decode(errors="replace"))
                    sys.stdout.flush()
            code = process.wait()
        finally:
            for timer in timers:
                timer.cancel()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return Outcome(None if late.is_set() else code, said.decode(errors="replace"), time.monotonic() - start)
