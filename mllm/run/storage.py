"""What a full, read-only or failing disk says: one line, with the checkpoint that the same command goes on from.

Left out: a disk that reports success and keeps something else. What it kept of a checkpoint is checked when it is read.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from mllm.errors import UserError

REMEDY = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room, or have the quota raised",
    errno.EFBIG: "allow larger files there",
    errno.EACCES: "allow access there",
    errno.EPERM: "allow access there",
    errno.EROFS: "allow writing there",
}
"""By the operating system's number."""
OF_TENSORSTORE = re.compile(r"\[os_error_code='(\d+)'\]")
"""In the text of its errors, which are ValueErrors."""


class Fault(NamedTuple):
    """What the operating system said of a write."""

    number: int | None
    text: str


def fault(error: BaseException | None) -> Fault | None:
    """The operating system's error that `error` is, or came from; None where it was none of its."""
    while error is not None:
        if isinstance(error, OSError):
            return Fault(error.errno, error.strerror or str(error) or type(error).__name__)
        if said := OF_TENSORSTORE.search(str(error)):
            number = int(said[1])
            return Fault(number, os.strerror(number))
        error = error.__cause__ or error.__context__
    return None


def whole_checkpoints(folder: Path) -> list[int]:
    """The steps of those that were written to their end, upwards."""
    try:
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal() and path.is_dir())
    except OSError:
        return []


def unwritable(path: Path, fault: Fault, checkpoints: Path) -> UserError:
    """The error of a run that can't write `path`; `checkpoints` is the folder that it resumes from."""
    steps = whole_checkpoints(checkpoints)
    newest = f"goes on from checkpoint {steps[-1]}" if steps else "begins again: there is no checkpoint yet"
    return UserError(f"{path}: can't be written ({fault.text}); {remedy(fault.number)}, and the same command {newest}")


def remedy(number: int | None) -> str:
    return REMEDY.get(number or 0, "mend that")


@contextmanager
def writing(path: Path, checkpoints: Path) -> Iterator[None]:
    """What the operating system refuses inside becomes a UserError about `path`."""
    try:
        yield
    except OSError as error:
        found = fault(error)
        assert found is not None
        raise unwritable(path, found, checkpoints) from None


class Appended:
    """A file of a run that grows, by whole records; nothing of them waits in a buffer of the process.

    Raises:
        UserError: by every method where the operating system refuses.
    """

    def __init__(self, path: Path, checkpoints: Path) -> None:
        self.path, self.checkpoints = path, checkpoints
        with writing(path, checkpoints):
            path.parent.mkdir(exist_ok=True)
            self.file = path.open("ab", buffering=0)

    def append(self, record: bytes) -> None:
        with writing(self.path, self.checkpoints):
            while record:
                record = record[self.file.write(record) :]

    def sync(self) -> None:
        """Until all of it survives a crash of the machine."""
        with writing(self.path, self.checkpoints):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        with writing(self.path, self.checkpoints):
            self.file.close()
