"""The process that reward functions run in, seen from outside (`Worker`) and from inside (`work`).

A stranger's function may raise, hang in C code with every signal blocked, end or fork its process, print, and write to
or close whatever is open. So the process is a fresh interpreter (forking one that runs JAX's threads may deadlock) in a
session of its own, with its output on stderr. What comes back from it is a line of JSON that is checked, never
unpickled; what is late is killed with all that it started; and it ends with the trainer, however that ends.

Left out: limits on memory and processors. Protection from malice: the functions have the rights of the user who trains.
Taking back what a function changes in its process (directory, environment): it stays for the functions after it. A
process that has left the session outlives a worker that ends by itself.
"""

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from mllm.errors import UserError
from mllm.rl.reward_functions import find

FAILURES = ("raised", "timed_out", "not_a_number")
HANDSHAKE = -1
"""The number of the answer that says whether the functions could be had: `ready` or `failed`."""
START_TIMEOUT = 120.0
"""Seconds that the process may take to import the functions."""
LARGEST = 1e18
"""Of rewards: the squares of larger ones overflow the float32 in which a group's are compared."""
MOST_SAID = 300
"""Characters of an error that travel."""
LONGEST_LINE = 2**15
TICK = 0.1
"""Seconds between looks at whether the process lives, and whether the trainer is asked to stop."""
GUARD = """
import os, signal, sys
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
sys.stdin.read()
os.killpg(int(sys.argv[1]), signal.SIGKILL)
"""
"""Kills a group as soon as nobody holds the other end of its input: it ends with the trainer, and needs nothing of the
group, in which a function may hang and let no other thread run."""


class Worker:
    """The process, seen from outside.

    `poll` is called at least every 0.25 s while it is waited for, and what that raises passes through.

    Args:
        names: of the functions, for `reward_functions.find`.
        scorer: the task's own.

    Raises:
        UserError: a function is unknown or can't be imported.
    """

    def __init__(self, names: Sequence[str], scorer: Any, poll: Callable[[], None]) -> None:
        self.socket, theirs = socket.socketpair()
        self.received = b""
        path = [entry or os.getcwd() for entry in sys.path]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from mllm.rl.reward_worker import work; work({theirs.fileno()})"],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[theirs.fileno()],
            # the functions may import JAX themselves; the accelerator is the trainer's
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*path, os.getcwd()]), "JAX_PLATFORMS": "cpu"},
            start_new_session=True,  # Ctrl-C is the trainer's to handle
        )
        theirs.close()
        self.guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD, str(self.process.pid)],
            stdin=subprocess.PIPE,
            stdout=2,
            start_new_session=True,
        )
        self.alive = True
        try:
            self.send((names, scorer), START_TIMEOUT, poll)
            kind, message = self.answer(HANDSHAKE, START_TIMEOUT, poll)
            if kind != "ready":
                raise UserError(message if kind == "failed" else f"task.rewards: importing them {message}")
        except BaseException:
            self.kill()
            raise

    def send(self, message: Any, timeout: float, poll: Callable[[], None]) -> None:
        """Tell it; where it has died or takes nothing for `timeout` seconds, `answer` will say so."""
        unsent = memoryview(pickle.dumps(message))
        deadline = time.monotonic() + timeout
        self.socket.settimeout(TICK)
        while unsent and time.monotonic() < deadline and self.process.poll() is None:
            poll()
            try:
                unsent = unsent[self.socket.send(unsent) :]
                deadline = time.monotonic() + timeout
            except TimeoutError:
                continue
            except ConnectionError:
                return

    def answer(self, number: int, timeout: float, poll: Callable[[], None]) -> tuple[str, Any]:
        """The next one, which must be of this number: ("value", float), or how it failed and what that says.

        The process may be dead thereafter: see `alive`.
        """
        deadline = time.monotonic() + timeout
        while b"\n" not in self.received and len(self.received) < LONGEST_LINE:
            poll()
            left = deadline - time.monotonic()
            ended = self.process.poll() is not None  # a child of its own may still hold the connection
            self.socket.settimeout(0.001 if ended else max(0.001, min(left, TICK)))
            try:
                chunk = self.socket.recv(4096)
            except TimeoutError:
                if not ended and left > 0:
                    continue
                if not ended:
                    self.kill()
                    return "timed_out", f"took longer than {timeout:g} s"
                chunk = b""
            except ConnectionError:
                chunk = b""
            if not chunk:
                poll()  # what ended it may have reached the trainer, too
                return "raised", self.end()
            self.received += chunk
        line, _, self.received = self.received.partition(b"\n")
        answer = read(line, number)
        if answer is None:
            self.kill()
            return "raised", "wrote to its process's connection with the trainer"
        return answer

    def end(self) -> str:
        """How it ended, once nothing more will come from it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(TICK)  # it is leaving: its own exit code is worth waiting for
        code = self.process.returncode
        self.kill()
        if code is None:
            return "closed its process's connection with the trainer"
        if code < 0:
            return f"had its process killed by signal {-code} ({signal.strsignal(-code)})"
        return f"ended its process with exit code {code}"

    def kill(self) -> None:
        """With whatever it started; killed twice is killed."""
        if not self.alive:
            return
        self.alive = False
        self.guard.kill()
        started = descendants(self.process.pid) if self.process.poll() is None else []
        for process in started:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel, as on a file server that is gone
            self.process.wait(1)
        for process in started:
            with contextlib.suppress(OSError):
                os.waitpid(process, os.WNOHANG)  # its own now, where the trainer is process 1, as in a container
        self.guard.communicate()
        self.socket.close()


def descendants(process: int) -> list[int]:
    """Its children and theirs, as Linux knows them, in whatever session; elsewhere none."""
    found: list[int] = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *descendants(child)]
    return found


def read(line: bytes, number: int) -> tuple[str, Any] | None:
    """A line as an answer; None: it is none, or of another number. A function may have written it, or a part of it."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    kinds = ("ready", "failed") if number == HANDSHAKE else FAILURES
    match message:
        case [int(said), "value", float(value)] if said == number and abs(value) <= LARGEST:
            return "value", value
        case [int(said), str(kind), str(text)] if said == number and kind in kinds:
            return kind, " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return None


def work(handle: int) -> None:
    """The process, seen from inside: take a batch, answer for every function and sample in turn, and again."""
    myself = os.getpid()

    def spare(number: int, frame: FrameType | None) -> None:
        """Signals to all processes of a job are the trainer's to handle; children that functions fork die of them."""
        if os.getpid() != myself:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, spare)
    signal.signal(signal.SIGINT, spare)
    connection = socket.socket(fileno=handle)
    incoming = connection.makefile("rb")

    def tell(number: int, kind: str, result: float | str) -> None:
        if os.getpid() != myself:
            os._exit(0)  # a copy that a function forked, and that came back out of it
        try:
            connection.sendall(json.dumps([number, kind, result]).encode() + b"\n")
        except OSError:
            os._exit(1)

    try:
        names, scorer = pickle.load(incoming)
        functions = [find(name, scorer) for name in names]
    except UserError as error:
        tell(HANDSHAKE, "failed", str(error))
        return
    tell(HANDSHAKE, "ready", "")
    while True:
        try:
            samples, done = pickle.load(incoming)
        except (EOFError, OSError):
            return
        for number in range(done, len(functions) * len(samples)):
            function, sample = divmod(number, len(samples))
            tell(number, *call(functions[function], samples[sample]))


def call(function: Callable[..., Any], sample: Sequence[Any]) -> tuple[str, float | str]:
    """("value", float), or ("raised" or "not_a_number", what it said)."""
    try:
        value = function(*sample)
    except BaseException as error:  # SystemExit too: one sample's trouble is not the others'
        return "raised", described(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # or an alarm that it left behind would go off in another one
    try:
        number = as_number(value)
        if abs(number) <= LARGEST:
            return "value", number
        return "not_a_number", f"returned {value!r:.{MOST_SAID}}"
    except BaseException as error:
        return "not_a_number", f"returned a {type(value).__name__:.{MOST_SAID}}: {described(error)}"


def as_number(value: Any) -> float:
    """NaN for what is none. Text isn't, though numpy's has a __float__."""
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    if isinstance(value, str | bytes) or kind in ("S", "U", "O", "M", "m", "c") or not hasattr(value, "__float__"):
        return float("nan")
    return float(value)


def described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error!s:.{MOST_SAID}}"
    except BaseException:
        return "an exception that can't be printed"
