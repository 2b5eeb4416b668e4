"""Connects the processes of a run by `jax.distributed`, compares their settings, and ends them together.

JAX notices a lost process by its heartbeat; collectives over TCP notice a closed connection. Neither JAX's coordinator
nor the devices' collectives authenticate.
"""

import os
import socket
import sys
import traceback
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from mllm.config.load import differences
from mllm.config.places import FILES
from mllm.errors import RESTART, CommonError, UserError, brief, ending, printable
from mllm.parallel.processes import gather_objects

MAY_DIFFER = {*FILES, "data.mix.source", "task.path", "data.cache"} - {"data.mix"}
"""Paths that may differ between machines; the data there are compared when they are read."""
COLLECTIVES = ("gloo", "nccl", "coordination")
"""Names in JAX's errors about another process that does not answer any more."""


def join(group: tuple[str | None, int | None, int | None], settings: Mapping[str, Any], heartbeat: int = 60) -> None:
    """Connect to the other processes, before any other use of JAX.

    `group` is process 0's host:port, the number of processes, and which one this is; JAX finds None in a
    cluster. UserError is raised where that fails or the port is taken, and in all processes where settings or programs
    differ. JAX aborts a process when another process has been silent for `heartbeat` seconds.
    """
    coordinator, _, process = group
    jax.config.update("jax_enable_preemption_service", False)  # the trainer handles SIGTERM itself
    try:
        if coordinator and process == 0:  # JAX 0.10 crashes if the port is taken
            bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", coordinator)
            socket.create_server(("", int(bound.rpartition(":")[2]))).close()
        jax.distributed.initialize(*group, heartbeat_timeout_seconds=heartbeat)
    except Exception as error:  # a cluster's environment may raise any
        named = dict(zip(("--coordinator", "--processes", "--process"), group, strict=True))
        given = ", ".join(f"{flag} {value}" for flag, value in named.items() if value is not None) or "--cluster"
        needed = " and ".join(flag for flag, value in named.items() if value is None)
        way_out = f"; give {needed}, since JAX finds no cluster here" * bool(needed)
        raise UserError(f"{given}: {brief(error)}{way_out}") from None
    with ending_together():
        compare(settings)


def compare(settings: Mapping[str, Any]) -> None:
    """Raise CommonError, with the key, if a process has other settings or programs than process 0."""
    root = Path(__file__).parents[2]
    files = sorted(path for room in ("kernels/lm_head", "mllm") for path in (root / room).rglob("*.py"))
    code = f"code {zlib.crc32(b''.join(path.read_bytes() for path in files)):08x}"
    first, *others = gather_objects({"mllm": code, "jax": jax.__version__, **settings})
    for number, other in enumerate(others, 1):
        for key, expected, actual in differences(first, other):
            if key not in MAY_DIFFER:
                raise CommonError(f"{key}: process {number} has {actual!r}, process 0 {expected!r}: give all the same")


@contextmanager
def ending_together() -> Iterator[None]:
    """End this process at once if it alone fails, so that other processes notice; a normal exit would wait for them.

    An error that all processes raise passes through.
    """
    try:
        yield
    except BaseException as error:
        if jax.process_count() == 1 or isinstance(error, CommonError):
            raise
        code, line = ending(error)
        if code == 1 and any(name in str(error).lower() for name in COLLECTIVES):
            reason = f"{printable(brief(error)):.300}"
            code, line = RESTART, f"another process was lost ({reason}): the same command resumes"
        elif code == 1:
            traceback.print_exception(error)
        print(f"error: {line}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(code)
