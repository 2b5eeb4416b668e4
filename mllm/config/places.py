"""Where the files and modules that a configuration names are: in its own folder, or in the current one."""

import glob
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FILES = ("data.source", "data.validation.source", "task.train", "task.test")
"""Settings whose value may be a file or a pattern of files."""
FOLDERS = ("model.source", "model.tokenizer", "task.path")
"""Settings whose value may be a folder."""
WORDS = ("task", "bytes")
"""Values of these settings that never name a file."""


MODULES: list[str] = []
"""The folders in which the modules that configurations name are looked for, after all that Python knows."""


def add_modules(folder: Path) -> None:
    """Add the folder of a configuration and the current one to `MODULES`."""
    for place in (str(folder.absolute()), os.getcwd()):
        if place not in MODULES:
            MODULES.append(place)


@contextmanager
def importable() -> Iterator[None]:
    """Let Python find the modules in `MODULES`, for as long as a user's code runs.

    It is not for longer: libraries try to import each other, and would take a folder `datasets` for the library.
    """
    added = [folder for folder in MODULES if folder not in sys.path]
    sys.path += added
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)


def locate(settings: dict[str, Any], folders: Sequence[Path]) -> None:
    """Replace each name of a file or folder in `settings` by its path in the first of `folders` that has it.

    What none has stays: a hub id, or a file that is missing.
    """
    hub = isinstance(settings.get("task"), dict) and settings["task"].get("name") == "hub"
    for key in (*FILES, *FOLDERS):
        *sections, name = key.split(".")
        values: Any = settings
        for section in sections:
            values = values.get(section) if isinstance(values, dict) else None
        if not isinstance(values, dict) or (hub and sections == ["task"]):  # there they are the names of splits
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
