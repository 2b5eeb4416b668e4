"""Starts a process for each method that the bench measures, and makes of whatever comes of it a row of a table.

A process that runs out of memory, dies or takes too long is a row that says so, and the next one is started.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from mllm.plan.assignment import reason
from tools.bench import report as bench_report
from tools.bench.methods import Method
from tools.bench.problem import Problem, Shape

ROOT = Path(__file__).parent.parent.parent
COMMAND = (sys.executable, "-m", "tools.bench.child")
MEMORY = ("RESOURCE_EXHAUSTED", "OutOfMemory", "out of memory", "MemoryError", "bad_alloc")
LEFT_OUT = "--limit: the time was used up"


class Settings(NamedTuple):
    dtype: str
    lives: Sequence[float]
    """Shares of rows that count."""
    rounds: int
    least: float
    """Seconds a turn."""
    seed: int
    peak: float = 0.0
    """Of the inputs: bench_problem.py says which."""


class Outcome(NamedTuple):
    found: Any
    """What the process left, if anything."""
    status: str = "measured"
    """Or what came instead: `skipped`, `failed`, `left out`."""
    reason: str = ""


class Children:
    """One process at a time, as long as the limit allows."""

    def __init__(self, limit: float, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.timeout, self.deadline = clock, timeout, clock() + limit
        self.environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
        """What isn't set already. Without the second the most that a process gets is three quarters of a GPU."""

    def start(self, task: dict[str, Any]) -> Outcome:
        left = self.deadline - self.clock()
        if left <= 0:
            return Outcome(None, "left out", LEFT_OUT)
        with tempfile.TemporaryDirectory() as folder:
            file, said = Path(folder) / "found.json", Path(folder) / "said"
            code = self._run([*COMMAND, json.dumps(task), str(file)], said, min(self.timeout, left))
            found = json.loads(file.read_text()) if file.exists() else None
            if code == 0:
                return Outcome(found)
            if code is None and left <= self.timeout:
                return Outcome(found, "left out", f"{LEFT_OUT} before it ended")
            if code is None:
                return Outcome(found, "failed", f"stopped after {self.timeout:g} s (--timeout)")
            return Outcome(found, "failed", why(code, said.read_text(errors="replace")))

    def _run(self, command: Sequence[str], said: Path, seconds: float) -> int | None:
        """The exit code, or None where the time was used up. What the process has started ends with it."""
        with (
            said.open("wb") as output,
            subprocess.Popen(
                command,
                cwd=ROOT,
                env={**self.environment, **os.environ},
                stdin=subprocess.PIPE,  # ends with this process, however that ends, and then the child ends, too
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process,
        ):
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def why(code: int, said: str) -> str:
    """A line, from what a process said before it ended."""
    line = reason(said)[:300] if said.strip() else "it said nothing"
    if any(word in line for word in MEMORY):
        return f"out of memory: {line}"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}: {line}"
    return line


def not_here(method: Method, platform: str) -> str | None:
    """Why it can't be tried, as far as that can be told without starting it."""
    missing = [module for module in method.needs if importlib.util.find_spec(module) is None]
    if missing:
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
    return "needs a GPU" if method.on_gpu and platform != "gpu" else None


def bench(
    shapes: Sequence[Shape], methods: Sequence[Method], platform: str, settings: Settings, children: Children
) -> Iterator[tuple[list[dict[str, Any]], bool]]:
    """The tables of a shape, one for each share, whenever they have grown by a row; and whether they are complete."""
    able = [method for method in methods if not_here(method, platform) is None]
    with (
        tqdm(total=len(shapes) * (len(able) + 1), unit="process", dynamic_ncols=True) as bar,
        tempfile.TemporaryDirectory() as folder,
    ):
        if platform == "gpu":  # so that all methods are beside the same products, compiled once
            children.environment["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/compiled"
            children.environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

        def start(problem: Problem, label: str, **task: Any) -> Outcome:
            bar.set_description(f"{bench_report.title(problem.shape)}: {label}")
            outcome = children.start({**task, **problem._asdict(), "lives": settings.lives, "platform": platform})
            bar.update()
            return outcome

        for shape in shapes:
            problem = Problem(shape, settings.dtype, settings.seed, folder, settings.peak)
            tables = [bench_report.table(problem, live) for live in settings.lives]
            prepared = start(problem, "inputs", task="prepare", methods=[method.name for method in able])
            ready = prepared.status == "measured"
            obstacles = prepared.found["obstacles"] if ready else {}
            for table in tables:
                table["largest_probability"] = prepared.found["largest_probability"] if ready else None
            bar.total -= len(obstacles)  # type: ignore[operator]
            for method in methods:
                obstacle = not_here(method, platform) or obstacles.get(method.name)
                if obstacle is not None:
                    outcome = Outcome(None, "skipped", obstacle)
                elif not ready:
                    bar.update()
                    outcome = Outcome(None, prepared.status, f"inputs: {prepared.reason}")
                else:
                    how = {"methods": [method.name], "rounds": settings.rounds, "least": settings.least}
                    outcome = start(problem, method.name, task="measure", **how)
                for table in tables:
                    table["methods"].append(bench_report.row(method, table, outcome))
                yield tables, method is methods[-1]
            for path in Path(folder).glob("_".join(map(str, shape)) + "_*"):
                shutil.rmtree(path)  # answers are large
