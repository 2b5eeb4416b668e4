"""train.py in a process that tells its phases, so that a harness can kill it in the midst of one.

Trainers are forks of a server process that has imported everything and done nothing else: that saves the imports, which
write nothing, for each of many processes. A trainer runs train.py's own `main`. The methods that begin and end a phase
are wrapped from outside and send the phase's name through a pipe; the trainer's code knows nothing of it. Linux only.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

ROOT = Path(__file__).parent.parent.parent
SILENCE = 180.0
"""Seconds without a mark after which a process counts as hung; the first compilation is the longest silence."""
ORPHANS = 10.0
"""Seconds within which all that a trainer has started must end after it."""
ROOMS = ("config", "model", "data", "train", "rl", "run")
MODULES = [path.relative_to(ROOT).with_suffix("") for room in ROOMS for path in (ROOT / "mllm" / room).glob("*.py")]
PRELOADED = ("train", "transformers", *(".".join(path.parts) for path in MODULES))
"""What the server process imports: train.py, and what it imports later."""
BETWEEN, END = "between", "end"
"""Marks of no phase: outside of all, and when `main` has returned."""


class Trainer:
    """A process that runs train.py with these arguments and appends its output to a file.

    Args:
        variables: further ones of its environment.

    Attributes:
        token: in the environment of every process that the trainer starts.
        marks: each phase's beginning, by `time.monotonic`, which is the same in all processes, and its name.
        synced: the bytes of each log, by its path, that survive a crash of the machine.
    """

    def __init__(self, arguments: Sequence[str], output: Path, **variables: str) -> None:
        self.token = uuid4().hex
        self.marks: list[tuple[float, str]] = []
        self.synced: dict[str, int] = {}
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(["__main__", *PRELOADED])
        self.pipe, theirs = server.Pipe(duplex=False)
        self.process = server.Process(target=run, args=(list(arguments), output, self.token, theirs, variables))
        self.process.start()
        theirs.close()

    def follow(self, *phases: str, count: int | None = None) -> bool:
        """Read marks until one of the phases begins, for the `count`th time if given; False if the process ends before.

        Raises:
            TimeoutError: no mark came for SILENCE seconds; the process was killed.
        """
        while True:
            if not self.pipe.poll(SILENCE):
                self.kill(everything=True)
                raise TimeoutError(f"no mark for {SILENCE:g} s after {self.marks[-1:]}")
            try:
                mark = self.pipe.recv()
            except EOFError:
                return False
            if isinstance(mark, dict):
                self.synced |= mark
            else:
                self.marks.append(mark)
                if mark[1] in phases and count in (None, self.begun(mark[1])):
                    return True

    def begun(self, phase: str) -> int:
        """How often the phase has begun."""
        return sum(name == phase for name, _ in groupby(name for _, name in self.marks))

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def kill(self, *, everything: bool) -> None:
        """kill -9 the trainer, alone or with all that it has started, and read its marks up to its end."""
        self.signal(signal.SIGKILL)
        for pid in self.descendants() if everything else []:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.end()

    def end(self) -> int:
        """Wait for the process's end, and read its marks. Returns the exit code, -n if signal n ended it."""
        self.follow()
        self.process.join()
        return self.process.exitcode

    def descendants(self) -> list[int]:
        """The living processes that the trainer has started, directly or not."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):  # it has ended, or is another user's
                if entry.name.isdigit() and f"FAULTS_TOKEN={self.token}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def orphans(self) -> list[int]:
        """The processes that the trainer had started and that outlived it by ORPHANS seconds; they are killed."""
        deadline = time.monotonic() + ORPHANS
        while (left := self.descendants()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        return left


# In the trainer's process


def run(arguments: list[str], output: Path, token: str, pipe: Connection, variables: Mapping[str, str]) -> None:
    """Run train.py's `main`, sending marks, and exit with its code. After SIGUSR1 there is no memory left."""
    os.setsid()  # Ctrl-C is the harness's to handle
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import jax
    from jax._src import compiler

    import train
    from mllm.rl import evaluation, trajectories
    from mllm.run.checkpoint import Checkpoints
    from mllm.run.metrics import RunLog
    from mllm.stopwatch import Stopwatch
    from mllm.store import bucket, lock

    def use_up_memory(*_: Any) -> None:
        raise MemoryError

    trajectories.MOST_FAILED_GROUPS = 1.0  # those of the rewards that fail on purpose
    signal.signal(signal.SIGUSR1, use_up_memory)
    bucket.RETRIES.update(max_retries=12, initial_delay="5ms", max_delay="50ms")
    lock.SECONDS, lock.SENDING_SECONDS = 10, 0.2
    os.environ |= {**variables, "FAULTS_TOKEN": token}
    if folder := variables.get("JAX_COMPILATION_CACHE_DIR"):
        # JAX is imported already. It lets only process 0 write, though the others' programs have other keys.
        jax.config.update("jax_compilation_cache_dir", folder)
        compiler.distributed = SimpleNamespace(global_state=SimpleNamespace(process_id=0, client=None))
    open_phases = [BETWEEN]

    def tell(name: str) -> None:
        pipe.send((time.monotonic(), name))

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        """A phase of this name, or a part of the one in which it begins."""
        open_phases.append(name if open_phases[-1] == BETWEEN else open_phases[-1])
        tell(open_phases[-1])
        try:
            yield
        finally:
            open_phases.pop()
            tell(open_phases[-1])

    sync = os.fsync

    def synced(handle: int) -> None:
        size, path = os.fstat(handle).st_size, os.readlink(f"/proc/self/fd/{handle}")
        sync(handle)
        if path.endswith(".jsonl"):
            pipe.send({path: size})

    timed = Stopwatch.phase

    @contextmanager
    def timed_phase(watch: Any, name: str) -> Iterator[None]:
        with phase(name), timed(watch, name):
            yield

    tell("start")
    Stopwatch.phase = timed_phase
    os.fsync = synced
    for owner, method, name in (
        (Checkpoints, "restore", "restore"),
        (Checkpoints, "save", "save"),
        (Checkpoints, "wait", "wait"),
        (RunLog, "write", "metrics"),
        (evaluation, "sample_trajectories", "eval"),
    ):
        setattr(owner, method, phase(name)(getattr(owner, method)))
    code = train.main(arguments)
    tell(END)
    sys.stdout.flush()
    atexit._run_exitfuncs()
    os._exit(code)
