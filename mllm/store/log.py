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

    @classmethod
    def of(cls, content: bytes) -> "Mark":
        return cls(len(content), hashlib.sha256(content).hexdigest())


class Log:
    """A log on a disk, without a buffer here. Each method raises UserError where the disk refuses."""

    def __init__(
        self, path: Path, size: int, check: Callable[[], None], failing: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Open a log, of which `size` bytes stay.

        `check` raises UserError where the run was taken from this process; `failing` makes UserErrors of the system's
        errors.
        """
        self.check, self.failing = check, failing
        check()
        with failing():
            self.file = path.open("ab", buffering=0)
            self.file.truncate(size)
            content = path.read_bytes()
            self.size, self.checksum = len(content), hashlib.sha256(content)

    def append(self, record: bytes) -> None:
        self.check()
        with self.failing():
            left = record
            while left:
                left = left[self.file.write(left) :]
        self.size += len(record)
        self.checksum.update(record)

    def sync(self) -> Mark:
        """Wait until all of the log survives a crash of the machine."""
        with self.failing():
            if not self.file.closed:  # a run saves once more after its log was closed
                os.fsync(self.file.fileno())
        return Mark(self.size, self.checksum.hexdigest())

    def close(self) -> None:
        with self.failing():
            self.file.close()


def compare(content: bytes, mark: Any) -> str:
    """How a log's content differs from what stood there when `mark` was made, in words; empty where it does not."""
    size, sha256 = mark
    if len(content) < size:
        return f"lacks its last {size - len(content):,} bytes"
    return "has changed" if Mark.of(content[:size]).sha256 != sha256 else ""
