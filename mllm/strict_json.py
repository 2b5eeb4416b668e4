"""Strict JSON for messages between processes: finite numbers, well-formed UTF-8, limited depth and size.

Python's json also accepts NaN and 1e999, lone surrogates, and lists so deep that writing them fails.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, NoReturn

DEEPEST = 50
"""The deepest nesting of lists and objects."""
LONGEST = 2**19
"""The most bytes of a text."""
TOO_DEEP = "it has too many levels"


def dump(value: Any) -> bytes:
    """The value as JSON; ValueError, in a line, where `load` would refuse it or JSON can't hold it."""
    try:
        data = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except TypeError as error:
        raise ValueError(f"JSON can't hold it: {error}") from None
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    check(value)
    if len(data) > LONGEST:
        raise ValueError(f"it takes {len(data):,} bytes as JSON, and the limit is {LONGEST:,}")
    return data


def load(data: bytes | str) -> Any:
    """The value of a JSON text, which the caller has bounded in size; ValueError where the text is not strict JSON."""
    try:
        value = json.loads(data, parse_constant=refuse)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    check(value)
    return value


def check(value: Any, levels: int = DEEPEST) -> None:
    """Raise ValueError for a number in a JSON value that isn't finite, half a character, and too many levels."""
    match value:
        case str():
            value.encode()  # UnicodeEncodeError is a ValueError
        case float():
            if not math.isfinite(value):
                refuse(str(value))
        case dict() | list() | tuple():
            if not levels:
                raise ValueError(TOO_DEEP)
            for item in [*value, *value.values()] if isinstance(value, dict) else value:
                check(item, levels - 1)


def refuse(constant: str) -> NoReturn:
    """Raise ValueError for a constant that Python would read as a number."""
    raise ValueError(f"{constant} is no finite number")


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these names and values; ValueError where a name stands twice, since its first value is lost."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name stands twice in an object")
    return value


def whole_characters(text: str) -> str:
    """The text with a question mark for each half character, which no UTF-8 can hold."""
    return text.encode(errors="replace").decode()
