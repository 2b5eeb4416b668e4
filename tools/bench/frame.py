"""The frame of every benchmark: options, methods in processes of their own, turns, and the table.

A method's process runs its benchmark's module and calls `answer`; `start` runs it. `compare` starts the processes of
several methods in turns; `in_turns` does the same with functions of one process. Figures that are compared are medians
over rounds, and ratios of what was measured in the same round.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mllm import child_process, errors
from mllm.errors import UserError

ROOT = Path(__file__).resolve().parent.parent.parent
MOST_CALLS = 1000
"""Calls in a turn."""
DEFAULTS = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
"""Environment variables: a process gets three quarters of a GPU at once unless it is told otherwise."""
Figures = dict[str, Any]
Number = TypeVar("Number", int, float)
Shape = tuple[int, int, int]
"""Tokens, hidden size, vocabulary."""


# --- the command line


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    return errors.ArgumentParser(
        prog=f"python tools/bench {name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def positive(kind: type[Number], *, zero: bool = False, most: float = math.inf) -> Callable[[str], Number]:
    """For argparse: a finite number above 0, or 0 as well, and at most `most`."""
    expected = f"{'0 or more' if zero else 'a number above 0'}{f', at most {most:g}' if most < math.inf else ''}"

    def number(text: str) -> Number:
        found = kind(text)
        if not 0 <= found <= most or found == math.inf or (found == 0 and not zero):
            raise argparse.ArgumentTypeError(f"{text} is not {expected}")
        return found

    number.__name__ = kind.__name__
    return number


def shape_of(text: str) -> Shape:
    """For argparse: N,D,V as numbers."""
    try:
        tokens, features, vocabulary = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not N,D,V: three whole numbers") from None
    if not 1 <= min(tokens, features, vocabulary) <= max(tokens, features, vocabulary) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} has a size that isn't from 1 to {2**31 - 1}")
    return tokens, features, vocabulary


def title(shape: Sequence[int]) -> str:
    return "N={}, D={}, V={}".format(*shape)


# --- processes


def answer(find: Callable[..., Iterable[Figures]], *given: Any) -> None:
    """In a method's process: hand over a task's figures, as they are found, and end when the command does."""
    child_process.end_with_parent()
    for figures in find(*given, json.loads(sys.argv[1])):
        child_process.answer(figures)


def start(
    module: str, task: Figures, seconds: float | None = None, cache: str | None = None
) -> tuple[list[Figures], str]:
    """Run a task in a process of its own, `python -m module TASK`, which calls `answer`.

    Returns its answers, and why it has failed in a line, "" where it hasn't. `cache` is a folder of compiled programs
    that processes share.
    """
    defaults = DEFAULTS | ({"JAX_COMPILATION_CACHE_DIR": cache} if cache else {})
    command = [sys.executable, "-m", module, json.dumps(task)]
    ended = child_process.run(command, seconds=seconds, env=defaults | os.environ, cwd=ROOT)
    return ended.answers, ended.reason


def turn(make: Callable[[str, Figures], Callable[[int], Figures]], task: Figures) -> Iterator[Figures]:
    """In a process of `compare`, for `answer`: the figures for a seed, which are found twice, first to warm up.

    `make` gets the method's name and the sizes, and returns the function from a seed to figures.
    """
    measure = make(task["method"], task)
    measure(task["seed"])
    yield measure(task["seed"])


def compare(
    name: str, doc: str | None, arguments: Sequence[str] | None, methods: Sequence[str], **options: tuple[int, str]
) -> int:
    """The command of the benchmark `name`, which prints the table of these methods; returns the exit code.

    Its options are numbers above 0, each with a default and a meaning: `repeats`, and sizes. A turn is a process of the
    method's own, one after the other, which warms up first and then measures what its seed gives, the same for all
    methods. UserError is raised where one has failed.
    """
    known = parser(name, doc)
    for option, (default, meaning) in options.items():
        known.add_argument(f"--{option}", type=positive(int), default=default, help=f"{meaning} (default {default:,})")
    sizes = vars(known.parse_args(arguments))
    turns: dict[str, list[Figures]] = {method: [] for method in methods}
    with tempfile.TemporaryDirectory() as cache:
        for seed in range(sizes.pop("repeats")):
            for method in methods:
                found, failure = start(f"tools.bench.{name}", {"method": method, "seed": seed, **sizes}, cache=cache)
                if failure:
                    raise UserError(f"{method}: {failure}")
                turns[method] += found
                print(f"turn {seed + 1}: {method}: {found[-1]['seconds']:.2f} s", file=sys.stderr)
    print(compared(turns))
    return 0


# --- figures


def in_turns(
    functions: Mapping[str, Callable[[], Any]],
    wait: Callable[[Any], Any],
    *,
    rounds: int,
    least: float,
    queue: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of a call, one figure for each round, by the host's clock; the functions take turns in every round.

    Args:
        wait: returns when what a function has returned is there.
        least: seconds that a turn takes; it has as many calls as fill them.
        queue: calls that may be under way. With two, the device goes on while the host hears of the first, so that the
            device's own time shows; more would hold more results.
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


def compared(found: Mapping[str, Sequence[Figures]]) -> str:
    """The table of `compare`'s figures, a row for each method: medians over the turns.

    The first method has all columns. `ratio` is that of the seconds to the first one's in the same turn, and its range.
    """
    first = next(iter(found.values()))
    rows = []
    for name, turns in found.items():
        ratios = [own["seconds"] / other["seconds"] for own, other in zip(turns, first, strict=True)]
        cells = [name, f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]
        for key in first[0]:
            middle = statistics.median(turn.get(key, math.nan) for turn in turns)
            cells.append("-" if math.isnan(middle) else f"{middle:.{0 if middle >= 100 else 3}f}")
        rows.append(cells)
    return table(["method", "ratio", *first[0]], rows)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; all but the first are numbers."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    rule = ["-" * widths[0], *(f"{'-' * (width - 1)}:" for width in widths[1:])]
    lines = [columns, rule, *rows]
    cells = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
    return "\n".join(f"| {' | '.join(each)} |" for each in cells)
