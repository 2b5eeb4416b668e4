"""Records of text data: JSON lines from a file, rows of a data set on the hub, and the chats in them.

Each record comes with its place (`train.jsonl:17`). Blank lines are no records, but count in the lines' numbers.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from mllm.errors import UserError, brief

Record = dict[str, Any]
Records = Iterator[tuple[str, Record | UserError]]

LONGEST_LINE = 2**23
"""The limit to a line's bytes: about a million tokens, each of which takes a hundred bytes for a moment."""


def json_lines(path: Path, key: str) -> Records:
    """The records of a file; UserError, which names the setting `key`, where it is missing or can't be read."""
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe may never return
        raise UserError(f"{key}: {path} is no regular file: give a file of JSON lines")
    try:
        with path.open("rb") as file:
            for number, line in enumerate(lines(file), start=1):
                if not line.strip():
                    continue
                place = f"{path}:{number}"
                try:
                    yield place, parse(place, line)
                except UserError as error:
                    yield place, error
    except OSError as error:
        raise UserError(f"{key}: {path} can't be read ({error.strerror}): give a file of JSON lines") from None


def lines(file: IO[bytes]) -> Iterator[bytes]:
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


def hub_rows(source: str, subset: str | None, split: str, key: str) -> Records:
    """The rows of a split of a hub's data set; UserError, which names the setting `key`, where it can't be had."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{key}: {source} is no file here, and a hub id needs the package datasets: "
            "give a local path, or pip install -e '.[hub]'"
        ) from None
    try:
        rows = datasets.load_dataset(source, subset, split=split)
    except Exception as error:  # many kinds: no network, no such data set, a damaged cache
        raise UserError(f"{key}: {source} can't be had from the hub ({brief(error)}): give a local path") from None
    for number, row in enumerate(rows):
        yield f"{source}[{split}][{number}]", row


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
    """The chat in a record, its `messages` or its `question` and `answer`; UserError where it is not as expected.

    If it `needs_answer`, the assistant must have a message, else there may be none, nor an `answer`.
    """
    if "messages" not in record:
        if "question" not in record:
            raise UserError(f"{place}: neither messages nor question{' and answer' * needs_answer} are there")
        chat = [{"role": "user", "content": text(place, record, "question")}]
        if needs_answer or "answer" in record:
            chat.append({"role": "assistant", "content": text(place, record, "answer")})
        return chat
    messages = record["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError(f"{place}: messages must be a list of objects with role and content")
    chat = [{key: text(place, message, key) for key in ("role", "content")} for message in messages]
    roles = [message["role"] for message in chat]
    if unknown := [role for role in roles if role not in ("system", "user", "assistant")]:
        raise UserError(f"{place}: role {unknown[0]!r} is none of system, user and assistant")
    if needs_answer and "assistant" not in roles:
        raise UserError(f"{place}: no message is the assistant's, so there is nothing to learn")
    return chat
