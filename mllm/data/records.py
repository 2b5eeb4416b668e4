"""Records of text data: lines and rows of files, and rows of a data set on the hub, each with its place.

Several processes share the work by blocks of records: each reads all of the files, which is fast, and parses and
tokenizes its own blocks, which is slow. Blank lines are no records, but count in the lines' numbers.
"""

import glob
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mllm.config.data import names_files
from mllm.errors import UserError, brief
from mllm.store.bucket import is_bucket
from mllm.store.fetch import fetch_files

T = TypeVar("T")
Record = dict[str, Any]
Records = Iterator[tuple[str, Record | UserError]]
"""Records with their places, `train.jsonl:17`, or what is wrong with them."""

FORMATS = "a file of JSON lines (.jsonl, .jsonl.gz) or .parquet"
LISTED_PLACES = 20
"""How many bad lines an error lists."""
BLOCK_BYTES, BLOCK_ROWS = 2**16, 64
"""About the bytes of a block of lines, and the rows of a block of a table."""
LONGEST_LINE = 2**23
"""The limit to a line's bytes: about a million tokens, each of which takes a hundred bytes for a moment."""


class Block(NamedTuple):
    """Records that follow each other in a file or a data set, and that one process parses."""

    source: str
    first: int
    """The number of the first line or row."""
    rows: Any
    """Lines in bytes, or rows: a list, or pyarrow's RecordBatch."""

    def records(self) -> Records:
        """The records; rows lack what is null in them, where every column of a table has a value or null."""
        rows = self.rows if isinstance(self.rows, list) else self.rows.to_pylist()
        for number, row in enumerate(rows, self.first):
            place = f"{self.source}:{number}"
            if not isinstance(row, bytes):
                yield place, {name: value for name, value in row.items() if value is not None}
            elif row.strip():
                yield place, parse(place, row)


class Content(NamedTuple):
    """What is in some files."""

    digest: str
    lines: int
    """The number of line ends; 0 where lines are no records."""


class Origin(NamedTuple):
    """Where records come from, and the setting that says so."""

    key: str
    source: str
    subset: str | None = None
    split: str = "train"

    def is_files(self) -> bool:
        """Whether files are meant, and no hub id; UserError where it is a folder."""
        if os.path.isdir(self.source):
            raise UserError(f"{self.key}: {self.source} is a folder: give {FORMATS}, or a hub id")
        return names_files(self.source) or os.path.exists(self.source)

    def content(self) -> Content:
        """What is in the files, and what is chosen of them; UserError where they can't be had or read."""
        if self.is_files():
            return content_of(file_paths(self.source, self.key), self.key)
        files = hub_split(self.source, self.subset, self.split, self.key).cache_files
        found = content_of([Path(file["filename"]) for file in files], self.key)
        return Content(f"{self.subset} {self.split} {found.digest}", 0)

    def blocks(self) -> Iterator[Block]:
        """All blocks; UserError where they can't be had or read."""
        if self.is_files():
            return file_blocks(self.source, self.key)
        return hub_blocks(self.source, self.subset, self.split, self.key)


def content_of(paths: list[Path], key: str) -> Content:
    """The content of files; UserError, which names the setting `key`, where one can't be read."""
    digest, lines = hashlib.sha256(), 0
    for path in paths:
        kind = path.suffix if path.suffix in (".gz", ".parquet") else ""  # the same bytes, read in another way
        found = hashlib.sha256(kind.encode())
        with open_file(path, key, compressed=True) as file:
            while piece := file.read(2**20):
                found.update(piece)
                lines += 0 if kind else piece.count(b"\n")
        digest.update(found.digest())
    return Content(digest.hexdigest(), lines)


def sound_records(records: Records, key: str, read: Callable[[str, Record], T]) -> Iterator[T]:
    """`read(place, record)` for each record, without those that are bad or that `read` raises a UserError for.

    After the last one all bad lines are raised as one UserError, which names the setting `key` and lists their places.
    """
    bad: list[tuple[str, UserError]] = []
    for place, record in records:
        try:
            if isinstance(record, UserError):
                raise record
            result = read(place, record)
        except UserError as error:
            bad.append((place, error))
            continue
        yield result
    if bad:
        raise bad_lines(bad, key)


def bad_lines(bad: list[tuple[str, UserError]], key: str) -> UserError:
    """The error of one or more bad lines, each with its place."""
    (_, first), *more = bad
    if not more:
        return first
    places = ", ".join(place for place, _ in bad[:LISTED_PLACES])
    left = f" and {len(bad) - LISTED_PLACES} more" if len(bad) > LISTED_PLACES else ""
    return UserError(f"{key}: {len(bad)} lines are bad ({places}{left}), the first: {first}")


def file_records(source: str, key: str) -> Records:
    """The records of a file or of all files that a pattern matches; UserError as by `file_blocks`."""
    return chain.from_iterable(block.records() for block in file_blocks(source, key))


def file_blocks(source: str, key: str) -> Iterator[Block]:
    """The blocks of a file or of all files that a pattern matches, in the order of their names.

    The first line or row is number 1. UserError, which names the setting `key`, is raised where there is no such file,
    or one can't be read.
    """
    for path in file_paths(source, key):
        first = 1
        for rows in row_blocks(path, key) if path.suffix == ".parquet" else line_blocks(path, key):
            yield Block(str(path), first, rows)
            first += len(rows)


def file_paths(source: str, key: str) -> list[Path]:
    """The file of that name, or the files that match it, in order; UserError where none does."""
    if is_bucket(source):
        return fetch_files(source, key)
    if os.path.lexists(source) or not glob.has_magic(source):
        return [Path(source)]
    paths = sorted(path for path in glob.glob(source, recursive=True) if not os.path.isdir(path))
    if not paths:
        raise UserError(f"{key}: no file matches {source}: give {FORMATS}")
    return [Path(path) for path in paths]


@contextmanager
def open_file(path: Path, key: str, compressed: bool = False) -> Iterator[Any]:
    """The file, open and decompressed (`.gz`) unless it is to be `compressed`.

    UserError, which names the setting `key`, is raised where it can't be read.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe may never return
        raise UserError(f"{key}: {path} is no regular file: give {FORMATS}")
    try:
        with gzip.open(path) if path.suffix == ".gz" and not compressed else path.open("rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or brief(error)
        raise UserError(f"{key}: {path} can't be read ({reason}): give {FORMATS}") from None


def row_blocks(path: Path, key: str) -> Iterator[Any]:
    """A parquet file's rows in RecordBatches; UserError, which names the setting `key`, where it can't be read."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(f"{key}: {path} needs the package pyarrow: pip install -e '.[parquet]'") from None
    try:
        with open_file(path, key), ParquetFile(path) as table:
            yield from table.iter_batches(BLOCK_ROWS)
    except ArrowException as error:
        raise UserError(f"{key}: {path} can't be read ({brief(error)}): give {FORMATS}") from None


def line_blocks(path: Path, key: str) -> Iterator[list[bytes]]:
    """The lines of a file; one beyond `LONGEST_LINE` is cut, one byte after the limit. UserError as by `open_file`."""
    block, size = list[bytes](), 0
    with open_file(path, key) as file:
        while line := file.readline(LONGEST_LINE + 1):
            rest = line
            while not rest.endswith(b"\n") and (rest := file.readline(LONGEST_LINE)):
                pass
            block.append(line)
            size += len(line)
            if size >= BLOCK_BYTES:
                yield block
                block, size = [], 0
    if block:
        yield block


def parse(place: str, line: bytes) -> Record | UserError:
    """The JSON object in a line, or what is wrong with it."""
    if len(line) > LONGEST_LINE:
        return UserError(f"{place}: longer than {LONGEST_LINE >> 20} MiB: is it a file of JSON lines?")
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return UserError(f"{place}: not JSON in UTF-8 ({error})")
    if not isinstance(record, dict):
        return UserError(f"{place}: expected a JSON object, got {type(record).__name__}")
    return record


def hub_records(source: str, subset: str | None, split: str, key: str) -> Records:
    """The rows of a split of a hub's data set; UserError as by `hub_split`."""
    return chain.from_iterable(block.records() for block in hub_blocks(source, subset, split, key))


def hub_blocks(source: str, subset: str | None, split: str, key: str) -> Iterator[Block]:
    """The blocks of a split of a hub's data set, whose first row is number 0; UserError as by `hub_split`."""
    rows, first = iter(hub_split(source, subset, split, key)), 0
    while block := list(islice(rows, BLOCK_ROWS)):
        yield Block(f"{source}[{split}]", first, block)
        first += len(block)


def hub_split(source: str, subset: str | None, split: str, key: str) -> Any:
    """The split of a hub's data set; UserError, which names the setting `key`, where it can't be had."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{key}: {source} is no file here, and a hub id needs the package datasets: "
            "give a local path, or pip install -e '.[hub]'"
        ) from None
    try:
        return datasets.load_dataset(source, subset, split=split)
    except Exception as error:  # many kinds: no network, no such data set, a damaged cache
        raise UserError(f"{key}: {source} can't be had from the hub ({brief(error)}): give a local path") from None
