"""SIGTERM and SIGINT ask the loop to save and leave; a second one ends the process at once.

A signal to one of several processes stops all of them after the same step: they ask each other once a step.
"""

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupt:
    """While entered, notes the first signal in `received` instead of dying of it."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received: int | None = None
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self.previous = {number: signal.signal(number, self.note) for number in self.SIGNALS}
        return self

    def agree(self, everyone: Callable[[int | None], list[int | None]]) -> bool:
        """Whether a signal has reached any of the processes; `received` is then the same in all of them."""
        received = [number for number in everyone(self.received) if number is not None]
        if received:
            self.received = received[0]
        return bool(received)

    def note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.restore()

    def restore(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.restore()

    @property
    def exit_code(self) -> int:
        """As a shell reports a process that died of the signal: 143 for SIGTERM, 130 for SIGINT; 0 for none."""
        return 0 if self.received is None else 128 + self.received
