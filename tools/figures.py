"""The files that options such as --json name: checked before the work begins, written as a whole."""

import json
import os
from pathlib import Path
from typing import Any

from mllm.errors import UserError


def check(path: Path | None, option: str = "--json") -> None:
    """Raise UserError where no file can be written at `path`."""
    if path is None:
        return
    if not os.path.isdir(path.parent):
        raise UserError(f"{option}: there is no folder {path.parent}")
    if os.path.isdir(path):
        raise UserError(f"{option}: {path} is a folder; give a file")


def write(path: Path | None, content: Any, option: str = "--json") -> None:
    """Write JSON, in place of what was there; a reader sees the old file or the new one."""
    if path is None:
        return
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise UserError(f"{option}: {path} can't be written ({error.strerror})") from None
