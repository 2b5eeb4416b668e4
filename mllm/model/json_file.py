"""JSON files of a model's folder, which may be a stranger's: read in one piece, or refused in one line."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mllm.errors import UserError

LARGEST = 2**26
"""Bytes. The index of the largest models takes a hundredth of that."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(f"{path}: larger than {LARGEST >> 20} MiB; a model's settings are not")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
