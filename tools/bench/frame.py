"""The frame of the benchmarks: callables that take turns, and a table of their medians and ratios."""

import argparse
import math
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

LEAST = 0.05
"""Seconds of a turn, so that the clock and the start of the calls don't count."""
MOST_CALLS = 1000
"""Calls in a turn."""
Number = TypeVar("Number", int, float)
Seconds = Mapping[str, Sequence[float]]
"""Seconds of a call, one figure for each round."""


# --- the command line


def positive(kind: type[Number], *, zero: bool = False, most: float = math.inf) -> Callable[[str], Number]:
    """For argparse: a finite number above 0, or 0 as well, and at most `most`."""
    expected = f"{'0 or more' if zero else 'a number above 0'}{f', at most {most:g}' if most < math.inf else ''}"

    def number(text: str) -> Number:
        value = kind(text)
        if not 0 <= value <= most or value == math.inf or (value == 0 and not zero):
            raise argparse.ArgumentTypeError(f"{text} is not {expected}")
        return value

    number.__name__ = kind.__name__
    return number


def shape(names: str) -> Callable[[str], tuple[int, ...]]:
    """For argparse: whole numbers above 0, as many as there are names, as in N,D,V."""

    def sizes(text: str) -> tuple[int, ...]:
        if not re.fullmatch(r"[1-9]\d{0,8}(,[1-9]\d{0,8})*", text, re.ASCII) or text.count(",") != names.count(","):
            raise argparse.ArgumentTypeError(f"{text!r} is not {names}: whole numbers above 0")
        return tuple(map(int, text.split(",")))

    return sizes


# --- time


def in_turns(functions: Mapping[str, Callable[[], Any]], rounds: int, queue: int) -> Seconds:
    """Times functions that return arrays, by the host's clock; they take turns in every round.

    `queue` calls may be under way. With two, the device goes on while the host hears of the first, so that the device's
    own time shows; more would hold more results.
    """
    import jax

    def turn(function: Callable[[], Any], calls: int) -> float:
        under_way: deque[Any] = deque()
        start = time.perf_counter()
        for _ in range(calls):
            under_way.append(function())
            if len(under_way) == queue:
                jax.block_until_ready(under_way.popleft())
        jax.block_until_ready([*under_way])
        return (time.perf_counter() - start) / calls

    calls = {}
    for name, function in functions.items():
        turn(function, 1)
        calls[name] = max(1, min(MOST_CALLS, math.ceil(LEAST / max(turn(function, 1), 1e-9))))
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            seconds[name].append(turn(function, calls[name]))
    return seconds


# --- the table


def figures(seconds: Seconds, base: str) -> dict[str, list[str]]:
    """For each function its median in milliseconds, and the median of its ratios to `base` in the same round."""
    medians = {}
    for name, rounds in seconds.items():
        ratios = [mine / its for mine, its in zip(rounds, seconds[base], strict=True)]
        medians[name] = [f"{1e3 * statistics.median(rounds):.2f}", f"{statistics.median(ratios):.2f}"]
    return medians


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; all but the first are numbers. Missing cells are empty."""
    rows = [[*row, *[""] * (len(columns) - len(row))] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    rule = ["-" * widths[0], *(f"{'-' * (width - 1)}:" for width in widths[1:])]
    cells = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in (columns, rule, *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
