"""A training process that is watched and disturbed: started, followed by its marks, killed; and what it leaves behind.

Linux only: what is left running is found by /proc.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import IO, NamedTuple
from uuid import uuid4

from chaos_child import RESTORED

ROOT = Path(__file__).parent.parent.parent
SILENCE = 180.0
"""Seconds without a mark after which a process counts as hung; the first compilation is the longest silence."""
ORPHANS = 10.0
"""Seconds within which what a process has started must end after it."""


class Mark(NamedTuple):
    seconds: float
    """On `time.monotonic`, which all processes share."""
    name: str
    step: int | None


class Hung(Exception):
    """A process said nothing for too long."""


class Server:
    """The process that trainers are forked from; `within` is a command that runs it, for another namespace."""

    def __init__(self, environment: Mapping[str, str], within: Sequence[str] = ()) -> None:
        self.environment = environment
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [*within, sys.executable, "-m", "tests.faults.chaos_child", str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the harness's to handle
            )
        self.running: list[Process] = []

    def start(self, arguments: Sequence[str], said: Path) -> "Process":
        """train.py with these arguments; what it prints goes to the file `said`."""
        process = Process()
        marks, status = os.pipe(), os.pipe()
        with said.open("ab") as output:
            request = "\0".join([process.token, *arguments]).encode()
            socket.send_fds(self.connection, [request], [marks[1], output.fileno(), status[1]])
        for handle in (marks[1], status[1]):
            os.close(handle)
        process.pipe, process.status = marks[0], os.fdopen(status[0], "rb", buffering=0)
        process.pid = int(process.status.readline())
        self.running.append(process)
        return process

    def close(self) -> None:
        """End it, and all that it has started."""
        for process in self.running:
            if process.code is None:
                process.kill(everything=True)
        self.connection.close()
        self.process.wait()


class Process:
    """A trainer."""

    pid: int
    pipe: int
    """The marks come from here; -1 when there will be no more."""
    status: IO[bytes]

    def __init__(self) -> None:
        self.token = uuid4().hex
        self.buffer = b""
        self.marks: list[Mark] = []
        self.restored: int | None = None
        self.code: int | None = None
        """As the operating system gives it: -n where signal n ended it. None before its end was seen."""

    def follow(self, reached: Callable[[Mark], bool] = lambda mark: False, *, silence: float = SILENCE) -> Mark | None:
        """Read marks until one that is `reached`; None where the process ends before.

        Raises:
            Hung: no mark for `silence` seconds. It is killed.
        """
        while self.pipe >= 0:
            while b"\n" in self.buffer:
                line, _, self.buffer = self.buffer.partition(b"\n")
                mark = self.note(line.decode())
                if reached(mark):
                    return mark
            if not select.select([self.pipe], [], [], silence)[0]:
                self.kill(everything=True)
                raise Hung(f"no mark for {silence:g} s after {self.phase}")
            if not (read := os.read(self.pipe, 65536)):
                os.close(self.pipe)
                self.pipe = -1
            self.buffer += read
        return None

    def reach(self, phase: str, count: int) -> bool:
        """Read marks until `phase` has begun `count` times; False where the process ends before."""
        return self.follow(lambda mark: mark.name == phase and self.counts()[phase] == count) is not None

    def note(self, line: str) -> Mark:
        seconds, name, *step = line.split()
        mark = Mark(float(seconds), name, int(step[0]) if step else None)
        if name == RESTORED:
            self.restored = mark.step
        else:
            self.marks.append(mark)
        return mark

    @property
    def phase(self) -> str:
        """The phase that the process is, or was last, in."""
        return self.marks[-1].name if self.marks else "start"

    def counts(self) -> Counter[str]:
        """How often each phase has begun; one inside another of its name is the same."""
        return Counter(name for name, _ in groupby(mark.name for mark in self.marks))

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self, *, everything: bool) -> None:
        """kill -9: it alone, or with all that it has started. All marks up to its end are read."""
        self.signal(signal.SIGKILL)
        if everything:
            for pid in self.descendants():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.end()

    def end(self, seconds: float = SILENCE) -> int:
        """Wait for its end. Returns the exit code as a shell gives it: 128 + n where signal n ended it."""
        if self.code is None:
            if not select.select([self.status], [], [], seconds)[0]:
                self.kill(everything=True)
                raise Hung(f"did not end within {seconds:g} s after {self.phase}")
            self.code = int(self.status.readline())
            self.status.close()
        self.follow()
        return 128 - self.code if self.code < 0 else self.code

    def descendants(self) -> list[int]:
        """The processes that it has started, directly or not, and that live."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.pid:
                with suppress(OSError):  # it has ended, or is somebody else's
                    if f"CHAOS={self.token}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def orphans(self) -> tuple[float, list[str]]:
        """Seconds until all that it has started was gone, and what had to be killed because it was not."""
        begin = time.monotonic()
        while (left := self.descendants()) and time.monotonic() - begin < ORPHANS:
            time.sleep(0.02)
        seconds, commands = time.monotonic() - begin, []
        for pid in left:
            with suppress(OSError):
                commands.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
                os.kill(pid, signal.SIGKILL)
        return seconds, commands
