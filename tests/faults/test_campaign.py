"""Runs that are killed at random moments end like one that nothing disturbed, to the bit; so do two processes."""

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from object_store import BUCKET, ObjectStore, object_store
from runs import ROOT, arguments, assert_same_end, changed, environment, free_address, outputs, run, spawn
from tiny import METHODS, config

from mllm.errors import RESTART
from mllm.run.metrics import RunLog

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]
EVEN = {"heldout": 8, "rewards": [{"name": "user_rewards:even_characters"}]}
LONGER = {"steps": 12, "checkpoint": {"every": 2}}
RUNS = {
    "sft": config("sft", **LONGER, eval={"every": 4}),
    "grpo": config("grpo", **LONGER, eval={"every": 4, "samples": 1}, task=EVEN),
    **{name: changed(METHODS[name], **LONGER) for name in ("turns", "dpo", "distill")},
}
KILL, TERM = signal.SIGKILL, signal.SIGTERM
AIMS = [(KILL, "start"), (KILL, "any time"), (KILL, "step"), (KILL, "save"), (KILL, "save"), (TERM, "any time")]
STOPPED = {KILL: [-KILL], TERM: [-TERM, 128 + TERM]}
"""Exit codes of a process that such a signal has ended."""
REQUESTS = ["503", "reset", "lost", "late"]
"""How requests to a bucket fail."""
LEASE = 6
"""Seconds for which a bucket's lease lasts here."""
TRAIN = f"""
import sys, train
from mllm.store import holder
holder.SECONDS = {LEASE}
sys.exit(train.main(sys.argv[1:]))
"""
PATIENCE = 10.0
"""Seconds within which all that a trainer has started must end after it."""


def lines(log: Path, since: float = 0.0) -> int:
    """The lines of a log; -1 where it has not been there, or not been written, since a time."""
    with suppress(OSError):
        if log.stat().st_mtime > since:
            return log.read_bytes().count(b"\n")
    return -1


@dataclass
class Run:
    """A run of a method on a disk, or in a bucket, and the processes that have trained it."""

    settings: Any
    folder: Path
    server: ObjectStore | None = None
    starts: int = 0
    begun: float = 0.0
    """When the last process was started, as the file system counts."""
    said: list[str] = field(default_factory=list)

    def start(self) -> subprocess.Popen:
        """The same command once more; for a run in a bucket on another machine, which has no copy of anything."""
        self.starts += 1
        machine = self.folder / f"machine_{self.starts if self.server else 1}"
        machine.mkdir(parents=True, exist_ok=True)
        variables = self.server.environment if self.server else {}
        variables = environment(XDG_CACHE_HOME=str(machine), FAULTS_TOKEN=str(self.folder), **variables)
        command = [sys.executable, "-c", TRAIN, *arguments(self.settings)]
        self.begun = time.time()
        with (self.folder / "said").open("wb") as file:
            return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=file, stderr=file)

    def end(self, process: subprocess.Popen) -> int:
        """Wait for the end; returns the exit code, when all that the process has started has ended, too."""
        code = process.wait(300)
        self.said.append((self.folder / "said").read_text(errors="replace"))
        deadline = time.monotonic() + PATIENCE
        while left := self.orphans():
            assert time.monotonic() < deadline, (left, self.said[-1][-3000:])
            time.sleep(0.05)
        return code

    def orphans(self) -> list[str]:
        """The processes that trainers of this run have started, directly or not."""
        left = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is another user's
                if f"FAULTS_TOKEN={self.folder}\0".encode() in (entry / "environ").read_bytes():
                    left.append(entry.name)
        return left

    def lines(self) -> int:
        """The steps that the last process has found, or written, in metrics.jsonl; -1 before it has opened the log."""
        copies = self.folder / f"machine_{self.starts}" / "mllm" / "runs"
        logs = copies.rglob("metrics.jsonl") if self.server else [Path(self.settings.run_dir, "metrics.jsonl")]
        return max((lines(log, self.begun) for log in logs), default=-1)

    def saving(self) -> bool:
        """Whether there is a checkpoint that is not whole."""
        if not self.server:
            return any(Path(self.settings.run_dir, "checkpoints").glob("*orbax-checkpoint-tmp*"))
        names = [*self.server.objects]
        root = self.settings.run_dir.removeprefix(f"gs://{BUCKET}/") + "/checkpoints/"
        steps = {name.removeprefix(root).partition("/")[0] for name in names if name.startswith(root)}
        return any(f"{root}{step}/commit_success.txt" not in names for step in steps if step.isdecimal())

    def disturb(self, process: subprocess.Popen, number: int, aim: str, seconds: float, dice: random.Random) -> bool:
        """Signal the process at a moment; returns whether that came before its end."""
        steps = self.settings.steps

        def until(there: Callable[[], bool]) -> None:
            while process.poll() is None and not there():
                time.sleep(0.001)

        if aim in ("step", "save"):
            until(lambda: self.lines() > -1)
            target = dice.randrange(max(0, self.lines()), steps)
            until(lambda: self.lines() >= target)
            until(self.saving if aim == "save" else lambda: True)
            time.sleep(dice.uniform(0, 0.03))
        else:
            imports = seconds / 3
            time.sleep(dice.uniform(imports, seconds) if aim == "any time" else dice.uniform(0, imports))
        process.send_signal(number)
        code = self.end(process)
        if code == 0 or (code == 2 and self.server):
            return False
        assert code in STOPPED[number], self.said[-1][-3000:]
        return True

    def finish(self) -> None:
        """Let the run go on to its end; requests to a bucket that fail for long may end it several times before."""
        for _ in range(10):
            code = self.end(self.start())
            if code != 2 or not self.server:
                break
        assert code == 0, self.said[-1][-3000:]


def campaign(settings: Any, undisturbed: Any, seconds: float, aims: list[tuple[int, str]], place: Any) -> None:
    """Disturb runs of these settings, each until it ends by itself."""
    dice, aims = random.Random(f"{settings.algorithm} {aims}"), [*aims]
    dice.shuffle(aims)
    run = None
    while aims or run:
        run = run or next(place)
        if aims and run.disturb(run.start(), *aims[-1], seconds, dice):
            aims.pop()
            if aims:
                continue
        run.finish()
        assert_same_end(run.settings, undisturbed)
        for said in run.said:
            assert "Traceback" not in said, said[-3000:]
            assert "put aside" not in said, said[-3000:]
        run = None


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Any, float]]]:
    """Gives the settings of a method's run that nothing has disturbed, and the seconds that it has taken."""
    made: dict[str, tuple[Any, float]] = {}

    def train(method: str) -> tuple[Any, float]:
        if method not in made:
            for name in ("first", "second"):  # the first one compiles
                folder = tmp_path_factory.mktemp(method)
                run = Run(changed(RUNS[method], run_dir=str(folder / name)), folder)
                run.finish()
                made[method] = run.settings, time.time() - run.begun
        return made[method]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield train


@pytest.mark.parametrize("method", RUNS)
def test_a_killed_run_on_a_disk_loses_nothing(method, undisturbed, tmp_path):
    expected, seconds = undisturbed(method)
    folders = (tmp_path / str(number) for number in itertools.count())
    runs = (Run(changed(RUNS[method], run_dir=str(folder / "run")), folder) for folder in folders)
    campaign(RUNS[method], expected, seconds, AIMS, runs)


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_a_killed_run_in_a_bucket_whose_requests_fail_loses_nothing(method, undisturbed, tmp_path, monkeypatch):
    expected, seconds = undisturbed(method)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    dice = random.Random(method)
    with object_store() as server:
        runs = (
            Run(changed(RUNS[method], run_dir=f"{server.url}/{number}"), tmp_path / str(number), server)
            for number in itertools.count()
        )
        server.fault = lambda *_: dice.choice(REQUESTS) if dice.random() < 0.01 else None
        campaign(RUNS[method], expected, 2 * seconds + LEASE, AIMS[1:], runs)


# Two processes that train together. What a fault adds to one of them is gone when the run is started again.

TWO = config(
    steps=40,
    mesh={"dp": 2},
    task={"rewards": [{"name": "user_rewards:even_characters"}]},
    eval=None,
    checkpoint={"every": 4},
    log={"samples": 2},
)
LOST = {RESTART, -signal.SIGABRT}
"""The exit codes of a process that has lost another one: its own, or that of JAX's coordination service."""
KILLED, MISTAKE = {-signal.SIGKILL}, {2}
TIMES = ["--heartbeat", "10"]


def launch(settings, program: Path = ROOT) -> list[subprocess.Popen]:
    """Start both processes of the run; the second one may have its program in another folder."""
    command = [*arguments(settings), "--coordinator", free_address(), "--processes", "2", *TIMES]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    trainers = [str(folder / "train.py") for folder in (ROOT, program)]
    commands = [[trainer, *command, "--process", str(number)] for number, trainer in enumerate(trainers)]
    return [spawn(command, subprocess.STDOUT, **flags) for command in commands]


def strike(fault: str, settings, rng: random.Random, folder: Path) -> list[subprocess.Popen]:
    """Start the run, and let the fault befall it."""
    if fault == "other code in 1":
        for room in ("kernels", "mllm"):
            shutil.copytree(ROOT / room, folder / room)
        shutil.copy(ROOT / "train.py", folder)
        with (folder / "mllm" / "errors.py").open("a") as file:
            file.write("# another version\n")
        return launch(settings, program=folder)
    processes = launch(settings)
    metrics, steps = Path(settings.run_dir, "metrics.jsonl"), rng.randrange(1, 35)
    while lines(metrics) < steps:
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
    "other code in 1": (MISTAKE, MISTAKE),
}
"""Each fault, with its process, and the exit codes that the processes may have."""


@pytest.fixture(scope="module")
def undisturbed_two(tmp_path_factory):
    """The settings of a run of two processes that nothing has disturbed."""
    settings = changed(TWO, run_dir=str(tmp_path_factory.mktemp("undisturbed") / "run"))
    outputs(launch(settings))
    return settings


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_all_processes_and_the_same_command_loses_nothing(fault, undisturbed_two, tmp_path):
    settings = changed(TWO, run_dir=str(tmp_path / "run"))
    processes = strike(fault, settings, random.Random(fault), tmp_path / "code")
    while left := [process for process in processes if process.poll() is None]:
        time.sleep(0.01)
        if "SIGSTOP" in fault and len(left) == 1:
            processes[int(fault[-1])].send_signal(signal.SIGCONT)
    said = [process.stdout.read() for process in processes]
    codes = zip([process.returncode for process in processes], FAULTS[fault], strict=True)
    assert all(code in allowed for code, allowed in codes), said
    if FAULTS[fault][0] is MISTAKE:
        assert not Path(settings.run_dir).exists()
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
    "threads": 2,  # other pools than tensorstore's fill slowly, too
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
    print(*map("{:20} {:15,.4f} + {:12,.4f} in 1,000 steps".format, LIMITS, first, growth), sep="\n")
    assert [name for name, grown, limit in zip(LIMITS, growth, LIMITS.values(), strict=True) if grown > limit] == []
