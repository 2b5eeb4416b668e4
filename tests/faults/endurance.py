"""Whether a long run stays as it was: python tests/faults/endurance.py [--steps 2000]

A small GRPO run, with its rewards in their process, evaluations and checkpoints, which are waited for. After each step
memory, file handles, threads, children, live JAX arrays, compilations and seconds are sampled; after a warm-up of a
quarter of the steps none of them may grow.

Each fifth of the samples counts by its least value, which a disturbed moment does not move. A quantity grows if its
last fifth lies above its first by more than the limit allows.

Exit codes: 0 nothing grows, 1 something does, 2 bad arguments. Linux only. Left out: the device's memory.
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from series import workload

from mllm.errors import ArgumentParser, UserError, command, run_main
from mllm.run.checkpoint import Checkpoints
from mllm.run.metrics import RunLog

COMPILED, SLOW = "/jax/core/compile/backend_compile_duration", ("time/eval", "time/save")
FEWEST, ENOUGH = 40, 500
"""Steps that a run needs at least; and steps after the warm-up with which memory and speed have settled."""

LIMITS = {
    "Python's blocks": (10.0, "1,000", 1e-3),
    "memory": (8.0, "MiB", 2.0**-20),
    "memory of children": (1.0, "MiB", 2.0**-20),
    "seconds of a step": (0.4, "ms", 1e3),
    "file handles": (0.0, "", 1),
    "threads": (2.0, "", 1),  # pools fill slowly
    "children": (0.0, "", 1),
    "live arrays": (0.0, "", 1),
    "compilations": (0.0, "", 1),
}
"""By quantity: how much it may grow in a thousand steps, in which unit, and the units in one of what is sampled."""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="updates (default 2000)")
    steps = parser.parse_args(arguments).steps
    if steps < FEWEST or steps % 2:
        raise UserError(f"--steps: {steps}: give an even number from {FEWEST}")
    if not Path("/proc/self/status").exists():
        raise UserError("tests/faults/endurance.py: needs Linux's /proc")
    samples, warm = run(steps), steps // 4
    print(f"GRPO, {steps} steps, the first {warm} to warm up; growth in 1,000 steps\n")
    print(f"{'':<26} {'first':>9} {'last':>9}   {'growth':>8} {'limit':>7}")
    grown = [report(name, samples[name][warm:]) for name in LIMITS]
    return int(any(grown))


def run(steps: int) -> dict[str, np.ndarray]:
    """Train for so many steps; returns each quantity after each step."""
    sys.path += [str(Path(__file__).parents[up]) for up in (1, 2)]  # of the rewards and of train.py
    import runs

    samples = {name: np.full(steps, np.nan) for name in LIMITS}  # allocated beforehand, so that sampling adds nothing
    compiled: Counter[str] = Counter()
    write, save = RunLog.write_timings, Checkpoints.save

    def save_and_wait(self: Checkpoints, *args: Any, **options: Any) -> None:
        save(self, *args, **options)
        self.wait()

    def sample(self: RunLog, step: int, timings: Mapping[str, float], *args: Any) -> None:
        write(self, step, timings, *args)
        seconds = sum(timings[name] for name in timings if name.startswith("time/") and name not in SLOW)
        counts = {
            "live arrays": len(jax.live_arrays()),
            "compilations": compiled[COMPILED],
            "seconds of a step": seconds,
        }
        for name, value in {**process_quantities(), **counts}.items():
            samples[name][step - 1] = value

    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.update([event]))
    RunLog.write_timings, Checkpoints.save = sample, save_and_wait  # type: ignore[assignment,method-assign]
    every = max(4, steps // 10 // 2 * 2)  # a rollout has two updates
    sections = {"eval": {"every": every, "prompts": 8, "sampled": True}, "checkpoint": {"every": every, "keep": 3}}
    with tempfile.TemporaryDirectory(prefix="endurance_") as folder, redirect_stdout(sys.stderr):
        code = runs.run(runs.changed(workload("grpo", Path(folder, "run")), steps=steps, **sections))
    if code:
        raise UserError(f"the run ended with exit code {code}")
    return samples


def process_quantities() -> dict[str, float]:
    """What Linux says of this process and of its children."""
    children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    return {
        "Python's blocks": sys.getallocatedblocks(),
        "memory": private_bytes("self"),
        "memory of children": sum(map(private_bytes, children)),
        "file handles": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "children": len(children),
    }


def private_bytes(pid: str) -> int:
    """Resident bytes of a process's own; pages of files come and go as the machine likes."""
    with suppress(FileNotFoundError):
        status = Path(f"/proc/{pid}/status").read_text()
        return 1024 * next((int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")), 0)
    return 0


def report(name: str, values: np.ndarray) -> bool:
    """Print a quantity's row; returns whether it grows."""
    most, unit, scale = LIMITS[name]
    fifth = len(values) // 5
    first, last = scale * values[:fifth].min(), scale * values[-fifth:].min()
    growth = (last - first) * 1000 / (len(values) - fifth)
    grows = growth > most and (len(values) >= ENOUGH or most == 0)
    label, verdict = f"{name} ({unit})" if unit else name, "grows" if grows else "flat"
    print(f"{label:<26} {first:>9.2f} {last:>9.2f}   {growth:>8.3f} {most:>7.2f}   {verdict}")
    return grows


if __name__ == "__main__":
    run_main(main)
