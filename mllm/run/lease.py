"""A run in a bucket belongs to one run of processes at a time: a lock that expires, since a bucket has no other."""

import json
import os
import secrets
import socket
import sys
import threading
import time
from typing import Any

from mllm.bucket import Bucket
from mllm.errors import UserError

NAME = "lock"
SECONDS = 60
"""How long a lease lasts that nobody renews; hosts' clocks are not compared."""
RENEWALS = 6
"""Renewals in that time."""


class Lease:
    """An object that its holder rewrites every few seconds; who sees it unchanged for `SECONDS` may take it."""

    def __init__(self, bucket: Bucket) -> None:
        """Take the lease; UserError where another process holds it, or the bucket can't be written.

        The lease of a process of this host that is dead is taken at once. That of another host is waited for.
        """
        self.bucket = bucket
        self.token = secrets.token_hex(4)
        self.renewed = time.monotonic()
        self.ended = threading.Event()
        self.generation = self.take(self.wait_for_end())
        self.thread = threading.Thread(target=self.keep, name="lease", daemon=True)
        self.thread.start()

    def wait_for_end(self) -> bytes:
        """Wait until the lease that is there has ended; returns the generation of what may be replaced."""
        content, generation = self.bucket.read_generation(NAME)
        holder = read_holder(content or b"")
        if content is None or is_dead(holder):
            return generation
        name = f"process {holder.get('process')} on {holder.get('host')}"
        print(f"{self.bucket.url}: {name} held it; waiting {SECONDS} s for a sign of its life", file=sys.stderr)
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            time.sleep(SECONDS / RENEWALS)
            content, now = self.bucket.read_generation(NAME)
            if content is None:
                return now
            if now != generation:
                raise UserError(f"run_dir: {self.bucket.url} is in use by {name}; wait for it, or give another folder")
        return generation

    def take(self, generation: bytes) -> bytes:
        """Write the lease in place of the one of this generation, and return the new one's."""
        holder = {"token": self.token, "host": socket.gethostname(), "process": os.getpid(), "time": time.time()}
        begun = time.monotonic()
        new = self.bucket.replace(NAME, json.dumps(holder).encode(), generation)
        if new is None:
            # A request whose answer was lost has been repeated, and then finds its own work.
            content, new = self.bucket.read_generation(NAME)
            if read_holder(content or b"").get("token") != self.token:
                raise UserError(f"run_dir: {self.bucket.url} was taken by another process; give another folder")
        self.renewed = begun
        return new

    def keep(self) -> None:
        while not self.ended.wait(SECONDS / RENEWALS):
            try:
                self.generation = self.take(self.generation)
            except UserError as error:
                print(f"warning: the lease is not renewed: {error}", file=sys.stderr)
                if "taken" in str(error):
                    self.renewed = -float("inf")
                    return

    def check(self) -> None:
        """Raise UserError if another process may have taken the run: nothing more may be published."""
        if time.monotonic() - self.renewed > SECONDS * 0.9:
            raise UserError(f"run_dir: the lease of {self.bucket.url} could not be renewed; the same command resumes")

    def end(self) -> None:
        """Let the run go, if it is still held."""
        self.ended.set()
        self.thread.join()
        self.check()
        self.bucket.delete([NAME])


def read_holder(content: bytes) -> dict[str, Any]:
    try:
        holder = json.loads(content)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def is_dead(holder: dict[str, Any]) -> bool:
    """Whether a holder was a process of this host that is no more."""
    if holder.get("host") != socket.gethostname():
        return False
    process = holder.get("process")
    if process == os.getpid():  # in a container processes have the same numbers again
        return True
    try:
        os.kill(int(process or 0), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        pass
    return False
