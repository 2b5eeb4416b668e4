"""Kill, stop and damage training runs, and see whether anything is lost: python tests/faults/chaos.py [--short]

Small SFT and GRPO runs are killed with -9 at random moments of each of their phases, asked to stop by SIGTERM and
SIGINT, started twice on one run_dir, and find their newest checkpoint damaged, their logs torn, their disk full, their
rewards hanging. After each fault the same command runs again. At the end parameters, optimizer, position of the data,
metrics.jsonl and samples.jsonl must equal those of a run that nothing disturbed, bit for bit. What may be lost is work:
steps that are done again.

A kill is aimed at a phase and counted for the phase in which it fell, by the process's own last word (see
tests/faults/chaos_child.py). The seed decides every aim; what the machine makes of it differs from run to run.

Exit codes: 0 nothing was lost, 1 something was, 2 bad arguments. The default takes about a quarter of an hour on two
cores, --short less than a minute. Linux only. Left out: several processes, power cuts (what a file system does with
what was never synced).
"""

import argparse
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from mllm.errors import ArgumentParser, UserError

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # a script sees only its own folder
import chaos_faults as faults
from chaos_damage import DAMAGES
from chaos_lane import Lane, Trial
from chaos_process import Hung, Server

KILLS, SHORT = 60, 6

Fault = Callable[[Lane], None]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kills", type=int, metavar="N", help=f"by kill -9 (default {KILLS}); other faults in proportion"
    )
    parser.add_argument("--short", action="store_true", help=f"as --kills {SHORT}")
    parser.add_argument("--seed", type=int, default=0, help="of what is aimed at (default 0)")
    parser.add_argument("--keep", action="store_true", help="keep the runs' folder; after a loss it is kept anyway")
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells what reading only means
    try:
        options = parser.parse_args(arguments)
        if options.kills is not None and (options.short or options.kills < 1):
            raise UserError(f"--kills: {options.kills}: give a number from 1, without --short")
        if not Path("/proc/self/environ").exists():
            raise UserError("tests/faults/chaos.py: needs Linux's /proc")
        kills = options.kills or (SHORT if options.short else KILLS)
        trials, seconds = campaign(kills, options.seed, options.keep)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"seed {options.seed}: {len(trials)} faults in {seconds:.0f} s\n")
    print("\n".join(table(trials)))
    lost = [trial for trial in trials if trial.failure]
    print(f"\n{len(lost)} of {len(trials)} lost" if lost else "\nnothing lost")
    return 1 if lost else 0


def plan(kills: int, rng: random.Random) -> list[tuple[str, str, Fault]]:
    """The faults in the order that they are tried: the runs that each disturbs, its name, and what does it."""

    def some(count: int, name: str, fault: Fault) -> Iterator[tuple[str, str, Fault]]:
        """Two thirds of them on GRPO, which has more phases."""
        yield from ((("grpo", "sft", "grpo")[index % 3], name, fault) for index in range(count))

    damages = [lambda lane, kind=kind: faults.damage(lane, kind) for kind in DAMAGES]
    planned = [
        *some(kills, "kill -9", faults.kill),
        *some(-(-kills // 4), "a signal", faults.interrupt),
        *some(kills // 10, "two signals", faults.interrupt_twice),
        *(next(some(1, "damage", damages[index % len(damages)])) for index in range(kills // 4)),
        *some(kills // 10, "a torn log", faults.tear),
        *some(-(-kills // 60), "a second process", faults.start_twice),
        *some(kills // 30, "a full disk", faults.fill_disk),
    ]
    rng.shuffle(planned)
    slow = [("slow", "a signal", lambda lane: faults.interrupt(lane, faults.HEARD))] * (kills // 15)
    hanging = [("hanging", "kill -9", lambda lane: faults.kill(lane, ["reward"]))] * (kills // 20)
    return [*planned, *slow, *hanging]


def campaign(kills: int, seed: int, keep: bool) -> tuple[list[Trial], float]:
    """Try the faults; all trials, and the seconds that it took."""
    rng, begin = random.Random(seed), time.monotonic()
    planned = plan(kills, rng)
    folder = Path(tempfile.mkdtemp(prefix="chaos_"))
    environment = {
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    names = sorted({name for name, _, _ in planned})
    server = Server(environment)
    lanes = {name: Lane(name, folder, rng, server) for name in names}
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, lambda number, frame: sys.exit(128 + number))
    trials: list[Trial] = []
    try:
        with tqdm(total=len(planned) + 2 * len(lanes), unit="fault", dynamic_ncols=True, smoothing=0.05) as bar:
            for name, lane in lanes.items():
                bar.set_description(f"{name}, undisturbed")
                lane.undisturbed()
                bar.update()
            for name, fault, act in planned:
                bar.set_description(f"{name}, {fault}")
                try:
                    act(lanes[name])
                except Hung as error:
                    lanes[name].trials.append(Trial(fault, hit="hung", lane=name))
                    lanes[name].close(f"{lanes[name].run_dir}: {error}")
                bar.update()
            for name, lane in lanes.items():
                bar.set_description(f"{name}, to its end")
                lane.finish()
                bar.update()
        trials = [trial for lane in lanes.values() for trial in lane.finished]
    finally:
        server.close()
        if keep or any(trial.failure for trial in trials):
            print(f"kept: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder)
    return trials, time.monotonic() - begin


PLACES = ("start", "restore", "data", "rollout", "reward", "logprob", "update", "eval", "metrics", "save", "wait")
"""The phases in the order of events, for the table."""


def table(trials: Sequence[Trial]) -> Iterator[str]:
    """A row for each fault and the phase that it fell in, or what it struck; then what holds for all of them."""
    rows: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        rows.setdefault((trial.fault, trial.hit), []).append(trial)
    order = [*PLACES, *DAMAGES]
    kinds = list(dict.fromkeys(trial.fault for trial in sorted(trials, key=lambda trial: trial.fault != "kill -9")))
    ranked = sorted(rows, key=lambda row: (kinds.index(row[0]), order.index(row[1]) if row[1] in order else len(order)))
    yield f"{'fault':<18} {'in':<14} {'SFT':>4} {'GRPO':>5} {'survived':>9}   {'steps done again':<18}"
    yield f"{'':<52}   {'mean':>6} {'most':>5}"
    for row in ranked:
        tried = rows[row]
        sft = sum(trial.lane == "sft" for trial in tried)
        redone = [trial.redone or 0 for trial in tried]
        yield (
            f"{row[0]:<18} {row[1]:<14} {sft:>4} {len(tried) - sft:>5} {survived(tried):>9}   "
            f"{sum(redone) / len(redone):>6.1f} {max(redone):>5}   {remark(tried)}"
        ).rstrip()
    yield f"{'all':<18} {'':<14} {'':>4} {len(trials):>5} {survived(trials):>9}"
    yield ""
    aimed = [trial for trial in trials if trial.aimed]
    yield f"fell in the phase aimed at: {sum(trial.aimed == trial.hit for trial in aimed)} of {len(aimed)}"
    children = [trial.children for trial in trials if trial.children is not None]
    yield f"all that a process had started was gone {max(children):.2f} s after it, at most"
    for trial in trials:
        if trial.failure:
            yield f"LOST  {trial.fault}, {trial.hit}: {trial.failure}"


def survived(trials: Sequence[Trial]) -> int:
    return sum(not trial.failure for trial in trials)


def remark(trials: Sequence[Trial]) -> str:
    """What is worth knowing of faults of one kind."""
    words = []
    if count := sum(trial.beside_writing for trial in trials):
        words.append(f"{count} beside a half-written checkpoint")
    if noticed := [trial.noticed for trial in trials if trial.noticed is not None]:
        words.append(f"noticed in {max(noticed):.2f} s")
    if left := [trial.left for trial in trials if trial.left is not None]:
        words.append(f"left in {max(left):.2f} s")
    if found := [trial.found for trial in trials if trial.found is not None]:
        words.append(f"{sum(found)} noticed")
    words += sorted({trial.said for trial in trials if trial.said and trial.found is None})
    return "; ".join(words)


if __name__ == "__main__":
    sys.exit(main())
