"""How the processes of a run meet: each visits process 0, which checks that it is one of them, and its settings.

A visitor proves that it knows the run_dir, and MLLM_TOKEN where that is set, without sending either. Who can't is
ignored with a line: whatever strangers send, or leave unsaid, neither ends the run nor keeps it waiting.

Left out: encryption. JAX's coordinator, which listens at the next port, and its collectives know no token.
"""

import hmac
import json
import os
import secrets
import socket
import sys
import threading
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax

from mllm.config.load import differences
from mllm.config.places import FILES
from mllm.errors import RESTART, UserError, printable
from mllm.parallel import watch
from mllm.parallel.watch import SILENCE, Link

TOKEN = "MLLM_TOKEN"
"""The environment's variable with a secret that all processes of a run share, or none."""
MAY_DIFFER = {*FILES, "task.path", "data.cache"}
"""Settings that name places of a machine's own; the data there are compared when they are read."""
PATIENCE = 10.0
"""Seconds for a visitor's greeting."""
LONGEST_GREETING = 2**22
TICK = 0.05


class Member(NamedTuple):
    """A process of a run, as it says itself."""

    process: int
    processes: int
    facts: Mapping[str, Any]
    """Its settings, and the versions of its programs."""

    @classmethod
    def of(cls, process: int, processes: int, settings: Mapping[str, Any]) -> "Member":
        """This process, with the settings of its resolved configuration as JSON."""
        root = Path(__file__).parents[2]
        files = sorted(path for room in ("kernels", "mllm") for path in (root / room).rglob("*.py"))
        code = zlib.crc32(b"".join(path.read_bytes() for path in files))
        return cls(process, processes, {"mllm": f"code {code:08x}", "jax": jax.__version__, **settings})

    def proof(self, challenge: str, text: str) -> str:
        """A proof that the sender of a text knows what the processes of this run know."""
        key = f"{os.environ.get(TOKEN, '')}\n{self.facts.get('run_dir')}"
        return hmac.new(os.fsencode(key), f"{challenge}{text}".encode(), "sha256").hexdigest()

    def difference(self, other: "Member") -> UserError | None:
        """What differs between this process and another of the same run, if anything that may not does."""
        number = other.process
        if other.processes != self.processes:
            counts = f"process {number} was started with {other.processes}, process 0 with {self.processes}"
            return UserError(f"--processes: {counts}")
        for key, mine, yours in differences(self.facts, other.facts):
            if key not in MAY_DIFFER:
                return UserError(f"{key}: process {number} has {yours!r}, process 0 {mine!r}: give all the same")
        return None


def begin(own: Member, coordinator: str, missing: list[int]) -> str:
    """Connect the processes' threads; waits until all have come. `coordinator` is process 0's host:port.

    The threads meet at the port below the coordinator's. Returns where JAX's coordinator is to listen. UserError is
    raised if a port can't be opened, and in all that have come if one of them differs from process 0. Process 0 takes
    those that have come from the numbers that are `missing`.
    """
    host, _, port = coordinator.rpartition(":")
    bound = listening(coordinator)
    here, below = bound.rpartition(":")[0].strip("[]"), int(port) - 1
    links = {0: visit(own, (host.strip("[]"), below))} if own.process else receive(own, here, below, missing)
    watch.watch = watch.Watch(own.process, links)
    return bound


def listening(coordinator: str) -> str:
    """host:port where process 0 listens: at the coordinator's address where that is this machine's only, else at all.

    Behind NAT or a service the address is another machine's. Where a name stands for the loopback, as a machine's own
    may in its /etc/hosts, others have another address for it. JAX_COORDINATOR_BIND_ADDRESS takes precedence.
    """
    if given := os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
        return given
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]") if host != "localhost" else "127.0.0.1"
    with suppress(OSError, ValueError):
        (address,) = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
        if address == host or not ip_address(address).is_loopback:
            open_port(address, 0).close()
            return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return f"[::]:{port}"


def open_port(host: str, port: int) -> socket.socket:
    """A socket that listens at an address of this machine; `::` stands for all."""
    if host == "::" and not socket.has_dualstack_ipv6():
        host = ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=host == "::")


def receive(own: Member, host: str, port: int, missing: list[int]) -> dict[int, Link]:
    """The links to all other processes, which come to this port of process 0's; those that are `missing` grow fewer."""
    links: dict[int, Link] = {}
    visitors: SimpleQueue[tuple[Link, Member]] = SimpleQueue()
    try:
        server = open_port(host, port)
    except OSError as error:
        reason = f"can't be opened ({error.strerror}); take another port"
        raise UserError(f"--coordinator: {port}, the port below the coordinator's, {reason}") from None
    with server:
        server.settimeout(TICK)
        while missing:
            with suppress(OSError, RuntimeError):  # nobody has come, or too many at once
                connection, (place, *_) = server.accept()
                threading.Thread(target=greet, args=(own, connection, place, visitors), daemon=True).start()
            while not visitors.empty():
                link, other = visitors.get()
                if problem := own.difference(other):
                    for one in (link, *links.values()):
                        one.send(end=[2, str(problem)])
                    raise problem
                if other.process in links:
                    link.send(end=[2, f"--process: {other.process} was started twice"])
                    continue
                link.status = link.status._replace(process=other.process)
                links[other.process] = link
                missing.remove(other.process)
    for link in links.values():
        link.send(go=True)
    return links


def greet(own: Member, connection: socket.socket, place: str, visitors: "SimpleQueue[tuple[Link, Member]]") -> None:
    """Put a visitor into the queue if it proves to be of this run; any other is ignored, with a line."""
    link, challenge = Link(connection), secrets.token_hex(16)
    connection.settimeout(PATIENCE)
    try:
        link.send(challenge=challenge)
        match link.receive(LONGEST_GREETING):
            case {"hello": str(text), "proof": str(proof)}:
                if not hmac.compare_digest(proof.encode(), own.proof(challenge, text).encode()):
                    differ = f"its run_dir or {TOKEN} is not process 0's: give all processes the same"
                    link.send(end=[2, f"--coordinator: this process is refused: {differ}"])
                    raise ValueError(differ)
                match json.loads(text):
                    case [int(process), int(processes), dict(facts)] if 0 < process < processes:
                        visitors.put((link, Member(process, processes, facts)))
                        return
        raise ValueError("it sent no greeting of a process")
    except (OSError, ValueError, RecursionError) as error:
        sys.stderr.write(f"warning: --coordinator: a visitor from {place} is ignored: {printable(str(error))}\n")
        connection.close()


def visit(own: Member, address: tuple[str, int]) -> Link:
    """The link to process 0, at the port where it waits for the others; the process ends if it is refused."""
    while True:
        with suppress(OSError):
            link = Link(socket.create_connection(address, SILENCE))
            break
        time.sleep(0.1)
    link.socket.settimeout(None)
    message = link.receive()
    match message:
        case {"challenge": str(challenge)}:
            text = json.dumps(own)
            link.send(hello=text, proof=own.proof(challenge, text))
            message = link.receive()
    match message:
        case {"go": True}:
            return link
        case {"end": [int(code), str(line)]} if 0 < code < 256:
            pass
        case None:
            code, line = RESTART, "process 0 ended before all processes had come"
        case _:
            code, line = 2, f"--coordinator: what listens at port {address[1]}, the one below it, is no process 0"
    print(f"error: {printable(line)}", file=sys.stderr)
    sys.exit(code)


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
