"""Processes for reward functions and environments: a function that hangs or exits costs one call.

Pebble starts the processes, limits the time of each call, and replaces a process that times out or exits. A process is
a fresh interpreter without JAX, since forking the trainer's threads may deadlock. The process leads a session, so its
child processes are killed with it. Answers are strict JSON. Memory is not limited, and functions have the user's
rights.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.context import SpawnContext, SpawnProcess
from threading import Lock
from types import ModuleType
from typing import Any, NamedTuple

from pebble import ProcessExpired, ProcessPool

from mllm import strict_json
from mllm.config.places import MODULES
from mllm.errors import UserError
from mllm.rewards.calls import answers, describe
from mllm.rewards.scores import Answer

START_TIMEOUT = 120.0
TICK = 0.1
MOVES = 16
"""The moves of environments in a call: each call takes about as long as ten short moves."""
STARTING = Lock()


class Process(SpawnProcess):
    """A process that doesn't import the trainer's main module, and is killed together with its children."""

    def start(self) -> None:
        # multiprocessing would have the process import the main module of the trainer, and JAX with it.
        with STARTING:
            main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
            try:
                super().start()
            finally:
                sys.modules["__main__"] = main

    def terminate(self) -> None:
        assert self.pid is not None
        with suppress(OSError):  # it has no session yet
            os.killpg(self.pid, signal.SIGKILL)
        self.kill()


class Context(SpawnContext):
    Process = Process


class Call(NamedTuple):
    """A call that waits for a process, or is running."""

    future: Future[list[bytes]]
    answers: int
    limit: float

    def result(self) -> list[Answer]:
        """Wait for the answers, function by function; failures if the call timed out or its process ended."""
        try:
            return [decode(message) for message in self.future.result()]
        except TimeoutError:
            failure = "timed_out", f"took longer than {self.limit:g} s"
        except ProcessExpired as expired:
            failure = "raised", ended(expired.exitcode)
        except BrokenProcessPool:
            failure = "raised", "its process has ended"
        return [failure] * self.answers


class Workers:
    """A pool of processes that starts at the first call, with the functions that `make` returns."""

    kinds: list[str]
    """Each function's `Reward.kind`; known once a process has started."""
    tools: list[dict[str, Any]]
    """The JSON schemas of the tools."""

    def __init__(self, make: Callable[[], Sequence[Any]], count: int = 1, key: str = "task.rewards") -> None:
        """`key` is the setting that names the functions, for error messages."""
        self.make, self.count, self.key = make, count, key
        self.pool: ProcessPool | None = None

    def start(self) -> None:
        """Start the processes; UserError if a function can't be imported, or requires an unknown argument."""
        self.pool = ProcessPool(self.count, initializer=begin, initargs=(self.make, MODULES), context=Context())
        try:
            fault, self.kinds, self.tools = self.pool.schedule(describe_functions).result(START_TIMEOUT)
        except BrokenProcessPool:
            fault = f"{self.key}: importing it ended its process"
        except TimeoutError:
            fault = f"{self.key}: importing it took longer than {START_TIMEOUT:g} s"
        if fault:
            self.close()
            raise UserError(fault)

    def schedule(self, functions: Sequence[int], samples: Sequence[Any], seconds: float) -> Call:
        """Call functions, by index, with samples; the time limit is `seconds` per function and sample."""
        if not (self.pool and self.pool.active):  # it has not started, or a process ended in between
            self.close()
            self.start()
        assert self.pool is not None
        wanted = len(functions) * len(samples)
        # The process itself limits the time of coroutines and environments; this limit comes later.
        limit = seconds * (wanted + {"played": 2, "async": 1}.get(self.kinds[functions[0]], 0))
        call = self.pool.schedule(answer, args=(functions, samples, seconds), timeout=limit)
        return Call(call, wanted, limit)

    def ask(self, samples: Sequence[Any], seconds: float, poll: Callable[[], None]) -> list[Answer]:
        """The only function's answers: `MOVES` samples a call, or all samples in one call of a coroutine function."""
        if self.pool is None:
            self.start()
        size = len(samples) if self.kinds == ["async"] else MOVES
        calls = [self.schedule([0], samples[i : i + size], seconds) for i in range(0, len(samples), size)]
        while wait([call.future for call in calls], TICK).not_done:
            poll()
        return [answer for call in calls for answer in call.result()]

    def close(self) -> None:
        """End the processes and their children."""
        if self.pool:
            self.pool.stop()
            self.pool.join()
        self.pool = None


def ended(code: int) -> str:
    """The end of an error message about a process with this exit code."""
    if code < 0:
        return f"had its process killed by signal {-code} ({signal.strsignal(-code)})"
    return f"ended its process with exit code {code}"


# The processes' own side

FUNCTIONS: list[Any] = []
FAULTS: list[str] = []


def begin(make: Callable[[], Sequence[Any]], modules: Sequence[str]) -> None:
    """Set up the process and make its functions; `modules` are folders to add to Python's path."""
    os.setsid()  # Ctrl-C is the trainer's to handle
    os.dup2(2, 1)
    os.environ["JAX_PLATFORMS"] = "cpu"  # the functions may import JAX themselves; the accelerator is the trainer's
    sys.path += [folder for folder in (*modules, os.getcwd()) if folder not in sys.path]
    end_with_trainer()
    for signum in (signal.SIGTERM, signal.SIGINT):  # they reach all processes of a job, and are the trainer's
        signal.signal(signum, lambda *_: None)
    try:
        FUNCTIONS.extend(make())
    except UserError as error:
        FAULTS.append(str(error))


def end_with_trainer() -> None:
    """Fork a process that kills this process group as soon as the trainer or this process ends.

    A thread would not do, since a function may hold Python's lock.
    """
    trainer, worker = multiprocessing.parent_process(), os.getpid()
    assert trainer is not None
    if os.fork():
        return
    try:
        while os.getppid() == worker and not connection.wait([trainer.sentinel], TICK):
            pass
    finally:
        os.killpg(0, signal.SIGKILL)


def describe_functions() -> tuple[str, list[str], list[Any]]:
    """The error that prevented the functions (empty if none did), their kinds, and their tools."""
    return "".join(FAULTS), [each.kind for each in FUNCTIONS], [tool for each in FUNCTIONS for tool in each.tools]


def answer(functions: Sequence[int], samples: Sequence[Any], seconds: float) -> list[bytes]:
    """The answers of the functions, by index, for the samples, each as JSON."""
    try:
        return [encode(*each) for each in answers([FUNCTIONS[i] for i in functions], samples, seconds)]
    except BaseException as error:
        return [encode("raised", describe(error))] * (len(functions) * len(samples))


def encode(kind: str, value: float | str, *logged: tuple[Any, ...]) -> bytes:
    """An answer as strict JSON; a failure if strict JSON can't hold the answer."""
    value = " ".join("".join(c if c.isprintable() else " " for c in value).split()) if isinstance(value, str) else value
    try:
        return strict_json.dump([kind, value, *logged])
    except ValueError as error:
        return strict_json.dump(["raised", f"what it gave can't be sent: {error!s:.300}"])


def decode(message: bytes) -> Answer:
    kind, value, *logged = strict_json.load(message)
    return (kind, value, *logged)
