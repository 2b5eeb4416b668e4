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
    """A log in a bucket: `sync` sends what was appended since the last time, in parts of their own.

    Each holder of the run writes a series of parts of its own, with a number above all that it has seen. The log is the
    highest series that has a part at offset 0; what a holder that has lost the run still sends belongs to a lower one.
    """

    def __init__(self, bucket: Bucket, name: str, cut: Cut | None, check: Callable[[], None]) -> None:
        """Write the log anew, in few and large parts. `check` raises UserError where nothing more may be written."""
        self.bucket, self.name, self.check = bucket, name, check
        self.unsent, self.part = bytearray(), b""
        self.sending = threading.Lock()
        earlier, content = list_parts(bucket, name), read_parts(bucket, name)
        if cut:
            content = content[: cut(io.BytesIO(content))]
        self.check()
        self.series = 1 + max((series for series, _ in earlier), default=0)
        self.offset = len(content)
        for offset in reversed(range(0, len(content), PART_BYTES)):  # the first one makes the series the log
            self.write(offset, content[offset : offset + PART_BYTES])
        self.check()
        bucket.delete(part_name(name, *part) for part in earlier)

    def write(self, offset: int, part: bytes) -> None:
        self.bucket.replace(part_name(self.name, self.series, offset), part)

    def append(self, record: bytes) -> None:
        self.check()
        self.unsent += record

    def sync(self) -> None:
        with self.sending:
            while self.unsent:
                self.check()
                self.part = self.part or bytes(self.unsent[:PART_BYTES])  # the same again where an attempt has failed
                self.write(self.offset, self.part)
                self.offset += len(self.part)
                del self.unsent[: len(self.part)]
                self.part = b""

    close = sync


Log = FileLog | PartsLog


def part_name(name: str, series: int, offset: int) -> str:
    """The object that holds a log's bytes from `offset` on; the names sort as the numbers do."""
    return f"{name}.{series:06}.{offset:015}"


def list_parts(bucket: Bucket, name: str) -> list[tuple[int, int]]:
    """The series and offset of each of a log's parts, ascending."""
    pattern = re.compile(re.escape(name) + r"\.(\d{6})\.(\d{15})")
    found = [pattern.fullmatch(other) for other in bucket.names(f"{name}.")]
    return [(int(match[1]), int(match[2])) for match in found if match]


def read_parts(bucket: Bucket, name: str) -> bytes:
    """A log's content, up to the first part that is missing."""
    while True:
        parts = list_parts(bucket, name)
        newest = max((series for series, offset in parts if offset == 0), default=0)
        begun = [(offset, part_name(name, newest, offset)) for series, offset in parts if series == newest]
        reads = [(offset, part, bucket.objects.read(part)) for offset, part in begun]
        content = bytearray()
        for offset, part, future in reads:
            found = bucket.result(future, part, "read")
            if found.state != "value":  # another holder has replaced the series since it was listed
                break
            if offset == len(content):
                content += found.value
        else:
            return bytes(content)
