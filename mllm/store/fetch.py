"""Objects of a bucket as files of this machine: models, data and other runs, which all other code reads from disk.

An object is fetched once, and again when its size or time says that it has changed. A file has its name only when it
is whole. The folders below `local_place` may be deleted whenever nothing uses them; each fetch removes folders that
nothing has used for `UNUSED_DAYS`, and the folders used longest ago while all have more than `MOST_BYTES`.
"""

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from etils import epath
from tqdm import tqdm

from mllm.errors import UserError
from mllm.store.files import below, bucket_path, cache_folder, failing, is_plain, local_place

AT_ONCE = 8
"""Objects that are read at a time."""
OBJECTS = "objects"
"""The folder of `local_place` for objects."""
PART_BYTES = 2**23
UNUSED_DAYS, MOST_BYTES = 30, 200 * 10**9
LOCK = ".lock"
TEMPLATES = "additional_chat_templates"
"""transformers' folder for the templates that a tokenizer has beside the default one."""


def fetch_files(source: str, key: str) -> list[Path]:
    """The object of a URL, or all that match a pattern, in the order of their names, as files.

    UserError, which names the setting `key`, is raised where there is none, or it can't be had.
    """
    url, _, pattern = source.rpartition("/")
    if "*" in url or "?" in url or "[" in url:
        raise UserError(f"{key}: {source}: a pattern is only for the last part of a name in a bucket")
    is_pattern = any(sign in pattern for sign in "*?[")
    return fetch(url, matching(url, [pattern], key) if is_pattern else [pattern], key)


def fetch_folder(url: str, patterns: Sequence[str], key: str) -> Path:
    """A folder with the objects just below a URL whose names match one of the patterns, and with a tokenizer's further
    templates; UserError as `fetch_files`."""
    wanted = matching(url, patterns, key)
    with naming(key, url):
        names = [f"{TEMPLATES}/{path.name}" for path in below(bucket_path(f"{url}/{TEMPLATES}"))]
    wanted += [name for name in names if is_plain(name) and any(map(Path(name).match, patterns))]
    folder = fetch(url, wanted, key)[0].parent
    for path in (*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*")):  # what has been removed from the bucket
        name = str(path.relative_to(folder))
        if name not in wanted and path.is_file() and path.name[0] != "." and any(map(path.match, patterns)):
            path.unlink()
    return folder


def matching(url: str, patterns: Sequence[str], key: str) -> list[str]:
    """The names of the objects just below a URL that match one of the patterns, in order; UserError if none does."""
    with naming(key, url):
        names = [path.name for path in below(bucket_path(url))]
    if found := sorted(name for name in names if is_plain(name) and any(map(Path(name).match, patterns))):
        return found
    raise UserError(f"{key}: {url}: nothing there is called {' or '.join(patterns)}; correct the URL")


def fetch(url: str, names: Sequence[str], key: str, root: str = OBJECTS) -> list[Path]:
    """Objects below a URL as files in `root`, one process of a machine at a time; UserError as `fetch_files`."""
    folder = local_place(url.rstrip("/"), root)
    with naming(key, url):
        sources = [bucket_path(f"{url}/{name}") for name in names]  # before a folder of such a name is made
        with locked(folder), ThreadPoolExecutor(AT_ONCE) as pool:
            prune((cache_folder() / root).iterdir())
            fetched = pool.map(fetch_object, sources, [folder / name for name in names])
            return list(tqdm(fetched, f"fetching {url}", len(names), unit="file", delay=1, disable=None))


def fetch_object(source: epath.Path, path: Path) -> Path:
    """The file of an object, at a path where an earlier version may be."""
    try:
        stat = source.stat()
    except FileNotFoundError:
        stat = None
    if stat is None or stat.is_directory:
        raise UserError(f"{source}: there is no such object: correct the URL")
    with suppress(OSError):
        if (path.stat().st_size, path.stat().st_mtime) == (stat.length, stat.mtime):
            return path
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    with source.open("rb") as content, unfinished.open("wb") as file:
        shutil.copyfileobj(content, file, PART_BYTES)
    if source.stat() != stat:
        raise UserError(f"{source}: has changed while it was read: start again")
    os.utime(unfinished, (stat.mtime, stat.mtime))  # which says what version of the object the file is
    return unfinished.replace(path)


def prune(folders: Iterable[Path]) -> None:
    """Remove the files in such folders as the module says, but no files in folders used within a day."""
    entries = list[tuple[float, int, list[Path]]]()
    for folder in folders:
        with suppress(OSError):  # another process may be removing them, too
            files = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
            used = max((file.st_mtime for file in files.values()), default=0.0)
            entries.append((used, sum(file.st_size for file in files.values()), [*files]))
    total = sum(size for _, size, _ in entries)
    for used, size, paths in sorted(entries):
        days = (time.time() - used) / 86400
        if days > UNUSED_DAYS or (days > 1 and total > MOST_BYTES):
            for path in paths:
                with suppress(OSError):
                    if path.name != LOCK:  # others may wait for the lock
                        path.unlink()
            total -= size


@contextmanager
def naming(key: str, url: str) -> Iterator[None]:
    """Let errors begin with the setting, and make errors of this machine's disk, or of the bucket, UserErrors."""
    try:
        with failing(f"{url}: can't be had"):
            yield
    except UserError as error:
        raise UserError(f"{key}: {error}") from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made, against other processes of this machine; the system releases it at their end."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:  # its time says when it was last used
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that has {folder}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def send(folder: Path, url: str, names: Sequence[str]) -> None:
    """Write files of a folder as objects below a URL, in order; raises what gcsfs raises."""
    for name in names:
        with (folder / name).open("rb") as source, (bucket_path(url) / name).open("wb") as target:
            shutil.copyfileobj(source, target, PART_BYTES)
