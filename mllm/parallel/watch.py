"""The processes of a run watch each other: if one ends, hangs or fails, all of them end, with one line that says why.

Each process has a thread that tells process 0 what its process is doing, every BEAT seconds, and is answered.
A process that ends, however it ends, closes its connection, which is noticed at once. One that is stopped, or whose
machine, network or disk hangs, is silent, which is noticed after SILENCE seconds. One that fails says so. Process 0
passes on what has happened; each process prints it and ends at once, because a collective that waits for a lost process
can't be interrupted.

Nothing tells a main thread that hangs from slow work, such as compiling: a line says where each process is, and a limit
of the user's ends the run (`limit_stalls`). A thread here that fails ends the run, too, for nobody else would notice.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import jax

from mllm.errors import RESTART, CommonError, UserError, ending, printable

BEAT = 2.0
SILENCE = 30.0
"""Seconds without a word from a process after which it counts as lost."""
GRACE = 1.0
"""Seconds that a process's last message is given to arrive before its connection is cut."""
LONGEST_MESSAGE = 2**16
LATEST = 2**40
"""The largest sum of two times in a message."""
END = "end"
"""The phase of a process that has trained to its end: its connection may close."""
GO_ON = "the same command goes on from the newest checkpoint"


class Status(NamedTuple):
    """What a process is doing."""

    process: int
    step: int
    """Steps that are done."""
    phase: str
    since: float
    """When the phase began, in Unix time."""
    time: float
    """When the process said so, in Unix time."""

    def __str__(self) -> str:
        return f"process {self.process} (after step {self.step}, {self.phase})"


class Link:
    """A connection to another process's thread."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(GRACE)
        self.socket, self.lines = connection, connection.makefile("rb")
        self.status = Status(0, 0, "start", time.time(), time.time())
        """What the other process said last."""
        self.heard = time.monotonic()

    def send(self, **message: Any) -> None:
        with suppress(OSError):  # whoever reads finds out that the connection is closed
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, longest: int = LONGEST_MESSAGE) -> dict[str, Any] | None:
        """The next message, empty where what came is none; None if the connection is closed."""
        line, message = b"", None
        with suppress(OSError):
            line = self.lines.readline(longest)
        if not line:
            return None
        self.heard = time.monotonic()
        with suppress(ValueError, RecursionError):
            message = json.loads(line)
        return message if isinstance(message, dict) else {}


class Watch:
    """What this process tells the others, and hears of them; a process that trains alone has no links."""

    def __init__(self, process: int = 0, links: dict[int, Link] | None = None) -> None:
        now = time.time()
        self.status = Status(process, 0, "start", now, now)
        self.links = links or {}
        self.publish: Callable[[list[Status]], None] = lambda statuses: None
        """Called every BEAT seconds with what process 0 knows of all processes, and the others of themselves."""
        self.patience = 600.0
        """Seconds without a new phase after which a line says where each process is."""
        self.ending = threading.Lock()
        self.stopped = threading.Event()
        for link in self.links.values():
            link.heard = time.monotonic()  # nobody had to say anything until the last one came
        self.thread = self.begin(self.run)
        for number, link in [*self.links.items()]:
            link.socket.settimeout(None)
            self.begin(self.listen, number, link)

    def begin(self, work: Callable[..., None], *arguments: Any) -> threading.Thread:
        """Start a thread; whatever it raises ends the run."""

        def guarded() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                self.fail(error)

        thread = threading.Thread(target=guarded, name="watch", daemon=True)
        thread.start()
        return thread

    def mark(self, step: int, phase: str) -> None:
        """Note what this process does from now on."""
        now = time.time()
        self.status = Status(self.status.process, step, phase, now, now)

    def run(self) -> None:
        """Send every BEAT seconds, until `stop`."""
        last = time.monotonic()
        while not self.stopped.is_set():
            now = time.monotonic()
            if self.links and now - last > SILENCE:
                self.end(RESTART, f"{self.status} was stopped for {now - last:.0f} s: {GO_ON}")
            last = now
            self.beat()
            self.stopped.wait(BEAT)

    def listen(self, number: int, link: Link) -> None:
        """Read another process's messages; if its connection closes before the run has ended, end this process, too."""
        while (message := link.receive()) is not None:
            match message:
                case {"end": [int(code), str(line)]} if 0 < code < 256:
                    self.end(code, printable(line))
                case {
                    "status": [int(process), int(step), str(phase), int() | float() as since, int() | float() as now]
                } if process == number and step >= 0 and phase.isprintable() and abs(since) + abs(now) < LATEST:
                    link.status = Status(process, step, phase, since, now)
                case _:
                    raise UserError(f"process {number} sent what is no message of this program: {message!r:.100}")
        del self.links[number]
        if link.status.phase != END:
            self.end(RESTART, f"{link.status} was killed, or has lost its machine or network: {GO_ON}")

    def beat(self) -> None:
        """Send and publish what this process does, and look for processes that are silent."""
        own, links = self.status._replace(time=time.time()), [*self.links.values()]
        self.publish(statuses := self.statuses())
        stalled = own.time - max(status.since for status in statuses)
        if own.process == 0 and stalled > self.patience:
            self.patience = 2 * stalled  # so that long phases are not reported every time
            where = ", ".join(map(str, statuses))
            with suppress(OSError, ValueError):
                sys.stderr.write(f"warning: no new phase for {stalled / 60:.0f} minutes: {where}\n")
        for link in links:
            link.send(status=own)
            if time.monotonic() - link.heard > SILENCE:
                why = "it is stopped, or its machine, network or disk hangs"
                self.end(RESTART, f"{link.status} has been silent for {SILENCE:.0f} s: {why}; {GO_ON}")

    def statuses(self) -> list[Status]:
        """What process 0 knows of all processes, and the others of themselves."""
        others = [] if self.status.process else [link.status for link in [*self.links.values()]]
        return sorted([self.status._replace(time=time.time()), *others])

    def limit_stalls(self, seconds: float) -> None:
        """From now on process 0 ends the run when no process has had a new phase for so long.

        Only time in which this thread runs is counted: a process that is stopped, or whose machine sleeps, loses none.
        """

        def run() -> None:
            pause, idle, before = min(BEAT, seconds / 4), 0.0, list[Any]()
            while not self.stopped.wait(pause) and self.status.phase != END:
                now = [status[:4] for status in self.statuses()]
                idle, before = idle + pause if now == before else 0.0, now
                if idle >= seconds:
                    where = ", ".join(map(str, self.statuses()))
                    self.end(RESTART, f"--stall-limit: no new phase for {seconds:g} s: {where}; {GO_ON}")

        if self.status.process == 0:
            self.begin(run)

    def end(self, code: int, line: str, details: str = "") -> None:
        """End this process with an error in one line, and first all others, with the same code and line.

        The first of two threads that call this ends the process. Nothing is printed after the line, though the main
        thread goes on for a moment, and JAX notices that others end.
        """
        self.ending.acquire()
        for link in [*self.links.values()]:
            link.send(end=[code, line])
        with suppress(OSError, ValueError):  # the output may be on a full disk, or closed
            sys.stdout.flush()
        output = 2
        with suppress(OSError):
            output = os.dup(2)
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        with suppress(OSError):
            os.write(output, f"{details}error: {line}\n".encode(errors="backslashreplace"))
        time.sleep(GRACE if self.links else 0)
        os._exit(code)

    def finish(self, error: BaseException | None) -> None:
        """End with the run: normally, or by an error that all processes raise alike; another error ends all of them.

        Errors of JAX wait for news of a lost process, which may be what caused them.
        """
        if not self.links or error is None or isinstance(error, CommonError):
            with self.ending:  # which is held while another thread ends the process
                self.mark(self.status.step, END)
                for link in [*self.links.values()]:
                    link.send(status=self.status)
            return
        if ending(error)[0] == 1:
            time.sleep(SILENCE + 2 * BEAT if is_jax(error) else GRACE)
        self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End as `end` does, by an error of this process alone; a bug has its traceback."""
        code, line = ending(error)
        details = "".join(traceback.format_exception(error)) if code == 1 else ""
        self.end(code, f"process {self.status.process}: {line}" if self.links else line, details)

    def stop(self) -> None:
        """End the thread of a process that trains alone."""
        self.stopped.set()
        self.thread.join()


def is_jax(error: BaseException | None) -> bool:
    """Whether an error is JAX's, or was caused by one of JAX's."""
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__ or error.__context__
    return error is not None


watch: Watch | None = None
"""This process's, if it is one of several."""
