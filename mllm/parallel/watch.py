"""The processes of a run watch each other: if one ends, hangs or fails, all of them end, with one line that says why.

Each process has a thread that tells process 0 what its process is doing, every BEAT seconds, and is answered.
A process that ends, however it ends, closes its connection, which is noticed at once. One that is stopped, or whose
machine, network or disk hangs, is silent, which is noticed after SILENCE seconds. One that fails says so. Process 0
passes on what has happened; each process prints it and ends at once, because a collective that waits for a lost process
can't be interrupted.

Left out: to end a run whose main thread hangs while its process lives. Nothing tells that from slow work, such as
compiling; a line says where each process is.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import jax

from mllm.errors import RESTART, CommonError, UserError, ending

BEAT = 2.0
SILENCE = 30.0
"""Seconds without a word from a process after which it counts as lost."""
GRACE = 1.0
"""Seconds that a process's last message is given to arrive before its connection is cut."""
LONGEST_MESSAGE = 2**16
END = "end"
"""The phase of a process that has trained to its end: its connection may close."""
GO_ON = "the same command goes on from the newest checkpoint"


class Status(NamedTuple):
    """What a process is doing."""

    process: int
    step: int
    """Steps that are done."""
    phase: str
    since: float
    """When the phase began, in Unix time."""
    time: float
    """When the process said so, in Unix time."""

    def __str__(self) -> str:
        return f"process {self.process} (after step {self.step}, {self.phase})"


class Link:
    """A connection to another process's thread."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(GRACE)
        self.socket, self.lines = connection, connection.makefile("rb")
        self.status = Status(0, 0, "start", time.time(), time.time())
        """What the other process said last."""
        self.heard = time.monotonic()

    def send(self, **message: Any) -> None:
        with suppress(OSError):  # whoever reads finds out that the connection is closed
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """The next message; None if the connection is closed."""
        with suppress(OSError, ValueError):
            message = json.loads(self.lines.readline(LONGEST_MESSAGE))
            self.heard = time.monotonic()
            return message if isinstance(message, dict) else None
        return None


class Watch:
    """What this process tells the others, and hears of them; a process that trains alone has no links."""

    def __init__(self, process: int = 0, links: dict[int, Link] | None = None) -> None:
        now = time.time()
        self.status = Status(process, 0, "start", now, now)
        self.links = links or {}
        self.publish: Callable[[list[Status]], None] = lambda statuses: None
        """Called every BEAT seconds with what process 0 knows of all processes, and the others of themselves."""
        self.patience = 600.0
        """Seconds without a new phase after which a line says where each process is."""
        self.ending = threading.Lock()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run, name="watch", daemon=True)
        for link in self.links.values():
            link.heard = time.monotonic()  # nobody had to say anything until the last one came
        self.thread.start()
        for number, link in [*self.links.items()]:
            link.socket.settimeout(None)
            threading.Thread(target=self.listen, args=(number, link), name="watch", daemon=True).start()

    def mark(self, step: int, phase: str) -> None:
        """Note what this process does from now on."""
        now = time.time()
        self.status = Status(self.status.process, step, phase, now, now)

    def run(self) -> None:
        """Send every BEAT seconds, until `stop`."""
        last = time.monotonic()
        while not self.stopped.is_set():
            now = time.monotonic()
            if self.links and now - last > SILENCE:
                self.end(RESTART, f"{self.status} was stopped for {now - last:.0f} s: {GO_ON}")
            last = now
            self.beat()
            self.stopped.wait(BEAT)

    def listen(self, number: int, link: Link) -> None:
        """Read another process's messages; if its connection closes before the run has ended, end this process, too."""
        while message := link.receive():
            if "end" in message:
                self.end(*message["end"])
            link.status = Status(*message["status"])
        del self.links[number]
        if link.status.phase != END:
            self.end(RESTART, f"{link.status} was killed, or has lost its machine or network: {GO_ON}")

    def beat(self) -> None:
        """Send and publish what this process does, and look for processes that are silent."""
        own = self.status._replace(time=time.time())
        links = [*self.links.values()]
        others = [] if own.process else [link.status for link in links]
        self.publish(statuses := sorted([own, *others]))
        stalled = own.time - max(status.since for status in statuses)
        if own.process == 0 and stalled > self.patience:
            self.patience = 2 * stalled  # so that long phases are not reported every time
            where = ", ".join(map(str, statuses))
            sys.stderr.write(f"warning: no new phase for {stalled / 60:.0f} minutes: {where}\n")
        for link in links:
            link.send(status=own)
            if time.monotonic() - link.heard > SILENCE:
                why = "it is stopped, or its machine, network or disk hangs"
                self.end(RESTART, f"{link.status} has been silent for {SILENCE:.0f} s: {why}; {GO_ON}")

    def end(self, code: int, line: str, details: str = "") -> None:
        """End this process with an error in one line, and first all others, with the same code and line.

        The first of two threads that call this ends the process. Nothing is printed after the line, though the main
        thread goes on for a moment, and JAX notices that others end.
        """
        self.ending.acquire()
        for link in [*self.links.values()]:
            link.send(end=[code, line])
        with suppress(OSError, ValueError):  # the output may be on a full disk, or closed
            sys.stdout.flush()
        with suppress(OSError):
            output = os.dup(2)
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            os.write(output, f"{details}error: {line}\n".encode(errors="backslashreplace"))
        time.sleep(GRACE if self.links else 0)
        os._exit(code)

    def finish(self, error: BaseException | None) -> None:
        """End with the run: normally, or by an error that all processes raise alike; another error ends all of them.

        Errors of JAX wait for news of a lost process, which may be what caused them.
        """
        if not self.links or error is None or isinstance(error, CommonError):
            with self.ending:  # which is held while another thread ends the process
                self.mark(self.status.step, END)
                for link in [*self.links.values()]:
                    link.send(status=self.status)
            return
        code, line = ending(error)
        if code == 1:
            time.sleep(SILENCE + 2 * BEAT if is_jax(error) else GRACE)
        details = "".join(traceback.format_exception(error)) if code == 1 else ""
        self.end(code, f"process {self.status.process}: {line}", details)

    def stop(self) -> None:
        """End the thread of a process that trains alone."""
        self.stopped.set()
        self.thread.join()


def is_jax(error: BaseException | None) -> bool:
    """Whether an error is JAX's, or was caused by one of JAX's."""
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__ or error.__context__
    return error is not None


watch: Watch | None = None
"""This process's, if it is one of several."""


def begin(process: int, processes: int, coordinator: str) -> None:
    """Connect the processes' threads; waits until all have come. `coordinator` is process 0's host:port.

    The threads meet at the port below the coordinator's. UserError is raised if that can't be opened, and in all that
    have come if one of them was started with another number of `processes`.
    """
    global watch
    host, _, port = coordinator.rpartition(":")
    address = host.strip("[]"), int(port) - 1
    watch = Watch(process, {0: visit(process, processes, address)} if process else receive(processes, address[1]))


def receive(processes: int, port: int) -> dict[int, Link]:
    """The links to all other processes, which come to this port of process 0's."""
    links: dict[int, Link] = {}
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, backlog=processes, dualstack_ipv6=dual)
    except OSError as error:
        reason = f"can't be opened ({error.strerror}); take another port"
        raise UserError(f"--coordinator: {port}, the port below the coordinator's, {reason}") from None
    with server:
        while len(links) < processes - 1:
            link = Link(server.accept()[0])
            try:
                number, count = json.loads(link.socket.recv(LONGEST_MESSAGE))["hello"]
            except (OSError, KeyError, ValueError, TypeError):  # it is no process of this run
                continue
            if count != processes:
                problem = f"--processes: process {number} was started with {count}, process 0 with {processes}"
                for other in (link, *links.values()):
                    other.send(end=[2, problem])
                raise UserError(problem)
            if number in links:
                link.send(end=[2, f"--process: {number} was started twice"])
                continue
            link.status = link.status._replace(process=number)
            links[number] = link
    for link in links.values():
        link.send(go=True)
    return links


def visit(process: int, processes: int, address: tuple[str, int]) -> Link:
    """The link to process 0, at the port where it waits for the others; the process ends if it is refused."""
    while True:
        with suppress(OSError):
            link = Link(socket.create_connection(address, SILENCE))
            break
        time.sleep(0.1)
    link.send(hello=[process, processes])
    link.socket.settimeout(None)
    message = link.receive() or {"end": [RESTART, "process 0 ended before all processes had come"]}
    if "end" in message:
        code, line = message["end"]
        print(f"error: {line}", file=sys.stderr)
        sys.exit(code)
    return link


def relay(address: str) -> str:
    """Return the address of a relay on this machine that forwards connections to `address`, which may open later.

    JAX aborts a process, with a stack trace, when its connection to process 0 closes. This one stays open, so that the
    process can end as `Watch` says.
    """
    host, _, port = address.rpartition(":")
    server = socket.create_server(("localhost", 0))

    def serve() -> None:
        while True:
            here = server.accept()[0]
            while True:
                with suppress(OSError):
                    there = socket.create_connection((host.strip("[]"), int(port)))
                    break
                time.sleep(0.1)
            for pair in ((here, there), (there, here)):
                threading.Thread(target=forward, args=pair, daemon=True).start()

    threading.Thread(target=serve, name="relay", daemon=True).start()
    return f"localhost:{server.getsockname()[1]}"


def forward(source: socket.socket, target: socket.socket) -> None:
    """Send what comes from one socket to the other, which stays open when the first is closed."""
    with suppress(OSError):
        while chunk := source.recv(2**16):
            target.sendall(chunk)
