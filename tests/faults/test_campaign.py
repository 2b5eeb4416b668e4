"""Runs that are killed at random moments end like one that nothing disturbed, to the bit, on a disk and in a bucket.

Each of a method's kills falls into one run after the other: the same command goes on until the next kill, and the last
one of a run is let go to its end.
"""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from object_store import BUCKET, ObjectStore, object_store
from runs import TESTS, arguments, assert_same_end, changed
from tiny import METHODS, config
from trainer import LEASE, Trainer

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

    def start(self) -> Trainer:
        """The same command once more; for a run in a bucket on another machine, which has no copy of anything."""
        self.starts += 1
        machine = self.folder / f"machine_{self.starts if self.server else 1}"
        machine.mkdir(parents=True, exist_ok=True)
        variables = {"XDG_CACHE_HOME": str(machine), **(self.server.environment if self.server else {})}
        self.begun = time.time()
        return Trainer(arguments(self.settings), machine / "said", variables)

    def lines(self) -> int:
        """The steps that the last process has found, or written, in metrics.jsonl; -1 before it has opened the log."""
        copies = self.folder / f"machine_{self.starts}" / "mllm" / "runs"
        logs = copies.rglob("metrics.jsonl") if self.server else [Path(self.settings.run_dir, "metrics.jsonl")]
        with suppress(OSError):  # it may not be there yet
            return next((log.read_bytes().count(b"\n") for log in logs if log.stat().st_mtime > self.begun), -1)
        return -1

    def saving(self) -> bool:
        """Whether there is a checkpoint that is not whole."""
        if not self.server:
            return any(Path(self.settings.run_dir, "checkpoints").glob("*orbax-checkpoint-tmp*"))
        names = [*self.server.objects]
        root = self.settings.run_dir.removeprefix(f"gs://{BUCKET}/") + "/checkpoints/"
        steps = {name.removeprefix(root).partition("/")[0] for name in names if name.startswith(root)}
        return any(f"{root}{step}/commit_success.txt" not in names for step in steps if step.isdecimal())

    def disturb(self, trainer: Trainer, number: int, aim: str, seconds: float, dice: random.Random) -> str:
        """Signal the process at a moment; returns where that fell, nothing if the process had ended before."""
        steps = self.settings.steps

        def until(there: Callable[[], bool]) -> None:
            while trainer.process.is_alive() and not there():
                time.sleep(0.001)

        if aim in ("step", "save"):
            until(lambda: self.lines() > -1)
            target = dice.randrange(max(0, self.lines()), steps)
            until(lambda: self.lines() >= target)
            until(self.saving if aim == "save" else lambda: True)
            time.sleep(dice.uniform(0, 0.03))
        else:
            time.sleep(dice.uniform(0, seconds if aim == "any time" else seconds / 3))
        lines = self.lines()
        where = "start" if lines < 0 else "save" if self.saving() else "end" if lines > steps else "step"
        with suppress(ProcessLookupError):
            os.kill(trainer.process.pid, number)
        code = trainer.end()
        self.said.append(trainer.said())
        assert trainer.orphans() == [], self.said[-1][-3000:]
        if code == 0 or (code == 2 and self.server):
            return ""
        assert code in STOPPED[number], self.said[-1][-3000:]
        return f"{number.name} in {where}"

    def finish(self) -> None:
        """Let the run go on to its end; requests to a bucket that fail for long may end it several times before."""
        for _ in range(10):
            trainer = self.start()
            code = trainer.end()
            self.said.append(trainer.said())
            if code != 2 or not self.server:
                break
        assert code == 0, self.said[-1][-3000:]


def campaign(settings: Any, undisturbed: Any, seconds: float, aims: list[tuple[int, str]], place: Any) -> list[str]:
    """Disturb runs of these settings, each until it ends by itself; returns where each signal fell."""
    dice, hits, aims = random.Random(f"{settings.algorithm} {aims}"), [], [*aims]
    dice.shuffle(aims)
    run = None
    while aims or run:
        run = run or next(place)
        if aims and (hit := run.disturb(run.start(), *aims[-1], seconds, dice)):
            hits.append(hit)
            aims.pop()
            if aims:
                continue
        run.finish()
        assert_same_end(run.settings, undisturbed)
        for said in run.said:
            assert "Traceback" not in said, said[-3000:]
            assert "put aside" not in said, said[-3000:]
        run = None
    return hits


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
        patch.setenv("PYTHONPATH", os.pathsep.join([*TESTS, str(Path(__file__).parent)]))
        yield train


def report(place: str, method: str, hits: list[str], capfd: pytest.CaptureFixture) -> None:
    with capfd.disabled():
        print(f"\n{place}, {method}:", ", ".join(f"{hits.count(hit)} {hit}" for hit in sorted({*hits})))


@pytest.mark.parametrize("method", RUNS)
def test_a_killed_run_on_a_disk_loses_nothing(method, undisturbed, tmp_path, capfd):
    expected, seconds = undisturbed(method)
    folders = (tmp_path / str(number) for number in itertools.count())
    runs = (Run(changed(RUNS[method], run_dir=str(folder / "run")), folder) for folder in folders)
    report("disk", method, campaign(RUNS[method], expected, seconds, AIMS, runs), capfd)


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_a_killed_run_in_a_bucket_whose_requests_fail_loses_nothing(method, undisturbed, tmp_path, capfd, monkeypatch):
    expected, seconds = undisturbed(method)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    dice = random.Random(method)
    with object_store() as server:
        runs = (
            Run(changed(RUNS[method], run_dir=f"{server.url}/{number}"), tmp_path / str(number), server)
            for number in itertools.count()
        )
        server.fault = lambda *_: dice.choice(REQUESTS) if dice.random() < 0.01 else None
        hits = campaign(RUNS[method], expected, 2 * seconds + LEASE, AIMS[1:], runs)
        server.fault = lambda *_: None
        report(f"bucket, failed requests {dict(server.faults)}", method, hits, capfd)
