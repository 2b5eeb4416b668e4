"""train.py's `main` in processes that a campaign may kill.

They are forks of a server that has imported everything and done nothing else, which saves seconds of imports for each
of many starts. Linux only.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import transformers  # noqa: F401  # it is imported late, and slowly

import train
from mllm.run import build, report  # noqa: F401
from mllm.store import holder

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["trainer"])
LEASE = 6
"""Seconds for which a bucket's lease lasts here."""
PATIENCE = 10.0
"""Seconds within which all that a trainer has started must end after it."""


class Trainer:
    """A process that trains with these arguments of train.py and appends what it says to a file."""

    def __init__(self, arguments: Sequence[str], output: Path, variables: Mapping[str, str]) -> None:
        self.token, self.output = uuid4().hex, output
        variables = {**variables, "FAULTS_TOKEN": self.token}
        self.process = CONTEXT.Process(target=run, args=(list(arguments), output, variables))
        self.process.start()

    def end(self, seconds: float = 300) -> int:
        """Wait for the end; returns the exit code, -n where signal n ended the process."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(f"it had not ended after {seconds:g} s: {self.said()[-2000:]}")
        return self.process.exitcode

    def said(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def orphans(self) -> list[int]:
        """The processes that the trainer has started, directly or not, and that outlive it by `PATIENCE`."""
        deadline = time.monotonic() + PATIENCE
        while True:
            left = []
            for entry in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):  # it has ended, or is another user's
                    if f"FAULTS_TOKEN={self.token}".encode() in (entry / "environ").read_bytes():
                        left.append(int(entry.name))
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)


def run(arguments: list[str], output: Path, variables: Mapping[str, str]) -> None:
    """Train, in the process."""
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= variables
    holder.SECONDS = LEASE
    code = train.main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
