"""Logs only grow, and are cut when a run resumes. Each method raises UserError where the disk or the bucket refuses.

A bucket can't append: there a log is a row of parts, each named by the offset of its first byte.
"""

import io
import os
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from mllm.store.bucket import PART_BYTES, Bucket

Cut = Callable[[Iterable[bytes]], int]
"""Given a log's lines, how many of its bytes stay."""


class FileLog:
    """A log on a disk, without a buffer here."""

    def __init__(self, path: Path, cut: Cut | None, failing: Callable[[], AbstractContextManager[None]]) -> None:
        """`failing` makes UserErrors of the system's errors."""
        self.failing = failing
        with failing():
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("ab", buffering=0)
            if cut:
                with path.open("rb") as lines:
                    size = cut(lines)
                self.file.truncate(size)

    def append(self, record: bytes) -> None:
        with self.failing():
            while record:
                record = record[self.file.write(record) :]

    def sync(self) -> None:
        """Wait until all of the log survives a crash of the machine; nothing happens when it is closed."""
        with self.failing():
            if not self.file.closed:  # a checkpoint may be published after that
                os.fsync(self.file.fileno())

    def close(self) -> None:
        with self.failing():
            self.file.close()


class PartsLog:
    """A log in a bucket: `sync` sends what was appended since the last time, in parts of their own."""

    def __init__(self, bucket: Bucket, name: str, cut: Cut | None, check: Callable[[], None]) -> None:
        """Make the log's parts few and large again. `check` raises the UserError of a thread that could not send."""
        self.bucket, self.name, self.check = bucket, name, check
        self.unsent = bytearray()
        self.sending = threading.Lock()
        content = read_parts(bucket, name)
        if cut:
            content = content[: cut(io.BytesIO(content))]
        self.offset, offsets = len(content), range(0, len(content), PART_BYTES)
        stale = [offset for offset in part_offsets(bucket, name) if offset not in offsets]
        for offset in reversed(offsets):  # until the first one is written, those that were there are the log
            bucket.write(part_name(name, offset), content[offset : offset + PART_BYTES])
        bucket.delete(part_name(name, offset) for offset in stale)

    def append(self, record: bytes) -> None:
        self.check()
        self.unsent += record

    def sync(self) -> None:
        with self.sending:
            while part := bytes(self.unsent[:PART_BYTES]):
                self.bucket.write(part_name(self.name, self.offset), part)
                self.offset += len(part)
                del self.unsent[: len(part)]

    close = sync


Log = FileLog | PartsLog


def part_name(name: str, offset: int) -> str:
    """The object that holds a log's bytes from `offset` on; the names sort as the offsets do."""
    return f"{name}.{offset:015}"


def part_offsets(bucket: Bucket, name: str) -> list[int]:
    """The offsets of a log's parts, ascending."""
    pattern = re.compile(re.escape(name) + r"\.(\d{15})")
    return [int(found[1]) for other in bucket.names(f"{name}.") if (found := pattern.fullmatch(other))]


def read_parts(bucket: Bucket, name: str) -> bytes:
    """A log's content, without parts that do not follow the one before: those are a holder's that lost the run."""
    begun = {offset: bucket.objects.read(part_name(name, offset)) for offset in part_offsets(bucket, name)}
    content = bytearray()
    for offset, future in begun.items():
        part = bucket.result(future, part_name(name, offset), "read").value
        if offset == len(content):
            content += part
    return bytes(content)
