"""Runs of one small workload: one that nothing disturbs, and others that are disturbed and must end like it."""

import json
import random
import shutil
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from trainer import BETWEEN, Trainer

from mllm.config.load import dump
from mllm.config.schema import Config
from mllm.errors import UserError

ONCE = ("start", "restore", "wait")
"""Phases that a process goes through once."""


def rewards(**weights: float) -> dict[str, Any]:
    named = [{"name": f"user_rewards:{name}", "weight": weight} for name, weight in weights.items()]
    return {"heldout": 8, "rewards": named}


SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {"steps": 36, "eval": {"every": 12, "prompts": 8}, "checkpoint": {"every": 4, "keep": 3}},
    "grpo": {
        "steps": 24,
        "grpo": {"steps_per_generation": 2, "dynamic_sampling": 2, "beta": 0.1, "reference": "initial"},
        "eval": {"every": 8, "prompts": 8, "sampled": True},
        "task": rewards(even_characters=1.0, fussy=0.5),
        "checkpoint": {"every": 4, "keep": 3},
    },
    "hanging": {"steps": 2, "task": rewards(even_characters=1.0, slow_at_times=0.5)},
    "slow": {
        "eval": {"every": 2, "prompts": 4, "sampled": True},
        "task": rewards(slow=1.0),
        "rollout": {"max_completion_length": 256, "max_slots": 1},
        "checkpoint": {"every": 2},
    },
}
"""By the workload's name: as small as it can be with every part in it; `hanging` and `slow` have long phases."""


def workload(name: str, run_dir: Path) -> Config:
    from tiny import config

    return config("sft" if name == "sft" else "grpo", run_dir=str(run_dir), **SETTINGS[name])


@dataclass
class Trial:
    """One fault, and what came of it."""

    fault: str
    hit: str = ""
    """The phase in which it fell, or what it damaged."""
    aimed: str = ""
    """The phase that was meant."""
    workload: str = ""
    redone: int = 0
    """Steps that had been logged and are done again because of it."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What was timed after the fault, by its name in the table."""
    remarks: list[str] = field(default_factory=list)
    failure: str = ""
    """What was lost or went wrong; empty if the run survived."""


class Series:
    """The runs of one workload, one after the other."""

    def __init__(self, name: str, folder: Path, rng: random.Random) -> None:
        self.name, self.folder, self.rng = name, folder, rng
        self.durations: dict[str, list[float]] = {}
        """Seconds of each phase, each time that the undisturbed run went through it."""
        self.writing = 0.0
        """Seconds from the beginning of a save until the checkpoint was written in the background."""
        self.turns: dict[str, list[str]] = {}
        """By fault: the phases in which it is still to be tried before the next turn begins."""
        self.runs = 0
        self.trials: list[Trial] = []
        """The faults of the run that is under way."""
        self.finished: list[Trial] = []

    @property
    def run_dir(self) -> Path:
        return self.folder / f"{self.name}_{self.runs}"

    @property
    def output(self) -> Path:
        """The file with all that the run's processes printed."""
        return self.run_dir.with_suffix(".txt")

    @property
    def undisturbed(self) -> Path:
        return self.folder / f"{self.name}_0"

    def arguments(self, run_dir: Path) -> list[str]:
        path = self.folder / f"{self.name}.yaml"
        path.write_text(dump(workload(self.name, self.undisturbed)), encoding="utf-8")
        return ["--config", str(path), f"run_dir={run_dir}"]

    def launch(self) -> Trainer:
        return Trainer(self.arguments(self.run_dir), self.output)

    def run_undisturbed(self) -> None:
        """Make the run that the others are compared with, and learn how long each phase takes.

        Raises:
            UserError: it fails, or its metrics.jsonl has not every step once.
        """
        trainer = self.launch()
        if trainer.end() != 0:
            raise UserError(f"a run of {self.name} that nothing disturbed failed: {last_line(self.output)}")
        phases = [next(marks) for _, marks in groupby(trainer.marks, lambda mark: mark[1])]
        for (begin, phase), (end, _) in pairwise(phases):
            if phase != BETWEEN:
                self.durations.setdefault(phase, []).append(end - begin)
        clock = time.time() - time.monotonic()
        for step in checkpoints(self.run_dir):  # a checkpoint's folder changes last when it gets its name
            written = (self.run_dir / "checkpoints" / str(step)).stat().st_ctime - clock
            begun = max(seconds for seconds, phase in trainer.marks if phase == "save" and seconds < written)
            self.writing = max(self.writing, written - begun)
        lines = (self.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        config, steps = workload(self.name, self.run_dir), [json.loads(line)["step"] for line in lines]
        if steps != list(range(0 if config.eval else 1, config.steps + 1)):
            raise UserError(f"metrics.jsonl of a run of {self.name} that nothing disturbed has the steps {steps}")
        self.runs = 1

    def duration(self, phase: str) -> float:
        """The usual seconds of a phase; those of a save end when the checkpoint is written."""
        return self.writing if phase == "save" else median(self.durations[phase])

    def aim(self, fault: str, phases: Collection[str]) -> tuple[str, int, float]:
        """A phase for the fault, each in its turn; which of its beginnings; a delay in seconds."""
        possible = [name for name in phases if name != "restore" or checkpoints(self.run_dir)]
        turn = self.turns.setdefault(fault, [])
        if not {*possible} & {*turn}:
            turn += self.rng.sample(possible, len(possible))
        phase = next(name for name in turn if name in possible)
        turn.remove(phase)
        count = 1 if phase in ONCE else self.rng.randint(1, 2 if phase == "save" else 4)
        return phase, count, self.rng.uniform(0, self.duration(phase))

    def reach(self, phase: str, count: int = 1) -> Trainer:
        """A trainer that has begun `phase` for the `count`th time, or an earlier time if runs are too short.

        A run that ends before is checked, and a new one begun.
        """
        while True:
            trainer = self.launch()
            if trainer.follow(phase, count=count):
                return trainer
            self.check(trainer)
            count = max(1, count - 1)

    def run_until(self, enough: Callable[[], bool]) -> None:
        """Let the run go on, step by step, until `enough()` holds, and kill it there."""
        while True:
            trainer = self.launch()
            while trainer.follow("metrics") and not enough():
                pass
            if self.kill(trainer):
                return

    def kill(self, trainer: Trainer, *, everything: bool = True) -> bool:
        """Kill a trainer; False if it had already come to its end, and its run was checked."""
        trainer.kill(everything=everything)
        if trainer.end() == -signal.SIGKILL:
            return True
        self.check(trainer)
        return False

    def record(self, trial: Trial, trainer: Trainer) -> None:
        """Add the trial of a fault that ended the trainer."""
        trial.workload = self.name
        newest = max(checkpoints(self.run_dir), default=0)
        if trainer.begun("metrics"):  # else the log's later lines are another trial's loss
            trial.redone = max(0, last_step(self.run_dir) - newest)
        if any((self.run_dir / "checkpoints").glob("[0-9]*.*")):
            trial.remarks.append("beside a half-written checkpoint")
        trial.seconds["all processes gone"], orphans = trainer.orphans()
        if orphans:
            trial.failure = f"in {trial.hit}: it left processes behind, {orphans}"
        self.trials.append(trial)

    def check(self, trainer: Trainer) -> None:
        """The trainer's run is over: compare it with the undisturbed one, and begin the next run."""
        code = trainer.end()
        problem = difference(self.name, self.run_dir, self.undisturbed) if code == 0 else last_line(self.output)
        self.close(f"{self.run_dir}: exit code {code}, {problem}" if code or problem else "")

    def close(self, problem: str) -> None:
        """The run is over; a problem, if there is one, is the failure of all of its trials."""
        if problem and not self.trials:
            self.trials.append(Trial("none", workload=self.name))
        for trial in self.trials:
            trial.failure = trial.failure or problem
        if not problem:
            shutil.rmtree(self.run_dir)
            self.output.unlink()
        self.finished += self.trials
        self.trials = []
        self.runs += 1

    def finish(self) -> None:
        """Let the run that is under way come to its end."""
        if self.trials:
            self.check(self.launch())


def checkpoints(run_dir: Path) -> list[int]:
    """The steps of the checkpoints that are complete by their names, in order."""
    return sorted(int(path.name) for path in (run_dir / "checkpoints").glob("*") if path.name.isdigit())


def last_line(path: Path) -> str:
    """The last line that a process printed."""
    return next(reversed(path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]), "")


def last_step(run_dir: Path) -> int:
    """The last step in metrics.jsonl; 0 if there is none."""
    lines = (run_dir / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines else 0


def difference(name: str, run_dir: Path, undisturbed: Path) -> str:
    """How a finished run's end differs from the undisturbed run's; empty if it is the same to the bit."""
    from runs import assert_same_end

    try:
        assert_same_end(workload(name, run_dir), workload(name, undisturbed))
    except AssertionError as error:
        return f"it ends otherwise: {error}"
    return ""
