"""Errors of a full, read-only or failing disk: one line that names the checkpoint from which the run resumes."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mllm.errors import UserError

REMEDY = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room, or have the quota raised",
    errno.EFBIG: "allow larger files there",
    errno.EACCES: "allow access there",
    errno.EPERM: "allow access there",
    errno.EROFS: "allow writing there",
}
TENSORSTORE_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")
"""The operating system's error number in the text of tensorstore's errors, which are ValueErrors."""


def find_fault(error: BaseException | None) -> OSError | None:
    """The operating system's error that `error` is, or was caused by; None if there is none."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        if found := TENSORSTORE_ERROR.search(str(error)):
            return OSError(int(found[1]), os.strerror(int(found[1])))
        error = error.__cause__ or error.__context__
    return None


def is_run(folder: Path) -> bool:
    """Whether a run has begun in the folder."""
    return (folder / "config.yaml").exists()


def saved_steps(checkpoints: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, ascending; UserError where it can't be read."""
    try:
        return sorted(int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal() and path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{checkpoints}: can't be read ({error.strerror}); {remedy(error.errno)}") from None


def write_error(path: Path, fault: OSError, checkpoints: Path) -> UserError:
    """The error of a run that can't write `path`; `checkpoints` is the folder from which it resumes."""
    try:
        steps = saved_steps(checkpoints)
        resumes = f"goes on from checkpoint {steps[-1]}" if steps else "begins again: there is no checkpoint yet"
    except UserError:
        resumes = "resumes"
    reason = fault.strerror or str(fault) or type(fault).__name__
    return UserError(f"{path}: can't be written ({reason}); {remedy(fault.errno)}, and the same command {resumes}")


def remedy(number: int | None) -> str:
    return REMEDY.get(number or 0, "mend that")


@contextmanager
def writing(path: Path, checkpoints: Path) -> Iterator[None]:
    """Turn an error of the operating system into a UserError about `path`."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error, checkpoints) from None


class LogFile:
    """A file that only grows, without a buffer here; every method raises UserError where the system refuses."""

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
        """Wait until all of the file survives a crash of the machine."""
        with writing(self.path, self.checkpoints):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        with writing(self.path, self.checkpoints):
            self.file.close()
