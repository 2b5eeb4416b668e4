"""The seconds of a step by phase, those of compiling apart, and its memory."""

import contextlib
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax


class CompileClock:
    """Counts the seconds in which the main thread traces, lowers and compiles programs, or reads compiled ones.

    A line says which program is compiled where that takes more than a second.
    """

    BACKEND = "/jax/core/compile/backend_compile_duration"
    EVENTS = (
        "/jax/core/compile/jaxpr_trace_duration",
        "/jax/core/compile/jaxpr_to_mlir_module_duration",
        BACKEND,
    )

    def __init__(self) -> None:
        self.seconds = self.taken = self.began = 0.0
        self.depth = 0  # a trace has others in it
        self.notice = threading.Timer(0, print)

    def listen(self) -> None:
        """Hear JAX's events from now on."""
        jax.monitoring.register_scalar_listener(self.begin)
        jax.monitoring.register_event_duration_secs_listener(self.end)

    def begin(self, event: str, value: float, **details: str | int) -> None:
        if event in self.EVENTS and threading.current_thread() is threading.main_thread():
            if self.depth == 0:
                self.began = time.perf_counter()
            self.depth += 1
            if event == self.BACKEND and jax.process_index() == 0:
                name = str(details.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
                self.notice = threading.Timer(1, print, [f"compiling {name} ..."], {"file": sys.stderr})
                self.notice.daemon = True
                self.notice.start()

    def end(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event in self.EVENTS and threading.current_thread() is threading.main_thread() and self.depth:
            self.notice.cancel()
            self.depth -= 1
            if self.depth == 0:
                self.seconds += time.perf_counter() - self.began

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self.taken = self.seconds - self.taken, self.seconds
        return seconds


COMPILING = CompileClock()
"""This process's."""


class Stopwatch:
    """Counts the seconds of one step by phase, without those of compiling, and its tokens per second."""

    def __init__(self, mark: Callable[[str], None] = lambda name: None) -> None:
        """`mark` is called with the name of each phase that begins."""
        self.mark = mark
        self.seconds: dict[str, float] = {}
        self.tokens_per_second = 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time that the body takes to the phase's seconds."""
        self.mark(name)
        begin = time.perf_counter() - COMPILING.seconds
        try:
            yield
        finally:
            seconds = time.perf_counter() - COMPILING.seconds - begin
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def count_tokens(self, tokens: int) -> None:
        """Set the step's speed from the phases so far: evaluation and saving come after and are no part of it."""
        self.tokens_per_second = tokens / sum(self.seconds.values())

    def timings(self) -> dict[str, float]:
        """A line of timings.jsonl: seconds of compiling since the last one, and by phase; speed; peak bytes."""
        times = {f"time/{name}": seconds for name, seconds in {"compile": COMPILING.take(), **self.seconds}.items()}
        return {**times, "tokens_per_second": self.tokens_per_second, "memory/peak_bytes": peak_memory()}


def peak_memory() -> int:
    """Peak bytes in use of the fullest device; on devices that don't count them, the process's peak resident bytes."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [int(stat["peak_bytes_in_use"]) for stat in stats if "peak_bytes_in_use" in stat]
    return max(peaks) if peaks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
