"""Places in buckets, gs://bucket/path, as etils' paths: through gcsfs, with the credentials and retries that it has."""

import hashlib
import os
import re
from pathlib import Path

from etils import epath

from mllm.errors import UserError, need

SCHEME = "gs://"
PLAIN = re.compile(r"([^./\\][^/\\]*/)*[^./\\][^/\\]*")


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
