"""The file that --json names: looked at before the work begins, and written after it."""

import json
import os
from pathlib import Path
from typing import Any

from mllm.errors import UserError


def check(path: Path | None) -> None:
    """Raise UserError where no file can be written at `path`."""
    if path is None:
        return
    if not os.path.isdir(path.parent):
        raise UserError(f"--json: there is no folder {path.parent}")
    if os.path.isdir(path):
        raise UserError(f"--json: {path} is a folder; give a file")


def write(path: Path | None, content: dict[str, Any]) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json: {path} can't be written ({error.strerror})") from None
