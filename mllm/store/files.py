"""Places in buckets and on disks: their names, and what their errors mean.

Buckets, gs://bucket/path, are read through etils and gcsfs, with the credentials and retries that it has.
"""

import errno
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etils import epath

from mllm.errors import UserError, brief, need

SCHEME = "gs://"
PLAIN = re.compile(r"([^./\\][^/\\]*/)*[^./\\][^/\\]*")
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


# Names


def is_plain(name: str) -> bool:
    """Whether a name with slashes, which may be a stranger's, leads to a file below its folder and prints as it is.

    Absolute paths, backslashes, control characters and parts that begin with a dot, as `..` does, are refused.
    """
    return bool(PLAIN.fullmatch(name)) and name.isprintable()


def is_bucket(place: object) -> bool:
    """Whether a path of a configuration names something in a bucket; UserError for a storage that isn't known."""
    if not isinstance(place, str) or "://" not in place:
        return False
    if not place.startswith(SCHEME):
        way_out = "mount it as a file system, or copy the folder after the run"
        raise UserError(f"{place}: of buckets only {SCHEME} is known: {way_out}")
    return True


def bucket_path(url: str) -> epath.Path:
    """The path of a URL, which may be a stranger's; UserError if it names no place in a bucket, or gcsfs is missing."""
    path = url.removeprefix(SCHEME).strip("/")
    if not is_plain(path):  # copies of its objects are below a folder of that name
        raise UserError(f"{url}: is no place in a bucket: give {SCHEME}bucket/path")
    need("gcsfs", "gcs", SCHEME)
    return epath.Path(f"{SCHEME}{path}")


def below(folder: epath.Path) -> list[epath.Path]:
    """The files and folders just below a folder; none where there is no folder. Raises where a disk or bucket fails.

    `is_dir` raises nothing: for it, a bucket that refuses or fails is empty.
    """
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def local_place(url: str, root: str) -> Path:
    """This machine's folder for the files of a URL: in `root`, in mllm's folder in $XDG_CACHE_HOME or ~/.cache."""
    scheme, _, path = url.rstrip("/").partition("://")
    return cache_folder() / root / f"{scheme}-{hashlib.sha256(url.encode()).hexdigest()[:8]}" / path


def cache_folder() -> Path:
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")).absolute() / "mllm"


# Errors


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
