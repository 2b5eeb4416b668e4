"""A limit to the time that a stranger's Python code may take, in whichever thread it runs.

A thread raises an exception in code that has exceeded its time, again and again until the code ends, since a `__del__`
may swallow one. A single instruction in C is not limited. Limits can't be nested.
"""

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock, Thread, get_ident

from mllm.errors import UserError

CHECK_SECONDS = 0.5
LOCK = Lock()
DEADLINES: dict[int, float] = {}
"""The end of the time of each thread's limited code, by the thread's identifier."""


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise UserError in the body once it has taken longer; `what` begins the message."""
    start_checking()
    with LOCK:
        DEADLINES[get_ident()] = time.monotonic() + seconds
    try:
        yield
    except TimeoutError:
        raise UserError(f"{what} took longer than {seconds:g} s") from None
    finally:
        with LOCK:
            DEADLINES.pop(get_ident(), None)


@cache
def start_checking() -> None:
    """Start the thread that checks, once in a process."""
    Thread(target=check_deadlines, name="time limit", daemon=True).start()


def check_deadlines() -> None:
    while True:
        time.sleep(CHECK_SECONDS)
        with LOCK:
            for thread in (thread for thread, deadline in DEADLINES.items() if time.monotonic() > deadline):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeoutError))
