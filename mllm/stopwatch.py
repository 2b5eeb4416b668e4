"""The seconds of a step by phase, and its memory."""

import contextlib
import resource
import time
from collections.abc import Callable, Iterator

import jax


class Stopwatch:
    """Counts the seconds of one step by phase, and its tokens per second."""

    def __init__(self, mark: Callable[[str], None] = lambda name: None) -> None:
        """`mark` is called with the name of each phase that begins."""
        self.mark = mark
        self.seconds: dict[str, float] = {}
        self.tokens_per_second = 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time that the body takes to the phase's seconds."""
        self.mark(name)
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def count_tokens(self, tokens: int) -> None:
        """Set the step's speed from the phases so far: evaluation and saving come after and are no part of it."""
        self.tokens_per_second = tokens / sum(self.seconds.values())

    def timings(self) -> dict[str, float]:
        """A line of timings.jsonl: seconds by phase, tokens per second, peak memory in bytes."""
        times = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        return {**times, "tokens_per_second": self.tokens_per_second, "memory/peak_bytes": peak_memory()}


def peak_memory() -> int:
    """Peak bytes in use of the fullest device; on devices that don't count them, the process's peak resident bytes."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [int(stat["peak_bytes_in_use"]) for stat in stats if "peak_bytes_in_use" in stat]
    return max(peaks) if peaks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
