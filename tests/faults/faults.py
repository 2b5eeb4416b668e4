"""The table of faults. Each disturbs a series' run once; the next trainers must go on from what is left.

A process, one of several, is disturbed in each phase in its turn, at a random moment after it has begun. All
must end within a minute with the documented exit codes, and the others with the same line, which names the process.
"""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from series import LIMIT, ONCE, Series, Trial, last_line
from trainer import END, ROOT, Trainer

from mllm.errors import RESTART

NOTICED = 1.0
"""Seconds within which one process must notice a signal in the phases of `PROMPT`, and a second signal anywhere."""
PROMPT = ("rollout", "reward", "eval")
LOGS = ("metrics.jsonl", "samples.jsonl", "timings.jsonl")
KILLED, LOST, FAILED = {-signal.SIGKILL}, {RESTART}, {2}
"""Exit codes."""


def strike(
    series: Series,
    fault: str,
    act: Callable[[Trainer], float | None],
    own: Collection[int],
    others: Collection[int],
    phases: Collection[str] = (),
    *,
    again: bool = True,
    compiled: bool = False,
    bad: bool = False,
) -> tuple[Trial, Trainer, float]:
    """Let `act` happen to one process at a random moment from a phase's beginning, and judge how all of them end.

    Args:
        act: may return the moment from which is timed, if that is not its beginning.
        own, others: the exit codes that are right for this process, and for the others.
        again: try again where the run came to its end all the same; else such a trial had no effect.
        compiled: not in a phase's first time, which compiles.
        bad: the process's data have a bad line.

    Returns:
        The trial, the process, and the moment of the act.
    """
    while True:
        victim = series.rng.randrange(series.processes)
        phase, count = series.aim(fault, phases or series.phases)
        count += compiled and phase not in ONCE
        trainer = series.reach(phase, count, victim, bad=victim if bad else None)[victim]
        time.sleep(series.moment())
        begin = time.monotonic()
        begin = act(trainer) or begin
        codes, late, ended = series.end(begin, trainer if fault == "SIGSTOP" else None)
        if any(codes) or not again:
            break
        series.check()
    marks = [phase for seconds, phase in trainer.marks if seconds <= begin or codes[victim] == -signal.SIGKILL]
    trial = series.add(fault, marks[-1] if marks else "start")
    series.note_orphans(trial)
    trial.seconds["ended"] = ended
    if any(codes):
        # At the end all is saved: the others have ended already, or JAX ends those that wait for this one.
        ended_too = {0, -signal.SIGABRT} if trial.hit == END else set()
        trial.failure = trial.failure or misjudged(series, victim, codes, late, own, {*others} | ended_too)
    else:
        trial.hit, trial.seconds = "no effect", {}
        series.check()
    return trial, trainer, begin


def misjudged(
    series: Series, victim: int, codes: list[int], late: list[int], own: Collection[int], others: Collection[int]
) -> str:
    """What is wrong with the way in which the processes ended; empty if nothing is."""
    rest = [i for i in range(series.processes) if i != victim]
    lines = [last_line(series.output(i)) for i in rest if codes[i] in (2, RESTART)]
    if late:
        return f"processes {late} had not ended after {LIMIT:.0f} s"
    if codes[victim] not in own or not {codes[i] for i in rest} <= {*others}:
        return f"exit codes {codes}: {lines or last_line(series.output(victim))}"
    for i in range(series.processes):
        if i == victim and rest:
            continue  # its line may be what it could not write
        said = series.output(i).read_text(encoding="utf-8", errors="replace")
        if said.count("error: ") != (codes[i] in (2, RESTART)) or "Traceback" in said:
            return f"process {i} said more or less than one line: {said[-400:]!r}"
    if len({*lines}) > 1 or not all(f"process {victim}" in line for line in lines):
        return f"process {victim} is not named by all: {lines}"
    return ""


def kill(series: Series, phases: Collection[str] = ()) -> Trainer:
    """kill -9 a process, alone or with all that it started."""
    everything = series.rng.random() < 0.5
    return strike(series, "kill -9", lambda one: one.kill(everything=everything), KILLED, LOST, phases)[1]


def cut_power(series: Series) -> None:
    """kill -9, after which the logs have what had been synced of them."""
    trainer = kill(series)
    series.trials[-1].fault = "power cut"
    for name in LOGS:
        path = Path(series.run_dir, name)
        kept = trainer.synced.get(str(path), series.sizes.get(name, 0))
        if path.exists() and path.stat().st_size > kept:
            os.truncate(path, kept)


def interrupt(series: Series, phases: Collection[str] = ()) -> None:
    """SIGTERM or SIGINT; the other processes stop at the same step, or lose this one if it had nothing to save."""
    number = series.rng.choice([signal.SIGTERM, signal.SIGINT])
    phases = phases or [phase for phase in series.phases if phase != "wait"]
    codes = {128 + number, -number}
    trial, trainer, sent = strike(
        series, "a signal", lambda one: one.signal(number), codes, {*codes, RESTART}, phases, compiled=True
    )
    saved = (seconds for seconds, phase in trainer.marks if seconds > sent and phase in ("save", "wait", END))
    trial.seconds["noticed"] = next(saved, sent + trial.seconds["ended"]) - sent
    if series.processes == 1 and trial.hit in PROMPT and trial.seconds["noticed"] > NOTICED:
        trial.failure = trial.failure or f"{number.name} in {trial.hit}: noticed late, {trial.seconds}"


def interrupt_twice(series: Series) -> None:
    """SIGTERM or SIGINT, and again while the trainer saves what the first asked it to."""
    number = series.rng.choice([signal.SIGTERM, signal.SIGINT])

    def act(trainer: Trainer) -> float:
        trainer.signal(number)
        if trainer.follow("save", "wait"):
            time.sleep(series.moment())
        second = time.monotonic()
        trainer.signal(number)
        return second

    codes = {128 + number, -number}
    trial, _, _ = strike(series, "two signals", act, codes, {*codes, RESTART}, ["update"])
    # At its end it has all but left.
    if series.processes == 1 and trial.hit != END and trial.seconds["ended"] > NOTICED:
        trial.failure = trial.failure or f"a second {number.name} in {trial.hit}: {trial.seconds}"


def stop(trainer: Trainer) -> None:
    """SIGSTOP, until the others have ended."""
    trainer.signal(signal.SIGSTOP)


def give_bad_line(series: Series) -> None:
    """The data of one process have a bad line, which is met soon after its start."""
    strike(series, "bad line", lambda one: one.marks[0][0], FAILED, FAILED, ["start"], bad=True)


def use_up_memory(series: Series, trainer: Trainer) -> None:
    trainer.signal(signal.SIGUSR1)


def refuse_to_write(series: Series, trainer: Trainer) -> None:
    """No file of the process may grow any more."""
    with suppress(ProcessLookupError):
        resource.prlimit(trainer.process.pid, resource.RLIMIT_FSIZE, (series.rng.randrange(2000),) * 2)


def damage_cache(series: Series, trainer: Trainer) -> None:
    """Zeros in a process's cache of the data."""
    for path in series.cache(series.running.index(trainer)).rglob("*.arrayrecord"):
        path.write_bytes(b"\0" * path.stat().st_size)


def refuse_requests(series: Series, _: Trainer) -> None:
    """All requests to the bucket fail until the processes have ended."""
    series.bucket.fault = lambda *_: "503"


def start_twice(series: Series) -> None:
    """Run the same command while the first still runs: it must be refused."""
    series.finish()
    first = series.reach("update")
    if series.bucket:  # a run that is new and slow lasts longer than the second start waits for a sign of its life
        series.bucket.fault = lambda *_: "late"
    trial = series.add("second start", "refused")
    codes = [trainer.end() for trainer in series.launch()]
    said = [last_line(series.output(i)) for i in range(series.processes)]
    if {*codes} != {2} or not all("error: " in line and "in use by" in line for line in said):
        trial.hit, trial.failure = "let in", f"a second start on {series.run_dir} ended with {codes}: {said}"
    series.running = first
    series.kill()


def stop_holder(series: Series) -> None:
    """SIGSTOP all processes of a run until a second start has taken its lease and has begun to train; then go on.

    What the first ones do then must change nothing, and the next start removes what they have left.
    """
    phase, count = series.aim("stopped holder", series.phases)
    first = series.reach(phase, count)
    time.sleep(series.moment())
    for trainer in first:
        trainer.signal(signal.SIGSTOP)
    stopped, outputs = time.monotonic(), [series.output(i) for i in range(series.processes)]
    second = series.launch()
    second[0].follow(series.rng.choice(series.phases), count=series.rng.randint(1, 3))
    resumed = time.monotonic()
    for trainer in first:
        trainer.signal(signal.SIGCONT)
    codes = [trainer.end() for trainer in first]
    trial = series.add("stopped holder", next(name for seconds, name in reversed(first[0].marks) if seconds < stopped))
    trial.seconds["ended"] = time.monotonic() - resumed
    lines = [last_line(path) for path in outputs]
    alone = all(path.read_text(encoding="utf-8", errors="replace").count("error: ") == 1 for path in outputs)
    released = trial.hit == END or (trial.hit == "start" and not any(codes))  # it had not taken the lease yet
    if not released and (not {*codes} <= FAILED | LOST or not alone):
        trial.failure = f"stopped in {trial.hit}, it ended with {codes}: {lines}"
    series.running = second
    if not any(series.codes()):
        series.launch()
    series.check()


# What lies on the disk


def damage(series: Series, kind: str) -> None:
    """Damage the newest of two or more checkpoints, and see whether the next trainers notice."""
    series.run_until(lambda: len(series.steps) > 1)
    newest = series.steps[-1]
    spoil(series, newest, kind)
    trial = series.add("newest checkpoint", kind)
    if series.rng.random() < 0.5:  # a kill while the damaged one is read or put aside
        series.reach("restore")
        time.sleep(series.moment())
        series.kill()
    (trainer, *_) = series.launch()
    trainer.follow("metrics")
    if newest not in series.steps:
        trial.remarks.append("noticed")
    series.kill()


DAMAGES = ("truncated", "a bit flipped", "zeroed", "half deleted")


def spoil(series: Series, step: int, kind: str) -> None:
    """Damage a file of a checkpoint, half of the time the largest, or delete half of the files."""
    files, rng = series.files_of(step), series.rng
    if kind == "half deleted":
        series.store.place.delete(rng.sample(sorted(files), -(-len(files) // 2)))
        return
    largest = max(files, key=lambda name: len(files[name]))
    name = largest if rng.random() < 0.5 else rng.choice(sorted(files))
    content = bytearray(files[name])
    place = rng.randrange(len(content))
    if kind == "a bit flipped":
        content[place] ^= 1 << rng.randrange(8)
    else:
        content[place:] = b"" if kind == "truncated" else bytes(len(content) - place)
    series.store.place.write(name, bytes(content))


def tear_log(series: Series) -> None:
    """Let a log end in half a line or in zeros, as a machine's crash leaves it."""
    series.run_until(lambda: Path(series.run_dir, "metrics.jsonl").exists())
    tail = series.rng.choice([b'{"step": 1', b'{"step": 99, "lo', b"\0" * 512, b"\n"])
    with Path(series.run_dir, series.rng.choice(LOGS)).open("ab") as file:
        file.write(tail)
    series.add("log", "torn")


DISK = """mount -t tmpfs -o size=$1 faults "$2" || exit; disk=$2; shift 2
"$@"; echo "ended $?"
mount -o remount,size=64m "$disk" && "$@"; echo "ended $?"
cp -r "$disk/run" "$disk.end"
"""
"""Run a command on a disk of a size in bytes at a folder, twice: the second time there is room. Keep what it wrote."""


def fill_disk(series: Series) -> None:
    """A disk, which only processes in a namespace of their own see, has no room for all of a run."""
    folder = series.folder / "disk"
    folder.mkdir(exist_ok=True)
    undisturbed = [path.stat().st_size for path in (series.folder / "0").rglob("*") if path.is_file()]
    pages = sum(-(-size // 4096) for size in undisturbed) * series.rng.uniform(0.3, 0.9)
    command = [sys.executable, "train.py", *series.arguments(f"{folder}/run")]
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", DISK, "sh", f"{int(pages) * 4096}"]
    done = subprocess.run([*namespace, folder, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    codes = re.findall(r"^ended (\d+)$", done.stdout, re.MULTILINE)
    lines = [line for line in done.stderr.splitlines() if "error: " in line]
    trial = series.add("disk full", f"exit code {codes[0]}" if codes else "not tried")
    trial.remarks = [line.replace(str(folder), "...") for line in lines] if codes else done.stderr.splitlines()[-1:]
    if codes and (codes != ["2", "0"] or len(lines) != 1 or "Traceback" in done.stderr):
        trial.failure = f"exit codes {codes} on a full disk and with room again: {lines}"
    elif codes:
        trial.failure = series.difference(f"{folder}.end")


def fail_requests(series: Series) -> None:
    """A fifth of all requests to the bucket fail while the run goes on to its end.

    Their answers are `lost` after they were carried out, or `late` by 0.3 s, or say so.
    """
    kinds = ("429", "503", "reset", "lost", "late")
    trial = series.add("requests", "a fifth fails")
    before = series.bucket.faults.total()
    series.bucket.fault = lambda *_: series.rng.choice(kinds) if series.rng.random() < 0.2 else None
    series.launch()
    series.check()
    trial.remarks.append(f"{series.bucket.faults.total() - before} failed")


class Fault(NamedTuple):
    """A row of the table."""

    name: str
    share: float
    """How many of them there are for each kill; one at least."""
    act: Callable[[Series], object]
    workloads: tuple[str, ...] = ("sft", "grpo")
    processes: str = "any number"
    """Or `one`, or `several`."""
    place: str = "any place"
    """Or `disk`, or `bucket`."""


def failing(name: str, act: Callable[[Series, Trainer], None]) -> Callable[[Series], Any]:
    """A fault of one process after which all end with exit code 2, unless it comes too late to have an effect."""
    return lambda series: strike(series, name, partial(act, series), FAILED, FAILED, again=False)


FAULTS = (
    Fault("kill -9", 1, kill),
    Fault("a signal", 1 / 4, interrupt),
    Fault("two signals", 1 / 10, interrupt_twice),
    *(Fault(f"checkpoint {kind}", 1 / 16, partial(damage, kind=kind)) for kind in DAMAGES),
    Fault("a torn log", 1 / 10, tear_log, place="disk"),
    Fault("a second start", 1 / 60, start_twice),
    Fault("a stopped holder", 2 / 3, stop_holder, place="bucket"),
    Fault("a power cut", 1 / 10, cut_power, processes="one", place="disk"),
    Fault("a full disk", 1 / 30, fill_disk, ("sft",), "one", "disk"),
    Fault("failing requests", 1 / 10, fail_requests, place="bucket"),
    Fault("no requests", 1 / 10, failing("requests", refuse_requests), processes="one", place="bucket"),
    Fault("a signal in slow work", 1 / 15, partial(interrupt, phases=PROMPT), ("slow",), "one"),
    Fault("kill -9 of a hanging reward", 1 / 20, partial(kill, phases=["reward"]), ("hanging",), "one"),
    Fault("SIGSTOP", 1 / 3, lambda series: strike(series, "SIGSTOP", stop, LOST, LOST), processes="several"),
    Fault("no more writing", 1 / 3, failing("can't write", refuse_to_write), processes="several", place="disk"),
    Fault("no memory", 1 / 3, failing("no memory", use_up_memory), processes="several"),
    Fault("a damaged cache", 1 / 5, failing("damaged cache", damage_cache), ("sft",), "several"),
    Fault("a bad line", 1 / 5, give_bad_line, ("sft",), "several"),
)
