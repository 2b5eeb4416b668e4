"""Kill, stop and damage training runs, and see whether anything is lost: python tests/faults/campaign.py [--kills 3]

Small SFT and GRPO runs, by one process or several that train together, on a disk or in a bucket, are killed with -9 at
random moments of each of their phases, stopped by signals, cut off from power, started twice on one run_dir; their
newest checkpoint is damaged, their logs are torn, their disk is full, requests to their bucket fail, their rewards
hang. The table of faults is in faults.py. After each the same command runs again. At the end parameters, optimizer,
position of the data, metrics.jsonl and samples.jsonl must equal those of a run on a disk that nothing disturbed, bit
for bit. Only work may be lost: steps that are done again.

A fault is aimed at a phase and counted for the phase in which it fell, by the trainer's own last mark (see trainer.py).
The seed decides every aim; what the machine makes of it differs from run to run.

Exit codes: 0 nothing was lost, 1 something was, 2 bad arguments. The default takes about a quarter of an hour on two
cores, --kills 3 three minutes; a fault of several processes about half a minute. Linux only. Left out: several
machines, their network; what a power cut makes of files but logs.
"""

import logging
import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path

from faults import FAULTS, Fault
from series import Series, Trial
from tqdm import tqdm

from mllm.errors import ArgumentParser, UserError, command, run_main

KILLS = 30
PATHS = [str(Path(__file__).parents[up]) for up in (0, 1, 2)]
"""The folders from which trainers and this process import: a script sees only its own."""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1], help="that train together (default 1)")
    parser.add_argument("--workloads", nargs="+", default=["sft", "grpo"], choices=["sft", "grpo"], help="default both")
    parser.add_argument(
        "--buckets", nargs="+", default=[""], choices=["gs", "s3"], help="where runs lie; default a disk"
    )
    parser.add_argument("--kills", type=int, default=KILLS, help=f"of each (default {KILLS}); others in proportion")
    parser.add_argument("--faults", nargs="+", default=[""], metavar="WORD", help="only those that are named so")
    parser.add_argument("--seed", type=int, default=0, help="decides what is aimed at (default 0)")
    options = parser.parse_args(arguments)
    if min(options.kills, *options.processes) < 1:
        raise UserError("--kills and --processes: give numbers from 1")
    if not Path("/proc/self/environ").exists():
        raise UserError("tests/faults/campaign.py: needs Linux's /proc")
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax's remarks
    begin, rng = time.monotonic(), random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="campaign_"))
    prepare_environment(folder)
    from object_store import object_store

    with ExitStack() as stack:
        stores = {scheme: stack.enter_context(object_store(scheme)) for scheme in options.buckets if scheme}
        for store in stores.values():
            store.server.handle_error = lambda *_: None  # clients are killed in the middle of answers
        planned: dict[Series, list[Fault]] = {}
        workloads = [*options.workloads, *(["slow", "hanging"] if "grpo" in options.workloads else [])]
        for processes, place, name in product(options.processes, options.buckets, workloads):
            if faults := plan(options, name, processes, "bucket" if place else "disk", rng):
                planned[Series(name, processes, folder, rng, stores.get(place))] = faults
        trials = campaign(planned, folder)
    print(f"seed {options.seed}: {len(trials)} faults in {time.monotonic() - begin:.0f} s\n")
    print("\n".join(table(trials)))
    lost = sum(bool(trial.failure) for trial in trials)
    print(f"\n{lost} of {len(trials)} lost" if lost else "\nnothing lost")
    return 1 if lost else 0


def plan(options: Namespace, workload: str, processes: int, place: str, rng: random.Random) -> list[Fault]:
    """The faults of a workload on a `disk` or in a `bucket`, in the order in which they are tried."""
    number = "one" if processes == 1 else "several"
    planned = [
        fault
        for fault in FAULTS
        if workload in fault.workloads
        and fault.processes in (number, "any number")
        and fault.place in (place, "any place")
        if any(word in fault.name for word in options.faults)
        for _ in range(math.ceil(options.kills * fault.share))
    ]
    return rng.sample(planned, len(planned))


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


def campaign(planned: dict[Series, list[Fault]], folder: Path) -> list[Trial]:
    """Try the planned faults and let every run come to its end; returns all trials. After a loss the folder is kept."""
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, lambda number, frame: sys.exit(128 + number))
    lost = True
    try:
        for series, faults in planned.items():
            series.run_undisturbed()
            for fault in tqdm(faults, series.column, unit="fault", mininterval=0.1 if sys.stderr.isatty() else 60):
                try:
                    fault.act(series)
                except TimeoutError as error:
                    series.add(fault.name, "hung")
                    series.kill()
                    series.close(f"{series.run_dir}: {error}")
            series.finish()
        trials = [trial for series in planned for trial in series.finished]
        lost = any(trial.failure for trial in trials)
    finally:
        for running in multiprocessing.active_children():  # none, unless the campaign is broken off
            running.kill()
        if lost:
            print(f"kept: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder)
    return trials


def table(trials: Sequence[Trial]) -> Iterator[str]:
    """A row for each fault and the phase in which it fell, or what it damaged; then what holds for all of them."""
    columns = list(dict.fromkeys(trial.column for trial in trials))
    rows: dict[tuple[str, str], list[Trial]] = {}
    for trial in sorted(trials, key=lambda trial: (trial.fault != "kill -9", trial.fault, trial.hit)):
        rows.setdefault((trial.fault, trial.hit), []).append(trial)
    width = max(map(len, columns)) + 2
    heads = "".join(f"{column:>{width}}" for column in columns)
    yield f"{'fault':<18} {'in':<14}{heads} {'survived':>9} {'noticed in':>11} {'ended in':>9}"
    for (fault, hit), tried in [*rows.items(), (("all", ""), list(trials))]:
        counts = "".join(f"{sum(trial.column == column for trial in tried):>{width}}" for column in columns)
        times = [max(trial.seconds.get(name, 0.0) for trial in tried) for name in ("noticed", "ended")]
        noticed, ended = (f"{seconds:.2f} s" if seconds else "" for seconds in times)
        said = [remark for trial in tried for remark in trial.remarks] if hit else []
        remarks = "; ".join(f"{said.count(remark)} {remark}" for remark in sorted({*said}))
        survived = sum(not trial.failure for trial in tried)
        yield f"{fault:<18} {hit:<14}{counts} {survived:>9} {noticed:>11} {ended:>9}   {remarks}".rstrip()
    for trial in trials:
        if trial.failure:
            yield f"LOST  {trial.column}: {trial.fault}, {trial.hit}: {trial.failure}"


if __name__ == "__main__":
    run_main(main)
