"""Writes files as a whole, and explains errors of a disk or bucket that is full, refuses or fails."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mllm.errors import UserError, brief

REMEDY = {
    errno.ENOSPC: "make room",
    errno.EACCES: "allow access there",
    errno.EROFS: "allow writing there",
    errno.EMFILE: "allow more open files (ulimit -n)",
    None: "check the bucket and its credentials",
}
"""What mends an error, by its number; errors of a bucket have none."""
CLIENTS = ("gcsfs", "aiohttp", "google", "fsspec")
"""The packages of a bucket's client whose errors are kinds of their own. Tensorstore's are ValueErrors."""
STATUS = re.compile(
    r"UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED|ABORTED|INTERNAL"
)
"""How tensorstore's errors begin that say nothing of what a bucket holds."""
SYSTEM = re.compile(r"\[os_error_code='(\d+)'\]")
"""The operating system's error number in the text of tensorstore's errors."""
UNFINISHED = ".tmp"
"""How the name of a file ends that is not whole yet."""


def find_fault(error: BaseException | None) -> BaseException | None:
    """The error of the operating system or a bucket that `error` is, or was caused by; None if there is none."""
    while error is not None:
        if match := SYSTEM.search(str(error)):
            return OSError(int(match[1]), os.strerror(int(match[1])))
        of_tensorstore = type(error) is ValueError and STATUS.match(str(error))
        if isinstance(error, OSError) or of_tensorstore or type(error).__module__.partition(".")[0] in CLIENTS:
            return error
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def failing(subject: str, end: str = "") -> Iterator[None]:
    """Turn errors of a disk or bucket into a UserError: `subject`, such as `a.txt: can't be read`, why, and `end`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (fault := find_fault(error)) is None:
            raise
        reason = getattr(fault, "strerror", None) or brief(fault)
        remedy = REMEDY.get(getattr(fault, "errno", None), "check it")
        raise UserError(f"{subject} ({reason}); {remedy}{end}") from None


def write_file(path: Path, data: bytes) -> None:
    """Write a file as a whole or not at all; it has survived a crash of the machine from then on. Raises OSError."""
    unfinished = path.with_name(path.name + UNFINISHED)
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
