"""A run's folder belongs to one configuration, and to one process at a time that writes it.

A file system without locks leaves it to the user that no two runs write the same folder.
"""

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TextIO

from mllm.config.load import dump, read
from mllm.config.schema import Config
from mllm.errors import UserError
from mllm.parallel.processes import is_writer
from mllm.run.changes import check_changes
from mllm.run.source_run import pin_step
from mllm.run.storage import is_run, remedy, saved_steps

UNFINISHED_CONFIG, LOCK = "config.yaml.tmp", "lock"
logger = logging.getLogger(__name__)


@contextmanager
def claim(folder: Path, config: Config, change: bool = False) -> Iterator[Config]:
    """Check the folder as `check` does and hold it as `lock` does; of several processes only the first holds it.

    A new run's `model.step` becomes a number, from which its reference policy can be had again.
    """
    check(folder, config, change)
    with lock(folder) if is_writer() else nullcontext():
        config = check(folder, config, change)  # another process may have held it until now
        yield config if is_run(folder) else pin_step(config)


def check(folder: Path, config: Config, change: bool = False) -> Config:
    """The configuration with which the folder's run goes on, or a new one begins: with the record of its changes.

    `change` permits settings to differ as `check_changes` says. UserError is raised if `folder` holds a run of
    another configuration, or something that is no run.
    """
    path = folder / "config.yaml"
    with accessible(folder, "read"):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if not existing.is_dir():
            raise UserError(f"run_dir: {existing} is a file; give a folder")
        if not is_run(folder):
            # A run that was killed before it began leaves these two.
            if folder.is_dir() and {*os.listdir(folder)} - {UNFINISHED_CONFIG, LOCK}:
                raise UserError(f"run_dir: {folder} holds other files and no config.yaml; give an empty or new folder")
            if change:
                raise UserError(f"--change: {folder} holds no run; leave it out to begin one")
            return config.model_copy(update={"changes": ()})
    newest = max(saved_steps(folder / "checkpoints"), default=0)
    return check_changes(folder, read(path), config, newest, change)


def write(folder: Path, config: Config) -> None:
    """Make the folder and its config.yaml, in the first of several processes; UserError where it can't be written."""
    if not is_writer():
        return
    unfinished = folder / UNFINISHED_CONFIG
    with accessible(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(dump(config), encoding="utf-8")
        unfinished.replace(folder / "config.yaml")


@contextmanager
def accessible(folder: Path, use: str) -> Iterator[None]:
    """Turn an error of the operating system into a UserError: the folder can't be `use` (read or written)."""
    try:
        yield
    except OSError as error:
        way_out = f"{remedy(error.errno)}, or give another folder"
        raise UserError(f"run_dir: {folder} can't be {use} ({error.strerror}); {way_out}") from None


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the folder, which is made if it is missing, for this process: no other one writes it meanwhile.

    The operating system releases the lock when the process ends, however it ends. A folder in which no run has
    begun is left as it was found. UserError is raised if another process holds it, or it can't be written.
    """
    with accessible(folder, "written"):
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        file = open_locked(folder)
    try:
        yield
    finally:
        # Not the file itself: a process that has opened it already would lock a file that is no longer there.
        with suppress(OSError):
            file.truncate(0)
        if not is_run(folder):
            with suppress(OSError):
                (folder / LOCK).unlink()
                for path in made:
                    path.rmdir()
        file.close()


def open_locked(folder: Path) -> TextIO:
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
        file.close()  # another process removed it before this one had locked it
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file
