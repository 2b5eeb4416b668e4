"""The seconds of a step by phase, without compiling, which is counted separately; and peak memory."""

import contextlib
import json
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax

SLOW = 1.0
"""Seconds of compiling from which on a program is named."""


class CompileClock:
    """Counts the seconds that the main thread traces, compiles and reads programs; names slow programs."""

    def __init__(self) -> None:
        self.seconds = self.began = 0.0
        self.depth = 0  # a trace may contain other traces
        self.notice = threading.Timer(0, print)
        self.file: Path | None = None
        self.last: dict[str, float] = {}

    def remember(self, file: Path) -> None:
        """Say how long a slow program took last time. The file keeps the seconds by the program's name."""
        self.file = file
        with contextlib.suppress(OSError, ValueError):
            self.last = json.loads(file.read_text())

    def begin(self, event: str, value: float | int, fun_name: str | int = "", **_: str | int) -> None:
        if event.startswith("/jax/core/compile/") and threading.current_thread() is threading.main_thread():
            self.began = self.began if self.depth else time.perf_counter()
            self.depth += 1
            if event.endswith("backend_compile_duration") and jax.process_index() == 0:
                last = f" ({self.last[name]:.0f} s last time)" if (name := name_of(fun_name)) in self.last else ""
                self.notice = threading.Timer(SLOW, print, [f"compiling {name} ...{last}"], {"file": sys.stderr})
                self.notice.start()

    def end(self, event: str, duration_secs: float, fun_name: str | int = "", **_: str | int) -> None:
        if event.startswith("/jax/core/compile/") and threading.current_thread() is threading.main_thread():
            self.notice.cancel()
            self.depth -= 1
            self.seconds += 0 if self.depth else time.perf_counter() - self.began
            if event.endswith("backend_compile_duration") and duration_secs > SLOW and self.file:
                self.last[name_of(fun_name)] = duration_secs
                with contextlib.suppress(OSError):
                    self.file.write_text(json.dumps(self.last))


def name_of(fun_name: str | int) -> str:
    return str(fun_name).removeprefix("jit(").removesuffix(")")


COMPILING = CompileClock()


class Stopwatch:
    """Counts the seconds of one step by phase, without the seconds of compiling, and its tokens per second."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.tokens_per_second = 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time that the body takes to the phase's seconds."""
        begin = time.perf_counter() - COMPILING.seconds
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - COMPILING.seconds - begin

    def count_tokens(self, tokens: int) -> None:
        """Set the step's speed from the phases so far: evaluation and saving come after and are no part of it."""
        self.tokens_per_second = tokens / sum(self.seconds.values())

    def timings(self) -> dict[str, float]:
        """A line of timings.jsonl: seconds of compiling since the last line, and by phase; speed; peak bytes."""
        seconds, COMPILING.seconds = {"compile": COMPILING.seconds, **self.seconds}, 0.0
        times = {f"time/{name}": value for name, value in seconds.items()}
        return {**times, "tokens_per_second": self.tokens_per_second, "memory/peak_bytes": peak_memory()}


def peak_memory() -> int:
    """Peak bytes in use of the fullest device; on devices that don't count them, the process's peak resident bytes."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [int(stat["peak_bytes_in_use"]) for stat in stats if "peak_bytes_in_use" in stat]
    return max(peaks) if peaks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
