"""Paths on disks and in buckets (gs://bucket/path): names, errors, and local copies of a bucket's objects.

All other code reads models, data and runs from a disk. An object is copied to a local folder once, and again when its
size or time changes. A file gets its name only when it is complete. The copies may be deleted when nothing uses them.
Buckets are read through etils and gcsfs, with gcsfs' credentials and retries.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from etils import epath
from tqdm import tqdm

from mllm.errors import TemporaryError, UserError, brief, need

SCHEME = "gs://"
PLAIN = re.compile(r"([^./\\][^/\\]*/)*[^./\\][^/\\]*")
CLIENTS = ("gcsfs", "aiohttp", "fsspec", "google")
"""The packages of a bucket's client; their errors have types of their own."""
NO_ANSWER = (
    *("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "UNAUTHENTICATED"),
    *("ABORTED", "INTERNAL"),
)
"""The beginnings of tensorstore's ValueErrors about a bucket that does not answer."""
AT_ONCE = 8
"""Objects that are read at a time."""
OBJECTS = "objects"
"""The folder of `local_place` for objects."""
TEMPLATES = "additional_chat_templates"
"""transformers' folder for a tokenizer's further templates."""


# Names


def is_plain(name: str) -> bool:
    """Whether an untrusted relative path stays below its folder and is printable.

    Absolute paths, backslashes, control characters and parts that begin with a dot, such as `..`, are refused.
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
    """The path of an untrusted URL; UserError if it is no path in a bucket, or gcsfs is missing."""
    path = url.removeprefix(SCHEME).strip("/")
    if not is_plain(path):  # its objects are copied below a folder of this name
        raise UserError(f"{url}: is no place in a bucket: give {SCHEME}bucket/path")
    need("gcsfs", "gcs", SCHEME)
    return epath.Path(f"{SCHEME}{path}")


def below(folder: epath.Path) -> list[epath.Path]:
    """The files and folders in a folder; empty if the folder is missing. Raises if the disk or bucket fails.

    `is_dir` would not raise: it reports a failing bucket as empty.
    """
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def local_place(url: str, root: str) -> Path:
    """This machine's folder for the files of a URL: in `root`, in mllm's folder in $XDG_CACHE_HOME or ~/.cache."""
    scheme, _, path = url.rstrip("/").partition("://")
    return cache_folder() / root / f"{scheme}-{hashlib.sha256(url.rstrip('/').encode()).hexdigest()[:8]}" / path


def cache_folder() -> Path:
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")).absolute() / "mllm"


# Errors


@contextmanager
def failing(subject: str, end: str = "") -> Iterator[None]:
    """Turn errors of a disk or bucket into a UserError: `subject` (such as `a.txt: can't be read`), reason, and `end`.

    If a bucket does not answer, TemporaryError is raised.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not is_of_storage(error):
            raise
        reason = getattr(error, "strerror", None) or brief(error)
        if isinstance(error, ValueError):  # tensorstore's: where it failed, ": ", why, and details in brackets
            reason = reason.partition(" [")[0].rpartition(": ")[2]
        # gcsfs says that something is forbidden or missing by a plain OSError.
        answered = isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError)
        kind = UserError if answered or SCHEME not in subject else TemporaryError
        raise kind(f"{subject} ({reason}){end}") from None


def is_of_storage(error: BaseException) -> bool:
    """Whether an error is a failure of a disk or a bucket, and not of the stored contents."""
    of_client = type(error).__module__.partition(".")[0] in CLIENTS
    return of_client or isinstance(error, OSError) or (type(error) is ValueError and str(error).startswith(NO_ANSWER))


# Copies


def fetch_files(source: str, key: str) -> list[Path]:
    """The object of a URL, or all objects that match a pattern, as files in the order of their names.

    UserError, which names the setting `key`, is raised if there is no such object, or it can't be read.
    """
    url, _, pattern = source.rpartition("/")
    if any(sign in url for sign in "*?["):
        raise UserError(f"{key}: {source}: a pattern is only for the last part of a name in a bucket")
    return fetch(url, [pattern], key)


def fetch_folder(url: str, patterns: Sequence[str], key: str, root: str = OBJECTS) -> Path:
    """A folder with exactly the objects that `fetch` finds below a URL."""
    fetched, folder = fetch(url, patterns, key, root), local_place(url, root)
    for path in (*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*")):  # files that were removed from the bucket
        if path not in fetched and path.is_file() and any(map(path.match, patterns)):
            path.unlink()
    return folder


def fetch(url: str, patterns: Sequence[str], key: str, root: str = OBJECTS) -> list[Path]:
    """The objects directly below a URL that match a pattern, and a tokenizer's further templates. They become files
    below `root`, in order of name. UserError is raised as by `fetch_files`."""
    folder, wanted = local_place(url, root), dict[Path, epath.Path]()
    with naming(key), failing(f"{url}: can't be had"):
        for part in ("", f"/{TEMPLATES}"):
            for path in below(bucket_path(url + part)):
                if is_plain(path.name) and any(map(Path(path.name).match, patterns)):
                    wanted[folder / part[1:] / path.name] = path
        with ThreadPoolExecutor(AT_ONCE) as pool:
            copies = pool.map(fetch_object, wanted.values(), wanted)
            bar = tqdm(copies, f"fetching {url}", len(wanted), unit="file", delay=1, disable=None)
            if fetched := sorted(path for path in bar if path is not None):
                return fetched
    raise UserError(f"{key}: {url}: nothing there is called {' or '.join(patterns)}; correct the URL")


def fetch_object(source: epath.Path, path: Path) -> Path | None:
    """Copy an object to `path`, over an earlier version; None if the object is a folder."""
    stat = source.stat()
    if stat.is_directory:
        return None
    with suppress(OSError):
        if (path.stat().st_size, path.stat().st_mtime) == (stat.length, stat.mtime):
            return path
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with source.open("rb") as content, unfinished.open("wb") as file:
        shutil.copyfileobj(content, file, 2**23)
    os.utime(unfinished, (stat.mtime, stat.mtime))  # the time says which version of the object the file is
    return unfinished.replace(path)


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Let errors begin with a setting."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{key}: {error}") from None


def send(folder: Path, url: str, names: Sequence[str]) -> None:
    """Write files of a folder as objects below a URL, in order; raises gcsfs' errors."""
    for name in names:
        with (folder / name).open("rb") as source, (bucket_path(url) / name).open("wb") as target:
            shutil.copyfileobj(source, target, 2**23)
