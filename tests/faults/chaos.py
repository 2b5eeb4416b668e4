"""Kill, stop and damage training runs, and see whether anything is lost: python tests/faults/chaos.py [--short]

Small SFT and GRPO runs are killed with -9 at random moments of each of their phases, stopped by SIGTERM and SIGINT,
and started twice on one run_dir; their newest checkpoint is damaged, their logs are torn, their disk is full, their
rewards hang. After each fault the same command runs again. At the end parameters, optimizer, position of the data,
metrics.jsonl and samples.jsonl must equal those of a run that nothing disturbed, bit for bit. Only work may be lost:
steps that are done again.

A kill is aimed at a phase and counted for the phase in which it fell, by the trainer's own last mark (see trainer.py).
The seed decides every aim; what the machine makes of it differs from run to run.

Exit codes: 0 nothing was lost, 1 something was, 2 bad arguments. The default takes about a quarter of an hour on two
cores, --short about a minute. Linux only. Left out: several processes; power cuts, and what a file system makes of data
that was never synced.
"""

import argparse
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import faults
from series import Series, Trial
from tqdm import tqdm

from mllm.errors import ArgumentParser, UserError, command, run_main

KILLS, SHORT = 60, 6
PATHS = [str(Path(__file__).parents[up]) for up in (0, 1, 2)]
"""The folders from which trainers and this process import: a script sees only its own."""
Fault = Callable[[Series], None]


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, metavar="N", help=f"kills (default {KILLS}); other faults in proportion")
    parser.add_argument("--short", action="store_true", help=f"the same as --kills {SHORT}")
    parser.add_argument("--seed", type=int, default=0, help="decides what is aimed at (default 0)")
    parser.add_argument("--keep", action="store_true", help="keep the runs' folder; after a loss it is kept anyway")
    options = parser.parse_args(arguments)
    if options.kills is not None and (options.short or options.kills < 1):
        raise UserError(f"--kills: {options.kills}: give a number from 1, without --short")
    if not Path("/proc/self/environ").exists():
        raise UserError("tests/faults/chaos.py: needs Linux's /proc")
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax's remarks on read-only managers
    kills = options.kills or (SHORT if options.short else KILLS)
    begin = time.monotonic()
    trials = campaign(kills, options.seed, options.keep)
    print(f"seed {options.seed}: {len(trials)} faults in {time.monotonic() - begin:.0f} s\n")
    print("\n".join(table(trials)))
    lost = sum(bool(trial.failure) for trial in trials)
    print(f"\n{lost} of {len(trials)} lost" if lost else "\nnothing lost")
    return 1 if lost else 0


def plan(kills: int, rng: random.Random) -> list[tuple[str, str, Fault]]:
    """The faults in the order in which they are tried: the workload, the fault's name, the function."""

    def repeat(count: int, name: str, *functions: Fault) -> Iterator[tuple[str, str, Fault]]:
        """The functions in turn, two thirds of them on GRPO, which has more phases."""
        for i in range(count):
            yield ("grpo", "sft", "grpo")[i % 3], name, functions[i % len(functions)]

    damages = [lambda series, kind=kind: faults.damage(series, kind) for kind in faults.DAMAGES]
    planned = [
        *repeat(kills, "kill -9", faults.kill),
        *repeat(-(-kills // 4), "a signal", faults.interrupt),
        *repeat(kills // 10, "two signals", faults.interrupt_twice),
        *repeat(kills // 4, "damage", *damages),
        *repeat(kills // 10, "a torn log", faults.tear_log),
        *repeat(-(-kills // 60), "a second process", faults.start_twice),
        *repeat(kills // 30, "a full disk", faults.fill_disk),
    ]
    rng.shuffle(planned)
    slow = [("slow", "a signal", lambda series: faults.interrupt(series, faults.PROMPT))] * (kills // 15)
    hanging = [("hanging", "kill -9", lambda series: faults.kill(series, ["reward"]))] * (kills // 20)
    return [*planned, *slow, *hanging]


def prepare_environment(folder: Path) -> None:
    """Set what this process and those that it starts need: CPUs, the tests' modules, programs compiled once."""
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",  # killed processes leave locks
        "PYTHONPATH": os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")]),
    }
    sys.path += PATHS


def campaign(kills: int, seed: int, keep: bool) -> list[Trial]:
    """Try the planned faults and let every run come to its end; returns all trials."""
    rng = random.Random(seed)
    planned = plan(kills, rng)
    folder = Path(tempfile.mkdtemp(prefix="chaos_"))
    prepare_environment(folder)
    every = {name: Series(name, folder, rng) for name in sorted({name for name, _, _ in planned})}
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, lambda number, frame: sys.exit(128 + number))
    steps: list[tuple[str, str, Fault]] = [
        *((name, "undisturbed", Series.run_undisturbed) for name in every),
        *planned,
        *((name, "to its end", Series.finish) for name in every),
    ]
    lost = True
    try:
        for name, fault, act in (bar := tqdm(steps, unit="fault", dynamic_ncols=True, smoothing=0.05, disable=None)):
            bar.set_description(f"{name}, {fault}")
            try:
                act(every[name])
            except TimeoutError as error:
                every[name].trials.append(Trial(fault, hit="hung", workload=name))
                every[name].close(f"{every[name].run_dir}: {error}")
        trials = [trial for series in every.values() for trial in series.finished]
        lost = any(trial.failure for trial in trials)
    finally:
        for running in multiprocessing.active_children():  # none, unless the campaign is broken off
            running.kill()
        if keep or lost:
            print(f"kept: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder)
    return trials


def table(trials: Sequence[Trial]) -> Iterator[str]:
    """A row for each fault and the phase in which it fell, or what it damaged; then what holds for all of them."""
    rows: dict[tuple[str, str], list[Trial]] = {}
    for trial in sorted(trials, key=lambda trial: (trial.fault != "kill -9", trial.fault, trial.hit)):
        rows.setdefault((trial.fault, trial.hit), []).append(trial)
    yield f"{'fault':<18} {'in':<14} {'SFT':>4} {'GRPO':>5} {'survived':>9}   {'steps done again':<18}"
    yield f"{'':<52}   {'mean':>6} {'most':>5}"
    for (fault, hit), tried in rows.items():
        sft = sum(trial.workload == "sft" for trial in tried)
        survived = sum(not trial.failure for trial in tried)
        redone = [trial.redone for trial in tried]
        figures = f"{sft:>4} {len(tried) - sft:>5} {survived:>9}   {sum(redone) / len(redone):>6.1f} {max(redone):>5}"
        yield f"{fault:<18} {hit:<14} {figures}   {remarks(tried)}".rstrip()
    survived = sum(not trial.failure for trial in trials)
    yield f"{'all':<18} {'':<14} {'':>4} {len(trials):>5} {survived:>9}"
    aimed = [trial for trial in trials if trial.aimed]
    yield f"\nfell in the phase aimed at: {sum(trial.aimed == trial.hit for trial in aimed)} of {len(aimed)}"
    gone = max(trial.seconds.get("all processes gone", 0) for trial in trials)
    yield f"all that a trainer had started was gone {gone:.2f} s after it, at most"
    for trial in trials:
        if trial.failure:
            yield f"LOST  {trial.fault}, {trial.hit}: {trial.failure}"


def remarks(trials: Sequence[Trial]) -> str:
    """What the trials of one row have in common: remarks with their number, and the longest times."""
    said = [remark for trial in trials for remark in trial.remarks]
    words = [f"{said.count(remark)} {remark}" for remark in sorted({*said})]
    for name in ("noticed", "ended"):
        if seconds := [trial.seconds[name] for trial in trials if name in trial.seconds]:
            words.append(f"{name} in {max(seconds):.2f} s")
    return "; ".join(words)


if __name__ == "__main__":
    run_main(main)
