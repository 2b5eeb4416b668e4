"""SIGTERM and SIGINT ask the loop to save and stop; a second one, or an early one, ends the process at once.

A thread hears them within milliseconds: Python's own handlers wait for the main thread, which a compiled program may
hold for minutes. A signal to one of several processes stops all of them at the same place.
"""

import os
import signal
import socket
import sys
import threading
from typing import Self

from mllm.parallel.processes import gather_objects


class Interrupted(Exception):
    """A signal came in the middle of a step, which counts as not begun."""


class Interrupt:
    """Hears signals while it is entered. The first one while it is `holding` is noted in `received`; others kill."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received = 0
        """The signal's number; 0: none has come."""
        self.holding = False
        self.reading_end, self.writing_end = socket.socketpair()

    def __enter__(self) -> Self:
        self.writing_end.setblocking(False)
        # The interpreter writes each signal's number here when it comes, whatever the main thread is doing.
        signal.set_wakeup_fd(self.writing_end.fileno(), warn_on_full_buffer=False)
        self.previous = {number: signal.signal(number, lambda *_: None) for number in self.SIGNALS}
        threading.Thread(target=self.listen, name="signals", daemon=True).start()
        return self

    def listen(self) -> None:
        with self.reading_end:
            while number := self.reading_end.recv(1):
                if number[0] not in self.SIGNALS:
                    continue
                if self.received or not self.holding:
                    os._exit(128 + number[0])
                self.received = number[0]
                name = signal.Signals(self.received).name
                print(f"\n{name}: saving and stopping soon; a second signal stops at once", file=sys.stderr, flush=True)

    def agree(self) -> bool:
        """Whether any of the processes must stop; `received` is then the same in all of them."""
        received = gather_objects(self.received)
        if any(received):  # else one that has come meanwhile would be lost
            self.received = max(received)
        return any(received)

    def poll(self) -> None:
        """Raise `Interrupted` if any of the processes must stop; all of them must call this."""
        if self.agree():
            raise Interrupted

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        self.writing_end.close()  # which ends the thread
