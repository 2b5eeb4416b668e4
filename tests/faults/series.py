"""Runs of one small workload: one that nothing disturbs, and others that are disturbed and must end like it.

How checkpoints lie in a run's folder or bucket is known here alone, in `Series.files_of`.
"""

import json
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer import BETWEEN, END, Trainer

from mllm.config.load import dump
from mllm.config.schema import Config
from mllm.errors import UserError
from mllm.store.run_store import ASIDE, CHECKPOINTS, CHUNKS, RunStore

ONCE = ("start", "restore", "wait")
"""Phases that a process goes through once."""
LIMIT = 60.0
"""Seconds within which all processes must have ended after a fault."""


EVEN = {"name": "user_rewards:even_characters"}
SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {"steps": 36, "eval": {"every": 12}, "checkpoint": {"every": 4, "keep": 3}},
    "grpo": {
        "steps": 24,
        "grpo": {"updates_per_generation": 2, "dynamic_sampling": 2, "beta": 0.1, "reference": "initial"},
        "eval": {"every": 8, "samples": 1},
        "task": {"heldout": 8, "rewards": [EVEN, {"name": "user_rewards:fussy", "weight": 0.5}]},
        "checkpoint": {"every": 4, "keep": 3},
    },
    "hanging": {
        "steps": 2,
        "task": {"heldout": 8, "rewards": [EVEN, {"name": "user_rewards:slow_at_times", "weight": 0.5}]},
    },
    "slow": {
        "eval": {"every": 2, "samples": 1},
        "task": {"heldout": 8, "rewards": [{"name": "user_rewards:slow"}]},
        "rollout": {"max_completion_length": 256, "max_slots": 1},
        "checkpoint": {"every": 2},
    },
}
"""By the workload's name: as small as it can be with every part in it; `hanging` and `slow` have long phases."""


def workload(name: str, run_dir: str) -> Config:
    from tiny import config

    return config("sft" if name == "sft" else "grpo", run_dir=run_dir, **SETTINGS[name])


@dataclass
class Trial:
    """One fault, and what came of it."""

    fault: str
    hit: str = ""
    """The phase in which it fell, or what it damaged."""
    column: str = ""
    """The workload and its number of processes, as in the table."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What was timed after the fault, by its name in the table."""
    remarks: list[str] = field(default_factory=list)
    failure: str = ""
    """What was lost or went wrong; empty if the run survived."""


class Series:
    """The runs of one workload by one process or several, one run after the other; the first is always on the disk."""

    def __init__(self, name: str, processes: int, folder: Path, rng: random.Random, bucket: Any = None) -> None:
        self.name, self.processes, self.rng, self.bucket = name, processes, rng, bucket
        place = f" {bucket.scheme}" if bucket else ""
        self.folder = folder / f"{name}_{processes}{place.replace(' ', '_')}"
        self.folder.mkdir()
        algorithm = "SFT" if name == "sft" else "GRPO"
        self.column = (f"{algorithm} x{processes}" if processes > 1 else algorithm) + place
        self.phases: list[str] = []
        """Those that the undisturbed run went through."""
        self.tried: dict[str, Counter[str]] = {}
        """By fault: how often it was aimed at each phase."""
        self.runs = self.launches = 0
        self.running: list[Trainer] = []
        self.sizes: dict[str, int] = {}
        """Each log's bytes at the last launch, by its name."""
        self.trials: list[Trial] = []
        """The faults of the run that is under way."""
        self.finished: list[Trial] = []
        for source, last in (("data.jsonl", []), ("bad.jsonl", ["no JSON"])):
            lines = [json.dumps({"question": f"{i}+1=", "answer": str(i + 1)}) for i in range(64)]
            (self.folder / source).write_text("\n".join(lines + last) + "\n", encoding="utf-8")
        self.config = self.folder / "config.yaml"
        self.config.write_text(dump(workload(name, self.run_dir)), encoding="utf-8")

    @property
    def run_dir(self) -> str:
        place = f"{self.bucket.url}/{self.folder.name}" if self.bucket and self.runs else self.folder
        return f"{place}/{self.runs}"

    @property
    def store(self) -> RunStore:
        return RunStore(self.run_dir)

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints, in order."""
        return self.store.steps()

    def files_of(self, step: int) -> dict[str, bytes]:
        """The files of a checkpoint that hold anything, by name: its manifest and its chunks."""
        folder = self.store.folder_of(step)
        arrays = [f"{folder}/{array}" for array in self.store.entries(folder)]
        chunks = [f"{array}/{name}" for array in arrays for name in self.store.entries(array)]
        files = {name: self.store.read(name) for name in (f"checkpoints/{step}.json", *chunks)}
        return {name: content for name, content in files.items() if content}

    def output(self, process: int = 0) -> Path:
        """The file with what a process of the last launch has printed."""
        return self.folder / f"said_{self.launches}_{process}.txt"

    def launch(self, bad: int | None = None) -> list[Trainer]:
        """Start the processes; the data of `bad` has a bad line."""
        from runs import free_address

        self.launches += 1
        self.sizes = {path.name: path.stat().st_size for path in Path(self.run_dir).glob("*.jsonl")}
        address, self.running = free_address(), []
        for process in range(self.processes):
            given, variables = self.arguments(self.run_dir, process, bad), {}
            if self.processes > 1:
                given += [f"mesh.dp={2 * self.processes}", "--coordinator", address, "--wait", "60"]
                given += ["--processes", str(self.processes), "--process", str(process)]
                programs = f"{os.environ['JAX_COMPILATION_CACHE_DIR']}_{process}_of_{self.processes}"
                flags = "--xla_force_host_platform_device_count=2"
                variables = {"XLA_FLAGS": flags, "JAX_COMPILATION_CACHE_DIR": programs}
            self.running.append(Trainer(given, self.output(process), **variables))
        return self.running

    def arguments(self, run_dir: str, process: int = 0, bad: int | None = None) -> list[str]:
        """The arguments of train.py."""
        given = ["--config", str(self.config), f"run_dir={run_dir}"]
        if self.name == "sft":  # each process has a cache of its own, as if each were on its own machine
            source = self.folder / ("bad.jsonl" if process == bad else "data.jsonl")
            given += [f"data.source={source}", f"data.cache={self.cache(process)}"]
        return given

    def cache(self, process: int) -> Path:
        return self.folder / f"cache_{process}"

    def run_undisturbed(self) -> None:
        """The first run, which all others must end like; it tells the phases."""
        self.launch()
        if any(self.codes()):
            raise UserError(f"a run of {self.column} that nothing disturbed failed: {last_line(self.output())}")
        self.phases = sorted({phase for _, phase in self.running[0].marks} - {BETWEEN, END})
        self.runs = 1

    def moment(self) -> float:
        """Seconds of a delay, from 0.1 ms to one second, as long as phases last."""
        return 10 ** self.rng.uniform(-4, 0)

    def aim(self, fault: str, phases: Collection[str]) -> tuple[str, int]:
        """A phase for the fault, each in its turn; which of its beginnings."""
        possible = [name for name in phases if name != "restore" or self.steps]
        tried = self.tried.setdefault(fault, Counter())
        phase = min(self.rng.sample(possible, len(possible)), key=lambda name: tried[name])
        tried[phase] += 1
        count = 1 if phase in ONCE else self.rng.randint(1, 2 if phase == "save" else 4)
        return phase, count

    def reach(self, phase: str, count: int = 1, process: int = 0, bad: int | None = None) -> list[Trainer]:
        """Trainers of which one has begun `phase` for the `count`th time, or an earlier time if runs are too short.

        A run that ends before is checked, and a new one begun.
        """
        while True:
            trainers = self.launch(bad)
            if trainers[process].follow(phase, count=count):
                return trainers
            self.check()
            count = max(1, count - 1)

    def run_until(self, enough: Callable[[], bool]) -> None:
        """Let the run go on, step by step, until `enough()` holds, and kill it there."""
        while not enough():
            trainers = self.launch()
            while trainers[0].follow("metrics") and not enough():
                pass
            self.kill()

    def kill(self) -> None:
        """Kill what runs; a run that had already come to its end is checked."""
        for trainer in self.running:
            trainer.kill(everything=True)
        if not any(self.codes()):
            self.check()

    def end(self, begin: float, stopped: Trainer | None = None) -> tuple[list[int], list[int], float]:
        """The exit codes, the processes that had to be killed LIMIT seconds after `begin`, and the seconds until then.

        A process that is stopped goes on when the others have ended, and is not timed.
        """
        late = []
        for i, trainer in enumerate(self.running):
            trainer.process.join(0 if trainer is stopped else max(0.0, begin + LIMIT - time.monotonic()))
            if trainer is not stopped and trainer.process.is_alive():
                late.append(i)
                trainer.kill(everything=True)
        ended = time.monotonic() - begin
        if stopped:
            stopped.signal(signal.SIGCONT)
        return self.codes(), late, ended

    def codes(self) -> list[int]:
        """The exit codes, once all have ended; from then on no request to the bucket fails."""
        codes = [trainer.end() for trainer in self.running]
        if self.bucket:
            self.bucket.fault = lambda *_: None
        return codes

    def add(self, fault: str, hit: str = "") -> Trial:
        """Add a trial to those of the run that is under way."""
        self.trials.append(Trial(fault, hit, self.column))
        return self.trials[-1]

    def note_orphans(self, trial: Trial) -> None:
        """No process that a trainer has started may outlive it long."""
        if orphans := [pid for trainer in self.running for pid in trainer.orphans()]:
            trial.failure = f"in {trial.hit}: it left processes behind, {orphans}"

    def check(self) -> None:
        """The run is over: compare it with the undisturbed one, and begin the next run."""
        codes = self.codes()
        problem = last_line(self.output()) if any(codes) else self.difference(self.run_dir)
        self.close(f"{self.run_dir}: exit codes {codes}, {problem}" if any(codes) or problem else "")

    def difference(self, run_dir: str) -> str:
        """How a finished run's end differs from the undisturbed run's; empty if it is the same to the bit."""
        from runs import assert_same_end

        try:
            assert_same_end(workload(self.name, run_dir), workload(self.name, f"{self.folder}/0"))
        except AssertionError as error:
            return f"it ends otherwise: {error}"
        return f"it has left {left}" if (left := left_over(RunStore(run_dir))) else ""

    def close(self, problem: str) -> None:
        """The run is over; a problem, if there is one, is the failure of all of its trials."""
        if problem and not self.trials:
            self.add("none")
        for trial in self.trials:
            trial.failure = trial.failure or problem
        if not problem:
            shutil.rmtree(self.run_dir, ignore_errors=True)  # what is in a bucket goes with it
            for path in self.folder.glob("said_*.txt"):
                path.unlink()
        self.finished += self.trials
        self.trials = []
        self.runs += 1

    def finish(self) -> None:
        """Let the run that is under way come to its end."""
        if self.trials:
            self.launch()
            self.check()


def left_over(store: RunStore) -> list[str]:
    """Folders of arrays that are no checkpoint's, and parts of logs that another holder has written anew."""
    names = store.entries(CHECKPOINTS)
    known = {store.field(step, "folder") for step in store.steps()}
    damaged = {found[1] for name in names if (found := ASIDE.fullmatch(name))}
    folders = [name for name in names if CHUNKS.fullmatch(name) and name not in known]
    parts = [found for name in store.entries() if (found := re.fullmatch(r"(.*\.jsonl)\.(\d+)\.\d+", name))]
    newest = {part[1]: part[2] for part in parts}
    stale = [part[0] for part in parts if part[2] != newest[part[1]]]
    return [name for name in folders if name.partition("-")[0] not in damaged] + stale


def last_line(path: Path) -> str:
    """The last line that a process printed."""
    return next(reversed(path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]), "")
