"""heartbeat.json in a run's folder: what each process does, and when it last said so, for whoever supervises the run.

Process 0 replaces it every two seconds while the run's processes live. `time` of a process that is stopped stays as it
was, and so does `since` of one that makes no progress; where the disk hangs, the whole file does, as after the run.
"""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from mllm.parallel import watch
from mllm.parallel.processes import is_writer
from mllm.parallel.watch import Status, Watch
from mllm.store.run_store import RunStore

NAME = "heartbeat.json"


class Heartbeat:
    """Writes the file while it is entered, and lets the processes of a run end together: see `Watch.finish`."""

    def __init__(self) -> None:
        self.store: RunStore | None = None
        """Where the file is written; None as long as the run has not begun."""
        self.writes = is_writer()
        self.alone = watch.watch is None

    def __enter__(self) -> "Heartbeat":
        self.watch = watch.watch or Watch()
        self.watch.publish = self.publish
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.watch.finish(error)
        if self.alone:
            self.watch.stop()

    def mark(self, step: int, phase: str) -> None:
        """Note what this process does from now on, after `step` updates."""
        self.watch.mark(step, phase)

    def publish(self, statuses: Sequence[Status]) -> None:
        """Replace the file; processes that don't write look for it, so that a disk that hangs silences them, too."""
        if self.store is None:
            return
        with suppress(OSError):
            if self.writes:
                content = {"time": time.time(), "processes": [status._asdict() for status in statuses]}
                self.store.replace(NAME, (json.dumps(content) + "\n").encode())
            elif self.store.folder:
                (self.store.folder / NAME).open().close()
