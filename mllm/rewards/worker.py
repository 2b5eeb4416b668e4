"""The trainer's side of a process in which reward functions or environments run; its own side is process.py.

A user's function may raise, hang in C code with every signal blocked, end or fork its process, print, and write to or
close whatever is open. So the process is a fresh interpreter (forking one that runs JAX's threads may deadlock) in a
session of its own, and its output goes to stderr. Its answers are JSON, never unpickled. When an answer is late, when
a function ends the process, and when the trainer ends, however that does, all that the process has started is killed,
except for what began a session of its own. Memory is not limited, and functions have the rights of the user who trains.
"""

import multiprocessing
import os
import pickle
import queue
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock, Thread
from types import ModuleType
from typing import Any

from mllm.config.places import MODULES
from mllm.errors import UserError
from mllm.rewards.calls import Answer
from mllm.rewards.process import HANDSHAKE, SIGNALS, decode, work
from mllm.strict_json import LONGEST

CONTEXT = multiprocessing.get_context("spawn")
STARTING = Lock()
"""Held while a process is started: it begins with the signals blocked that it will ignore, and multiprocessing sees an
empty main module, since it would import the trainer's in the process, which takes as long as all the rest."""
START_TIMEOUT = 120.0
TICK = 0.1


class Worker:
    """The trainer's side of a process, which starts when it is needed, and again when a function has ended it.

    While a method waits, it calls `poll` at least every 0.25 s; what `poll` raises passes through.
    """

    kinds: list[str]
    """For each function `Reward.kind`; known once the process has started."""
    codes: list[str]
    """For each function a checksum of the file that it is in; empty for the trainer's own functions."""
    process: multiprocessing.process.BaseProcess

    def __init__(self, make: Callable[[], Sequence[Any]], poll: Callable[[], None], key: str = "task.rewards") -> None:
        """The process will have the functions that `make` returns there; `key` is the setting that names them."""
        self.make, self.poll, self.key = make, poll, key
        self.alive = False

    def start(self) -> None:
        """Start the process; UserError where a function can't be had, or requires what there isn't."""
        make = pickle.dumps(self.make)
        self.connection, other_end = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=work, args=(other_end, MODULES))
        with STARTING:
            main, blocked = sys.modules["__main__"], signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            sys.modules["__main__"] = ModuleType("__main__")
            try:
                self.process.start()
            finally:
                sys.modules["__main__"] = main
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        other_end.close()
        self.alive = True
        try:
            self.send(make, 1)
            kind, message = self.answer(HANDSHAKE, START_TIMEOUT)
            if kind != "ready":
                raise UserError(message if kind == "failed" else f"{self.key}: importing it {message}")
        except BaseException:
            self.kill()
            raise
        functions = [word.split(":") for word in message.split()]
        self.kinds, self.codes = [kind for kind, _ in functions], [code for _, code in functions]

    def ask(self, functions: Sequence[int], samples: Sequence[Any], seconds: float) -> list[Answer]:
        """Each function's answers for the samples, one function after the other; each may take `seconds`."""
        answers, wanted = list[Answer](), len(functions) * len(samples)
        while len(answers) < wanted:
            if not self.alive or not self.process.is_alive():
                self.kill()
                self.start()
            kind = self.kinds[functions[0]]
            # The process itself watches over coroutines and environments, and is waited for longer.
            limit = seconds * {"single": 1, "played": 3, "batched": wanted, "async": wanted + 1}[kind]
            first = secrets.randbits(48)  # so that what a function writes to the connection is no answer
            numbers = range(first, first + wanted - len(answers))
            self.send(pickle.dumps((functions, first, samples[len(answers) :], seconds)), len(numbers))
            for number in numbers:
                if self.alive:
                    answers.append(self.answer(number, limit))
            if kind in ("batched", "async"):
                answers += answers[-1:] * (wanted - len(answers))  # the call has failed for the rest
        return answers

    def send(self, message: bytes, answers: int) -> None:
        """Send a message, for which so many answers are expected, in a thread that puts each into a queue.

        None is put there where no more can come, b"" for what is no message. The thread may be blocked as long as the
        process lives, since a function may write half a message.
        """
        connection, self.received = self.connection, (received := queue.SimpleQueue[bytes | None]())

        def exchange() -> None:
            try:
                connection.send_bytes(message)
                for _ in range(answers):
                    received.put(connection.recv_bytes(LONGEST))
            except EOFError:
                received.put(None)
            except OSError as error:
                received.put(None if error.errno else b"")  # an error of the system, or a message of a wrong length

        self.thread = Thread(target=exchange, daemon=True)
        self.thread.start()

    def answer(self, number: int, timeout: float) -> Any:
        """The next answer, which must have this number: an `Answer`, or the handshake's."""
        deadline, message = time.monotonic() + timeout, None
        while True:
            self.poll()
            ended = not self.process.is_alive()  # a child of its own may still hold the connection
            left = deadline - time.monotonic()
            with suppress(queue.Empty):
                message = self.received.get(timeout=max(0.001, TICK if ended else min(left, TICK)))
                break
            if ended:
                break
            if left <= 0:
                self.kill()
                return "timed_out", f"took longer than {timeout:g} s"
        if message is None:
            self.poll()  # the signal that ended the process may have reached the trainer, too
            return "raised", self.end()
        answer = decode(message, number)
        if answer is None:
            self.kill()
            return "raised", "wrote to its process's connection with the trainer"
        return answer

    def end(self) -> str:
        """Kill the process, from which nothing more will come; returns how it had ended."""
        self.wait(TICK)  # a process that is about to exit gets the time to give its own exit code
        code = self.process.exitcode
        self.kill()
        if code is None:
            return "closed its process's connection with the trainer"
        if code < 0:
            return f"had its process killed by signal {-code} ({signal.strsignal(-code)})"
        return f"ended its process with exit code {code}"

    def wait(self, seconds: float) -> None:
        """Wait for the process's end; `join` would wait for ever where a function has closed the process's files."""
        deadline = time.monotonic() + seconds
        while self.process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.002)

    def kill(self) -> None:
        """Kill the process and all that it started in its session, if that is still to be done."""
        if not self.alive:
            return
        self.alive = False
        group = self.process.pid
        assert group is not None
        with suppress(OSError):  # it may not have its group yet
            os.killpg(group, signal.SIGKILL)
        self.process.kill()
        self.wait(1.0)
        with suppress(ChildProcessError):  # as process 1 of a container the trainer inherits what the worker started
            while os.waitpid(-group, os.WNOHANG)[0]:
                pass
        with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as ours:
            ours.shutdown(socket.SHUT_RDWR)  # the thread ends, whoever else holds the other end
        self.thread.join()
        self.connection.close()
        with suppress(ValueError):  # it is stuck in the kernel
            self.process.close()
