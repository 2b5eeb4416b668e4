"""Objects in buckets, gs://bucket/path and s3://bucket/path, through tensorstore's drivers and their own credentials.

A bucket has no rename, append or lock, but an object is written as a whole or not at all, and can be replaced on the
condition that nobody else has done so before. Requests that fail with 429, 5xx, a reset or silence are repeated for
about a minute.
"""

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from mllm.errors import UserError
from mllm.store.names import is_plain

SCHEMES = {"gs": "gcs", "s3": "s3"}
"""tensorstore's driver of each scheme."""
RETRIES = {"max_retries": 8, "initial_delay": "500ms", "max_delay": "16s"}
SILENCE = {"TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "20", "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "30"}
"""Seconds after which a server that does not answer has failed; tensorstore itself would wait for ever."""
PART_BYTES = 2**25
"""The most bytes of a file in one request, so that a failed one is soon repeated and memory stays bounded."""
ABSENT = b"\2"
"""tensorstore's generation of an object that does not exist."""
CONTENT = ("NOT_FOUND", "OUT_OF_RANGE", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "DATA_LOSS")
"""tensorstore's errors about what an object holds; after all others the bucket itself has failed."""


class LeaseLost(UserError):
    """Another process holds the run, and writes what this one wanted to write."""

    def __init__(self, url: str) -> None:
        super().__init__(f"run_dir: {url} was taken by another process; wait for it, or give another folder")


def is_bucket(place: object) -> bool:
    """Whether a path of a configuration names something in a bucket."""
    return isinstance(place, str) and place.partition("://")[0] in SCHEMES and "://" in place


def status(error: BaseException | None) -> str:
    """The status of a tensorstore error, such as NOT_FOUND, which only the beginning of its text tells."""
    return str(error).partition(":")[0]


class Bucket:
    """The objects whose names begin with a URL's path; every method raises UserError when its retries are spent."""

    def __init__(self, url: str) -> None:
        """Opens nothing; UserError where the URL names no place in a bucket. It may be a stranger's."""
        scheme, _, rest = url.partition("://")
        rest = rest.strip("/")
        self.url = f"{scheme}://{rest}"
        if not is_plain(rest):  # copies of its objects are below a folder of that name
            raise self.no_place()
        name, _, path = rest.partition("/")
        self.spec = {"driver": SCHEMES[scheme], "bucket": name, "path": f"{path}/" if path else ""}
        if scheme == "s3" and "AWS_ENDPOINT_URL" in os.environ:  # which tensorstore does not read
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
            self.spec |= {"endpoint": os.environ["AWS_ENDPOINT_URL"], "aws_region": region}

    @cached_property
    def objects(self) -> Any:
        """tensorstore's KvStore; UserError where the URL names no bucket."""
        import tensorstore

        try:
            return tensorstore.KvStore.open(self.spec, context=self.context).result()
        except ValueError:
            raise self.no_place() from None

    def no_place(self) -> UserError:
        scheme = self.url.partition("://")[0]
        return UserError(f"{self.url}: is no place in a bucket: give {scheme}://bucket/path")

    @property
    def context(self) -> Any:
        """What tensorstore opens arrays with."""
        return make_context()

    def array_spec(self, name: str) -> dict[str, str]:
        """tensorstore's specification of a folder with an array's chunks."""
        return {**self.spec, "path": f"{self.spec['path']}{name}/"}

    def failure(self, error: BaseException, name: str, use: str) -> UserError:
        """What the user is told of a tensorstore error."""
        reason = re.sub(r"^[A-Z_]+: | \[[a-z_]+=.*", "", str(error).partition("\n")[0])
        way_out = "check the bucket and its credentials, and start again"
        return UserError(f"{self.url}/{name}: can't be {use} ({reason}); {way_out}")

    def result(self, future: Any, name: str, use: str) -> Any:
        """The result of a request; UserError where it failed."""
        try:
            return future.result()
        except ValueError as error:  # tensorstore has no errors of its own
            raise self.failure(error, name, use) from None

    def read(self, name: str) -> bytes | None:
        """An object's content; None where there is no such object."""
        return self.read_generation(name)[0]

    def read_generation(self, name: str) -> tuple[bytes | None, bytes]:
        """An object's content, None where there is no such object, and the generation that `seen` returns."""
        found = self.result(self.objects.read(name), name, "read")
        return found.value if found.state == "value" else None, found.stamp.generation

    def seen(self, name: str) -> bytes:
        """The generation of an object, `ABSENT` where there is none: what `replace` and `remove` take."""
        return self.result(self.objects.read(name, byte_range=slice(0, 0)), name, "read").stamp.generation

    def read_parts(self, name: str) -> Iterator[tuple[bytes, bytes]]:
        """An object's content in parts of at most `PART_BYTES`, in order, each with the object's generation.

        The store's clients tell no sizes: whether a part is whole is tried by its last byte. They refuse a range that
        ends behind the object's end, some only when all of it has come.
        """
        for first in itertools.count(step=PART_BYTES):
            end = first + PART_BYTES
            last = self.objects.read(name, byte_range=slice(end - 1, end))
            whole = status(last.exception()) != "OUT_OF_RANGE" and bool(self.result(last, name, "read").value)
            for part in (slice(first, end),) if whole else (slice(first, None), slice(0, 0)):
                future = self.objects.read(name, byte_range=part)
                if status(future.exception()) != "OUT_OF_RANGE":
                    break
            found = self.result(future, name, "read")
            yield found.value, found.stamp.generation
            if not whole:
                return

    def write(self, name: str, data: bytes) -> None:
        self.result(self.objects.write(name, data), name, "written")

    def replace(self, name: str, data: bytes, seen: bytes = ABSENT) -> bytes:
        """Write an object if it is still of the generation `seen`; returns its new one. LeaseLost if it is not."""
        stamp = self.result(self.objects.write(name, data, if_equal=seen), name, "written")
        if stamp.generation:
            return stamp.generation
        # A request whose answer was lost has been repeated, and then finds its own work.
        content, new = self.read_generation(name)
        if content != data:
            raise LeaseLost(self.url)
        return new

    def remove(self, name: str, seen: bytes) -> None:
        """Delete an object if it is still of the generation `seen`."""
        self.result(self.objects.write(name, None, if_equal=seen), name, "deleted")

    def rename(self, old: str, new: str, check: Callable[[], None]) -> None:
        """Copy an object, which must be small, and remove the old one, unless `check` raises or it has changed."""
        content, seen = self.read_generation(old)
        check()
        self.write(new, content or b"")
        self.remove(old, seen)

    def names(self, prefix: str = "") -> list[str]:
        """The names of all objects that begin with `prefix`, in order."""
        import tensorstore

        every = tensorstore.KvStore.KeyRange(prefix, prefix + "\U0010ffff")
        return sorted(name.decode() for name in self.result(self.objects.list(every), prefix, "listed"))

    def entries(self, folder: str = "") -> list[str]:
        """The names of the objects and folders just below a folder."""
        prefix = f"{folder}/" if folder else ""
        return sorted({name.removeprefix(prefix).partition("/")[0] for name in self.names(prefix)})

    def delete(self, names: Iterable[str]) -> None:
        # A few at a time: the requests of all stores stand in one line, and the lease's must not wait long.
        left = iter(names)
        while begun := [(name, self.objects.write(name, None)) for name in itertools.islice(left, 8)]:
            for name, future in begun:
                self.result(future, name, "deleted")

    def delete_folder(self, folder: str) -> None:
        self.delete(self.names(f"{folder}/"))


@cache
def make_context() -> Any:
    """tensorstore's Context, with the retries; buckets share connections and credentials through it."""
    for name, value in SILENCE.items():
        os.environ.setdefault(name, value)
    import tensorstore

    return tensorstore.Context({f"{driver}_request_retries": RETRIES for driver in SCHEMES.values()})


def local_place(url: str, root: str) -> Path:
    """The folder of this machine for what belongs to a URL: `root` in mllm's own in $XDG_CACHE_HOME or ~/.cache."""
    scheme, _, rest = url.rstrip("/").partition("://")
    return cache_folder() / root / f"{scheme}-{hashlib.sha256(url.encode()).hexdigest()[:8]}" / rest


def cache_folder() -> Path:
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")).absolute() / "mllm"
