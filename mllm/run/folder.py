"""A run's folder belongs to one configuration, and to one process at a time that writes it.

What may differ when the same command resumes a run, and what may not. Left out: folders on file systems that know no
locks; there it's up to whoever starts a run that no other writes the same.
"""

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from mllm.config.load import dump, read
from mllm.config.schema import Config
from mllm.errors import UserError
from mllm.run.storage import remedy

HOW = {"run_dir", "mesh", "micro_batch_size", "head", "checkpoint", "log"}
LIMITS = {"optimizer.max_skipped", "task.max_failed_groups"}
"""Settings of how a run is carried out and when it gives up, not of what it computes: they may change when it
resumes."""

PARTIAL = "config.yaml.tmp"
LOCK = "lock"
BEGINNINGS = {PARTIAL, LOCK}
"""All that a run leaves that was killed while it began."""

logger = logging.getLogger(__name__)


def check(folder: Path, config: Config) -> None:
    """Raise UserError if `folder` holds a run of another configuration, or something that is no run."""
    path = folder / "config.yaml"
    with accessible(folder, "read"):
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir():
            raise UserError(f"run_dir: {there} is a file; give a folder")
        if not is_run(folder):
            if folder.is_dir() and {path.name for path in folder.iterdir()} - BEGINNINGS:
                raise UserError(f"run_dir: {folder} holds other files and no config.yaml; give an empty or new folder")
            return
    for key, old, new in differences(read(path), config.model_dump(mode="json")):
        free = key.split(".")[0] in HOW or key in LIMITS
        if not free and not (key == "steps" and extends(config, old)):
            raise UserError(
                f"{key}: {folder} belongs to a run with {old!r}, not {new!r}; give another run_dir, or the old value"
            )


def is_run(folder: Path) -> bool:
    """Whether a run has begun there."""
    return (folder / "config.yaml").exists()


def write(folder: Path, config: Config) -> None:
    """Make the folder and its config.yaml, the resolved configuration; UserError where that can't be done."""
    partial = folder / PARTIAL
    with accessible(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(dump(config), encoding="utf-8")
        partial.replace(folder / "config.yaml")


@contextmanager
def accessible(folder: Path, use: str) -> Iterator[None]:
    """What the operating system refuses inside becomes a UserError."""
    try:
        yield
    except OSError as error:
        way = f"{remedy(error.errno)}, or give another folder"
        raise UserError(f"run_dir: {folder} can't be {use} ({error.strerror}); {way}") from None


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the folder, which is made where it's missing, for this process: nobody else writes it meanwhile.

    The operating system holds the lock, and lets it go when the process ends, however it ends. A folder in which no run
    has begun is left as it was found. Of several processes of one run only the first may ask.

    Raises:
        UserError: another process holds it, or it can't be written.
    """
    with accessible(folder, "written"):
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        file = locked(folder)
    try:
        yield
    finally:
        # Not the file itself: whoever has opened it already would lock what is no longer there.
        with suppress(OSError):
            file.truncate(0)
        if not is_run(folder):
            with suppress(OSError):
                (folder / LOCK).unlink()
                for path in made:
                    path.rmdir()
        file.close()


def locked(folder: Path) -> TextIO:
    """The folder's lock file, open and locked, with this process's name in it."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise UserError(f"run_dir: {folder} is in use by {holder}; wait for it, or give another folder") from None
        except OSError as error:
            logger.warning("%s can't be locked (%s): let no other run write it", folder, error.strerror)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), (folder / LOCK).stat()):
                break
        file.close()  # another process removed it before this one had it
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def extends(config: Config, steps: Any) -> bool:
    """Whether a run may go on past its `steps`: with a constant learning rate the steps so far are the same."""
    return config.optimizer.schedule == "constant" and isinstance(steps, int) and config.steps > steps


def differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The settings in which two configurations differ, with dotted keys."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new
