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
from typing import Any, NamedTuple

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
Shape = tuple[int, int, int]
"""Tokens, hidden size, vocabulary."""


# --- the command line


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    return errors.ArgumentParser(
        prog=f"python tools/bench {name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def numbers(name: str, doc: str | None, arguments: Sequence[str] | None, **options: tuple[int, str]) -> dict[str, int]:
    """The values of a benchmark's options, which are all numbers above 0: a default and a meaning each."""
    known = parser(name, doc)
    for option, (default, meaning) in options.items():
        known.add_argument(f"--{option}", type=int, default=default, help=f"{meaning} (default {default:,})".strip())
    found = vars(known.parse_args(arguments))
    for option, value in found.items():
        if value < 1:
            raise UserError(f"--{option}: {value} is not a number above 0")
    return found


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


class SkippedError(Exception):
    """A method can't run here, by its own words."""


class Outcome(NamedTuple):
    """What came of a method's process."""

    found: list[Figures]
    """Its answers."""
    status: str = "measured"
    """Or "skipped", "failed"."""
    reason: str = ""


def answer(measure: Callable[..., Iterable[Figures]], *arguments: Any) -> None:
    """In a method's process: hand over the figures that a method finds, or why it can't run."""
    child_process.end_with_parent()
    try:
        for figures in measure(*arguments):
            child_process.answer(figures)
    except SkippedError as error:
        child_process.answer({"skipped": str(error)})


def start(module: str, task: Figures, seconds: float | None = None, cache: Path | None = None) -> Outcome:
    """Run a task in a process of its own, `python -m module TASK`, which calls `answer`.

    `cache` is a folder of compiled programs that processes share.
    """
    defaults = {**DEFAULTS, **({"JAX_COMPILATION_CACHE_DIR": str(cache)} if cache else {})}
    command = [sys.executable, "-m", module, json.dumps(task)]
    ended = child_process.run(command, seconds=seconds, env={**defaults, **os.environ}, cwd=ROOT)
    skipped = next((found["skipped"] for found in ended.answers if "skipped" in found), None)
    if skipped is not None:
        return Outcome([], "skipped", skipped)
    if ended.code == 0:
        return Outcome(ended.answers)
    return Outcome(ended.answers, "failed", f"stopped after {seconds:g} s" if ended.late else ended.reason)


def turn(make: Callable[[str, Figures], Callable[[int], Figures]], task: Figures) -> Iterator[Figures]:
    """In a process of `compare`, for `answer`: the figures for a seed, which are found twice, first to warm up.

    `make` gets the method's name and the sizes, and returns the function from a seed to figures.
    """
    measure = make(task["method"], task)
    measure(task["seed"])
    yield measure(task["seed"])


def compare(module: str, methods: Sequence[str], sizes: Figures, repeats: int) -> dict[str, list[Figures]]:
    """The figures of each method's turns; `seconds` is among them.

    A turn is a process of the method's own, one after the other, which warms up first and then measures what its seed
    gives, the same for all methods. UserError is raised where one has failed.
    """
    turns: dict[str, list[Figures]] = {name: [] for name in methods}
    with tempfile.TemporaryDirectory() as cache:
        for seed in range(repeats):
            for name in methods:
                outcome = start(module, {"method": name, "seed": seed, **sizes}, cache=Path(cache))
                if outcome.status != "measured":
                    raise UserError(f"{name}: {outcome.status}: {outcome.reason}")
                turns[name] += outcome.found
                print(f"turn {seed + 1}: {name}: {outcome.found[-1]['seconds']:.2f} s", file=sys.stderr)
    return turns


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


def compared(found: Mapping[str, Sequence[Figures]], columns: Mapping[str, tuple[str, float, str]]) -> str:
    """The table of `compare`'s figures, a row for each method: medians over the turns.

    `columns` has each figure's title, unit and format. A format that ends in "x" stands for a figure with its ratio to
    that of the first method in the same turn, the median and the range.
    """
    first = next(iter(found.values()))
    rows = []
    for name, turns in found.items():
        cells = [name]
        for key, (_, unit, form) in columns.items():
            if key not in turns[0]:
                cells.append("-")
                continue
            cells.append(format(statistics.median(turn[key] for turn in turns) / unit, form.removesuffix("x")))
            if form.endswith("x") and turns is not first:
                ratios = [own[key] / other[key] for own, other in zip(turns, first, strict=True)]
                cells[-1] += f", {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append(cells)
    return table(["method", *(title for title, _, _ in columns.values())], rows)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; all but the first are numbers."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    rule = ["-" * widths[0], *(f"{'-' * (width - 1)}:" for width in widths[1:])]
    lines = [columns, rule, *rows]
    cells = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
    return "\n".join(f"| {' | '.join(each)} |" for each in cells)
