"""JSON files in a model's folder, which may be a stranger's: each is read completely, or refused in one line."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mllm.errors import UserError

LARGEST = 2**26


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; UserError where there is no such file, or something else in it."""
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
