"""Whether a long run stays as it was: python tests/faults/endurance.py [--steps 2000]

A small GRPO run, with its rewards in their process, evaluations and checkpoints, which are waited for. After each step
memory, file handles, threads, children, live JAX arrays, compilations and seconds are sampled; after a warm-up of a
quarter of the steps none of them may grow.

Each fifth of the samples counts by its least value, which a disturbed moment does not move. A quantity grows if its
last fifth lies above its first by more than the limit allows.

Exit codes: 0 nothing grows, 1 something does, 2 bad arguments. Linux only. Left out: the device's memory.
"""

import os
import sys
import tempfile
from contextlib import redirect_stdout, suppress
from pathlib import Path

import jax
import numpy as np
from series import workload

from mllm.errors import ArgumentParser, UserError, command, run_main
from mllm.rl import trajectories
from mllm.run.checkpoint import Checkpoints
from mllm.run.metrics import RunLog

COMPILED, SLOW = "/jax/core/compile/backend_compile_duration", ("time/eval", "time/save")
FEWEST = 2000
"""In their first quarter the last programs are compiled, and memory and speed settle."""
LIMITS = {
    "Python's blocks (1,000)": (10.0, 1e-3),
    "memory (MiB)": (8.0, 2.0**-20),
    "memory of children (MiB)": (1.0, 2.0**-20),
    "seconds of a step (ms)": (0.4, 1e3),
    "file handles": (0.0, 1),
    "threads": (2.0, 1),  # other pools fill slowly
    "children": (0.0, 1),
    "live arrays": (0.0, 1),
    "compilations": (0.0, 1),
}
"""By quantity: how much it may grow in a thousand steps, and its units in one of what is sampled."""


@command
def main(arguments=None) -> int:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--steps", type=int, default=FEWEST, help=f"updates (default {FEWEST})")
    steps = parser.parse_args(arguments).steps
    if steps < FEWEST or steps % 2:
        raise UserError(f"--steps: {steps}: give an even number from {FEWEST}")
    samples, warm = run(steps), steps // 4
    print(f"GRPO, {steps} steps, the first {warm} to warm up; growth in 1,000 steps\n")
    print(f"{'':<26} {'first':>9} {'last':>9}   {'growth':>8} {'limit':>7}")
    exit_code = 0
    for (name, (limit, scale)), sampled in zip(LIMITS.items(), samples[warm:].T, strict=True):
        fifth = len(sampled) // 5
        first, last = scale * sampled[:fifth].min(), scale * sampled[-fifth:].min()
        growth = (last - first) * 1000 / (len(sampled) - fifth)
        verdict = "grows" if growth > limit else "flat"
        print(f"{name:<26} {first:>9.2f} {last:>9.2f}   {growth:>8.3f} {limit:>7.2f}   {verdict}")
        exit_code |= verdict == "grows"
    return exit_code


def run(steps: int) -> np.ndarray:
    """Train for so many steps; returns the quantities, in the order of `LIMITS`, after each step."""
    sys.path += [str(Path(__file__).parents[up]) for up in (1, 2)]  # of the rewards and of train.py
    import runs

    samples = np.full((steps, len(LIMITS)), np.nan)  # allocated beforehand, so that sampling adds nothing
    compiled = [0]
    write, save = RunLog.write_timings, Checkpoints.save

    def save_and_wait(self, *args, **options) -> None:
        save(self, *args, **options)
        self.wait()

    def sample(self, step, timings, *args) -> None:
        write(self, step, timings, *args)
        seconds = sum(timings[name] for name in timings if name.startswith("time/") and name not in SLOW)
        children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
        samples[step - 1] = (
            *(sys.getallocatedblocks(), private_bytes("self"), sum(map(private_bytes, children)), seconds),
            *(len(os.listdir("/proc/self/fd")), threads(), len(children)),
            *(len(jax.live_arrays()), compiled[0]),
        )

    def count(event, *_, **__) -> None:
        compiled[0] += event == COMPILED

    trajectories.MOST_FAILED_GROUPS = 1.0  # those of the rewards that fail on purpose
    jax.monitoring.register_event_duration_secs_listener(count)
    RunLog.write_timings, Checkpoints.save = sample, save_and_wait
    every = max(4, steps // 10 // 2 * 2)  # a rollout has two updates
    sections = {"eval": {"every": every, "samples": 1}, "checkpoint": {"every": every, "keep": 3}}
    with tempfile.TemporaryDirectory(prefix="endurance_") as folder, redirect_stdout(sys.stderr):
        if code := runs.run(runs.changed(workload("grpo", f"{folder}/run"), steps=steps, **sections)):
            raise UserError(f"the run ended with exit code {code}")
    return samples


def threads() -> int:
    """Threads, but for those of tensorstore's own pool: it fills slowly, up to 48 of them, and then grows no more."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return len(names) - names.count("ts_pool_worker\n")


def private_bytes(pid: str) -> int:
    """Resident bytes of a process's own; pages of files come and go as the machine likes."""
    with suppress(FileNotFoundError):
        status = Path(f"/proc/{pid}/status").read_text()
        return 1024 * next((int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")), 0)
    return 0


if __name__ == "__main__":
    run_main(main)
