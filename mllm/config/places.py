"""Where the files and modules that a configuration names are: in its own folder, or in the current one."""

import glob
import os.path
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILES = ("data.source", "data.validation", "task.train", "task.test")
"""Settings that name a file or a pattern of files, or something else than a file."""
FOLDERS = ("model.source", "model.tokenizer", "task.path")
"""Settings that name a folder, or something else than a folder."""
WORDS = ("task", "bytes")
"""Values of these settings that never name a file."""


def add_modules(folder: Path) -> None:
    """Let modules be imported from the configuration's folder and the current one, after all that Python knows."""
    for place in (folder.absolute(), Path.cwd()):
        if str(place) not in sys.path:
            sys.path.append(str(place))


def locate(settings: dict[str, Any], folders: Sequence[Path]) -> None:
    """Replace each name of a file or folder in `settings` by its path in the first of `folders` that has it.

    What none has stays: a hub id, or a file that is missing.
    """
    hub = isinstance(settings.get("task"), dict) and settings["task"].get("name") == "hub"
    for key in (*FILES, *FOLDERS):
        section, name = key.split(".")
        values = settings.get(section)
        if not isinstance(values, dict) or (hub and section == "task"):  # there they are the names of splits
            continue
        value = values.get(name)
        if not isinstance(value, str) or not value or value in WORDS:
            continue
        paths = [str(folder / value) for folder in folders]
        values[name] = next((path for path in paths if is_there(path, key in FOLDERS)), value)


def is_there(path: str, folder: bool) -> bool:
    """Whether there is such a folder, or else a file of that name or pattern."""
    if folder:
        return os.path.isdir(path)
    return os.path.isfile(path) or any(map(os.path.isfile, glob.iglob(path, recursive=True)))
