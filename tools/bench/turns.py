"""Methods that are timed in turns, each in a process of its own that stays and is warmed up first.

A method's process runs the benchmark's own module, which calls `serve`; `compare` starts the processes.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mllm import child_process
from mllm.errors import UserError

ROOT = Path(__file__).resolve().parent.parent.parent
Figures = dict[str, float]
Child = subprocess.Popen[str]


def serve(measure: Callable[[int], Figures]) -> None:
    """In a method's process: answer each seed on a line of stdin with the figures that `measure` finds for it."""
    for line in sys.stdin:
        child_process.answer(measure(int(line)))


def compare(module: str, methods: Mapping[str, Sequence[str]], repeats: int) -> dict[str, list[Figures]]:
    """The figures of each method's turns, whose seeds are 0 to `repeats` - 1; `seconds` is among the figures.

    `methods` has the arguments of each method's process, `python -m module`. UserError is raised where one has ended.
    """
    children = {name: start(module, arguments) for name, arguments in methods.items()}
    turns: dict[str, list[Figures]] = {name: [] for name in methods}
    try:
        for turn in range(-1, repeats):
            for name, child in children.items():
                # The warm-up compiles the programs that any of the seeds needs.
                for seed in range(repeats) if turn < 0 else [turn]:
                    found = ask(name, child, seed)
                    said = f"{'warm-up' if turn < 0 else f'turn {turn}'}: {name}: {found['seconds']:.2f} s"
                    print(said, file=sys.stderr)
                turns[name] += [found] * (turn >= 0)
    finally:
        for child in children.values():
            child.kill()
    return turns


def start(module: str, arguments: Sequence[str]) -> Child:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def ask(name: str, child: Child, seed: int) -> dict[str, Any]:
    """The child's answer to a seed; UserError where it has ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{seed}\n")
    child.stdin.flush()
    for line in child.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise UserError(f"{name}: its process ended with exit code {child.wait()}; the lines above say why")


def ratios(turns: Sequence[Figures], others: Sequence[Figures], key: str) -> list[float]:
    """A figure over that of another method in the same turn."""
    return [own[key] / other[key] for own, other in zip(turns, others, strict=True)]


def median(turns: Sequence[Figures], key: str) -> float:
    return statistics.median(turn[key] for turn in turns)
