"""Records of text data: lines and rows of files, and rows of a data set on the hub, each with its place.

Blank lines are no records, but count in the lines' numbers.
"""

import csv
import glob
import gzip
import hashlib
import io
import json
import logging
import os
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mllm.config import places
from mllm.errors import UserError, brief, need
from mllm.storage import fetch_files, is_bucket

T = TypeVar("T")
Record = dict[str, Any]

FORMATS = "a file of JSON lines (.jsonl, .jsonl.gz), .json, .csv or .parquet"
MAX_BAD_LINES = 10_000
"""Reading stops after this many bad lines."""
LISTED_FAULTS, LISTED_LINES = 5, 40
"""The number of kinds of faults that an error lists, and of lines of each fault."""
PARQUET_ROWS = 64
"""The rows of a parquet file that are read at a time."""


class BadRecord(UserError):
    """A record's fault, and the record's fields; the place is kept beside the error."""

    def __init__(self, message: str, fields: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.fields = fields


Records = Iterator[tuple[str, Record | BadRecord]]
"""(place, record or its fault); a place is `train.jsonl:17`."""


class Origin(NamedTuple):
    """The origin of records, and the setting that names it."""

    key: str
    source: str
    """A file or a pattern of files; or a hub id, if there is a split."""
    subset: str | None = None
    split: str | None = None

    def content(self) -> str:
        """A hash of the files, the subset and the split; UserError if a file is missing or can't be read."""
        if self.split is None:
            paths = file_paths(self.source, self.key)
        else:
            files = hub_split(self.source, self.subset, self.split, self.key).cache_files
            paths = [Path(file["filename"]) for file in files]
        digest = hashlib.sha256(f"{self.subset} {self.split} ".encode())
        for path in paths:
            with open_file(path, self.key, compressed=True) as file:
                digest.update(path.suffix.encode() + hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def records(self) -> Records:
        """All records; rows of a table come without the nulls that fill missing columns.

        Rows of a split are numbered from 0, lines and rows of files from 1; files come in the order of their names.
        UserError, which names the setting, is raised where a file or data set is missing or can't be read.
        """
        return read_records(self.rows(), parse)

    def rows(self) -> Iterator[tuple[str, bytes | Record]]:
        """Lines that are not blank, in bytes, or rows, each with its place."""
        if self.split is not None:
            rows: Iterable[Record] = hub_split(self.source, self.subset, self.split, self.key)
            for number, row in enumerate(rows):
                yield f"{self.source}[{self.split}]:{number}", without_nulls(row)
            return
        for path in file_paths(self.source, self.key):
            read = READERS.get(path.suffix, read_lines)
            for number, row in enumerate(read(path, self.key), start=1):
                if not isinstance(row, bytes) or row.strip():
                    yield f"{path}:{number}", row


def read_records(records: Iterable[tuple[str, Any]], read: Callable[[Any], T]) -> Iterator[tuple[str, T | BadRecord]]:
    """The result of `read` for each record, or the UserError that it raises, as a BadRecord."""
    for location, record in records:
        try:
            result = record if isinstance(record, BadRecord) else read(record)
        except UserError as error:
            fields = record if isinstance(record, dict) else ()
            result = BadRecord(str(error), [name for name in fields if isinstance(name, str)])
        yield location, result


def sound_records(records: Iterable[tuple[str, T | UserError]], key: str) -> Iterator[tuple[str, T]]:
    """The records that aren't bad, with their places.

    After the last line, or after `MAX_BAD_LINES` bad lines, one UserError lists all bad lines and names the setting
    `key`.
    """
    bad: list[tuple[str, UserError]] = []
    for location, record in records:
        if isinstance(record, UserError):
            bad.append((location, record))
            if len(bad) == MAX_BAD_LINES:
                break
        else:
            yield location, record
    if bad:
        raise bad_lines(bad, key)


def bad_lines(bad: list[tuple[str, UserError]], key: str) -> UserError:
    """The error for bad lines: each fault with the places of its lines, and the fields of the first bad line."""
    places = dict[str, list[str]]()
    for location, error in bad:
        places.setdefault(str(error), []).append(location)
    listed = [
        f"{fault} ({', '.join(shortened(numbers(lines), LISTED_LINES, 'more'))})" for fault, lines in places.items()
    ]
    fields = ", ".join(first.fields) if isinstance(first := bad[0][1], BadRecord) else ""
    faults = "; ".join(shortened(listed, LISTED_FAULTS, "other faults"))
    return UserError(f"{key}: {faults}" + f"; the fields there are {fields}" * bool(fields))


def numbers(places: Sequence[str]) -> list[str]:
    """The places, as `a.jsonl:2`; only the line's number if the place before has the same file, as `7`."""
    split = [place.rpartition(":") for place in places]
    return [
        number if number.isdecimal() and before and before[0] == file else place
        for place, (file, _, number), before in zip(places, split, [None, *split], strict=False)
    ]


def shortened(items: Sequence[str], most: int, what: str) -> list[str]:
    """At most `most` of the items, and the number of the remaining `what`."""
    more = len(items) - most
    return [*items[:most], *([f"and {more} {what}"] if more > 0 else [])]


def file_paths(source: str, key: str) -> list[Path]:
    """The file of that name, or the files that match it, in order; UserError where no file matches."""
    if is_bucket(source):
        return fetch_files(source, key)
    if os.path.lexists(source):
        return [Path(source)]
    paths = sorted(path for path in glob.glob(source, recursive=True) if not os.path.isdir(path))
    if not paths:
        raise UserError(f"{key}: {places.missing(source)}: give {FORMATS}")
    return [Path(path) for path in paths]


@contextmanager
def open_file(path: Path, key: str, damaged: type[Exception] = csv.Error, compressed: bool = False) -> Iterator[Any]:
    """The file, open and decompressed (`.gz`) unless it is to be `compressed`.

    UserError is raised if the file can't be opened or read, or if the body of the `with` statement raises `damaged`.
    The error names the setting `key`.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe may never return
        raise UserError(f"{key}: {path} is no regular file: give {FORMATS}")
    try:
        with gzip.open(path) if path.suffix == ".gz" and not compressed else path.open("rb") as file:
            yield file
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, damaged) as error:
        reason = getattr(error, "strerror", None) or brief(error)
        raise UserError(f"{key}: {path} can't be read ({reason}): give {FORMATS}") from None


def read_parquet(path: Path, key: str) -> Iterator[Record]:
    """A parquet file's rows; UserError, which names the setting `key`, where it can't be read."""
    load = load_dataset(f"{key}: {path}")
    with open_file(path, key, Exception):  # datasets and Arrow have many kinds
        files = glob.escape(str(path.absolute()))
        rows = load("parquet", data_files=files, split="train", streaming=True, batch_size=PARQUET_ROWS)
        yield from map(without_nulls, rows)


def without_nulls(value: Any) -> Any:
    """The value without the nulls in its objects: Arrow adds a null for a field that only other rows have."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def load_dataset(subject: str) -> Callable[..., Any]:
    """Hugging Face's `datasets.load_dataset`; UserError, which names the `subject`, if `datasets` isn't installed."""
    need("datasets", "hub", subject)
    import datasets

    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # its exceptions become our one-line error
    return datasets.load_dataset


def read_csv(path: Path, key: str) -> Iterator[bytes | Record]:
    """The rows of a CSV file with a header row, as texts. UserError if the file can't be read."""
    csv.field_size_limit(2**31)
    with open_file(path, key) as file:
        rows = csv.reader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
        header = next(rows, [])
        yield b""  # the names stand in row 1
        for row in rows:
            yield dict(zip_longest(header, row)) if row else b""


def read_lines(path: Path, key: str) -> Iterator[bytes]:
    """The lines of a file. UserError as by `open_file`."""
    with open_file(path, key) as file:
        yield from file


def read_json(path: Path, key: str) -> Iterator[bytes | Record]:
    """The items of a file with one JSON list, or the lines of a file with JSON lines."""
    with open_file(path, key, ValueError) as file:
        content = file.read()
        rows = json.loads(content) if content.removeprefix(BOM_UTF8).lstrip().startswith(b"[") else content.splitlines()
    yield from (row if isinstance(row, bytes | dict) else json.dumps(row).encode() for row in rows)


READERS: dict[str, Callable[[Path, str], Iterator[Any]]] = {
    ".parquet": read_parquet,
    ".csv": read_csv,
    ".json": read_json,
}
"""The reader of files with this ending; `read_lines` reads other files."""


def parse(row: bytes | Record) -> Record:
    """The JSON object in a line, or a row without its nulls; UserError where a line holds no object."""
    if isinstance(row, dict):
        if None in row:
            raise UserError("it has more values than the first line has names")
        return {name: value for name, value in row.items() if value is not None}
    try:
        record = json.loads(row.decode("utf-8-sig"))
    except json.JSONDecodeError as error:  # its own text counts lines within the line
        raise UserError(f"not JSON: {error.msg}, at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON in UTF-8 ({error})") from None
    if not isinstance(record, dict):
        raise UserError(f"expected a JSON object, got {type(record).__name__}")
    return record


def hub_split(source: str, subset: str | None, split: str, key: str) -> Any:
    """The split of a data set on the hub; UserError, which names the setting `key`, if it can't be loaded."""
    subject = f"{key}: {places.missing(source) if key in places.FILES else source}"  # the id of a task is no path
    load = load_dataset(f"{subject}; a hub id")
    try:
        return load(source, subset, split=split)
    except Exception as error:  # many kinds: no network, no such data set, a damaged cache
        raise UserError(f"{subject}; it can't be had from the hub ({brief(error)}): give a local path") from None
