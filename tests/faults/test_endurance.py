"""Thousands of steps leave memory, file handles, threads and the time of a step as they were, and compile nothing."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import changed, run
from test_campaign import RUNS

from mllm.run.metrics import RunLog

STEPS = 2000
LIMITS = {
    "Python's blocks": 10_000,
    "bytes of memory": 8 * 2**20,
    "bytes of children": 2**20,
    "seconds of a step": 4e-4,
    "file handles": 0,
    "threads": 2,  # other pools than tensorstore's fill slowly, too
    "children": 0,
    "live arrays": 0,
    "compilations": 0,
}
"""How much each quantity may grow in a thousand steps."""


def read(path: Path) -> str:
    """A file of a thread, empty where the thread has ended: Orbax's and Grain's come and go."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return path.read_text()
    return ""


def private_bytes(pid: str) -> int:
    """Resident bytes of a process's own; pages of files come and go as the machine likes."""
    with suppress(FileNotFoundError):
        status = Path(f"/proc/{pid}/status").read_text()
        return 1024 * next((int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")), 0)
    return 0


@pytest.mark.faults
@pytest.mark.timeout(0)
def test_nothing_grows_in_two_thousand_steps(tmp_path, monkeypatch, capfd):
    """After a quarter of the steps; each fifth of the others counts by its least value, which no load moves."""
    samples = np.full((STEPS, len(LIMITS)), np.nan)  # allocated beforehand, so that sampling adds nothing
    compiled, write = [0], RunLog.write_timings

    def sample(self, step, timings, *args):
        write(self, step, timings, *args)
        tasks = [name for path in Path("/proc/self/task").glob("*/comm") if (name := read(path))]
        children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in read(path).split()]
        samples[step - 1] = (
            *(sys.getallocatedblocks(), private_bytes("self"), sum(map(private_bytes, children))),
            *(timings["time/update"], len(os.listdir("/proc/self/fd")), len(tasks) - tasks.count("ts_pool_worker\n")),
            *(len(children), len(jax.live_arrays()), compiled[0]),
        )

    def count(event, *_, **__):
        compiled[0] += event == "/jax/core/compile/backend_compile_duration"

    monkeypatch.setattr(RunLog, "write_timings", sample)
    jax.monitoring.register_event_duration_secs_listener(count)
    every = {"every": STEPS // 10}
    rate = {"learning_rate": 1e-6}  # so that rewards go on to differ
    sections = {"eval": every, "checkpoint": every, "optimizer": rate}
    assert run(changed(RUNS["grpo"], run_dir=str(tmp_path / "run"), steps=STEPS, **sections)) == 0
    first, *_, last = (part.min(0) for part in np.array_split(samples[STEPS // 4 :], 5))
    growth = (last - first) * 1000 / (STEPS * 0.75 * 0.8)
    with capfd.disabled():
        print("", *map("{:20} {:15,.4f} + {:12,.4f} in 1,000 steps".format, LIMITS, first, growth), sep="\n")
    assert [name for name, grown, limit in zip(LIMITS, growth, LIMITS.values(), strict=True) if grown > limit] == []
