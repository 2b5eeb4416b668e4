"""Ends all that a process has started, in whatever session, however the process itself ends.

Linux gives orphans to the nearest ancestor that adopts them; elsewhere what has left its parent's session lives on.
This module imports little, so that `guard` starts fast.
"""

import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def adopt() -> None:
    """From now on orphans among this process's descendants become its children, where the system is Linux."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def prctl(option: int, value: int) -> None:
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def children(pid: int) -> list[int]:
    """The ids of a process's children, as Linux lists them; elsewhere none."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def end_children() -> None:
    """Kill this process's children, and theirs as they are adopted, until none is left."""
    while found := children(os.getpid()):
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for pid in found:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def guard(handle: int, code: str) -> NoReturn:
    """Run Python code in a process that has the file `handle`, in a session of its own, and end as that does.

    All that it has started ends with it, and it ends when this process's stdin closes, so when the parent ends.
    """
    adopt()
    child = os.fork()
    if not child:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execv(sys.executable, [sys.executable, "-P", "-c", code])
    os.close(handle)
    for number in (signal.SIGTERM, signal.SIGINT):  # to all processes of a job; they are the parent's to handle
        signal.signal(number, signal.SIG_IGN)

    def follow() -> None:
        os.read(0, 1)  # returns when nobody can write to stdin any more
        for kill in (os.killpg, os.kill):  # it may not have its session yet
            with suppress(OSError):
                kill(child, signal.SIGKILL)

    threading.Thread(target=follow, daemon=True).start()
    ended, status = os.wait()
    while ended != child:  # but an orphan that was adopted
        ended, status = os.wait()
    end_children()
    exit_code = os.waitstatus_to_exitcode(status)
    if exit_code < 0:
        with suppress(OSError):  # nothing handles SIGKILL
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code)
