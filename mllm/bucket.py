"""Objects in buckets, gs://bucket/path and s3://bucket/path, through tensorstore's drivers and their own credentials.

A bucket has no rename, append or lock. What stands in for them: an object is written as a whole or not at all; a file
that grows is a row of parts, each named by its offset; and an object can be replaced on the condition that nobody else
has done so before. Requests that fail with 429, 5xx, a reset or silence are repeated for about a minute.
"""

import hashlib
import os
import re
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mllm.errors import UserError

SCHEMES = {"gs": "gcs", "s3": "s3"}
"""tensorstore's driver of each scheme."""
RETRIES = {"max_retries": 8, "initial_delay": "500ms", "max_delay": "16s"}
SILENCE = {"TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "20", "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "30"}
"""Seconds after which a server that does not answer has failed; tensorstore itself would wait for ever."""
RUNS = "runs"
"""The folder of `local_place` for runs."""
PART_BYTES = 2**25
"""The most bytes of a file in one object, so that a failed request is soon repeated and memory stays bounded."""
AT_ONCE = 8
"""Requests at a time when a whole file or folder is copied."""


@dataclass(frozen=True)
class Part:
    """A piece of a file that is an object of its own."""

    offset: int
    size: int
    crc32: int

    @classmethod
    def of(cls, offset: int, data: bytes) -> "Part":
        return cls(offset, len(data), zlib.crc32(data))


def is_bucket(place: object) -> bool:
    """Whether a path of a configuration names something in a bucket."""
    return isinstance(place, str) and place.partition("://")[0] in SCHEMES and "://" in place


def part_name(name: str, offset: int) -> str:
    """The object that holds a file's bytes from `offset` on; the names sort as the offsets do."""
    return f"{name}.{offset:015}"


def parts_of(names: Iterable[str], name: str) -> list[int]:
    """The offsets of a file's parts among objects, ascending."""
    pattern = re.compile(re.escape(name) + r"\.(\d{15})")
    return sorted(int(found[1]) for other in names if (found := pattern.fullmatch(other)))


class Bucket:
    """The objects whose names begin with a URL's path; every method raises UserError when its retries are spent."""

    def __init__(self, url: str) -> None:
        """Opens nothing."""
        scheme, _, rest = url.partition("://")
        rest = rest.strip("/")
        self.url = f"{scheme}://{rest}"
        name, _, path = rest.partition("/")
        self.driver = SCHEMES[scheme]
        self.spec = {"driver": self.driver, "bucket": name, "path": f"{path}/" if path else ""}
        if self.driver == "s3" and "AWS_ENDPOINT_URL" in os.environ:  # which tensorstore does not read
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
            self.spec |= {"endpoint": os.environ["AWS_ENDPOINT_URL"], "aws_region": region}

    @property
    def store(self) -> Any:
        with suppress(ValueError):
            if self.spec["bucket"]:
                return open_store(tuple(self.spec.items()), tuple(RETRIES.items()))
        scheme = self.url.partition("://")[0]
        raise UserError(f"{self.url}: is no place in a bucket: give {scheme}://bucket/path")

    def finish(self, future: Any, name: str, use: str) -> Any:
        """The result of a request; UserError where it failed."""
        try:
            return future.result()
        except ValueError as error:  # tensorstore has no errors of its own
            reason = re.sub(r"^[A-Z_]+: | \[[a-z_]+=.*", "", str(error).splitlines()[0])
            raise UserError(
                f"{self.url}/{name}: can't be {use} ({reason}); check the bucket and its credentials, and start again"
            ) from None

    def read(self, name: str) -> bytes | None:
        """An object's content; None where there is no such object."""
        return self.read_generation(name)[0]

    def read_generation(self, name: str) -> tuple[bytes | None, bytes]:
        """An object's content, None where there is no such object, and what `replace` takes as its generation."""
        found = self.finish(self.store.read(name), name, "read")
        return found.value if found.state == "value" else None, found.stamp.generation

    def generation(self, name: str) -> bytes:
        """What differs whenever an object has been written anew; empty where there is no such object."""
        found = self.finish(self.store.read(name, byte_range=slice(0, 0)), name, "read")
        return found.stamp.generation if found.state == "value" else b""

    def pieces(self, name: str) -> int:
        """The number of pieces of `PART_BYTES` in an object, the last of which may be shorter; at least 1.

        The store's clients tell no sizes: whether there is a byte at the beginning of a piece is tried instead.
        """

        def ends_before(piece: int) -> bool:
            first = piece * PART_BYTES
            future = self.store.read(name, byte_range=slice(first, first + 1))
            if str(future.exception()).startswith("OUT_OF_RANGE"):
                return True
            return not self.finish(future, name, "read").value

        most = 1
        while not ends_before(most):
            most *= 2
        return bisect_left(range(most), True, lo=most // 2 + 1, key=ends_before)

    def read_piece(self, name: str, piece: int, last: bool) -> tuple[bytes, bytes]:
        """A piece of an object, and the object's generation."""
        end = None if last else (piece + 1) * PART_BYTES
        found = self.finish(self.store.read(name, byte_range=slice(piece * PART_BYTES, end)), name, "read")
        return found.value, found.stamp.generation

    def write(self, name: str, data: bytes) -> None:
        self.finish(self.store.write(name, data), name, "written")

    def replace(self, name: str, data: bytes, generation: bytes) -> bytes | None:
        """Write an object if it is still of this generation; returns its new one, None if another process was first."""
        stamp = self.finish(self.store.write(name, data, if_equal=generation), name, "written")
        return stamp.generation or None

    def names(self, prefix: str = "") -> list[str]:
        """The names of all objects that begin with `prefix`, in order."""
        last = prefix + "\U0010ffff"
        found = self.finish(self.store.list(key_range(prefix, last)), prefix, "listed")
        return sorted(name.decode() for name in found)

    def delete(self, names: Iterable[str]) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda name: self.finish(self.store.write(name, None), name, "deleted"), names))

    def send_file(self, path: Path, name: str, start: int = 0) -> list[Part]:
        """Write a local file's bytes from `start` on as parts of the file `name`, and return them."""
        return self.send_files({name: path}, start)[name]

    def send_files(self, files: dict[str, Path], start: int = 0) -> dict[str, list[Part]]:
        """Write local files as the parts of files of these names, several at a time, and return the parts."""

        def send(piece: tuple[str, int]) -> Part:
            name, offset = piece
            with files[name].open("rb") as file:
                file.seek(offset)
                data = file.read(min(PART_BYTES, sizes[name] - offset))
            self.write(part_name(name, offset), data)
            return Part.of(offset, data)

        sizes = {name: path.stat().st_size for name, path in files.items()}
        pieces = [(name, at) for name, size in sizes.items() for at in range(start, size, PART_BYTES)]
        sent: dict[str, list[Part]] = {name: [] for name in files}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for (name, _), part in zip(pieces, pool.map(send, pieces), strict=True):
                sent[name].append(part)
        return sent

    def fetch_files(self, files: dict[str, tuple[Path, list[Part]]], bad: Callable[[str], Exception]) -> None:
        """Read files of these names from their parts; raises what `bad` makes of the name of one that has changed."""

        def fetch(piece: tuple[str, Part]) -> None:
            name, part = piece
            with files[name][0].open("r+b") as file:
                file.seek(part.offset)
                if Part.of(part.offset, file.read(part.size)) == part:  # it has been read before
                    return
                found = self.read(part_name(name, part.offset))
                if found is None or Part.of(part.offset, found) != part:
                    raise bad(part_name(name, part.offset))
                file.seek(part.offset)
                file.write(found)

        for path, _ in files.values():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        pieces = [(name, part) for name, (_, parts) in files.items() for part in parts]
        if len(pieces) == 1:  # a checkpoint's chunk, in a thread of its own already
            fetch(pieces[0])
            return
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(fetch, pieces))


@cache
def open_store(spec: tuple[tuple[str, str], ...], retries: tuple[tuple[str, object], ...]) -> Any:
    for name, value in SILENCE.items():
        os.environ.setdefault(name, value)
    import tensorstore

    settings = dict(spec)
    context = {f"{settings['driver']}_request_retries": dict(retries)}
    return tensorstore.KvStore.open({**settings, "context": context}).result()


def key_range(first: str, last: str) -> Any:
    import tensorstore

    return tensorstore.KvStore.KeyRange(first, last)


def local_place(url: str, root: str) -> Path:
    """The folder of this machine for what belongs to a URL: `root` in mllm's own in $XDG_CACHE_HOME or ~/.cache."""
    scheme, _, rest = url.rstrip("/").partition("://")
    return cache_folder() / root / f"{scheme}-{hashlib.sha256(url.encode()).hexdigest()[:8]}" / rest


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "mllm"


def stands_for_bucket(folder: Path) -> bool:
    """Whether a folder is the local one of a run in a bucket, which only one process sees."""
    return cache_folder() / RUNS in folder.parents
