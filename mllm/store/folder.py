"""Writes files as a whole, and explains errors of a full, read-only or failing disk or bucket."""

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mllm.errors import UserError, brief

REMEDY = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room, or have the quota raised",
    errno.EFBIG: "allow larger files there",
    errno.EACCES: "allow access there",
    errno.EPERM: "allow access there",
    errno.EROFS: "allow writing there",
    errno.EMFILE: "allow more open files (ulimit -n)",
    errno.ENOMEM: "give the machine more memory",
}
TENSORSTORE_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")
"""The operating system's error number in the text of tensorstore's errors, which are ValueErrors."""
UNFINISHED = ".tmp"
"""How the name of a file ends that is not whole yet."""


def find_fault(error: BaseException | None) -> OSError | None:
    """The operating system's error that `error` is, or was caused by; None if there is none."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        if match := TENSORSTORE_ERROR.search(str(error)):
            return OSError(int(match[1]), os.strerror(int(match[1])))
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def failing(place: object, use: str, resumption: Callable[[], str] = str) -> Iterator[None]:
    """Turn the system's errors into a UserError: `place` can't be `use`, as in `read`; `resumption()` ends the line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (fault := find_fault(error)) is None:
            raise
        reason = fault.strerror or brief(fault)
        raise UserError(
            f"{place}: can't be {use} ({reason}); {REMEDY.get(fault.errno or 0, 'check it')}{resumption()}"
        ) from None


def write_file(path: Path, data: bytes) -> None:
    """Write a file as a whole or not at all; it has survived a crash of the machine from then on. Raises OSError."""
    unfinished = path.with_name(path.name + UNFINISHED)
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the list of files of a folder, survives a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
