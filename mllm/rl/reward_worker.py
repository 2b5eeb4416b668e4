"""The trainer's side of a process in which reward functions or environments run; its own side is reward_process.

A user's function may raise, hang in C code with every signal blocked, end or fork its process, print, and write to or
close whatever is open. So the process is a fresh interpreter (forking one that runs JAX's threads may deadlock) in a
session of its own, and its output goes to stderr. Its answers are lines of JSON that are checked, never unpickled. Its
parent is a guard (mllm/orphans.py), which ends with it: when an answer is late, when a function ends the process, and
when the trainer ends, however that does, the guard kills all that the process has started, in sessions of its own, too.
Memory is not limited, and functions have the rights of the user who trains.
"""

import contextlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mllm.child_process import kill_session
from mllm.config.places import MODULES
from mllm.errors import UserError
from mllm.rl.reward_process import FAILURES, HANDSHAKE, LARGEST, NOT_APPLICABLE, Answer

START_TIMEOUT = 120.0
LONGEST_LINE = 2**20
TICK = 0.1


class Worker:
    """The trainer's side of a process, which starts when it is needed, and again when a function has ended it.

    While a method waits, it calls `poll` at least every 0.25 s; what `poll` raises passes through.
    """

    kinds: list[str]
    """For each function `Reward.kind`; known once the process has started."""
    codes: list[str]
    """For each function a checksum of the file that it is in; empty for those of the trainer's own."""
    process: subprocess.Popen[bytes]
    """The guard, which ends as the process does."""

    def __init__(self, make: Callable[[], Sequence[Any]], poll: Callable[[], None], key: str = "task.rewards") -> None:
        """The process will have the functions that `make` returns there; `key` is the setting that names them."""
        self.make, self.poll, self.key = make, poll, key
        self.alive = False

    def start(self) -> None:
        """Start the process; UserError where a function can't be had, or requires what there isn't."""
        self.socket, theirs = socket.socketpair()
        self.received = b""
        # the guard reads no .pth, which may be all that says where this package is
        path = [*(entry or os.getcwd() for entry in sys.path), str(Path(__file__).parents[2])]
        code = f"from mllm.rl.reward_process import work; work({theirs.fileno()})"
        guard = f"from mllm.orphans import guard; guard({theirs.fileno()}, {code!r})"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-S", "-c", guard],
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=[theirs.fileno()],
            # the functions may import JAX themselves; the accelerator is the trainer's
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*path, *MODULES, os.getcwd()]), "JAX_PLATFORMS": "cpu"},
            start_new_session=True,  # Ctrl-C is the trainer's to handle
        )
        theirs.close()
        self.alive = True
        try:
            self.send(self.make, START_TIMEOUT)
            kind, message = self.answer(HANDSHAKE, START_TIMEOUT)
            if kind != "ready":
                raise UserError(message if kind == "failed" else f"{self.key}: importing it {message}")
        except BaseException:
            self.kill()
            raise
        functions = [word.split(":") for word in message.split()]
        self.kinds, self.codes = [kind for kind, _ in functions], [code for _, code in functions]

    def ask(self, functions: Sequence[int], samples: Sequence[Any], seconds: float) -> list[Answer]:
        """Each function's answers for the samples, one function after the other; several are called together.

        A call with all samples may take `seconds` for each of them.
        """
        answers, wanted = list[Answer](), len(functions) * len(samples)
        while len(answers) < wanted:
            if not self.alive or self.process.poll() is not None:
                self.kill()
                self.start()
            kind = self.kinds[functions[0]]
            # The process itself watches over coroutines and environments, and is waited for longer.
            limit = seconds * {"single": 1, "played": 3, "batched": wanted, "async": wanted + 1}[kind]
            self.send((functions, len(answers), samples[len(answers) :], seconds), limit)
            while self.alive and len(answers) < wanted:
                answers.append(self.answer(len(answers), limit))
            if kind in ("batched", "async"):
                answers += answers[-1:] * (wanted - len(answers))  # the call has failed for the rest
        return answers

    def send(self, message: Any, timeout: float) -> None:
        """Send a pickled message. Where the process has died or reads nothing for `timeout` s, `answer` reports it."""
        unsent = memoryview(pickle.dumps(message))
        deadline = time.monotonic() + timeout
        self.socket.settimeout(TICK)
        while unsent and time.monotonic() < deadline and self.process.poll() is None:
            self.poll()
            try:
                unsent = unsent[self.socket.send(unsent) :]
                deadline = time.monotonic() + timeout
            except TimeoutError:
                continue
            except ConnectionError:
                return

    def answer(self, number: int, timeout: float) -> Any:
        """The next answer, which must have this number; an `Answer`, or that of the handshake."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self.received and len(self.received) < LONGEST_LINE:
            self.poll()
            ended = self.process.poll() is not None  # a child of its own may still hold the connection
            left = 0.0 if ended else deadline - time.monotonic()
            self.socket.settimeout(max(0.001, min(left, TICK)))
            chunk = b""
            try:
                chunk = self.socket.recv(4096)
            except TimeoutError:
                if left > 0:
                    continue
                if not ended:
                    self.kill()
                    return "timed_out", f"took longer than {timeout:g} s"
            except ConnectionError:
                pass
            if not chunk:
                self.poll()  # the signal that ended the process may have reached the trainer, too
                return "raised", self.end()
            self.received += chunk
        line, _, self.received = self.received.partition(b"\n")
        answer = parse(line, number)
        if answer is None:
            self.kill()
            return "raised", "wrote to its process's connection with the trainer"
        return answer

    def end(self) -> str:
        """Kill the process, from which nothing more will come; returns how it had ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(TICK)  # a process that is about to exit gets the time to give its own exit code
        code = self.process.returncode
        self.kill()
        if code is None:
            return "closed its process's connection with the trainer"
        if code < 0:
            return f"had its process killed by signal {-code} ({signal.strsignal(-code)})"
        return f"ended its process with exit code {code}"

    def kill(self) -> None:
        """Kill the process and all that it started, if that is still to be done."""
        if not self.alive:
            return
        self.alive = False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=1)  # the guard's stdin closes
        kill_session(self.process)
        self.socket.close()


def parse(line: bytes, number: int) -> Any:
    """The answer on a line, or None where the line is no answer of this number: a function may have written it."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    kinds = ("ready", "failed") if number == HANDSHAKE else (*FAILURES, NOT_APPLICABLE)
    match message:
        case [int(given), "value", float(value), *logged] if given == number and abs(value) <= LARGEST:
            return ("value", value, *logged) if all(map(is_logged, logged)) else None
        case [int(given), str(kind), str(text), *logged] if given == number and kind in kinds:
            printable = " ".join("".join(c if c.isprintable() else " " for c in text).split())
            return (kind, printable, *logged) if all(map(is_logged, logged)) else None
    return None


def is_logged(one: Any) -> bool:
    """Whether this is `mllm.rl.reward_process.Logged`."""
    match one:
        case ["extra", str(), str()]:
            return True
        case ["extra" | "metric", str(), float(value)]:
            return abs(value) <= LARGEST
        case ["turn", list(messages), bool(), list(calls), int(errors), dict()]:
            return all(map(is_message, messages)) and all(map(is_call, calls)) and 0 <= errors <= len(calls) + 1
    return False


def is_message(one: Any) -> bool:
    whole = isinstance(one, dict) and {"role", "content"} <= one.keys() <= {"role", "content", "name"}
    return whole and all(isinstance(text, str) and not re.search("[\ud800-\udfff]", text) for text in one.values())


def is_call(one: Any) -> bool:
    try:  # all of it is logged
        json.dumps(one, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("arguments"), dict)
