"""A reward function that runs the completion: anything that a user's function might do, and the expected answer."""

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

LEFT = Path("left").absolute()
"""The file for the ids of started processes, in the trainer's working directory."""
USED = asyncio, ctypes, os, re, signal, subprocess, sys, threading, Decimal, np


def hostile(completion, answer):
    """1 for the right answer; any other completion is run, and its `result` returned, or 1."""
    if completion == answer:
        return 1.0
    names = dict(globals())
    exec(completion, names)
    return names.get("result", 1.0)


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
    "result = 10**400": "not_a_number returned 1000.*",
    "result = coroutine()": "not_a_number returned <coroutine.*",
    "result = having(repr=raises(OSError('no')))": "raised OSError: no",
    "result = Decimal(1)": "value",
    "result = np.array(1.0)": "value",
    "result = asyncio.run(coroutine())": "value",
    "threading.Thread(target=sleep, daemon=True).start()": "value",
    "os.chdir('/'); os.environ.clear()": "value",
    "signal.setitimer(signal.ITIMER_REAL, 0.05)": "value",
}
"""Acts that leave the process alive and the next sample's answer right: the kind of the answer, and the message."""
ENDING = {
    "os._exit(3)": "raised ended its process with exit code 3",
    "ctypes.string_at(0)": "raised had its process killed by signal 11 .*",
}
"""Acts that lose the process."""
FOREVER = "re.match(r'(a+)+$', 'a' * 64 + 'b')"
"""Hangs in C and holds Python's lock."""
HANGING = dict.fromkeys(
    (FOREVER, "while True:\n try: sleep()\n except BaseException: pass", "os.kill(os.getpid(), signal.SIGSTOP)"),
    "timed_out took longer than 0.4 s",
)
"""Acts that are killed at the time limit of 0.4 s."""
PRINTS = "for _ in range(200): print('o' * 10_000); print('e' * 10_000, file=sys.stderr); os.write(1, b'w' * 10_000)"
STARTS = "note(subprocess.Popen(['sleep', '600']).pid)\nif os.fork() == 0: note(os.getpid()); sleep()"
