"""Records of text data: lines and rows of files, rows of a data set on the hub, and the chats in them.

Each record comes with its place (`train.jsonl:17`). Blank lines are no records, but count in the lines' numbers.
"""

import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any, TypeVar

from mllm.bucket import is_bucket
from mllm.errors import UserError, brief
from mllm.fetch import fetch_files

T = TypeVar("T")
Record = dict[str, Any]
Records = Iterator[tuple[str, Record | UserError]]
Placed = tuple[str, bytes | Record]
"""A record with its place; that of a file of JSON lines may not be parsed yet."""
Wanted = Iterator[bool]
"""Says of one block of records after the other whether this process reads it."""

FORMATS = "a file of JSON lines (.jsonl, .jsonl.gz) or .parquet"
LISTED_PLACES = 20
"""How many bad lines an error lists."""

ROLES = {"system": "system", "user": "user", "assistant": "assistant", "human": "user", "gpt": "assistant"}
"""The role that a name means; the last two are ShareGPT's."""

ROWS_BYTES, MOST_ROWS = 2**20, 1024
"""About the uncompressed bytes of a block of a parquet file, and the limit to its rows."""

LONGEST_LINE = 2**23
"""The limit to a line's bytes: about a million tokens, each of which takes a hundred bytes for a moment."""


def sound_records(
    records: Iterable[tuple[str, Record | UserError]],
    key: str,
    read: Callable[[str, Record], T] = lambda place, record: (place, record),  # type: ignore[assignment,return-value]
) -> Iterator[T]:
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
    """The records of a file or of all files that a pattern matches, in the order of their names.

    UserError, which names the setting `key`, is raised where there is no such file, or one can't be read.
    """
    for path in file_paths(source, key):
        if path.suffix == ".parquet":
            yield from chain.from_iterable(parquet_blocks(path, key, repeat(True)))  # type: ignore[misc]
        else:
            yield from json_lines(path, key)


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


def check_regular(path: Path, key: str) -> None:
    """Raise UserError for what exists and is no file."""
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe may never return
        raise UserError(f"{key}: {path} is no regular file: give {FORMATS}")


@contextmanager
def open_parquet(path: Path, key: str) -> Iterator[Any]:
    """The parquet file, open; UserError, which names the setting `key`, where it can't be read."""
    check_regular(path, key)
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(f"{key}: {path} needs the package pyarrow: pip install -e '.[parquet]'") from None
    try:
        with ParquetFile(path) as file:
            yield file
    except (ArrowException, OSError) as error:
        raise UserError(f"{key}: {path} can't be read ({brief(error)}): give {FORMATS}") from None


def parquet_blocks(path: Path, key: str, wanted: Wanted) -> Iterator[list[Placed]]:
    """The rows of the wanted blocks of a parquet file: its row groups, or parts of large ones. The first is number 1.

    They lack what is null in them. A row group of which no block is wanted is not read.
    """
    first = 1
    with open_parquet(path, key) as file:
        for group in range(file.num_row_groups):
            rows, nbytes = file.metadata.row_group(group).num_rows, file.metadata.row_group(group).total_byte_size
            step = max(1, min(rows, MOST_ROWS, rows * ROWS_BYTES // max(1, nbytes)))
            mine = [next(wanted) for _ in range(0, rows, step)]
            for start, own, batch in (
                zip(*(range(0, rows, step), mine, file.iter_batches(step, [group])), strict=True) if any(mine) else ()
            ):
                if own:
                    numbered = enumerate(batch.to_pylist(), start=first + start)
                    yield [(f"{path}:{number}", without_nulls(row)) for number, row in numbered]
            first += rows


def without_nulls(row: Record) -> Record:
    """A row of a table, in which every column has a value or null, as a record that lacks the null ones."""
    return {name: value for name, value in row.items() if value is not None}


@contextmanager
def open_lines(path: Path, key: str, compressed: bool = False) -> Iterator[Any]:
    """The file, open and decompressed (`.gz`) unless it is to be `compressed`.

    UserError, which names the setting `key`, is raised where it can't be read.
    """
    check_regular(path, key)
    try:
        with gzip.open(path) if path.suffix == ".gz" and not compressed else path.open("rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or brief(error)
        raise UserError(f"{key}: {path} can't be read ({reason}): give {FORMATS}") from None


def json_lines(path: Path, key: str) -> Records:
    """The records of a file of JSON lines; UserError, which names the setting `key`, where it can't be read."""
    with open_lines(path, key) as file:
        for number, line in enumerate(lines(file), start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                yield place, parse(place, line)
            except UserError as error:
                yield place, error


def lines(file: io.BufferedIOBase) -> Iterator[bytes]:
    """The lines of a file; a line beyond `LONGEST_LINE` is cut, one byte after the limit."""
    while line := file.readline(LONGEST_LINE + 1):
        rest = line
        while not rest.endswith(b"\n") and (rest := file.readline(LONGEST_LINE)):
            pass
        yield line


def parse(place: str, line: bytes) -> Record:
    """The JSON object in a line; UserError where there is none."""
    if len(line) > LONGEST_LINE:
        raise UserError(f"{place}: longer than {LONGEST_LINE >> 20} MiB: is it a file of JSON lines?")
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON in UTF-8 ({error})") from None
    if not isinstance(record, dict):
        raise UserError(f"{place}: expected a JSON object, got {type(record).__name__}")
    return record


def hub_rows(source: str, subset: str | None, split: str, key: str) -> Iterator[tuple[str, Record]]:
    """The rows of a split of a hub's data set, without what is null in them; UserError as by `hub_split`."""
    for number, row in enumerate(hub_split(source, subset, split, key)):
        yield f"{source}[{split}][{number}]", without_nulls(row)


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


def text(place: str, record: Record, key: str) -> str:
    """`record[key]`; UserError unless it is a string that isn't blank."""
    if key not in record:
        raise UserError(f"{place}: {key} is missing")
    value = record[key]
    if not isinstance(value, str):
        raise UserError(f"{place}: {key} must be a string, got {type(value).__name__}")
    if not value.strip():
        raise UserError(f"{place}: {key} is empty")
    if half := re.search("[\ud800-\udfff]", value):
        raise UserError(f"{place}: {key} holds {half.group()!r}, which is half a character")
    return value


def messages_of(place: str, record: Record, needs_answer: bool = True) -> list[dict[str, str]]:
    """The chat in a record: `messages`, `conversations` (ShareGPT's), or `question` and `answer`; else UserError.

    If it `needs_answer`, the assistant must have a message, else there may be none, nor an `answer`.
    """
    if "messages" in record or "conversations" in record:
        chat = turns(place, record, "messages" if "messages" in record else "conversations")
        if needs_answer and all(message["role"] != "assistant" for message in chat):
            raise UserError(f"{place}: no message is the assistant's, so there is nothing to learn")
        return chat
    if "question" not in record:
        raise UserError(f"{place}: neither messages nor question{' and answer' * needs_answer} are there")
    chat = [{"role": "user", "content": text(place, record, "question")}]
    if needs_answer or "answer" in record:
        chat.append({"role": "assistant", "content": text(place, record, "answer")})
    return chat


def turns(place: str, record: Record, key: str) -> list[dict[str, str]]:
    """The messages in `record[key]`, objects with role and content, or with ShareGPT's from and value."""
    messages = record[key]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError(f"{place}: {key} must be a list of objects with role and content")
    chat = []
    for message in messages:
        names = ("from", "value") if "from" in message and "role" not in message else ("role", "content")
        role, content = (text(place, message, name) for name in names)
        if (known := ROLES.get(role)) is None:
            raise UserError(f"{place}: role {role!r} is none of system, user and assistant")
        chat.append({"role": known, "content": content})
    return chat
