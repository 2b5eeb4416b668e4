"""Places in buckets, gs://bucket/path, as etils' paths: through gcsfs, with the credentials and retries that it has."""

import hashlib
import os
from pathlib import Path

from etils import epath

from mllm.errors import UserError, need
from mllm.store.names import is_plain

SCHEME = "gs://"


def is_bucket(place: object) -> bool:
    """Whether a path of a configuration names something in a bucket; UserError for a storage that isn't known."""
    if not isinstance(place, str) or "://" not in place or place.startswith(SCHEME):
        return isinstance(place, str) and place.startswith(SCHEME)
    way_out = "mount it as a file system, or copy the folder after the run"
    raise UserError(f"{place}: of buckets only {SCHEME} is known: {way_out}")


def bucket_path(url: str) -> epath.Path:
    """The path of a URL; UserError where it names no place in a bucket, or gcsfs is missing. It may be a stranger's."""
    rest = url.removeprefix(SCHEME).strip("/")
    if not is_plain(rest):  # copies of its objects are below a folder of that name
        raise UserError(f"{url}: is no place in a bucket: give {SCHEME}bucket/path")
    need("gcsfs", "gcs", SCHEME)
    return epath.Path(f"{SCHEME}{rest}")


def below(folder: epath.Path) -> list[epath.Path]:
    """The files and folders just below a folder; none where there is no folder. Raises where a disk or bucket fails.

    `is_dir` does not: it says of a bucket that refuses or fails that there is nothing.
    """
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def local_place(url: str, root: str) -> Path:
    """The folder of this machine for what belongs to a URL: `root` in mllm's own in $XDG_CACHE_HOME or ~/.cache."""
    scheme, _, rest = url.rstrip("/").partition("://")
    return cache_folder() / root / f"{scheme}-{hashlib.sha256(url.encode()).hexdigest()[:8]}" / rest


def cache_folder() -> Path:
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")).absolute() / "mllm"
