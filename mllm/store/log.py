"""A log is a file that only grows; a run that resumes cuts it where its checkpoint says that it ended."""

import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple


class Mark(NamedTuple):
    """How far a log has come."""

    size: int
    """Bytes."""
    sha256: str
    """The checksum of these bytes, in hexadecimal digits."""


class Log:
    """A log on a disk, without a buffer here."""

    def __init__(self, path: Path, size: int, writing: Callable[[], AbstractContextManager[None]]) -> None:
        """Open a log, of which `size` bytes stay. All that is written is written inside of `writing`."""
        self.writing = writing
        with writing():
            self.file = path.open("ab", buffering=0)
            self.file.truncate(size)
            content = path.read_bytes()
        self.size, self.checksum = len(content), hashlib.sha256(content)

    def append(self, record: bytes) -> None:
        with self.writing():
            left = record
            while left:
                left = left[self.file.write(left) :]
        self.size += len(record)
        self.checksum.update(record)

    def sync(self) -> Mark:
        """Wait until all of the log survives a crash of the machine."""
        with self.writing():
            os.fsync(self.file.fileno())
        return Mark(self.size, self.checksum.hexdigest())

    def close(self) -> None:
        self.sync()
        self.file.close()


def compare(content: bytes, mark: Any) -> str:
    """How a log's content differs from what stood there when `mark` was made, in words; empty where it does not."""
    size, sha256 = mark
    if len(content) < size:
        return f"lacks its last {size - len(content):,} bytes"
    return "has changed" if hashlib.sha256(content[:size]).hexdigest() != sha256 else ""
