"""A limit to the time that a stranger's Python code may take, in whichever thread it runs.

A thread of this module's own looks every half second for code that is over its time, and stops it by an exception
between two of its instructions. What a single instruction in C takes, such as a product of huge numbers, is not
limited; rewards, which may be anything, run in a process of their own instead. Left out: limits within limits.
"""

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock, Thread, get_ident

from mllm.errors import UserError

TICK = 0.5
"""Seconds."""
LOCK = Lock()
ENDS: dict[int, float] = {}
"""By thread: when its code is over its time."""


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise UserError in the body once it has taken so long; `what` begins the message."""
    watch()
    with LOCK:
        ENDS[get_ident()] = time.monotonic() + seconds
    try:
        yield
    except TimeoutError:
        raise UserError(f"{what} took longer than {seconds:g} s") from None
    finally:
        with LOCK:
            ENDS.pop(get_ident(), None)


@cache
def watch() -> None:
    """Start the thread, once in a process."""
    Thread(target=look, name="time limit", daemon=True).start()


def look() -> None:
    while True:
        time.sleep(TICK)
        with LOCK:
            for thread in [thread for thread, end in ENDS.items() if time.monotonic() > end]:
                del ENDS[thread]
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeoutError))
