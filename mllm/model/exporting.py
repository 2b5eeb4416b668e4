"""Where an export is written: a folder of a disk, replaced as a whole or not at all, or one of a bucket."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import SafetensorError

from mllm.bucket import Bucket, cache_folder, is_bucket
from mllm.errors import UserError
from mllm.progress import transfer_bar

EXPORTED = re.compile(
    r"config\.json|generation_config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt"
    r"|chat_template\.jinja|adapter_config\.json|adapter_model\.safetensors"
)
"""The files of an export, the tokenizer's included: all that may be replaced."""
LAST = ("config.json", "adapter_config.json")
"""The file without which a folder holds no model, and no adapters."""


@contextmanager
def replacing(place: str | Path) -> Iterator[Path]:
    """A new folder, which is renamed to `place` when the block has ended; one that is there is replaced as a whole.

    If the block is cut off, an earlier export stays as it was; in a bucket it does so until the new one is sent.
    UserError is raised if the folder holds files that no export wrote, or can't be written.
    """
    if is_bucket(place):
        with replacing_in_bucket(str(place)) as unfinished:
            yield unfinished
        return
    folder = Path(place).expanduser().resolve()
    unfinished, previous = (folder.with_name(f".{folder.name}.{state}") for state in ("unfinished", "previous"))
    try:
        restore(folder, previous)
        refuse_foreign_files(folder)
        for leftover in (unfinished, previous):
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        if folder.exists():
            folder.rename(previous)
        unfinished.rename(folder)
        if previous.exists():
            shutil.rmtree(previous)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: can't be written: {error}") from None
    finally:
        restore(folder, previous)
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def replacing_in_bucket(url: str) -> Iterator[Path]:
    """A new folder of this machine, whose files become objects when the block has ended.

    An earlier export is removed first, and the file without which an export is none is written last. UserError is
    raised as by `replacing`.
    """
    bucket = Bucket(url)
    refuse_foreign_files(url)
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="export_", dir=cache_folder()) as folder:
            yield Path(folder)
            files = sorted(Path(folder).iterdir(), key=lambda path: (path.name in LAST, path.name))
            bucket.delete(bucket.names())
            with transfer_bar(f"sending to {url}", sum(path.stat().st_size for path in files)) as bar:
                for path in files:
                    bucket.write(path.name, path.read_bytes())
                    bar.update(path.stat().st_size)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{url}: can't be written: {error}") from None


def refuse_foreign_files(place: str | Path) -> None:
    """Raise UserError where a folder holds files that no export wrote, which replacing it would lose."""
    if is_bucket(place):
        names = Bucket(str(place)).names()
    elif os.path.exists(place) and not os.path.isdir(place):
        raise UserError(f"{place}: is a file; choose another folder for the export")
    else:
        names = [entry.name + "/" * entry.is_dir() for entry in os.scandir(place)] if os.path.isdir(place) else []
    if foreign := [name for name in names if name and not EXPORTED.fullmatch(name)]:
        raise UserError(f"{place}/{min(foreign)}: no export wrote this, and it would be lost; choose another folder")


def restore(folder: Path, previous: Path) -> None:
    """Undo the first of the two renames of a save that was cut off before the second."""
    if previous.exists() and not folder.exists():
        previous.rename(folder)
