"""Runs killed in each of their phases end like an undisturbed run, to the bit; so do two processes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from runs import ROOT, arguments, assert_same_end, changed, environment, outputs, run, start_group
from tiny import METHODS, config

from mllm.errors import RESTART
from mllm.run.metrics import RunLog

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]
EVEN = {"heldout": 8, "rewards": [{"name": "user_rewards:even_characters"}]}
LONGER = {"steps": 16, "checkpoint": {"every": 2}, "eval": {"every": 4}}
RUNS = {
    "sft": config("sft", **LONGER),
    "grpo": config("grpo", **LONGER, task=EVEN),
    "turns": changed(METHODS["turns"], **LONGER),
    "distill": changed(METHODS["distill"], **LONGER),
    "dpo": config("dpo", **LONGER, mesh={"dp": 2}, dpo={}),
}
STRIKES = [
    *((signal.SIGKILL, phase) for phase in ("start", "update", "eval", "save", "save", "after a save")),
    (signal.SIGTERM, "update"),
]
TRAIN = """
import json, os, sys, threading
number, phase, seconds = json.loads(os.environ["STRIKE"])
def strike():
    threading.Timer(seconds, os.kill, [os.getpid(), number]).start()
if phase == "start":
    strike()
import train
from mllm.stopwatch import Stopwatch
entered, enter = ["nothing"], Stopwatch.phase
def entering(self, name):
    global phase
    if phase == name or (phase == "after a save" and entered[-1] == "save"):
        phase = "done"
        strike()
    entered.append(name)
    return enter(self, name)
Stopwatch.phase = entering
sys.exit(train.main(sys.argv[1:]))
"""
"""A trainer that gets a signal some seconds after it has entered a phase for the first time."""
PATIENCE = 10.0
"""Seconds after a trainer's end. By then every process that the trainer started must have ended."""


def trained(settings: Any, folder: Path, strike: tuple[int, str, float] = (0, "never", 0.0)) -> int:
    """Run the command once in its own process. Returns its exit code after every process that it started has ended."""
    variables = {"XDG_CACHE_HOME": str(folder), "FAULTS_TOKEN": str(folder), "STRIKE": json.dumps(strike)}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "said").open("wb") as file:
        command = [sys.executable, "-c", TRAIN, *arguments(settings)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment(**variables), stdout=file, stderr=file)
    code, output = process.wait(300), (folder / "said").read_text(errors="replace")
    assert "Traceback" not in output, output[-3000:]
    assert "put aside" not in output, output[-3000:]
    deadline = time.monotonic() + PATIENCE
    while left := orphans(folder):
        assert time.monotonic() < deadline, (left, output[-3000:])
        time.sleep(0.05)
    return code


def orphans(folder: Path) -> list[str]:
    """The processes that trainers of a folder have started, directly or not."""
    left = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if f"FAULTS_TOKEN={folder}\0".encode() in (entry / "environ").read_bytes():
                left.append(entry.name)
    return left


@pytest.mark.parametrize("method", RUNS)
def test_a_run_that_is_killed_in_every_phase_loses_nothing(method, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    undisturbed, disturbed = (changed(RUNS[method], run_dir=str(tmp_path / name)) for name in ("one", "other"))
    assert trained(undisturbed, tmp_path / "machine") == 0
    dice, strikes = random.Random(method), [*STRIKES]
    dice.shuffle(strikes)
    for number, phase in strikes:
        seconds = dice.uniform(0, 4) if phase == "start" else dice.choice([0, dice.uniform(0, 0.05)])
        code = trained(disturbed, tmp_path / "machine", (number, phase, seconds))
        assert code in ((-number,) if number == signal.SIGKILL else (-number, 128 + number)), (phase, code)
    assert trained(disturbed, tmp_path / "machine") == 0
    assert_same_end(disturbed, undisturbed)


# Two processes that train together. A restart of the run removes the effect of a fault on either process.

TWO = config(
    steps=40,
    mesh={"dp": 2},
    task={"rewards": [{"name": "user_rewards:even_characters"}]},
    eval=None,
    checkpoint={"every": 4},
    log={"samples": 2},
)
LOST = {RESTART, -signal.SIGABRT}
"""The exit codes of a process that has lost another process: its own, or JAX's coordination service's."""
KILLED = {-signal.SIGKILL}


def launch(settings) -> list[subprocess.Popen]:
    """Start both processes of the run."""
    return start_group(["train.py", *arguments(settings), "--heartbeat", "10"], 2, 1)


def strike(fault: str, settings, rng: random.Random) -> list[subprocess.Popen]:
    """Start the run, and let the fault befall it."""
    processes = launch(settings)
    metrics, steps = Path(settings.run_dir, "metrics.jsonl"), rng.randrange(1, 35)
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < steps:
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.1))
    name, _, number = fault.split()
    processes[int(number)].send_signal(signal.Signals[name])
    return processes


FAULTS = {
    "SIGKILL of 0": (KILLED, LOST),
    "SIGKILL of 1": (LOST, KILLED),
    "SIGSTOP of 0": (LOST, LOST),
    "SIGSTOP of 1": (LOST, LOST),
    "SIGTERM to 1": ({143}, {143}),
}
"""Each fault, with its process, and the exit codes that the processes may have."""


@pytest.fixture(scope="module")
def undisturbed_two(tmp_path_factory):
    """The settings of a run of two processes that nothing has disturbed."""
    settings = changed(TWO, run_dir=str(tmp_path_factory.mktemp("undisturbed") / "run"))
    outputs(launch(settings))
    return settings


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_all_processes_and_loses_nothing(fault, undisturbed_two, tmp_path):
    settings = changed(TWO, run_dir=str(tmp_path / "run"))
    processes = strike(fault, settings, random.Random(fault))
    while left := [process for process in processes if process.poll() is None]:
        time.sleep(0.01)
        if "SIGSTOP" in fault and len(left) == 1:
            processes[int(fault[-1])].send_signal(signal.SIGCONT)
    texts = [process.stdout.read() for process in processes]
    codes = zip([process.returncode for process in processes], FAULTS[fault], strict=True)
    assert all(code in allowed for code, allowed in codes), texts
    outputs(launch(settings))
    assert_same_end(settings, undisturbed_two)


# Thousands of steps leave memory, file handles, threads and the time of a step as they were, and compile nothing

STEPS = 2000
LIMITS = {
    "Python's blocks": 10_000,
    "bytes of memory": 8 * 2**20,
    "bytes of children": 2**20,
    "seconds of a step": 4e-4,
    "file handles": 0,
    "threads": 2,  # other pools than tensorstore's fill slowly as well
    "children": 0,
    "live arrays": 0,
    "compilations": 0,
}
"""How much each quantity may grow in a thousand steps."""


def read(path: Path) -> str:
    """A file of a thread or process, empty where that has ended: Orbax's and Grain's come and go."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return path.read_text()
    return ""


def private_bytes(pid: str) -> int:
    """Resident bytes of a process's own; pages of files come and go as the machine likes."""
    status = read(Path(f"/proc/{pid}/status")).splitlines()
    return 1024 * next((int(line.split()[1]) for line in status if line.startswith("RssAnon")), 0)


@pytest.mark.timeout(0)
def test_nothing_grows_in_two_thousand_steps(tmp_path, monkeypatch):
    """Growth after a quarter of the steps. Each fifth of the rest counts by its least value, which no load moves."""
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
    print(*map("{:20} {:15,.4f} + {:12,.4f} in 1,000 steps".format, LIMITS, first, growth), sep="\n")
    assert [name for name, grown, limit in zip(LIMITS, growth, LIMITS.values(), strict=True) if grown > limit] == []
