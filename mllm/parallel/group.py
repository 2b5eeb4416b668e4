"""The processes of a run come together by `jax.distributed`, compare their settings, and end together.

JAX notices a process that is lost, by its heartbeat. Added here: a process that fails by itself tells the others why,
in the key-value store of JAX's coordinator, and a phase of the work may have a limit.

Left out: any protection of the coordinator's port. It trusts its network, as the devices' collectives do.
"""

import json
import os
import re
import socket
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import jax
from jax._src import distributed  # jax.distributed does not show the key-value store

from mllm.config.load import differences
from mllm.config.places import FILES
from mllm.errors import RESTART, CommonError, UserError, brief, ending, printable

MAY_DIFFER = {*FILES, "task.path", "data.cache"}
"""Settings that name places of a machine's own; the data there are compared when they are read."""
FACTS, END = "mllm/facts", "mllm/end"
"""Keys in the store: what each process was started with, and with which code and line all processes must end."""
POLL = 0.5
"""Seconds between two looks for the end that another process has announced."""
LOST = re.compile("gloo|nccl|coordination", re.IGNORECASE)
"""Words in the errors by which JAX reports that another process does not answer any more."""
GO_ON = "the same command goes on from the newest checkpoint"
leaving = threading.Lock()
"""Held by the thread that ends this process."""


def join(
    group: tuple[str | None, int | None, int | None], settings: Mapping[str, Any], wait: int = 300, heartbeat: int = 60
) -> None:
    """Connect to the other processes, before any other use of JAX.

    `group` is process 0's host:port, the number of processes, and which one this is; JAX finds in a cluster what is
    None. UserError is raised where that fails or the port is taken, and in all processes where one has other settings
    or programs. If not all come within `wait` seconds, this one ends with code RESTART. JAX aborts it when another one
    has been silent for `heartbeat` seconds.
    """
    coordinator, processes, process = group
    late = f"--coordinator: not all processes came to {coordinator or 'process 0'} within {wait} s (--wait)"
    watchdog = threading.Timer(wait, leave, (RESTART, late))  # JAX's own limit ends in a stack trace
    watchdog.daemon = True
    watchdog.start()
    jax.config.update("jax_enable_preemption_service", False)  # the trainer handles SIGTERM itself
    try:
        if coordinator and process == 0:  # where JAX would crash if the port is taken
            bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", coordinator)
            socket.create_server(("", int(bound.rpartition(":")[2]))).close()
        jax.distributed.initialize(*group, initialization_timeout=wait + 60, heartbeat_timeout_seconds=heartbeat)
    except Exception as error:  # a cluster's environment may raise any
        flags = f"--coordinator {coordinator}, --processes {processes}, --process {process}"
        raise UserError(f"{flags}: {brief(error)}; --cluster finds what is not given, in clusters JAX knows") from None
    finally:
        watchdog.cancel()
    try:
        compare(settings, wait)
    except jax.errors.JaxRuntimeError as error:
        leave(RESTART, f"another process was lost ({printable(brief(error)):.300}): start all again")


def compare(settings: Mapping[str, Any], wait: int) -> None:
    """Raise CommonError, with the key, where a process was started with other settings or programs than process 0."""
    root, state = Path(__file__).parents[2], distributed.global_state
    files = sorted(path for room in ("kernels/lm_head", "mllm") for path in (root / room).rglob("*.py"))
    code = zlib.crc32(b"".join(path.read_bytes() for path in files))
    facts = {"--processes": state.num_processes, "mllm": f"code {code:08x}", "jax": jax.__version__, **settings}
    client: Any = state.client
    client.key_value_set(f"{FACTS}/{state.process_id}", json.dumps(facts))
    client.wait_at_barrier(FACTS, wait * 1000)
    reported = {int(key.rpartition("/")[2]): json.loads(text) for key, text in client.key_value_dir_get(FACTS)}
    for number in sorted(reported):
        for key, first, other in differences(reported[0], reported[number]):
            if key not in MAY_DIFFER:
                raise CommonError(f"{key}: process {number} has {other!r}, process 0 {first!r}: give all the same")


def leave(code: int, line: str) -> NoReturn:
    """End this process at once with an error in one line; the first of two threads that call this does so."""
    leaving.acquire()
    with suppress(OSError, ValueError):  # the output may be on a full disk, or closed
        print(f"error: {line}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    if distributed.global_state.service:
        time.sleep(4 * POLL)  # the store ends with this process, and others have to read it
    os._exit(code)


class Watch:
    """What this process is doing; a thread ends it when another one has failed, or a phase exceeds `limit` seconds."""

    def __init__(self, limit: float | None) -> None:
        self.limit, self.client = limit, distributed.global_state.client
        self.doing, self.idle = "start", 0.0
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run, name="watch", daemon=True)
        self.thread.start()

    def mark(self, step: int, phase: str) -> None:
        """Note what this process does from now on, after so many steps."""
        self.doing, self.idle = f"after step {step}, {phase}", 0.0

    def run(self) -> None:
        pause = min(POLL, self.limit / 4) if self.limit else POLL
        while not self.stopped.wait(pause):
            self.follow()
            self.idle += pause  # time in which a process is stopped does not count
            if self.limit and self.idle > self.limit:
                self.fail(RESTART, f"--stall-limit: no new phase for {self.limit:g} s ({self.doing}): {GO_ON}")

    def follow(self) -> None:
        """End as another process has announced, if one has."""
        with suppress(jax.errors.JaxRuntimeError):  # there is no such key
            if self.client:
                code, line = json.loads(self.client.key_value_try_get(END))
                leave(int(code), printable(line))

    def fail(self, code: int, line: str) -> NoReturn:
        """End this process, and all others, with an exit code and an error in one line."""
        if self.client:
            line = f"process {distributed.global_state.process_id}: {line}"
            with suppress(jax.errors.JaxRuntimeError):  # another one was first
                self.client.key_value_set(END, json.dumps([code, line]))
            time.sleep(2 * POLL)  # this one's connections stay open until the others have read it
        leave(code, line)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End with the run: normally, or by an error that all processes raise alike; another error ends all of them."""
        self.stopped.set()
        self.thread.join()
        if not self.client or error is None or isinstance(error, CommonError):
            return
        if not isinstance(error, UserError) and LOST.search(str(error)):
            self.follow()  # for it may have said why
            leave(RESTART, f"another process was lost ({printable(brief(error)):.300}): {GO_ON}")
        code, line = ending(error)
        if code == 1:
            traceback.print_exception(error)
        self.fail(code, line)
