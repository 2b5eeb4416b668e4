"""SIGTERM and SIGINT ask the loop to save and stop; a second signal ends the process at once.

A signal to one of several processes stops all of them at the same place. Orbax's `reached_preemption` is not used: it
ignores SIGINT, is checked only between steps, and does nothing in a single process.
"""

import os
import signal
import threading
from types import FrameType

from mllm.parallel.processes import gather_objects


class Interrupted(Exception):
    """A signal came in the middle of a step; the step counts as not begun."""


class Interrupt:
    """Handles signals while it is entered. `received` holds the first signal; a second signal kills."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received = 0
        """The signal's number; 0: none has come."""

    def __enter__(self) -> "Interrupt":
        # Python lets the main thread alone set handlers: in another one signals are the caller's.
        heard = self.SIGNALS if threading.current_thread() is threading.main_thread() else ()
        self.previous = {number: signal.signal(number, self.note) for number in heard}
        return self

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(128 + number)
        self.received = number
        message = f"\n{signal.Signals(number).name}: saving and stopping soon; a second signal stops at once\n"
        os.write(2, message.encode())  # print may have been interrupted in the middle of another line

    def agree(self) -> bool:
        """Whether any of the processes must stop; `received` is then the same in all of them."""
        received = gather_objects(self.received)
        if any(received):  # else a signal that came meanwhile would be lost
            self.received = max(received)
        return any(received)

    def poll(self) -> None:
        """Raise `Interrupted` if any of the processes must stop; all of them must call this."""
        if self.agree():
            raise Interrupted

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
