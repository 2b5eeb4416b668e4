"""Finds the files and modules that a configuration names: in its own folder, or in the current folder."""

import difflib
import glob
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FILES = ("data.source", "data.mix", "data.validation.source", "task.train", "task.test")
"""Settings that may name a file or a pattern of files."""
FOLDERS = ("model.source", "model.tokenizer", "model.lora.source", "task.path", "teacher.source")
"""Settings that may name a folder."""
PLACES = {*FILES, *FOLDERS, "data.mix.source"} - {"data.mix"}
"""The keys of settings that name a file or a folder."""
WORDS = ("task", "bytes")
"""Values of these settings that never name a file."""
MODULES: list[str] = []
"""The folders that are searched for a configuration's modules, after Python's own path."""


def add_modules(folder: Path) -> None:
    """Add a configuration's folder and the current folder to `MODULES`."""
    for path in (str(folder.absolute()), os.getcwd()):
        if path not in MODULES:
            MODULES.append(path)


@contextmanager
def importable() -> Iterator[None]:
    """Let Python import from `MODULES` while a user's code runs.

    Not for longer: libraries try to import each other, and would take a folder `datasets` for the library.
    """
    added = [folder for folder in MODULES if folder not in sys.path]
    sys.path += added
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)


def locate(settings: dict[str, Any], folders: Sequence[Path]) -> None:
    """Replace each name of a file or folder in `settings` by its absolute path in the first of `folders` that has it.

    A name that no folder has is left as it is: a hub id, or a missing file.
    """
    task = settings.get("task")
    hub = isinstance(task, dict) and task.get("name") == "hub"  # its train and test are names of splits
    for key in (*FILES, *FOLDERS):
        *sections, name = key.split(".")
        values: Any = settings
        for section in sections:
            values = values.get(section) if isinstance(values, dict) else None
        value = values.get(name) if isinstance(values, dict) else None
        if value is None or (hub and sections == ["task"]):
            continue
        there = os.path.isdir if key in FOLDERS else is_file
        values[name] = (
            [place(item, folders, there) for item in value] if isinstance(value, list) else place(value, folders, there)
        )


def place(value: Any, folders: Sequence[Path], there: Callable[[str], bool]) -> Any:
    """The absolute path of a file name, or the mapping with its `source` made absolute; any other value unchanged."""
    if isinstance(value, dict):
        return {**value, "source": place(value["source"], folders, there)} if "source" in value else value
    if not isinstance(value, str) or value in ("", *WORDS):
        return value
    paths = [str(folder.absolute() / os.path.expanduser(value)) for folder in folders]
    return next(filter(there, paths), value)


def missing(name: str, kind: str = "file") -> str:
    """The error message for a missing file, with the searched folders and the most similar name in them."""
    folders = dict.fromkeys(os.path.dirname(os.path.join(folder, name)) for folder in MODULES or [os.getcwd()])
    paths = [path for folder in folders for path in glob.glob(f"{glob.escape(folder)}/*")]
    names = [os.path.basename(path) for path in paths if os.path.isdir(path) == (kind == "folder")]
    stems = {os.path.splitext(name)[0]: name for name in names}  # equal endings make no two names alike
    close = difflib.get_close_matches(os.path.splitext(os.path.basename(name))[0], stems, n=1, cutoff=0.7)
    hint = f" (did you mean {stems[close[0]]}?)" if close else ""
    return f"{name}: no such {kind} in {' or '.join(folders)}{hint}"


def is_file(path: str) -> bool:
    """Whether a file with this path or pattern exists."""
    return os.path.isfile(path) or any(map(os.path.isfile, glob.iglob(path, recursive=True)))
