"""heartbeat.json in a run's folder: what each process does, and when it last said so, for whoever supervises the run.

Process 0 replaces it every two seconds while the run's processes live. `time` of a process that is stopped stays as it
was, and so does `since` of one that makes no progress; where the disk hangs, the whole file does, as after the run.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from mllm.parallel import watch
from mllm.parallel.watch import Status, Watch
from mllm.store.run_store import RunStore

NAME = "heartbeat.json"


@contextmanager
def watched(stall_limit: float | None = None) -> Iterator[Watch]:
    """This process's watch. At the end of the body the processes of a run end together: see `Watch.finish`.

    The run also ends when it has shown no new phase for `stall_limit` seconds.
    """
    found, error = watch.watch or Watch(), None
    if stall_limit is not None:
        found.limit_stalls(stall_limit)
    try:
        yield found
    except BaseException as raised:
        error = raised
        raise
    finally:
        found.finish(error)
        if found is not watch.watch:
            found.stop()


def publish(store: RunStore, writes: bool, statuses: Sequence[Status]) -> None:
    """Replace the file; processes that don't write look for it, so that a disk that hangs silences them, too."""
    with suppress(OSError):
        if writes:
            content = {"time": time.time(), "processes": [status._asdict() for status in statuses]}
            store.replace(NAME, (json.dumps(content) + "\n").encode())
        elif store.folder:
            (store.folder / NAME).open().close()
