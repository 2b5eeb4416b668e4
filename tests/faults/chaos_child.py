"""train.py as tests/faults/chaos.py runs it, in forks of a process that has imported all of it and done nothing else.

That saves the imports, which write nothing, for each of many processes; JAX has started nothing before the fork. What
runs is train.py's own `main`. The methods that begin and end a phase are wrapped from outside, so that each phase tells
its name on a pipe when it begins: that is how the harness knows where a kill fell. The trainer knows nothing of it.

A line is the time, the phase that the process is in from now on, and a step where it has one; or in the phase's place
an event, that the checkpoint of a step was restored.
"""

import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import train
from mllm.run.checkpoint import Checkpoints, Restored
from mllm.run.metrics import RunLog
from mllm.stopwatch import Stopwatch

BETWEEN = "between"
"""What is no phase: the loop around them."""
END = "end"
"""`main` has returned, the interpreter leaves."""
RESTORED = "restored"
"""The event that a checkpoint of that step was read."""


class Marks:
    """The writing end of the pipe."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self.open: list[str] = []

    def tell(self, *words: object) -> None:
        line = " ".join(map(str, (time.monotonic(), *words)))
        os.write(self.pipe, f"{line}\n".encode())

    @contextmanager
    def phase(self, *words: object) -> Iterator[None]:
        self.tell(*words)
        self.open.append(str(words[0]))
        try:
            yield
        finally:
            self.open.pop()
            self.tell(*(self.open[-1:] or [BETWEEN]))

    def wrap(
        self,
        owner: Any,
        name: str,
        phase: str,
        *,
        step: bool = False,
        then: Callable[[Any], None] = lambda result: None,
    ) -> None:
        """Let the function `owner.name` tell `phase` when it's called; with `step`, its first argument, too.

        `then` gets what it returns.
        """
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def outer(*args: Any, **options: Any) -> Any:
            with self.phase(phase, *(args[1:2] if step else ())):
                result = inner(*args, **options)
            then(result)
            return result

        setattr(owner, name, outer)


def serve(connection: socket.socket) -> int:
    """Train in a fork for each request: a token and train.py's arguments, with handles of three files.

    They are the pipe for the marks, the output, and one that is told the trainer's process id and, when it has ended,
    its exit code. Returns in the forks, with the code that they are to exit with.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, handles, *_ = socket.recv_fds(connection, 2**16, 3, socket.MSG_CMSG_CLOEXEC)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            break
        for handle in handles:
            os.close(handle)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.close()
    pipe, output, status = handles
    token, *arguments = request.decode().split("\0")
    if trainer := os.fork():
        os.close(pipe)
        os.write(status, f"{trainer}\n".encode())
        _, code = os.waitpid(trainer, 0)
        os.write(status, f"{os.waitstatus_to_exitcode(code)}\n".encode())
        os._exit(0)
    os.close(status)
    os.setsid()
    for standard in (1, 2):
        os.dup2(output, standard)
    os.environ["CHAOS"] = token
    return run(Marks(pipe), arguments)


def run(marks: Marks, arguments: Sequence[str]) -> int:
    """train.py's `main`, telling its phases. Returns its exit code."""
    marks.tell("start")
    timed = Stopwatch.phase

    @contextmanager
    def phase(watch: Stopwatch, name: str) -> Iterator[None]:
        with marks.phase(name), timed(watch, name):
            yield

    def restored(found: Restored | None) -> None:
        if found is not None:
            marks.tell(RESTORED, found.step)

    Stopwatch.phase = phase  # type: ignore[assignment,method-assign]
    marks.wrap(Checkpoints, "restore", "restore", then=restored)
    marks.wrap(Checkpoints, "save", "save", step=True)
    marks.wrap(Checkpoints, "wait", "wait")
    marks.wrap(RunLog, "write", "metrics", step=True)
    marks.wrap(train, "evaluate", "eval")
    code = train.main(arguments)
    marks.tell(END)
    return code


if __name__ == "__main__":
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1]))))
