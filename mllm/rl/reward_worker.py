"""The process in which reward functions run: `Worker` is the trainer's side of it, `work` the process's own.

A user's function may raise, hang in C code with every signal blocked, end or fork its process, print, and write to or
close whatever is open. So the process is a fresh interpreter (forking one that runs JAX's threads may deadlock) in a
session of its own, and its output goes to stderr. Its answers are lines of JSON that are checked, never unpickled. When
an answer is late, the process is killed with all that it started; and it ends with the trainer, however that ends.
Memory is not limited, and functions have the rights of the user who trains.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from mllm.child_process import kill_session
from mllm.config.places import MODULES
from mllm.data.tasks.task import Scorer
from mllm.errors import UserError
from mllm.rl.reward_calls import Available, Reward, Sample, bind

FAILURES = ("raised", "timed_out", "not_a_number")
NOT_APPLICABLE = "not_applicable"
"""The kind of a batched function's None: it says nothing of this completion, which is neither failure nor 0."""
HANDSHAKE = -1
"""The number of the first answer, `ready` or `failed`: whether the functions could be imported."""
START_TIMEOUT = 120.0
LARGEST = 1e18
"""The largest reward: squares of larger ones overflow the float32 in which a group's rewards are compared."""
LONGEST_MESSAGE = 300
LONGEST_LINE = 2**15
TICK = 0.1
GUARD = """
import os, signal, sys
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
sys.stdin.read()
os.killpg(int(sys.argv[1]), signal.SIGKILL)
"""
"""A program that kills the process group in its argument when its stdin closes, so when the trainer ends."""


class Worker:
    """The trainer's side of a process, which starts when it is needed, and again when a function has ended it.

    While a method waits, it calls `poll` at least every 0.25 s; what `poll` raises passes through.
    """

    batched: list[bool]
    """For each function whether one call serves all samples; known once the process has started."""
    codes: list[str]
    """For each function `Reward.code`."""
    process: subprocess.Popen[bytes]

    def __init__(
        self, rewards: Sequence[tuple[str, Mapping[str, Any]]], scorer: Scorer | None, available: Available
    ) -> None:
        """The process will have the functions of these names and `args`."""
        self.bound = rewards, scorer, available
        self.alive = False

    def start(self, poll: Callable[[], None]) -> None:
        """Start the process; UserError where a function can't be had, or requires what there isn't."""
        self.socket, theirs = socket.socketpair()
        self.received = b""
        path = [entry or os.getcwd() for entry in sys.path]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from mllm.rl.reward_worker import work; work({theirs.fileno()})"],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[theirs.fileno()],
            # the functions may import JAX themselves; the accelerator is the trainer's
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*path, *MODULES, os.getcwd()]), "JAX_PLATFORMS": "cpu"},
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
            self.send(self.bound, START_TIMEOUT, poll)
            kind, message = self.answer(HANDSHAKE, START_TIMEOUT, poll)
            if kind != "ready":
                raise UserError(message if kind == "failed" else f"task.rewards: importing them {message}")
        except BaseException:
            self.kill()
            raise
        functions = [word.split(":") for word in message.split()]
        self.batched, self.codes = [kind == "batched" for kind, _ in functions], [code for _, code in functions]

    def ask(
        self, function: int, samples: Sequence[Sample], seconds: float, poll: Callable[[], None]
    ) -> list[tuple[str, float | str]]:
        """The function's answer for each sample. A batched call may take `seconds` for each of them."""
        answers: list[tuple[str, float | str]] = []
        while len(answers) < len(samples):
            if not self.alive or self.process.poll() is not None:
                self.kill()
                self.start(poll)
            limit = seconds * (len(samples) if self.batched[function] else 1)
            self.send((function, len(answers), samples[len(answers) :]), limit, poll)
            while self.alive and len(answers) < len(samples):
                answers.append(self.answer(len(answers), limit, poll))
            if self.batched[function]:
                answers += answers[-1:] * (len(samples) - len(answers))  # the call has failed for the rest
        return answers

    def send(self, message: Any, timeout: float, poll: Callable[[], None]) -> None:
        """Send a pickled message. Where the process has died or reads nothing for `timeout` s, `answer` reports it."""
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
        """The next answer, which must have this number: ("value", float), or another kind and a message."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self.received and len(self.received) < LONGEST_LINE:
            poll()
            left = deadline - time.monotonic()
            ended = self.process.poll() is not None  # a child of its own may still hold the connection
            self.socket.settimeout(0.001 if ended else max(0.001, min(left, TICK)))
            chunk = b""
            try:
                chunk = self.socket.recv(4096)
            except TimeoutError:
                if not ended and left > 0:
                    continue
                if not ended:
                    self.kill()
                    return "timed_out", f"took longer than {timeout:g} s"
            except ConnectionError:
                pass
            if not chunk:
                poll()  # the signal that ended the process may have reached the trainer, too
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
        self.guard.kill()
        kill_session(self.process)
        self.guard.communicate()
        self.socket.close()


def parse(line: bytes, number: int) -> tuple[str, Any] | None:
    """The answer on a line, or None where the line is no answer of this number: a function may have written it."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    kinds = ("ready", "failed") if number == HANDSHAKE else (*FAILURES, NOT_APPLICABLE)
    match message:
        case [int(given), "value", float(value)] if given == number and abs(value) <= LARGEST:
            return "value", value
        case [int(given), str(kind), str(text)] if given == number and kind in kinds:
            return kind, " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return None


def work(handle: int) -> None:
    """The process's own side: read calls from the socket `handle`, and answer for each of their samples."""
    worker = os.getpid()

    def ignore(number: int, frame: FrameType | None) -> None:
        """Signals to all processes of a job are the trainer's to handle; children that functions fork die of them."""
        if os.getpid() != worker:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, ignore)
    signal.signal(signal.SIGINT, ignore)
    connection = socket.socket(fileno=handle)
    incoming = connection.makefile("rb")

    def reply(number: int, kind: str, result: float | str) -> None:
        if os.getpid() != worker:
            os._exit(0)  # a function forked this process and returned in it, too
        try:
            connection.sendall(json.dumps([number, kind, result]).encode() + b"\n")
        except OSError:
            os._exit(1)

    try:
        named, scorer, available = pickle.load(incoming)
        rewards = [bind(name, args, scorer, available) for name, args in named]
    except UserError as error:
        reply(HANDSHAKE, "failed", str(error))
        return
    kinds = ("batched" if reward.batched else "single" for reward in rewards)
    reply(HANDSHAKE, "ready", " ".join(f"{kind}:{reward.code}" for kind, reward in zip(kinds, rewards, strict=True)))
    while True:
        try:
            function, first, samples = pickle.load(incoming)
        except (EOFError, OSError):
            return
        for number, answer in enumerate(answers(rewards[function], samples), first):
            reply(number, *answer)


def answers(reward: Reward, samples: Sequence[Sample]) -> Iterator[tuple[str, float | str]]:
    """For each sample ("value", float), ("raised" or "not_a_number", message), or (NOT_APPLICABLE, "")."""
    if not reward.batched:
        for sample in samples:
            kind, returned = call(reward, [sample])
            yield (kind, returned) if kind == "raised" else judge(returned)
        return
    kind, returned = call(reward, samples)
    if kind == "raised":
        yield from [(kind, returned)] * len(samples)
        return
    try:
        values = list(returned)
        if len(values) != len(samples):
            raise ValueError(f"{len(values)} values for {len(samples)} completions")
    except BaseException as error:
        yield from [("not_a_number", f"returned no list of numbers: {describe(error)}")] * len(samples)
        return
    yield from ((NOT_APPLICABLE, "") if value is None else judge(value) for value in values)


def call(reward: Reward, samples: Sequence[Sample]) -> tuple[str, Any]:
    """("returned", what the function returns), or ("raised", message)."""
    try:
        return "returned", reward(samples)
    except BaseException as error:  # SystemExit too: only this call has failed
        return "raised", describe(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that the function left would go off in another one


def judge(value: Any) -> tuple[str, float | str]:
    """("value", float), or ("not_a_number", message)."""
    try:
        number = as_number(value)
        if abs(number) <= LARGEST:
            return "value", number
        return "not_a_number", f"returned {value!r:.{LONGEST_MESSAGE}}"
    except BaseException as error:
        return "not_a_number", f"returned a {type(value).__name__:.{LONGEST_MESSAGE}}: {describe(error)}"


def as_number(value: Any) -> float:
    """The value as a float, NaN if it is no real number. Text is none, though numpy's has a `__float__`."""
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    if isinstance(value, str | bytes) or kind in ("S", "U", "O", "M", "m", "c") or not hasattr(value, "__float__"):
        return float("nan")
    return float(value)


def describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error!s:.{LONGEST_MESSAGE}}"
    except BaseException:
        return "an exception that can't be printed"
