"""What happens to a training run: each function disturbs a lane's run once, and the next process is to go on from it.

A process is disturbed in a phase that was tried the least so far, at a random moment of the time that the phase takes.
"""

import signal
import time
from collections.abc import Collection
from contextlib import closing

from chaos_child import END
from chaos_damage import DAMAGES, Unavailable, checkpoints, small_disk, tear_logs
from chaos_lane import ONCE, Lane, Trial, difference, tail
from chaos_process import Process, Server

NOTICED = 1.0
"""Seconds within which a signal must be noticed in the phases of `HEARD`, and a second one anywhere."""
HEARD = ("rollout", "reward", "eval")
LEAVING = ("save", "wait", END)
"""Phases in which a process that has noticed a signal is next."""
DISK = 16
"""MiB of the disk that fills up."""


def kill(lane: Lane, phases: Collection[str] | None = None) -> None:
    """kill -9, of the trainer alone or with its children."""
    fault = "kill -9"
    while True:
        phase, count, delay = lane.aim(fault, phases or lane.lengths)
        everything = lane.rng.random() < 0.5
        process = lane.reach(phase, count)
        pause(delay)
        if lane.killed(process, everything=everything):
            break
        lane.tries[fault, phase] += 1
    lane.record(Trial(fault, hit=process.phase, aimed=phase), process)


def interrupt(lane: Lane, phases: Collection[str] | None = None) -> None:
    """SIGTERM or SIGINT."""
    number = lane.rng.choice([signal.SIGTERM, signal.SIGINT])
    fault = number.name
    while True:
        phase, count, delay = lane.aim(fault, phases or [name for name in lane.lengths if name != "wait"])
        process = lane.reach(phase, count + (phase not in ONCE))  # the first of a phase compiles
        pause(delay)
        trial = signalled(process, number, fault)
        trial.aimed = phase
        if settled(lane, trial, process, number):
            break
        lane.tries[fault, phase] += 1


def interrupt_twice(lane: Lane) -> None:
    """SIGTERM or SIGINT, and another while the process saves what the first asked it to."""
    number = lane.rng.choice([signal.SIGTERM, signal.SIGINT])
    while True:
        process = lane.reach("update", lane.rng.randint(2, 4))
        process.signal(number)
        if not process.follow(lambda mark: mark.name in ("save", "wait")):
            trial = Trial("a second signal", hit="came too late", left=0.0, noticed=0.0)
        else:
            pause(lane.rng.uniform(0, lane.usual("save")))
            trial = signalled(process, number, "a second signal")
        if settled(lane, trial, process, number):
            break


def signalled(process: Process, number: signal.Signals, fault: str) -> Trial:
    """Send it the signal, and wait for its end."""
    sent = time.monotonic()
    process.signal(number)
    process.follow()
    process.end()
    gone = time.monotonic()
    hit = next((mark.name for mark in reversed(process.marks) if mark.seconds <= sent), "start")
    noticed = next((mark.seconds for mark in process.marks if mark.seconds > sent and mark.name in LEAVING), gone)
    return Trial(fault, hit=hit, noticed=noticed - sent, left=gone - sent)


def settled(lane: Lane, trial: Trial, process: Process, number: signal.Signals) -> bool:
    """Judge how a process that got a signal has left; False where it had come to its end anyhow."""
    code = process.end()
    if code == 0:
        lane.check(process)
        return False
    lane.account(process)
    second = trial.fault not in ("SIGTERM", "SIGINT") and trial.hit != END  # there it has all but left
    took = trial.left if second else trial.noticed
    lane.record(trial, process)
    if code != 128 + number:
        trial.failure = f"exit code {code} after {trial.fault} in {trial.hit}: {tail(lane.said)}"
    elif (second or trial.hit in HEARD) and took is not None and took > NOTICED:
        trial.failure = f"{trial.fault} in {trial.hit}: noticed after {took:.2f} s"
    return True


def damage(lane: Lane, kind: str) -> None:
    """The newest of two or more checkpoints is damaged before the next process reads it."""
    while lane.damaged or len(checkpoints(lane.run_dir)) < 2:
        lane.go_on(lambda: len(checkpoints(lane.run_dir)) > 1)
    newest = checkpoints(lane.run_dir)[-1]
    for trial in lane.trials:  # what they cost is what it takes from here
        trial.redone = max(0, (trial.wrote or 0) - newest) if trial.redone is None else trial.redone
    said = DAMAGES[kind](lane.run_dir / "checkpoints" / str(newest), lane.rng)
    trial = Trial("newest checkpoint", hit=kind, lane=lane.name, said=said)
    lane.trials.append(trial)
    lane.damaged = trial, newest


def tear(lane: Lane) -> None:
    """A log ends as a machine's crash leaves it."""
    if not (lane.run_dir / "metrics.jsonl").exists():
        lane.go_on(lambda: True)
    said = tear_logs(lane.run_dir, lane.rng)
    lane.trials.append(Trial("log", hit="torn", lane=lane.name, redone=0, said=said))


def start_twice(lane: Lane) -> None:
    """The same command while the first still runs."""
    process = lane.reach("update", 1)
    trial = Trial("second process", hit="refused", lane=lane.name, redone=0)
    lane.trials.append(trial)
    path = lane.said.with_suffix(".second.txt")
    other = lane.server.start(lane.arguments(lane.run_dir), path)
    other.follow()
    code, words = other.end(), path.read_text(encoding="utf-8")
    if code != 2 or words.count("\n") != 1 or not words.startswith("error: run_dir"):
        trial.hit, trial.failure = "let in", f"a second process on {lane.run_dir} ended with {code}: {words[-300:]!r}"
    path.unlink()
    lane.check(process)


def fill_disk(lane: Lane) -> None:
    """The disk fills up while a checkpoint is written, and is emptied again."""
    folder = lane.folder / "disk"
    folder.mkdir(exist_ok=True)
    trial = Trial("disk full", lane=lane.name, redone=0)
    lane.finished.append(trial)
    path = folder.with_suffix(".txt")
    try:
        with small_disk(folder, DISK) as disk, closing(Server(lane.server.environment, disk.within)) as server:
            command = lane.arguments(disk.inside / "run")
            process = server.start(command, path)
            process.follow(lambda mark: mark.name == "save" and process.counts()["save"] > 2)
            disk.fill(lane.rng.randrange(65536))
            process.follow()
            code = process.end()
            trial.hit, trial.said = f"exit code {code}", tail(path)
            disk.empty()
            again = server.start(command, path)
            again.follow()
            if code not in (0, 2):
                trial.failure = f"exit code {code} on a full disk: {trial.said}"
            elif again.end():
                trial.failure = f"exit code {again.end()} when the disk had room again: {tail(path)}"
            elif problem := difference(lane.name, disk.outside / "run", lane.folder):
                trial.failure = f"after a full disk: {problem}"
    except Unavailable as error:
        trial.hit, trial.said = "not tried", f"no small file system can be had here ({error})"


def pause(seconds: float) -> None:
    """To a few microseconds: some phases are over in a thousand of them."""
    until = time.perf_counter() + seconds
    if seconds > 0.005:
        time.sleep(seconds - 0.002)
    while time.perf_counter() < until:
        pass
