"""Files in a folder of a disk, with the methods of `Bucket`; and errors of a full, read-only or failing disk."""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from mllm.errors import UserError

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
MISSING = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
"""Errors that say what is on a disk; after all others the disk or the machine has failed."""
TENSORSTORE_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")
"""The operating system's error number in the text of tensorstore's errors, which are ValueErrors."""
UNFINISHED = ".tmp"
"""How the name of a file ends that is not whole yet."""


def find_fault(error: BaseException | None) -> OSError | None:
    """The operating system's error that `error` is, or was caused by; None if there is none."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        if found := TENSORSTORE_ERROR.search(str(error)):
            return OSError(int(found[1]), os.strerror(int(found[1])))
        error = error.__cause__ or error.__context__
    return None


class Folder:
    """The files below a folder; methods raise OSError where the system refuses."""

    context = None
    """tensorstore's own."""

    def __init__(self, path: Path) -> None:
        """Opens nothing."""
        self.path = path

    def array_spec(self, name: str) -> dict[str, str]:
        """tensorstore's specification of a folder with an array's chunks; its driver syncs each file and folder."""
        return {"driver": "file", "path": f"{(self.path / name).absolute()}/"}

    def failure(self, error: BaseException, name: str, use: str) -> UserError | None:
        """What the user is told of an error; None if no fault of the disk has caused it."""
        if (fault := find_fault(error)) is None:
            return None
        reason = fault.strerror or str(fault) or type(fault).__name__
        remedy = REMEDY.get(fault.errno or 0, "check the disk")
        return UserError(f"{self.path / name}: can't be {use} ({reason}); {remedy}")

    def read(self, name: str) -> bytes | None:
        """A file's content; None where there is no such file."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return (self.path / name).read_bytes()
        return None

    def write(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """Write a file as a whole or not at all; a `durable` one has survived a crash of the machine from then on."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + UNFINISHED)
        with unfinished.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)
        if durable:
            for folder in path.parents[: name.count("/") + 2]:  # they may be new, too
                sync(folder)

    def seen(self, name: str) -> bytes:
        """Nothing: the folder's lock keeps all others out, so that `replace` and `remove` have no condition."""
        return b""

    def replace(self, name: str, data: bytes, seen: bytes) -> None:
        self.write(name, data)

    def remove(self, name: str, seen: bytes) -> None:
        (self.path / name).unlink(missing_ok=True)

    def rename(self, old: str, new: str, check: Callable[[], None]) -> None:
        (self.path / old).rename(self.path / new)

    def entries(self, folder: str = "") -> list[str]:
        """The names of the files and folders just below a folder."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(self.path / folder))
        return []

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def delete_folder(self, folder: str) -> None:
        shutil.rmtree(self.path / folder, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file, or the list of files of a folder, survives a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
