"""A reward function that does what the completion names: whatever a user's function might do."""

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np

FOREVER = 600
PICKLE = b"cos\nsystem\n(S'touch executed'\ntR.\n"
"""Makes a file when it is unpickled."""
LEFT = Path("left").absolute()
"""The file for the ids of started processes, in the trainer's working directory: a function may change the worker's."""


def hostile(completion, answer):
    """1 for the right answer; any other completion is the name of a function below, which is called."""
    return 1.0 if completion == answer else FUNCTIONS[completion]()


def busy(completion):
    """1, after half a second in which it may be disturbed."""
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        time.sleep(0.01)
    return 1.0


def raise_error():
    raise ValueError("two\nlines \x1b[31m\ud800")


def raise_interrupt():
    raise KeyboardInterrupt


def recurse():
    return recurse()


class Unprintable(Exception):
    def __str__(self):
        raise self


def raise_unprintable():
    raise Unprintable


RAISE = {
    **{function.__name__: function for function in (raise_error, raise_interrupt, recurse, raise_unprintable)},
    "exit_by_exception": lambda: sys.exit(3),
    "eat_memory": lambda: bytearray(2**62),
}


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
    time.sleep(FOREVER)


END = {
    "exit_at_once": lambda: os._exit(3),
    "kill_itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill_its_group": lambda: os.killpg(0, signal.SIGKILL),
    "crash": lambda: ctypes.string_at(0),
    "write_pickle": lambda: write_to_all_sockets(PICKLE),
    "write_half_a_line": lambda: write_to_all_sockets(b"["),
    "write_deep_nesting": lambda: write_to_all_sockets(b"[" * 5000 + b"\n"),
    "write_endless_line": write_endless_line,
    "answer_for_another": lambda: write_to_all_sockets(b'[2, "value", 5.0]\n'),
    "answer_infinity": lambda: write_to_all_sockets(b'[1, "value", 1e400]\n'),
    "close_everything": lambda: os.closerange(0, 4096),
    "close_everything_and_stay": close_everything_and_stay,
}


def block_signals_and_sleep():
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
    time.sleep(FOREVER)


def catch_everything():
    while True:
        try:
            time.sleep(FOREVER)
        except BaseException:
            continue


class SlowToConvert:
    def __float__(self):
        time.sleep(FOREVER)
        return 1.0


class SlowToPrint:
    def __repr__(self):
        time.sleep(FOREVER)
        return "slow"


HANG = {
    "sleep": lambda: time.sleep(FOREVER),
    "match_forever": lambda: re.match(r"(a+)+$", "a" * 64 + "b"),
    "block_signals_and_sleep": block_signals_and_sleep,
    "catch_everything": catch_everything,
    "stop_itself": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "wait_for_a_child": lambda: subprocess.run(["sleep", str(FOREVER)], check=True),
    "return_slow_to_convert": SlowToConvert,
    "return_slow_to_print": SlowToPrint,
}


class WrongFloat:
    def __float__(self):
        return "1"


class RaisingFloat:
    def __float__(self):
        raise ValueError("not today")


class RaisingRepr:
    def __repr__(self):
        raise RuntimeError("no comment")


async def coroutine():
    return 1.0


RETURN_NO_NUMBER = {
    "none": lambda: None,
    "text": lambda: "1",
    "nan": lambda: float("nan"),
    "infinity": lambda: float("-inf"),
    "decimal_nan": lambda: Decimal("NaN"),
    "too_large": lambda: 1e30,
    "too_large_for_a_float": lambda: 10**400,
    "a_list": lambda: [1.0],
    "an_array_of_objects": lambda: np.array("1", object),
    "a_complex": lambda: 1j,
    "a_function": lambda: lambda: 1.0,
    "a_coroutine": lambda: coroutine(),
    "a_wrong_float": WrongFloat,
    "a_raising_float": RaisingFloat,
    "a_raising_repr": RaisingRepr,
}


class Unpicklable:
    def __float__(self):
        return 1.0

    def __reduce__(self):
        raise TypeError("stays here")


def print_much():
    for _ in range(200):
        print("o" * 10_000)
        print("e" * 10_000, file=sys.stderr)
        os.write(1, b"w" * 10_000)
    return 1.0


def fork_and_return():
    os.fork()
    return 1.0


def fork_and_raise():
    if os.fork() == 0:
        raise ValueError("raised in the child")
    return 1.0


def leave_a_child():
    if os.fork() == 0:
        time.sleep(FOREVER)
    return 1.0


def leave_a_thread():
    threading.Thread(target=time.sleep, args=(FOREVER,)).start()
    return 1.0


def change_everything():
    os.chdir("/")
    os.environ.clear()
    sys.path.clear()
    return 1.0


RETURN_ONE = {
    "true": lambda: True,
    "an_integer": lambda: 1,
    "a_decimal": lambda: Decimal(1),
    "a_fraction": lambda: Fraction(1),
    "a_float32": lambda: np.float32(1),
    "an_integer_of_numpy": lambda: np.int8(1),
    "an_array_of_no_dimension": lambda: np.array(1.0),
    "unpicklable": Unpicklable,
    "run_a_loop": lambda: asyncio.run(coroutine()),
    **{function.__name__: function for function in (fork_and_return, fork_and_raise, leave_a_child, leave_a_thread)},
    "change_everything": change_everything,
}


def leave_an_alarm():
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("late"))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    return 1.0


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
    time.sleep(FOREVER)


def fork_and_exit():
    child = os.fork()
    if child == 0:
        time.sleep(FOREVER)
    note(child)
    os._exit(3)


OTHERS = (print_much, leave_an_alarm, wait_for_all_children, start_a_session, start_a_session_and_sleep, fork_and_exit)
FUNCTIONS = {
    **(RAISE | END | HANG | RETURN_NO_NUMBER | RETURN_ONE),
    **{function.__name__: function for function in OTHERS},
}
