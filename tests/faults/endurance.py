"""Whether a long run stays as it was: python tests/faults/endurance.py [--steps 2000]

A small GRPO run, with its rewards in their process, evaluations and checkpoints. At each step are looked at: memory,
file handles, threads, children, live JAX arrays, compilations, seconds. After a warm-up of a quarter of the steps none
of it may grow.

Checkpoints are waited for, since one in the background takes memory, threads and handles for a while. The rest is cut
into blocks; of a block counts its least value, of the seconds its median. A line is laid through them (Theil-Sen: the
median of all slopes between two of them, which single blocks that the machine disturbs don't move), with a 95 %
interval. A quantity grows if the whole interval lies above its limit, it is flat if the whole interval lies below;
else, or with fewer than 500 steps, nobody can tell. Handles, children, arrays and compilations may not grow at all.

Memory in use is what malloc has given away, beside it the blocks of Python's own allocator: a leak shows in one of the
two. At some checkpoints memory in use jumps by 3.4 MiB, up or down.
What is resident is more by what malloc keeps in pieces, which grows for long, and ever slower.

Exit codes: 0 nothing grows, 1 something does, 2 bad arguments. Linux with glibc. Left out: the device's memory, which
a CPU doesn't have.
"""

import argparse
import contextlib
import ctypes
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.stats import theilslopes

from mllm.config.load import dump
from mllm.config.schema import Config
from mllm.errors import ArgumentParser, UserError
from mllm.run.checkpoint import Checkpoints
from mllm.run.metrics import RunLog

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # a script sees only its own folder
from chaos_lane import workload

import train

STEPS = 2000
FEWEST = 40
BLOCKS = 25
ENOUGH = 500
"""Steps after the warm-up; before, memory and speed still settle."""
COMPILED = "/jax/core/compile/backend_compile_duration"


class Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]


class Limit(NamedTuple):
    """How much a quantity may grow in a thousand steps."""

    unit: str
    scale: float
    """Of the samples, into the unit."""
    most: float
    """In the unit; where it is relative, in parts of the first block."""
    relative: bool = False


LIMITS = {
    "memory in use": Limit("MiB", 2.0**-20, 4.0),
    "Python's blocks": Limit("1,000", 1e-3, 10.0),
    "memory resident": Limit("MiB", 2.0**-20, 8.0),
    "memory of children": Limit("MiB", 2.0**-20, 1.0),
    "seconds a step": Limit("ms", 1e3, 0.05, relative=True),
    "file handles": Limit("", 1, 0),
    "threads": Limit("", 1, 2.0),
    "children": Limit("", 1, 0),
    "live arrays": Limit("", 1, 0),
    "compilations": Limit("", 1, 0),
}
"""Where the limit is 0 a single one more is too many; pools of threads fill slowly."""

Samples = dict[str, np.ndarray]
"""By quantity, a number a step."""


class Verdict(NamedTuple):
    first: float
    last: float
    """Of the first and the last block after the warm-up, in the limit's unit."""
    slope: float
    low: float
    high: float
    """Growth in a thousand steps with its 95 % interval."""
    limit: float
    says: str
    """`flat`, `grows`, or `can't tell`."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"updates (default {STEPS})")
    try:
        options = parser.parse_args(arguments)
        if options.steps < FEWEST or options.steps % 2:
            raise UserError(f"--steps: {options.steps}: give an even number from {FEWEST}")
        if not Path("/proc/self/status").exists() or not hasattr(ctypes.CDLL(None), "mallinfo2"):
            raise UserError("tests/faults/endurance.py: needs Linux's /proc and glibc 2.33 or newer")
        samples = run(options.steps)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    warm = options.steps // 4
    verdicts = {name: judge(values[warm:], LIMITS[name]) for name, values in samples.items()}
    print(f"GRPO, {options.steps} steps, the first {warm} to warm up; growth in 1,000 steps\n")
    print(f"{'':<24} {'at first':>9} {'at last':>9}   {'growth':>8} {'95 %':^21} {'limit':>7}")
    for name, verdict in verdicts.items():
        interval = f"{verdict.low:.3f} .. {verdict.high:.3f}"
        label = " ".join(filter(None, (name, LIMITS[name].unit and f"({LIMITS[name].unit})")))
        print(
            f"{label:<24} {verdict.first:>9.2f} {verdict.last:>9.2f}   {verdict.slope:>8.3f} {interval:^21} "
            f"{verdict.limit:>7.2f}   {verdict.says}"
        )
    return 1 if any(verdict.says == "grows" for verdict in verdicts.values()) else 0


def run(steps: int) -> Samples:
    """Train so many steps, an even number; what was sampled at the end of each."""
    # Made and filled beforehand: what is measured is not to grow by the measuring.
    samples = {name: np.full(steps, np.nan) for name in LIMITS}
    compiled = 0

    def count(event: str, duration_secs: float, **details: str | int) -> None:
        nonlocal compiled
        compiled += event == COMPILED

    write, save = RunLog.write_timings, Checkpoints.save

    def save_and_wait(checkpoints: Checkpoints, *args: Any) -> None:
        save(checkpoints, *args)
        checkpoints.wait()

    def sampled(log: RunLog, step: int, timings: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        write(log, step, timings, metrics)
        apart = ("time/eval", "time/save")
        seconds = sum(value for name, value in timings.items() if name.startswith("time/") and name not in apart)
        now = {**of_process(), "seconds a step": seconds, "live arrays": len(jax.live_arrays())}
        for name, value in {**now, "compilations": compiled}.items():
            samples[name][step - 1] = value

    jax.monitoring.register_event_duration_secs_listener(count)
    RunLog.write_timings = sampled  # type: ignore[assignment,method-assign]
    Checkpoints.save = save_and_wait  # type: ignore[assignment,method-assign]
    try:
        with tempfile.TemporaryDirectory(prefix="endurance_") as folder:
            path = Path(folder, "endurance.yaml")
            path.write_text(dump(settings(Path(folder, "run"), steps)), encoding="utf-8")
            with contextlib.redirect_stdout(sys.stderr):
                code = train.main(["--config", str(path)])
    finally:
        RunLog.write_timings = write  # type: ignore[method-assign]
        Checkpoints.save = save  # type: ignore[method-assign]
        jax.monitoring.unregister_event_duration_listener(count)
    if code:
        raise UserError(f"the run ended with exit code {code}")
    return samples


def settings(run_dir: Path, steps: int) -> Config:
    base = workload("grpo", run_dir)
    every = max(4, steps // 10 // 2 * 2)  # num_iterations divides it
    changes: dict[str, Any] = {
        "steps": steps,
        "checkpoint": {"every": every, "keep": 3},
        "eval": {"every": every, "prompts": 8, "sampled": True},
    }
    return Config.model_validate({**base.model_dump(), **changes})


def of_process() -> dict[str, float]:
    """What /proc tells of this process and of those that it has started."""
    children = children_of(os.getpid())
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo
    memory = libc.mallinfo2()
    return {
        "memory in use": memory.uordblks + memory.hblkhd,
        "Python's blocks": sys.getallocatedblocks(),
        "memory resident": anonymous(os.getpid()),
        "memory of children": sum(map(anonymous, children)),
        "file handles": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "children": len(children),
    }


def children_of(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # The name, in brackets, may hold anything; state and parent follow it.
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.name))
    return found


def anonymous(pid: int) -> int:
    """Bytes of memory of its own that a process has touched; pages of files come and go as the machine likes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))


def judge(values: Sequence[float] | np.ndarray, limit: Limit) -> Verdict:
    """Whether a quantity grows, by its values at consecutive steps."""
    count = min(BLOCKS, len(values) // 4)
    cuts = [round(len(values) * i / count) for i in range(count + 1)]
    of_block = median if limit.relative else min
    blocks = [limit.scale * of_block(values[begin:end]) for begin, end in pairwise(cuts)]
    places = [(begin + end) / 2000 for begin, end in pairwise(cuts)]
    slope, _, low, high = map(float, theilslopes(blocks, places, 0.95))
    most = limit.most * (blocks[0] if limit.relative else 1)
    if most == 0:
        says = "grows" if blocks[-1] > blocks[0] else "flat"
    else:
        sure = len(values) >= ENOUGH
        says = "grows" if sure and low > most else "flat" if sure and high < most else "can't tell"
    return Verdict(blocks[0], blocks[-1], slope, low, high, most, says)


if __name__ == "__main__":
    sys.exit(main())
