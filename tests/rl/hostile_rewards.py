"""A reward function that does what the completion names: whatever a user's function might do, and what is answered."""

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

FOREVER = 600
PICKLE = b"cos\nsystem\n(S'touch executed'\ntR.\n"
"""Makes a file when it is unpickled."""
LEFT = Path("left").absolute()
"""The file for the ids of started processes, in the trainer's working directory: a function may change the worker's."""


def hostile(completion, answer):
    """1 for the right answer; any other completion is a name of the tables below, whose function is called."""
    return 1.0 if completion == answer else CASES[completion][0]()


def busy(completion):
    """1, after half a second in which it may be disturbed."""
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        time.sleep(0.01)
    return 1.0


def raises(error):
    def raise_error(*_):
        raise error

    return raise_error


def having(**methods):
    """An object with these special methods."""
    return type("Special", (), {f"__{name}__": method for name, method in methods.items()})()


def sleep(*_):
    time.sleep(FOREVER)


def recurse():
    return recurse()


def unprintable():
    raise type("Unprintable", (Exception,), {"__str__": raises(ValueError())})


async def coroutine():
    return 1.0


def in_a_fork(act):
    """Forks; the child goes on, and `act` is called in it."""

    def fork():
        if os.fork() == 0:
            act()
        return 1.0

    return fork


def leave_a_thread():
    threading.Thread(target=sleep).start()
    return 1.0


def change_everything():
    os.chdir("/")
    os.environ.clear()
    sys.path.clear()
    return 1.0


def leave_an_alarm():
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("late"))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    return 1.0


def print_much():
    for _ in range(200):
        print("o" * 10_000)
        print("e" * 10_000, file=sys.stderr)
        os.write(1, b"w" * 10_000)
    return 1.0


def write_to_all_sockets(content):
    for path in Path("/proc/self/fd").iterdir():
        if os.path.realpath(path).find("socket:") >= 0:
            os.write(int(path.name), content)
    return 1.0


def write_endless_line():
    for _ in range(100):
        write_to_all_sockets(b"x" * 1000)


def close_everything_and_stay():
    os.closerange(0, 4096)
    sleep()


def wait_for_all_children():
    subprocess.run(["true"], check=True)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return 1.0


def note(pid):
    with LEFT.open("a") as file:
        file.write(f"{pid}\n")


def start_a_session():
    note(subprocess.Popen(["sleep", str(FOREVER)], start_new_session=True).pid)
    return 1.0


def start_a_session_and_sleep():
    start_a_session()
    sleep()


def fork_and_exit():
    child = os.fork()
    if child == 0:
        sleep()
    note(child)
    os._exit(3)


def block_signals_and_sleep():
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
    sleep()


def catch_everything():
    while True:
        try:
            sleep()
        except BaseException:
            continue


Case = tuple[Callable[[], Any], str, str]
"""What the function does, the kind of its answer, and a regular expression for the whole message."""

LASTING: dict[str, Case] = {
    "raise an error": (raises(ValueError("two\nlines \x1b[31m\ud800")), "raised", r"ValueError: two lines \[31m"),
    "raise an interrupt": (raises(KeyboardInterrupt()), "raised", "KeyboardInterrupt:"),
    "recurse": (recurse, "raised", "RecursionError: .*"),
    "raise what can't be printed": (unprintable, "raised", "an exception that can't be printed"),
    "exit by an exception": (lambda: sys.exit(3), "raised", "SystemExit: 3"),
    "eat memory": (lambda: bytearray(2**62), "raised", "MemoryError:"),
    **{
        f"return {name}": (returned, "not_a_number", message)
        for name, returned, message in (
            ("None", lambda: None, "returned None"),
            ("text", lambda: "1", "returned '1'"),
            ("NaN", lambda: float("nan"), "returned nan"),
            ("infinity", lambda: float("-inf"), "returned -inf"),
            ("a decimal NaN", lambda: Decimal("NaN"), "returned .*"),
            ("what is too large", lambda: 1e30, "returned 1e.30"),
            ("what is too large for a float", lambda: 10**400, "returned a int: OverflowError.*"),
            ("a list", lambda: [1.0], r"returned \[1.0\]"),
            ("an array of objects", lambda: np.array("1", object), "returned array.*"),
            ("a complex number", lambda: 1j, "returned 1j"),
            ("a function", lambda: lambda: 1.0, "returned <function.*"),
            ("a coroutine", lambda: coroutine(), "returned <coroutine.*"),
            ("what is converted to text", lambda: having(float=lambda _: "1"), "returned a Special: TypeError.*"),
            ("what can't be converted", lambda: having(float=raises(OSError("no"))), "returned a Special: OSError: no"),
            ("what can't be shown", lambda: having(repr=raises(OSError("no"))), "returned a Special: OSError: no"),
        )
    },
    **{
        name: (returns_one, "value", "")
        for name, returns_one in (
            ("true", lambda: True),
            ("an integer", lambda: 1),
            ("a decimal", lambda: Decimal(1)),
            ("a fraction", lambda: Fraction(1)),
            ("a float32", lambda: np.float32(1)),
            ("an integer of numpy", lambda: np.int8(1)),
            ("an array of no dimension", lambda: np.array(1.0)),
            ("unpicklable", lambda: having(float=lambda _: 1.0, reduce=raises(TypeError("stays here")))),
            ("wait for all children", wait_for_all_children),
            ("run a loop", lambda: asyncio.run(coroutine())),
            ("fork and return", in_a_fork(lambda: None)),
            ("fork and raise", in_a_fork(raises(ValueError("raised in the child")))),
            ("leave a child", in_a_fork(sleep)),
            ("leave a thread", leave_a_thread),
            ("change everything", change_everything),
        )
    },
}
"""By the completion: what leaves the process alive, and the next sample's answer right."""

KILLED, WROTE = r"had its process killed by signal 9 \(Killed\)", "wrote to its process's connection with the trainer"
ENDING: dict[str, Case] = {
    "exit at once": (lambda: os._exit(3), "raised", "ended its process with exit code 3"),
    "kill itself": (lambda: os.kill(os.getpid(), signal.SIGKILL), "raised", KILLED),
    "kill its group": (lambda: os.killpg(0, signal.SIGKILL), "raised", KILLED),
    "crash": (lambda: ctypes.string_at(0), "raised", "had its process killed by signal 11 .*"),
    "write a pickle": (lambda: write_to_all_sockets(PICKLE), "raised", WROTE),
    "write half a line": (lambda: write_to_all_sockets(b"["), "raised", WROTE),
    "write deep nesting": (lambda: write_to_all_sockets(b"[" * 5000 + b"\n"), "raised", WROTE),
    "write an endless line": (write_endless_line, "raised", WROTE),
    "answer for another": (lambda: write_to_all_sockets(b'[2, "value", 5.0]\n'), "raised", WROTE),
    "answer infinity": (lambda: write_to_all_sockets(b'[1, "value", 1e400]\n'), "raised", WROTE),
    "close everything": (lambda: os.closerange(0, 4096), "raised", "closed its process's .*|ended its process .*"),
    "close everything and stay": (close_everything_and_stay, "raised", "closed its process's connection .*"),
}
"""What loses the process."""

LATE = "took longer than 0.4 s"
HANGING: dict[str, Case] = {
    "sleep": (sleep, "timed_out", LATE),
    "match forever": (lambda: re.match(r"(a+)+$", "a" * 64 + "b"), "timed_out", LATE),
    "block signals and sleep": (block_signals_and_sleep, "timed_out", LATE),
    "catch everything": (catch_everything, "timed_out", LATE),
    "stop itself": (lambda: os.kill(os.getpid(), signal.SIGSTOP), "timed_out", LATE),
    "wait for a child": (lambda: subprocess.run(["sleep", str(FOREVER)], check=True), "timed_out", LATE),
    "return what is slow to convert": (lambda: having(float=sleep), "timed_out", LATE),
    "return what is slow to show": (lambda: having(repr=sleep), "timed_out", LATE),
}
"""What is killed at its time limit of 0.4 s."""

OTHERS = (print_much, leave_an_alarm, start_a_session, start_a_session_and_sleep, fork_and_exit)
CASES = LASTING | ENDING | HANGING | {function.__name__: (function, "", "") for function in OTHERS}
