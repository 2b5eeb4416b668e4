"""The faults: each function disturbs a series' run once; the next trainer must go on from what is left.

A trainer is disturbed in each phase in its turn, at a random moment of the phase's usual time.
"""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from series import ONCE, Series, Trial, checkpoints, difference, last_line
from trainer import END, Trainer

NOTICED = 1.0
"""Seconds within which a signal must be noticed in the phases of `PROMPT`, and a second signal anywhere."""
PROMPT = ("rollout", "reward", "eval")
DISK_MIB = 16


def kill(series: Series, phases: Collection[str] = ()) -> None:
    """kill -9, of the trainer alone or with all that it started."""
    while True:
        phase, count, delay = series.aim("kill -9", phases or series.durations)
        everything = series.rng.random() < 0.5
        trainer = series.reach(phase, count)
        pause(delay)
        if series.kill(trainer, everything=everything):
            return series.record(Trial("kill -9", hit=trainer.phase, aimed=phase), trainer)


def interrupt(series: Series, phases: Collection[str] = ()) -> None:
    """SIGTERM or SIGINT."""
    number = series.rng.choice([signal.SIGTERM, signal.SIGINT])
    phases = phases or [phase for phase in series.durations if phase != "wait"]
    while True:
        phase, count, delay = series.aim("a signal", phases)
        trainer = series.reach(phase, count + (phase not in ONCE))  # a phase's first time compiles
        pause(delay)
        if send(series, trainer, number, Trial("a signal", aimed=phase)):
            return


def interrupt_twice(series: Series) -> None:
    """SIGTERM or SIGINT, and again while the trainer saves what the first asked it to."""
    number = series.rng.choice([signal.SIGTERM, signal.SIGINT])
    while True:
        trainer = series.reach("update", series.rng.randint(2, 4))
        trainer.signal(number)
        if trainer.follow("save", "wait"):
            pause(series.rng.uniform(0, series.duration("save")))
        if send(series, trainer, number, Trial("a second signal")):
            return


def send(series: Series, trainer: Trainer, number: signal.Signals, trial: Trial) -> bool:
    """Send the signal and record what follows; False if the run came to its end anyhow, and was checked."""
    sent = time.monotonic()
    trainer.signal(number)
    code = trainer.end()
    gone = time.monotonic()
    if code == 0:
        series.check(trainer)
        return False
    trial.hit = next((phase for seconds, phase in reversed(trainer.marks) if seconds <= sent), "start")
    saved = (seconds for seconds, phase in trainer.marks if seconds > sent and phase in ("save", "wait", END))
    trial.seconds |= {"noticed": next(saved, gone) - sent, "ended": gone - sent}
    series.record(trial, trainer)
    second = not trial.aimed and trial.hit != END  # at its end it has all but left
    late = trial.seconds["ended" if second else "noticed"] > NOTICED and (second or trial.hit in PROMPT)
    if code not in (128 + number, -number):
        trial.failure = f"exit code {code} after {number.name} in {trial.hit}: {last_line(series.output)}"
    elif late:
        trial.failure = f"{number.name} in {trial.hit}: noticed late, {trial.seconds}"
    return True


def damage(series: Series, kind: str) -> None:
    """Damage the newest of two or more checkpoints, and see whether the next trainer notices."""
    if len(checkpoints(series.run_dir)) < 2:
        series.run_until(lambda: len(checkpoints(series.run_dir)) > 1)
    folder = series.run_dir / "checkpoints"
    newest = checkpoints(series.run_dir)[-1]
    spoil(folder / str(newest), kind, series.rng)
    trial = Trial("newest checkpoint", hit=kind, workload=series.name)
    series.trials.append(trial)
    restored = []
    if series.rng.random() < 0.5:  # a kill while the damaged one is read or put aside
        trainer = series.launch()
        pause(series.rng.uniform(0, series.duration("start") + series.duration("restore")))
        trainer.kill(everything=True)
        restored.append(trainer.restored)
    trainer = series.launch()
    trainer.follow("metrics")
    restored.append(trainer.restored)
    first = next((step for step in restored if step is not None), newest)
    if first != newest:
        trial.remarks.append("noticed")
        trial.redone = newest - first
    series.kill(trainer)


def truncate(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def flip_a_bit(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


def zero_the_end(content: bytes, rng: random.Random) -> bytes:
    """Write zeros over the end, as a power cut leaves them on some file systems."""
    return truncate(content, rng).ljust(len(content), b"\0")


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes] | None] = {
    "truncated": truncate,
    "a bit flipped": flip_a_bit,
    "zeroed": zero_the_end,
    "half deleted": None,
}
"""What happens to a file of the checkpoint; None: half of the files are deleted."""


def spoil(folder: Path, kind: str, rng: random.Random) -> None:
    """Damage a checkpoint; where one file is damaged, half of the time the largest, which holds the arrays."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    change = DAMAGES[kind]
    if change is None:
        for path in rng.sample(files, len(files) // 2):
            path.unlink()
        return
    largest = max(files, key=lambda path: path.stat().st_size)
    path = largest if rng.random() < 0.5 else rng.choice(files)
    path.write_bytes(change(path.read_bytes(), rng))


def tear_log(series: Series) -> None:
    """Let a log end in half a line or in zeros, as a machine's crash leaves it."""
    if not (series.run_dir / "metrics.jsonl").exists():
        series.run_until(lambda: True)
    name = series.rng.choice(["metrics.jsonl", "samples.jsonl", "timings.jsonl"])
    tail = series.rng.choice([b'{"step": 1', b'{"step": 99, "lo', b"\0" * 512, b"\n"])
    with (series.run_dir / name).open("ab") as file:
        file.write(tail)
    series.trials.append(Trial("log", hit="torn", workload=series.name))


def start_twice(series: Series) -> None:
    """Run the same command while the first still runs: it must be refused."""
    trainer = series.reach("update")
    trial = Trial("second process", hit="refused", workload=series.name)
    series.trials.append(trial)
    output = series.output.with_suffix(".second.txt")
    code = Trainer(series.arguments(series.run_dir), output).end()
    said = output.read_text(encoding="utf-8")
    if code != 2 or said.count("\n") != 1 or not said.startswith("error: run_dir"):
        trial.hit, trial.failure = "let in", f"a second process on {series.run_dir} ended with {code}: {said[-300:]!r}"
    output.unlink()
    series.check(trainer)


class Unavailable(Exception):
    """This machine grants no file system of one's own."""


@contextmanager
def small_disk(folder: Path) -> Iterator[tuple[int, Path]]:
    """Mount a small tmpfs at `folder` in a namespace of its own: (a process in it, the folder's path from outside).

    Raises:
        Unavailable: there are no user namespaces here.
    """
    mount = f'mount -t tmpfs -o size={DISK_MIB}m faults "$0" && echo mounted && exec sleep 86400'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(folder)]
    try:
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError:
        raise Unavailable("there is no command unshare") from None
    try:
        if holder.stdout is None or holder.stdout.readline() != "mounted\n":
            raise Unavailable(" ".join(holder.communicate()[1].split()))
        yield holder.pid, Path(f"/proc/{holder.pid}/root", *folder.parts[1:])
    finally:
        holder.kill()
        holder.communicate()


def fill_disk(series: Series) -> None:
    """The disk fills up while a checkpoint is written, and is emptied again."""
    folder = series.folder / "disk"
    folder.mkdir(exist_ok=True)
    trial = Trial("disk full", workload=series.name)
    series.finished.append(trial)
    output = folder.with_suffix(".txt")
    arguments = series.arguments(folder / "run")
    try:
        with small_disk(folder) as (holder, outside):
            trainer = Trainer(arguments, output, holder)
            trainer.follow("save", count=3)
            with (outside / "filler").open("wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            os.truncate(outside / "filler", (outside / "filler").stat().st_size - 4096 * series.rng.randrange(16))
            code = trainer.end()
            said = last_line(output)
            trial.hit, trial.remarks = f"exit code {code}", [said.replace(str(folder), "...")]
            (outside / "filler").unlink()
            again = Trainer(arguments, output, holder).end()
            if code not in (0, 2):
                trial.failure = f"exit code {code} on a full disk: {said}"
            elif again:
                trial.failure = f"exit code {again} when the disk had room again: {last_line(output)}"
            elif problem := difference(series.name, outside / "run", series.undisturbed):
                trial.failure = f"after a full disk: {problem}"
    except Unavailable as error:
        trial.hit, trial.remarks = "not tried", [f"no small file system can be had here ({error})"]


def pause(seconds: float) -> None:
    """Wait, exactly to a few microseconds: some phases last less than a thousand of them."""
    until = time.perf_counter() + seconds
    if seconds > 0.005:
        time.sleep(seconds - 0.002)
    while time.perf_counter() < until:
        pass
