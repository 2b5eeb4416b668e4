"""Finds, reads and replaces a model's folder, on a disk, in a bucket or on the hub.

The folder may be untrusted. A malformed JSON file is refused in one line.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from etils import epath
from safetensors import SafetensorError

from mllm.config.load import CONFIGS
from mllm.config.places import missing
from mllm.errors import UserError, brief
from mllm.progress import transfer_bar
from mllm.storage import OBJECTS, below, bucket_path, cache_folder, failing, fetch_folder, is_bucket, send

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_SECONDS = 5
SMALL, WEIGHTS = ("*.json", "*.txt", "*.jinja"), ("*.safetensors",)
"""The names of a model's description files, and of the files with its parameters."""
LARGEST_JSON = 2**26
EXPORTED = re.compile(
    r"config\.json|generation_config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt"
    r"|chat_template\.jinja|additional_chat_templates/?|adapter_config\.json|adapter_model\.safetensors"
    r"|(video_)?preprocessor_config\.json|processor_config\.json"
)
"""The files of an export, with the tokenizer's: only these may be replaced."""
README, REPLACED = "README.md", "<!-- tools/export.py wrote this file, and replaces it. -->\n"
"""The name of the file that describes an export, and its first line; a file with another first line is the user's."""
LAST = ("config.json", "adapter_config.json")
"""The file without which a folder holds no model, and no adapters."""


def local_folder(
    source: str,
    patterns: Sequence[str] = (*SMALL, *WEIGHTS),
    key: str = "model.source",
    last_resort: str = "set model.init=random",
    revision: str | None = None,
) -> Path:
    """The folder that `source` names, or the local cache's copy of a hub id or a bucket, fetched if need be.

    From the hub (at a `revision`) or a bucket, only files that match `patterns` are fetched. UserError is raised if
    there is no such folder, and neither the hub nor its local cache has the id. The error names the setting `key` and
    the `last_resort`.
    """
    if is_bucket(source):
        return fetch_folder(source, patterns, key)
    folder = Path(os.path.expanduser(source))
    if os.path.isdir(folder):
        return folder
    way_out = f"give a local folder or a hub id that can be reached, or {last_resort}"
    if os.path.lexists(folder):
        raise UserError(f"{key}: {source}: is not a folder (archives and single files are never opened); {way_out}")
    if (recipe := CONFIGS / f"{folder.name}.yaml").is_file():
        raise UserError(f"{key}: {missing(source, 'folder')}; train it: python train.py --config {recipe.name}")
    if not HUB_ID.fullmatch(source):
        raise UserError(f"{key}: {missing(source, 'folder')}; {way_out}")
    from huggingface_hub import HfApi, snapshot_download

    unreachable = None
    # The hub's client raises its own errors, its HTTP library's and OSError; each means that the hub doesn't give it.
    try:
        # This request comes first, because the download would wait for ever on a hub that never answers.
        HfApi().model_info(source, revision=revision, timeout=HUB_SECONDS)
    except Exception as error:
        unreachable = error
    try:
        offline, wanted = unreachable is not None, [*patterns]
        return Path(snapshot_download(source, revision=revision, allow_patterns=wanted, local_files_only=offline))
    except Exception as error:
        reason = f"and the hub did not give it ({brief(unreachable or error)})"
        raise UserError(f"{key}: {missing(source, 'folder')}, {reason}; {way_out}") from None


def is_there(source: str) -> bool:
    """Whether `local_folder` finds a model's small files."""
    try:
        return local_folder(source, SMALL).is_dir()
    except UserError:
        return False


def commit_of(source: str, revision: str | None, key: str) -> str | None:
    """The commit of a hub id's files; None for a folder or a bucket. UserError as `local_folder`."""
    if is_bucket(source) or os.path.isdir(os.path.expanduser(source)):
        return None
    folder = local_folder(source, SMALL, key, revision=revision)
    return folder.name if folder.parent.name == "snapshots" else revision


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; UserError if the file is missing or has other content."""
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise UserError(f"{path}: larger than {LARGEST_JSON >> 20} MiB; a model's settings are not")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def replacing(place: str | Path) -> Iterator[Path]:
    """A new folder. It is renamed to `place` when the block has ended; an existing export is replaced whole.

    If the block is cut off, an earlier export stays as it was; in a bucket, until the new export is sent.
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
    """A new folder of this machine; its files become objects when the block has ended.

    An earlier export is removed first, and the file of `LAST` is written last. UserError is raised as by `replacing`.
    """
    refuse_foreign_files(url)
    try:
        (copies := cache_folder() / OBJECTS).mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="export_", dir=copies) as folder:
            yield Path(folder)
            files = [path for path in Path(folder).rglob("*") if path.is_file()]
            files.sort(key=lambda path: (path.name in LAST, path.name))
            total = sum(path.stat().st_size for path in files)
            with failing(f"{url}: can't be written"), transfer_bar(f"sending to {url}", total) as bar:
                if bucket_path(url).exists():
                    bucket_path(url).rmtree()
                for path in files:
                    send(Path(folder), url, [str(path.relative_to(folder))])
                    bar.update(path.stat().st_size)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{url}: can't be written: {error}") from None


def refuse_foreign_files(place: str | Path) -> None:
    """Raise UserError where a folder holds files that no export wrote, which replacing it would lose."""
    folder = bucket_path(str(place)) if is_bucket(place) else epath.Path(place)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{place}: is a file; choose another folder for the export")
    with failing(f"{place}: can't be read"):
        names = [path.name + "/" * path.is_dir() for path in below(folder)]
    exported = README in names and (folder / README).read_bytes().startswith(REPLACED.encode())
    if foreign := [name for name in names if name and not (exported if name == README else EXPORTED.fullmatch(name))]:
        raise UserError(f"{place}/{min(foreign)}: no export wrote this, and it would be lost; choose another folder")


def restore(folder: Path, previous: Path) -> None:
    """Undo the first of the two renames of a save that was cut off before the second."""
    if previous.exists() and not folder.exists():
        previous.rename(folder)
