"""The tables that tools/tune.py writes and the head's kernels read: entries of JSON, one for each subject.

An entry says what it is for, by the values of some keys, and `by` what it was found: `time`, or the compiler's
`listing`. Left out: what an entry holds else.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mllm.errors import UserError

Entry = dict[str, Any]


def subject(entry: Entry, keys: Sequence[str]) -> tuple[Any, ...]:
    return tuple(entry.get(key) for key in keys)


def merged(noted: Sequence[Entry], new: Sequence[Entry], keys: Sequence[str]) -> list[Entry]:
    """New entries replace those of the same subject, but a rank by the listing no measured one."""
    result = {subject(entry, keys): entry for entry in noted}
    for entry in new:
        before = result.get(subject(entry, keys), {})
        if entry["by"] == "time" or before.get("by") != "time":
            result[subject(entry, keys)] = entry
    return sorted(result.values(), key=lambda entry: tuple(map(str, subject(entry, keys))))


def read(path: Path, keys: Sequence[str]) -> list[Entry]:
    """Nothing, where there is no file.

    Raises:
        UserError: it is no table.
    """
    try:
        noted = json.loads(path.read_text(encoding="utf-8")) if os.path.lexists(path) else []
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"--table: {path} is not JSON: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--table: {path} can't be read: {error}") from None
    if not (isinstance(noted, list) and all(isinstance(entry, dict) and _is_noted(entry, keys) for entry in noted)):
        raise UserError(f"--table: {path} holds no list of tilings, as the tables in kernels/lm_head do")
    return noted


def _is_noted(entry: Entry, keys: Sequence[str]) -> bool:
    return "by" in entry and all(isinstance(part, str | int | None) for part in subject(entry, keys))


def write(path: Path, entries: Sequence[Entry]) -> None:
    """An entry a line; as a whole, or not at all."""
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_text(f"[\n{lines}\n]\n")
        draft.replace(path)
    except OSError as error:
        raise UserError(f"--table: {error}") from None
