"""Times functions in turns, so that whatever slows the machine slows all of them; by the host's clock."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

MOST_CALLS = 1000


def in_turns(
    functions: Mapping[str, Callable[[], Any]],
    wait: Callable[[Any], Any],
    *,
    rounds: int,
    least: float,
    queue: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds a call, one figure a round, after a call or two that aren't counted.

    Args:
        wait: returns when what a function has returned is there.
        least: seconds that a turn takes, of as many calls as that is.
        queue: calls that may be under way. With two, the device goes on while the host hears of the first, and shows
            its own time; more would hold more results.
    """

    def turn(function: Callable[[], Any], calls: int) -> float:
        under_way: deque[Any] = deque()
        start = clock()
        for _ in range(calls):
            under_way.append(function())
            if len(under_way) == queue:
                wait(under_way.popleft())
        for result in under_way:
            wait(result)
        return (clock() - start) / calls

    calls = {}
    for name, function in functions.items():
        turn(function, 1)
        once = max(turn(function, 1), 1e-9)
        calls[name] = max(1, min(MOST_CALLS, math.ceil(least / once)))
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            seconds[name].append(turn(function, calls[name]))
    return seconds
