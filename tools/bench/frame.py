"""The frame of the benchmarks: options, methods in processes of their own, times in turns, and the table.

A method's process runs its benchmark's module and calls `answer`; `start` runs it.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent.parent
DEFAULTS = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
"""Environment variables: a process gets three quarters of a GPU at once unless it is told otherwise."""
SOURCES = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "kernels"), os.environ.get("PYTHONPATH")]))}
"""A machine with a device may have JAX, and this project as a folder: what isn't installed is found there."""
ANSWER, LATE = "ANSWER ", "the time limit was reached"
MOST_CALLS = 1000
"""Calls in a turn."""
Figures = dict[str, Any]
Number = TypeVar("Number", int, float)
Shape = tuple[int, int, int]
"""Tokens, hidden size, vocabulary."""


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


def shape_of(text: str) -> Shape:
    """For argparse: N,D,V as numbers."""
    if not re.fullmatch(r"[1-9]\d{0,8}(,[1-9]\d{0,8}){2}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not N,D,V: three whole numbers from 1 to {10**9 - 1}")
    tokens, features, vocabulary = map(int, text.split(","))
    return tokens, features, vocabulary


def title(shape: Sequence[int]) -> str:
    return "N={}, D={}, V={}".format(*shape)


# --- processes


def answer(find: Callable[[Figures], Iterable[Figures]]) -> None:
    """In a method's process: hand over a task's figures as they are found."""
    for figures in find(json.loads(sys.argv[1])):
        print(f"{ANSWER}{json.dumps(figures)}", flush=True)


def start(
    module: str, task: Figures, seconds: float | None = None, cache: str | None = None
) -> tuple[list[Figures], str]:
    """Run a task in a process of its own, `python -m module TASK`, which calls `answer`.

    Returns its answers, and why it has failed in a line, "" where it hasn't. `cache` is a folder of compiled programs
    that processes share.
    """
    defaults = DEFAULTS | ({"JAX_COMPILATION_CACHE_DIR": cache} if cache else {})
    command = [sys.executable, "-m", module, json.dumps(task)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        reason, environment = "", defaults | os.environ | SOURCES
        try:
            code = subprocess.call(command, stdout=out, stderr=err, timeout=seconds, env=environment, cwd=ROOT)
        except subprocess.TimeoutExpired:
            code, reason = 0, LATE
        out.seek(0)
        err.seek(0)
        said, complaints = out.read().splitlines(), [line.strip() for line in err if line.strip()]
    if code:
        # JAX's remarks come after the error.
        errors = [line for line in complaints if re.match(r"\S*(Error|Exception|EXHAUSTED)\b", line)]
        reason = (errors or complaints or [f"exit code {code}"])[-1][:300]
    return [json.loads(line.removeprefix(ANSWER)) for line in said if line.startswith(ANSWER)], reason


# --- time


def in_turns(
    functions: Mapping[str, Callable[[], Any]],
    wait: Callable[[Any], Any],
    *,
    rounds: int,
    least: float,
    queue: int,
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
        start = time.perf_counter()
        for _ in range(calls):
            under_way.append(function())
            if len(under_way) == queue:
                wait(under_way.popleft())
        for result in under_way:
            wait(result)
        return (time.perf_counter() - start) / calls

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


# --- the table


def line(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; all but the first are numbers."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    rule = ["-" * widths[0], *(f"{'-' * (width - 1)}:" for width in widths[1:])]
    cells = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in (columns, rule, *rows))
    return "\n".join(map(line, cells))
