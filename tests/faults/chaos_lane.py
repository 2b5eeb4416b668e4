"""Training runs that are disturbed and must end like one that nothing disturbed; and what they train on."""

import json
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import jax
from chaos_child import BETWEEN
from chaos_damage import checkpoints, half_written
from chaos_process import Process, Server

from mllm.config.load import dump
from mllm.config.schema import Config
from mllm.errors import UserError
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh
from mllm.run.checkpoint import Checkpoints, Restored
from mllm.run.metrics import read_records
from mllm.train.optimizer import make_optimizer
from mllm.train.step import abstract_state

ONCE = ("start", "restore", "wait")
"""Phases that a process goes through once."""
SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {"steps": 36, "data": {"source": "task", "max_length": 32}, "eval": {"every": 12, "prompts": 8}},
    "grpo": {
        "steps": 24,
        "grpo": {"num_generations": 4, "num_iterations": 2, "beta": 0.1, "reference": "initial"},
        "eval": {"every": 8, "prompts": 8, "sampled": True},
        "rewards": {"even_characters": 1.0, "raises_at_times": 0.5},
    },
    "hanging": {
        "steps": 4,
        "grpo": {"num_generations": 4},
        "rewards": {"even_characters": 1.0, "hangs_at_times": 0.5},
    },
    "slow": {
        "steps": 4,
        "grpo": {"num_generations": 4},
        "eval": {"every": 2, "prompts": 4, "sampled": True},
        "rewards": {"slow": 1.0},
        "rollout": {"max_completion_length": 256, "batch_size": 1},
        "width": 64,
    },
}
"""By the name of the runs: as small as they can be, with every part in them; or with phases that last seconds."""


def workload(name: str, run_dir: Path) -> Config:
    special = SETTINGS[name]
    width = special.get("width", 32)
    rewards = [
        {"name": f"tools.chaos_rewards:{key}", "weight": weight} for key, weight in special.get("rewards", {}).items()
    ]
    return Config.model_validate(
        {
            "algorithm": "sft" if name == "sft" else "grpo",
            "run_dir": str(run_dir),
            "steps": special["steps"],
            "batch_size": 8,
            "model": {
                "init": "random",
                "architecture": {
                    "model_type": "qwen2",
                    "vocab_size": 260,
                    "hidden_size": width,
                    "intermediate_size": 2 * width,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "tie_word_embeddings": True,
                    "rope_theta": 10000.0,
                },
                "dtype": "float32",
                "remat": "none",
            },
            "optimizer": {"learning_rate": 1e-2},
            "task": {"name": "arithmetic", "heldout": 8}
            | ({"rewards": rewards, "max_failed_groups": 1.0} if rewards else {}),
            "rollout": {"max_prompt_length": 16, "max_completion_length": 4} | special.get("rollout", {}),
            "checkpoint": {"every": 4 if special["steps"] > 4 else 2, "keep": 3},
            **{key: special[key] for key in ("data", "grpo", "eval") if key in special},
        }
    )


@dataclass
class Trial:
    """One fault, and what came of it."""

    fault: str
    hit: str = ""
    """The phase that it fell in, or what it struck."""
    aimed: str = ""
    """The phase that was meant."""
    lane: str = ""
    wrote: int | None = None
    """The last step in the log, where the process that was hit had written one."""
    redone: int | None = None
    """Steps done again because of it; None: nobody knows yet."""
    beside_writing: bool = False
    """A checkpoint was half-written then."""
    noticed: float | None = None
    """Seconds until a signal was noticed."""
    left: float | None = None
    """Seconds until the process was gone."""
    children: float | None = None
    """Seconds until all that it had started was gone, too."""
    found: bool | None = None
    """Whether the next process noticed a damage."""
    said: str = ""
    failure: str = ""
    """What was lost, or went wrong; empty where it was survived."""


@dataclass
class Lane:
    """Runs of one workload: one that nothing disturbs, and others that must end like it."""

    name: str
    folder: Path
    rng: random.Random
    server: Server
    lengths: dict[str, list[float]] = field(default_factory=dict)
    """Seconds that a phase took, each time that it was seen to end."""
    writing: float = 0.0
    """Seconds from the beginning of a save to the end of its writing in the background."""
    tries: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By fault and phase: two for each that fell in it, one for each that missed it."""
    runs: int = 0
    trials: list[Trial] = field(default_factory=list)
    """Of the run that is under way."""
    finished: list[Trial] = field(default_factory=list)
    damaged: tuple[Trial, int] | None = None
    """The newest checkpoint, that of this step, was damaged, and nobody has read it since."""

    @property
    def run_dir(self) -> Path:
        return self.folder / f"{self.name}_{self.runs}"

    @property
    def said(self) -> Path:
        """What the processes of the run printed."""
        return self.run_dir.with_suffix(".txt")

    def arguments(self, run_dir: Path) -> list[str]:
        path = self.folder / f"{self.name}.yaml"
        if not path.exists():
            path.write_text(dump(workload(self.name, self.folder / f"{self.name}_0")), encoding="utf-8")
        return ["--config", str(path), f"run_dir={run_dir}"]

    def launch(self) -> Process:
        return self.server.start(self.arguments(self.run_dir), self.said)

    def undisturbed(self) -> None:
        """The run that the others are held against; it tells how long each phase takes.

        Raises:
            UserError: it fails, or its metrics.jsonl has not every step once.
        """
        clock = time.time() - time.monotonic()
        process = self.launch()
        process.follow()
        if process.end() != 0:
            raise UserError(f"a run of {self.name} that nothing disturbed failed: {tail(self.said)}")
        self.measure(process)
        for mark in process.marks:
            path = self.run_dir / "checkpoints" / str(mark.step)
            if mark.name == "save" and path.is_dir():
                # Its folder changes last when it gets its name.
                self.writing = max(self.writing, path.stat().st_ctime - clock - mark.seconds)
        config = workload(self.name, self.run_dir)
        steps = [record["step"] for record in read_records(self.run_dir / "metrics.jsonl")]
        if steps != list(range(0 if config.eval else 1, config.steps + 1)):
            raise UserError(f"metrics.jsonl of a run of {self.name} that nothing disturbed has the steps {steps}")
        self.runs = 1

    def measure(self, process: Process) -> None:
        """Take note of how long its phases took."""
        phases = [next(marks) for _, marks in groupby(process.marks, lambda mark: mark.name)]
        for mark, after in pairwise(phases):
            if mark.name != BETWEEN:
                self.lengths.setdefault(mark.name, []).append(after.seconds - mark.seconds)

    def usual(self, phase: str) -> float:
        """Seconds that it takes; of a save those until it is written."""
        return self.writing if phase == "save" else median(self.lengths[phase])

    def aim(self, fault: str, phases: Collection[str]) -> tuple[str, int, float]:
        """A phase that `fault` was tried at the least, its how-maniest beginning, and seconds thereafter."""
        possible = [name for name in phases if name != "restore" or checkpoints(self.run_dir)]
        fewest = min(self.tries[fault, name] for name in possible)
        phase = self.rng.choice([name for name in possible if self.tries[fault, name] == fewest])
        count = 1 if phase in ONCE else self.rng.randint(1, 2 if phase == "save" else 4)
        return phase, count, self.rng.uniform(0, self.usual(phase))

    def reach(self, phase: str, count: int) -> Process:
        """A process that has begun `phase` the `count`th time, or where runs are too short for that an earlier one.

        A run that ends before is checked, and a new one begun.
        """
        while True:
            process = self.launch()
            if process.reach(phase, count):
                return process
            self.check(process)
            count = max(1, count - 1)

    def go_on(self, enough: Callable[[], bool]) -> None:
        """Let the run go on until `enough()` holds while a step is written, and kill it there."""
        while True:
            process = self.launch()
            if process.follow(lambda mark: mark.name == "metrics" and enough()) and self.killed(process):
                return

    def killed(self, process: Process, *, everything: bool = True) -> bool:
        """Kill it; False where it had already come to its end, and its run was checked."""
        process.kill(everything=everything)
        if process.code == -signal.SIGKILL:
            self.account(process)
            return True
        self.check(process)
        return False

    def account(self, process: Process) -> None:
        """What a process that has ended tells of the faults before it: the steps that it did again."""
        self.measure(process)
        if process.phase in ("start", "restore"):
            return
        resumed = process.restored or 0
        for trial in self.trials:
            if trial.redone is None:
                trial.redone = max(0, (trial.wrote or 0) - resumed)
        if self.damaged:
            trial, newest = self.damaged
            trial.redone, trial.found, self.damaged = newest - resumed, resumed < newest, None

    def record(self, trial: Trial, process: Process) -> None:
        """A fault that ended a process."""
        trial.lane = self.name
        trial.beside_writing = half_written(self.run_dir)
        trial.wrote = last_step(self.run_dir) if "metrics" in process.counts() else None
        trial.children, orphans = process.orphans()
        if orphans:
            trial.failure = f"in {trial.hit}: it left processes behind, {', '.join(orphans)}"
        self.tries[trial.fault, trial.hit] += 2
        if trial.aimed and trial.aimed != trial.hit:
            self.tries[trial.fault, trial.aimed] += 1
        self.trials.append(trial)

    def check(self, process: Process) -> None:
        """Its run is over: hold it against the undisturbed one, and begin the next."""
        process.follow()
        code = process.end()
        self.account(process)
        problem = f"exit code {code}: {tail(self.said)}" if code else difference(self.name, self.run_dir, self.folder)
        self.close(f"{self.run_dir}: {problem}" if problem else "")

    def close(self, problem: str) -> None:
        """The run is over; `problem` is in what it differs from the undisturbed one."""
        if problem and not self.trials:
            self.trials.append(Trial("none", lane=self.name))
        for trial in self.trials:
            trial.redone = trial.redone or 0
            trial.failure = trial.failure or problem
        if not problem:
            shutil.rmtree(self.run_dir)
            self.said.unlink()
        self.finished += self.trials
        self.trials, self.damaged = [], None
        self.runs += 1

    def finish(self) -> None:
        """Let the run that is under way come to its end."""
        if self.trials:
            self.check(self.launch())


def tail(path: Path) -> str:
    """The last line that a process printed."""
    return next(reversed(path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]), "")


def last_step(run_dir: Path) -> int:
    """The last step in metrics.jsonl, of its whole lines; 0 where there is none."""
    lines = (run_dir / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines else 0


def difference(name: str, run_dir: Path, folder: Path) -> str | None:
    """In what a finished run differs from the undisturbed one; None where it is the same to the bit."""
    one, other = newest(workload(name, run_dir)), newest(workload(name, folder / f"{name}_0"))
    if one.step != other.step:
        return f"it ends at step {one.step}, and not at {other.step}"
    # Of a run that was stopped in its last evaluation the checkpoint says that this is still to be made.
    for key in {*one.position, *other.position} - {"unjudged"}:
        if one.position.get(key) != other.position.get(key):
            return f"the position's {key} is {one.position.get(key)}, and not {other.position.get(key)}"
    for (path, leaf), same in zip(
        jax.tree_util.tree_leaves_with_path(one.state), jax.tree.leaves(other.state), strict=True
    ):
        if bytes(jax.device_get(leaf).data) != bytes(jax.device_get(same).data):
            return f"{jax.tree_util.keystr(path)} differs"
    for log in ("metrics.jsonl", "samples.jsonl"):
        if (run_dir / log).read_bytes() != (folder / f"{name}_0" / log).read_bytes():
            return f"{log} differs"
    return None


def newest(config: Config) -> Restored:
    """The newest checkpoint of a finished run."""
    policy = load_policy(config, make_mesh(config.mesh))
    manager = Checkpoints(Path(config.run_dir, "checkpoints"), config.checkpoint, read_only=True)
    restored = manager.restore(abstract_state(policy.params, make_optimizer(config.optimizer, config.steps)))
    manager.close()
    assert restored is not None
    return restored
