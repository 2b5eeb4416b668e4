"""A reward function that runs the completion: whatever a user's function might do, and what is answered."""

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
from pathlib import Path

import numpy as np

PICKLE = b"cos\nsystem\n(S'touch executed'\ntR.\n"
"""Makes a file when it is unpickled."""
LEFT = Path("left").absolute()
"""The file for the ids of started processes, in the trainer's working directory: a function may change the worker's."""
DISTURBED = Path("disturbed").absolute()
"""A file that is there when a function that is to be disturbed has been."""
USED = asyncio, ctypes, re, signal, subprocess, sys, threading, Decimal, np


def hostile(completion, answer):
    """1 for the right answer; any other completion is run, and its `result` returned, or 1."""
    if completion == answer:
        return 1.0
    names = dict(globals())
    exec(completion, names)
    return names.get("result", 1.0)


def busy(completion):
    """1, when it has been disturbed, and after half a second, in which an alarm may go off."""
    end = time.monotonic() + 0.5
    while time.monotonic() < end or not DISTURBED.exists():
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
    time.sleep(600)


async def coroutine():
    return 1.0


def write_to_all_sockets(content):
    for path in Path("/proc/self/fd").iterdir():
        if os.path.realpath(path).find("socket:") >= 0:
            os.write(int(path.name), content)


def note(pid):
    with LEFT.open("a") as file:
        file.write(f"{pid}\n")


PLACE = r"\(hostile_rewards.py:[0-9]+\)"
LASTING = {
    r"raise ValueError('two\nlines \x1b[31m\ud800')": rf"raised ValueError: two lines \[31m {PLACE}",
    "raise KeyboardInterrupt": f"raised KeyboardInterrupt: {PLACE}",
    "recurse = lambda: recurse(); recurse()": "raised RecursionError: .*",
    "raise type('E', (Exception,), {'__str__': raises(OSError())})": "raised an exception that can't be printed",
    "sys.exit(3)": f"raised SystemExit: 3 {PLACE}",
    "bytearray(2**62)": f"raised MemoryError: {PLACE}",
    "result = None": "not_applicable ",
    "result = '1'": "not_a_number returned '1'",
    "result = float('-inf')": "not_a_number returned -inf",
    "result = 1e30": "not_a_number returned 1e.30",
    "result = 10**400": "not_a_number returned a int: OverflowError.*",
    "result = coroutine()": "not_a_number returned <coroutine.*",
    "result = having(repr=raises(OSError('no')))": "not_a_number returned a Special: OSError: no",
    "result = Decimal(1)": "value",
    "result = np.array(1.0)": "value",
    "result = having(float=lambda _: 1.0, reduce=raises(TypeError('it stays here')))": "value",
    "result = asyncio.run(coroutine())": "value",
    "os.fork()": "value",
    "if os.fork() == 0: raise ValueError('raised in the child')": "value",
    "threading.Thread(target=sleep).start()": "value",
    "os.chdir('/'); os.environ.clear(); sys.path.clear()": "value",
}
"""What leaves the process alive and the next sample's answer right: the kind of its answer, and the message."""

WROTE = "raised wrote to its process's connection with the trainer"
ENDING = {
    "os._exit(3)": "raised ended its process with exit code 3",
    "os.killpg(0, signal.SIGKILL)": r"raised had its process killed by signal 9 \(Killed\)",
    "ctypes.string_at(0)": "raised had its process killed by signal 11 .*",
    "write_to_all_sockets(PICKLE)": WROTE,
    "write_to_all_sockets(b'\\0\\0\\0\\3NaN')": WROTE,
    """write_to_all_sockets(b'\\0\\0\\0\\x11[0, "value", 9.0]')""": WROTE,
    "os.closerange(0, 4096)": "raised closed its process's .*|raised ended its process .*",
    "os.closerange(0, 4096); sleep()": "raised closed its process's connection .*",
}
"""What loses the process."""

FOREVER = "re.match(r'(a+)+$', 'a' * 64 + 'b')"
CATCHES = "while True:\n try: sleep()\n except BaseException: pass"
HANGING = dict.fromkeys(
    (
        FOREVER,
        CATCHES,
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG)); sleep()",
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "result = having(repr=sleep)",
        "write_to_all_sockets(b'\\0\\0\\x10\\0['); sleep()",
    ),
    "timed_out took longer than 0.4 s",
)
"""What is killed at its time limit of 0.4 s, also where half a message was written."""

PRINTS = "for _ in range(200): print('o' * 10_000); print('e' * 10_000, file=sys.stderr); os.write(1, b'w' * 10_000)"
ALARM = "signal.signal(signal.SIGALRM, lambda *_: sys.exit('late')); signal.setitimer(signal.ITIMER_REAL, 0.3)"
STARTS = "note(subprocess.Popen(['sleep', '600']).pid)\nif os.fork() == 0: note(os.getpid()); sleep()"
DAEMON = "if os.fork() == 0:\n os.setsid()\n if os.fork() == 0: note(os.getpid()); sleep()\n os._exit(0)"
"""Leaves its session and its parent, as daemons do, and holds all that the process has open."""
