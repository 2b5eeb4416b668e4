"""Disturb one of several processes that train together, again and again: python tests/faults/several.py [--faults 30]

Groups of 2 and of 4 processes, each with two devices, run SFT on a file and GRPO. At a random moment one of them is
killed or stopped, finds its disk full, its memory used up or its cache of the data damaged; or its data has a bad line
from the start; or a second group is started on the same run_dir. All others must end within a minute, each with the
same single line, which names the process, and with the documented exit code. Then the same command runs again. At the
end everything must equal a run that nothing disturbed, bit for bit, as in chaos.py.

Exit codes: 0 nothing was lost, 1 something was, 2 bad arguments. Linux only. A fault takes about half a minute on two
cores. Left out: several machines, their network.
"""

import argparse
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

from chaos import prepare_environment
from series import Trial, difference, last_line, last_step, workload
from series import checkpoints as saved_steps
from tqdm import tqdm
from trainer import END, Trainer

from mllm.config.load import dump
from mllm.errors import RESTART, ArgumentParser, UserError, command, run_main

LIMIT = 60.0
"""Seconds within which the others must have ended."""
START, STEPS, STEP = 10.0, 8, 0.5
"""A fault falls within so many seconds of the start, one time in five, or up to STEPS steps of STEP seconds later."""
CODES = {"kill -9": RESTART, "SIGSTOP": RESTART, "disk full": 2, "no memory": 2, "damaged cache": 2, "bad line": 2}
"""The exit code of all others, and of the disturbed one unless it was killed, by the fault."""
SECOND = "second group"
Fault = tuple[str, int, str]
"""The workload, the number of processes, and what happens to one of them."""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=30, help="for each workload and number of processes (default 30)")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], help="of a group (default 2 and 4)")
    parser.add_argument("--workloads", nargs="+", default=["sft", "grpo"], choices=["sft", "grpo"], help="default both")
    parser.add_argument("--seed", type=int, default=0, help="decides what happens when, and to whom (default 0)")
    options = parser.parse_args(arguments)
    if options.faults < 1 or min(options.processes) < 2:
        raise UserError("--faults: give a number from 1; and --processes: numbers from 2")
    logging.getLogger("absl").setLevel(logging.ERROR)
    rng, begin = random.Random(options.seed), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="several_"))
    prepare_environment(folder)
    groups = [Group(name, count, folder, rng) for count in options.processes for name in options.workloads]
    trials: list[Trial] = []
    with tqdm(total=len(groups) * options.faults, unit="fault", dynamic_ncols=True, disable=None) as bar:
        for group in groups:
            group.finish()  # undisturbed
            for fault in group.plan(options.faults):
                bar.set_description(f"{group.name}, {group.count} processes, {fault}")
                trial = group.disturb(fault)
                bar.update()
                ended = f"{trial.seconds.get('ended', 0):.1f} s {trial.failure}"
                tqdm.write(f"{group.name} x{group.count}: {fault} in {trial.hit}, {ended}", sys.stderr)
            group.finish()
            trials += group.trials
    print(f"seed {options.seed}: {len(trials)} faults in {time.monotonic() - begin:.0f} s\n")
    print("\n".join(table(trials)))
    lost = sum(bool(trial.failure) for trial in trials)
    print(f"\n{lost} of {len(trials)} lost: {folder}" if lost else "\nnothing lost")
    if not lost:
        shutil.rmtree(folder)
    return 1 if lost else 0


class Group:
    """The runs of a workload by some processes: first one that nothing disturbs, then others."""

    def __init__(self, name: str, count: int, folder: Path, rng: random.Random) -> None:
        self.name, self.count, self.folder, self.rng = name, count, folder / f"{name}_{count}", rng
        self.folder.mkdir()
        self.runs = self.launches = 0
        self.trials: list[Trial] = []
        self.open: list[Trial] = []
        """The faults of the run that is under way."""
        for name, bad in (("data.jsonl", False), ("bad.jsonl", True)):
            lines = [json.dumps({"question": f"{i}+1=", "answer": str(i + 1)}) for i in range(64)]
            (self.folder / name).write_text("\n".join(lines + ["no JSON"] * bad) + "\n", encoding="utf-8")
        self.config = self.folder / "config.yaml"
        self.config.write_text(dump(workload(self.name, self.run_dir)), encoding="utf-8")

    @property
    def run_dir(self) -> Path:
        return self.folder / str(self.runs)

    def plan(self, count: int) -> Iterator[str]:
        """So many faults: most of them kills and stops, and each other kind that the workload can meet."""
        kinds = ["kill -9", "SIGSTOP", "kill -9", "disk full", "kill -9", "no memory", SECOND]
        if self.name == "sft":
            kinds += ["damaged cache", "bad line"]
        return (kind for kind, _ in zip(cycle(kinds), range(count), strict=False))

    def arguments(self, process: int, source: str = "data.jsonl") -> list[str]:
        given = ["--config", str(self.config), f"run_dir={self.run_dir}", f"mesh.dp={2 * self.count}"]
        if self.name == "sft":
            cache = self.folder / f"cache_{process}"  # as if each machine had its own
            given += [f"data.source={self.folder / source}", f"data.cache={cache}"]
        return given

    def launch(self, bad: int | None = None) -> list[Trainer]:
        """Start the processes; the data of `bad` has a bad line."""
        from runs import free_address

        self.launches += 1
        address, trainers = free_address(), []
        for process in range(self.count):
            flags = f"--coordinator {address} --processes {self.count} --process {process} --wait 60".split()
            given = self.arguments(process, "bad.jsonl" if process == bad else "data.jsonl")
            programs = f"{os.environ['JAX_COMPILATION_CACHE_DIR']}_{process}_of_{self.count}"
            variables = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_COMPILATION_CACHE_DIR": programs}
            trainers.append(Trainer([*given, *flags], self.output(process), **variables))
        return trainers

    def finish(self) -> None:
        """Let the run come to its end; it must be that of the undisturbed one, which is the first."""
        self.check([trainer.end() for trainer in self.launch()])

    def check(self, codes: list[int]) -> None:
        problem = f"exit codes {codes}: {self.said(0)}" if any(codes) else ""
        if self.runs == 0 and problem:
            raise UserError(f"a run of {self.name} that nothing disturbed failed: {problem}")
        problem = problem or difference(self.name, self.run_dir, self.folder / "0")
        for trial in self.open:
            trial.failure = trial.failure or problem
        self.trials, self.open, self.runs = self.trials + self.open, [], self.runs + 1

    def output(self, process: int) -> Path:
        """What a process of the last launch has printed."""
        return self.folder / f"said_{self.launches}_{process}.txt"

    def said(self, process: int) -> str:
        return last_line(self.output(process))

    def reach_moment(self, trainer: Trainer) -> None:
        """Let the processes run to a random moment of their start or of their next steps."""
        if self.rng.random() < 0.2:
            trainer.follow("start")
            time.sleep(self.rng.uniform(0, START))
        else:
            for _ in range(self.rng.randint(1, STEPS)):
                trainer.follow("metrics")
            time.sleep(self.rng.uniform(0, STEP))

    def disturb(self, fault: str) -> Trial:
        """Try a fault on one of the processes at a random moment of the run."""
        while True:
            victim = self.rng.randrange(self.count)
            trainers = self.launch(bad=victim if fault == "bad line" else None)
            if fault != "bad line":
                self.reach_moment(trainers[victim])
            if all(trainer.process.is_alive() for trainer in trainers):
                break
            self.check([trainer.end() for trainer in trainers])  # too late: it has come to its end
        begin, trial = time.monotonic(), Trial(fault, workload=self.name)
        trial.remarks = [str(self.count)]
        self.open.append(trial)
        if fault == SECOND:
            self.start_second(trial)
            if not all(trainer.process.is_alive() for trainer in trainers):  # the first has come to its end
                self.check([trainer.end() for trainer in trainers])
            for trainer in trainers:
                trainer.kill(everything=True)
            return trial
        self.act(fault, trainers[victim], victim)
        others = [trainer for trainer in trainers if fault != "SIGSTOP" or trainer is not trainers[victim]]
        for trainer in others:
            trainer.process.join(max(0.0, begin + LIMIT + 5 - time.monotonic()))
        trial.seconds["ended"] = time.monotonic() - begin
        trainers[victim].signal(signal.SIGCONT)
        late = [i for i, trainer in enumerate(trainers) if trainer in others and trainer.process.is_alive()]
        for i in late:
            trainers[i].kill(everything=True)
        codes = [trainer.end() for trainer in trainers]
        marks = [phase for seconds, phase in trainers[victim].marks if seconds <= begin]
        trial.hit = marks[-1] if marks else "start"
        if not any(codes):  # it had nothing more to write or to read, or passed over the error
            trial.hit = "no effect"
            trial.seconds.clear()
            self.check(codes)
            return trial
        self.judge(trial, victim, codes, late)
        if trial.hit not in ("start", END):
            trial.redone = max(0, last_step(self.run_dir) - max(saved_steps(self.run_dir), default=0))
        return trial

    def act(self, fault: str, trainer: Trainer, victim: int) -> None:
        if fault == "kill -9":
            trainer.signal(signal.SIGKILL)
        if fault == "SIGSTOP":
            trainer.signal(signal.SIGSTOP)
        if fault == "no memory":
            trainer.signal(signal.SIGUSR1)
        if fault == "disk full":
            resource.prlimit(trainer.process.pid, resource.RLIMIT_FSIZE, (self.rng.randrange(2000),) * 2)
        if fault == "damaged cache":
            for path in (self.folder / f"cache_{victim}").glob("*/documents.arrayrecord"):
                path.write_bytes(b"\0" * path.stat().st_size)

    def judge(self, trial: Trial, victim: int, codes: list[int], late: list[int]) -> None:
        """Whether the processes ended in time, with the right exit codes and with one line each, the same."""
        code = CODES[trial.fault]
        expected = [-signal.SIGKILL if trial.fault == "kill -9" and i == victim else code for i in range(self.count)]
        others = [i for i in range(self.count) if i != victim]
        lines = {self.said(i) for i in others}
        output = "".join(self.output(i).read_text(encoding="utf-8") for i in others)
        if late or trial.seconds["ended"] > LIMIT:
            trial.failure = f"processes {late} had not ended after {LIMIT:.0f} s"
        elif codes != expected:
            trial.failure = f"exit codes {codes} instead of {expected}: {lines}"
        elif output.count("error: ") != len(others) or "Traceback" in output or "Check failure" in output:
            trial.failure = f"more than one line: {output[-400:]!r}"
        elif any(f"process {victim}" not in line for line in lines) or len(lines) > 1:
            trial.failure = f"process {victim} is not named by all: {lines}"

    def start_second(self, trial: Trial) -> None:
        """Another group with the same run_dir must be refused."""
        codes = [trainer.end() for trainer in self.launch()]
        lines = {self.said(i) for i in range(self.count)}
        trial.hit = "refused"
        if {*codes} != {2} or any("is in use by" not in line for line in lines):
            trial.hit, trial.failure = "let in", f"a second group ended with {codes}: {lines}"


def table(trials: Sequence[Trial]) -> Iterator[str]:
    """A row for each fault and phase, and what holds for all of them."""
    counts = sorted({trial.remarks[0] for trial in trials})
    columns = [(name, count) for count in counts for name in ("sft", "grpo")]
    heads = "".join(f"{name.upper() + ' x' + count:>8}" for name, count in columns)
    yield f"{'fault':<14} {'in':<10}{heads} {'survived':>9} {'ended within':>13} {'done again':>11}"
    rows: dict[tuple[str, str], list[Trial]] = {}
    for trial in sorted(trials, key=lambda trial: (trial.fault, trial.hit)):
        rows.setdefault((trial.fault, trial.hit), []).append(trial)
    for (fault, hit), tried in [*rows.items(), (("all", ""), list(trials))]:
        figures = "".join(f"{sum((t.workload, t.remarks[0]) == column for t in tried):>8}" for column in columns)
        seconds = max(trial.seconds.get("ended", 0) for trial in tried)
        survived = sum(not trial.failure for trial in tried)
        redone = max(trial.redone for trial in tried)
        yield f"{fault:<14} {hit:<10}{figures} {survived:>9} {seconds:>11.1f} s {redone:>5} steps"
    for trial in trials:
        if trial.failure:
            yield f"LOST  {trial.workload} x{trial.remarks[0]}, {trial.fault}, {trial.hit}: {trial.failure}"


if __name__ == "__main__":
    run_main(main)
