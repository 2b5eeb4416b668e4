"""A reward function that does what completions tell it to: whatever a stranger's might do, by name."""

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
"""Unpickled, it would make a file."""


def hostile(prompt, completion, example):
    """1 for the right answer."""
    return 1.0 if completion == example.answer else globals()[completion]()


def busy(prompt, completion, example):
    """For a second, in which it may be disturbed; then 1."""
    end = time.monotonic() + 1
    while time.monotonic() < end:
        time.sleep(0.01)
    return 1.0


# It raises, or ends its process


def raise_error():
    raise ValueError("two\nlines \x1b[31m\ud800")


def raise_interrupt():
    raise KeyboardInterrupt


def leave():
    sys.exit(3)


def recurse():
    return recurse()


def eat_memory():
    return bytearray(2**62)


class Unspeakable(Exception):
    def __str__(self):
        raise self


def raise_unspeakable():
    raise Unspeakable


def leave_at_once():
    os._exit(3)


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_its_group():
    os.killpg(0, signal.SIGKILL)


def crash():
    ctypes.string_at(0)


def fork_and_leave():
    if os.fork() == 0:
        time.sleep(FOREVER)
    os._exit(3)


# It reaches for what isn't its own


def connections():
    """Sockets among the open files."""
    return [int(path.name) for path in Path("/proc/self/fd").iterdir() if os.path.realpath(path).find("socket:") >= 0]


def write_to_all(content):
    for handle in connections():
        os.write(handle, content)
    return 1.0


def write_pickle():
    return write_to_all(PICKLE)


def write_half_a_line():
    return write_to_all(b"[")


def write_depths():
    return write_to_all(b"[" * 5000 + b"\n")


def write_no_end():
    for _ in range(100):
        write_to_all(b"x" * 1000)
    return 1.0


def answer_for_another():
    return write_to_all(b'[2, "value", 5.0]\n')


def answer_what_is_none():
    return write_to_all(b'[1, "value", 1e400]\n')


def close_everything():
    os.closerange(0, 4096)
    return 1.0


def close_everything_and_stay():
    os.closerange(0, 4096)
    time.sleep(FOREVER)


# It hangs


def sleep():
    time.sleep(FOREVER)


def match_for_ever():
    re.match(r"(a+)+$", "a" * 64 + "b")


def block_signals_and_sleep():
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
    time.sleep(FOREVER)


def ignore_signals_and_sleep():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(FOREVER)


def catch_everything():
    while True:
        try:
            time.sleep(FOREVER)
        except BaseException:
            continue


def stop_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_a_child():
    subprocess.run([sys.executable, "-c", f"import time; time.sleep({FOREVER})"], check=True)


class Slow:
    def __float__(self):
        time.sleep(FOREVER)
        return 1.0


class SlowToSay:
    def __repr__(self):
        time.sleep(FOREVER)
        return "slow"


def number_for_ever():
    return Slow()


def say_for_ever():
    return SlowToSay()


# What it returns is no number


class Liar:
    def __float__(self):
        return "1"


class Refusal:
    def __float__(self):
        raise ValueError("not today")


class Silent:
    def __repr__(self):
        raise RuntimeError("no comment")


async def later():
    return 1.0


NO_NUMBERS = {
    "none": lambda: None,
    "text": lambda: "1",
    "some_bytes": lambda: b"1",
    "nan": lambda: float("nan"),
    "infinity": lambda: float("-inf"),
    "decimal_nan": lambda: Decimal("NaN"),
    "too_large": lambda: 1e30,
    "too_large_for_a_float": lambda: 10**400,
    "a_list": lambda: [1.0],
    "several": lambda: np.array([1.0, 2.0]),
    "numpy_text": lambda: np.str_("1"),
    "an_array_of_text": lambda: np.array("1"),
    "an_array_of_anything": lambda: np.array("1", object),
    "an_array_of_nothing": lambda: np.array([]),
    "a_date": lambda: np.datetime64("2020-01-01"),
    "imaginary": lambda: 1j,
    "imaginary_of_numpy": lambda: np.complex64(1j),
    "a_function": lambda: lambda: 1.0,
    "a_promise": lambda: later(),
    "a_type": lambda: float,
    "a_liar": Liar,
    "a_refusal": Refusal,
    "a_silence": Silent,
}

# What it returns is a number, of 1


class Unpicklable:
    def __float__(self):
        return 1.0

    def __reduce__(self):
        raise TypeError("stays here")


NUMBERS = {
    "true": lambda: True,
    "an_integer": lambda: 1,
    "a_decimal": lambda: Decimal(1),
    "a_fraction": lambda: Fraction(1),
    "a_float32": lambda: np.float32(1),
    "an_integer_of_numpy": lambda: np.int8(1),
    "an_array_of_no_dimension": lambda: np.array(1.0),
    "unpicklable": Unpicklable,
}
globals().update(NO_NUMBERS | NUMBERS)

# It returns 1, but not without a trace


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
        raise ValueError("a child's")
    return 1.0


def leave_a_child():
    if os.fork() == 0:
        time.sleep(FOREVER)
    return 1.0


def leave_a_thread():
    threading.Thread(target=time.sleep, args=(FOREVER,)).start()
    return 1.0


def leave_an_alarm():
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("late"))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    return 1.0


def move_away():
    os.chdir("/")
    os.environ.clear()
    sys.path.clear()
    return 1.0


def wait_for_all_children():
    subprocess.run(["true"], check=True)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return 1.0


def run_a_loop():
    return asyncio.run(later())


# It starts processes

LEFT = Path("left").absolute()
"""A file of their numbers, where the trainer stands: the functions above may have moved."""


def note(*processes):
    with LEFT.open("a") as file:
        file.writelines(f"{process}\n" for process in processes)


def start_a_session():
    """A process of a session of its own."""
    note(subprocess.Popen(["sleep", str(FOREVER)], start_new_session=True).pid)
    return 1.0


def start_a_session_and_sleep():
    start_a_session()
    time.sleep(FOREVER)


def fork_and_end():
    child = os.fork()
    if child == 0:
        time.sleep(FOREVER)
    note(child)
    os._exit(3)
