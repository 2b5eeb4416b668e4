"""Documents on disk: the examples of files or of a hub id, tokenized once and found again by what they are made of.

A cache is a folder, named by a hash of the sources' content, the tokenizer with its template, and the settings that
change tokens: documents in an ArrayRecord file, their sizes, mapped into memory, and a summary with checksums, which is
written last, and compared whenever the cache is opened. A lock lets one process of each machine make it while others
wait. Whenever a cache is made, caches that nothing has used for long are removed, by `UNUSED_DAYS` and `MOST_BYTES`.
"""

import fcntl
import hashlib
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from jaxtyping import Int32
from tqdm import tqdm

from mllm.config.data import DataConfig, PreferenceForm
from mllm.data.records import Origin, bad_lines
from mllm.data.tokenizing import Document, Documents, Encoded, Preference, Skipped, encode_records
from mllm.errors import UserError, brief
from mllm.model.tokenizer import Renderer, Tokenizer
from mllm.parallel.processes import gather_objects
from mllm.storage import cache_folder

log = logging.getLogger(__name__)

VERSION = 5
"""The version of the cache's format and of formats.py's results; with a new one older caches are not found."""
RECORDS, SIZES, SUMMARY = "documents.arrayrecord", "sizes.int32", "summary"
MOST_BAD = 10_000
UNUSED_DAYS, MOST_BYTES = 30, 200 * 10**9
LOCK = ".lock"
LABELS = (None, True, False)


def cached_documents(
    origin: Origin, config: DataConfig, renderer: Renderer, form: PreferenceForm | None = None
) -> Documents:
    """All examples, or with a `form` preferences, of files or a hub id; a warning counts skipped and cut examples.

    All processes must call it. UserError is raised if the source can't be read or differs
    between processes, has no example, or a line of it is bad.
    """
    caches, content = folder_of(config), origin.content()
    contents = gather_objects(content)
    if differing := [process for process, other in enumerate(contents) if other != contents[0]]:
        difference = f"process {differing[0]} and process 0 have different examples"
        raise UserError(f"{origin.key}: {difference}: give all the same data")
    try:
        tokens = [tokenizer_digest(renderer.tokenizer), renderer.rule]
        settings = [VERSION, content, *tokens, config.max_length, *filter(None, [form, config.columns])]
        folder = caches / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]
        if (summary := read_summary(folder)) is None:
            with locked(folder):
                if (summary := read_summary(folder)) is None:  # no other process has made it meanwhile
                    prune(path for path in caches.glob("[0-9a-f]" * 32) if (path / LOCK).exists())
                    encoded = encode_records(renderer, config.max_length, origin.records(), form, config.columns)
                    summary = make(folder, origin, encoded, content)
    except (OSError, RuntimeError) as error:  # array_record raises RuntimeErrors
        reason = getattr(error, "strerror", None) or brief(error)
        way_out = "make room, or set data.cache to another folder"
        raise UserError(f"data.cache: {caches} can't be written ({reason}): {way_out}") from None
    with suppress(OSError):  # it may be another user's
        (folder / LOCK).touch()  # it says when the cache was last used
    counts = {"cut at data.max_length": summary["cut"]}
    counts |= {f"left out: {reason}": count for reason, count in summary["skipped"].items()}
    for outcome, count in counts.items():
        if count:
            log.warning("%s: %s: %d examples were %s", origin.key, origin.source, count, outcome)
    return open_documents(folder, summary, form)


def folder_of(config: DataConfig) -> Path:
    """The folder of all caches."""
    return Path(os.path.expanduser(config.cache)) if config.cache else cache_folder()


def open_documents(folder: Path, summary: dict[str, Any], form: PreferenceForm | None = None) -> Documents:
    """The documents in a cache's folder; to read one raises UserError where it is damaged."""
    sizes = np.asarray(np.memmap(folder / SIZES, np.int32, "r")).reshape(-1, 2)
    records = grain.sources.ArrayRecordDataSource([str(folder / RECORDS)])
    lock = threading.Lock()  # training reads ahead in a thread while validation may read, too

    def read(indices: Sequence[int]) -> list[Document | Preference]:
        try:
            with lock:
                # A process may have no row of a last batch, and the reader takes no empty list.
                stored = records.__getitems__(indices) if indices else ()
                return [unsigned(np.frombuffer(record, np.int32), form) for record in stored]
        except (RuntimeError, ValueError) as error:
            raise UserError(f"data.cache: {folder} is damaged ({brief(error)}): delete it") from None

    return Documents(sizes, read, summary["content"], "texts" if summary["texts"] == len(sizes) else "chats", form)


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a cache; None where there is none, or its files are damaged."""
    try:
        recorded, _, text = (folder / SUMMARY).read_text().partition("\n")
        return json.loads(text) if recorded == checksum(folder, text) else None
    except (OSError, UnicodeDecodeError):
        return None


def checksum(folder: Path, summary: str) -> str:
    """A hash of a cache's files and its summary."""
    parts = [summary.encode(), *(file_digest(folder / name).encode() for name in (RECORDS, SIZES))]
    return hashlib.sha256(b"\n".join(parts)).hexdigest()


def make(folder: Path, origin: Origin, encoded: Iterator[Encoded], content: str) -> dict[str, Any]:
    """Write the cache of a source with this content, in place of a damaged or an unfinished one.

    Returns its summary.
    """
    if (folder / SUMMARY).exists():
        log.warning("data.cache: %s is damaged, and made again", folder)
    clear(folder)
    with ExitStack() as failed:
        failed.callback(clear, folder)
        summary = write_documents(folder, origin, encoded)
        if origin.content() != content:
            raise UserError(f"{origin.key}: {origin.source} has changed while it was read: start again")
        text = json.dumps(summary)
        (folder / SUMMARY).write_text(f"{checksum(folder, text)}\n{text}")
        failed.pop_all()
    return summary


def clear(folder: Path) -> None:
    for name in (SUMMARY, RECORDS, SIZES):
        (folder / name).unlink(missing_ok=True)


def write_documents(folder: Path, origin: Origin, encoded: Iterator[Encoded]) -> dict[str, Any]:
    """Write documents and sizes.

    Returns a hash of the documents, how many are texts or were cut, and how many were skipped for each reason.
    """
    content, bad, skipped, cut, texts = hashlib.sha256(), list[tuple[str, UserError]](), Counter[str](), 0, 0
    bar = tqdm(encoded, "tokenizing", unit=" records", dynamic_ncols=True, delay=1, disable=None)
    with (
        closing(ArrayRecordWriter(str(folder / RECORDS), "group_size:1")) as writer,
        (folder / SIZES).open("wb") as sizes,
    ):
        for location, result in bar:
            if isinstance(result, UserError):
                bad.append((location, result))
                if len(bad) == MOST_BAD:
                    break
            elif isinstance(result, Skipped):
                skipped[result.reason] += 1
            else:
                document, complete, is_text = result
                record = signed(document).tobytes()
                writer.write(record)
                content.update(record)
                sizes.write(np.array(document.size, np.int32).tobytes())
                cut += not complete
                texts += is_text
        documents = sizes.tell()
    if bad:
        raise bad_lines(bad, origin.key)
    if not documents:
        why = f" that can be learned: {'; '.join(skipped)}" if skipped else " in it"
        raise UserError(f"{origin.key}: {origin.source}: there is no example{why}")
    return {"content": content.hexdigest(), "skipped": skipped, "cut": cut, "texts": texts}


def signed(document: Document | Preference) -> Int32[np.ndarray, " T"]:
    """A document's tokens, with all bits inverted where one is learned.

    A preference's tokens stand behind its label's index in `LABELS` and the length of its first sequence.
    """
    if isinstance(document, Preference):
        first, second, label = document
        header = np.array([LABELS.index(label), len(first.tokens)], np.int32)
        return np.concatenate([header, signed(first), signed(second)])
    return np.where(document.learned, ~document.tokens, document.tokens)


def unsigned(stored: Int32[np.ndarray, " T"], form: PreferenceForm | None = None) -> Document | Preference:
    """The document of signed tokens, or the preference where a `form` is given."""

    def document(stored: Int32[np.ndarray, " T"]) -> Document:
        return Document(np.where(stored < 0, ~stored, stored), stored < 0)

    if form is None:
        return document(stored)
    end = 2 + stored[1]
    return Preference(document(stored[2:end]), document(stored[end:]), LABELS[stored[0]])


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """A hash of the files that the tokenizer and its template are saved as; UserError where these can't be written."""
    digest = hashlib.sha256()
    try:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
                digest.update(f"{path.name} {file_digest(path)}".encode())
    except Exception as error:  # the package tokenizers' errors are no OSErrors
        raise UserError(f"TMPDIR: the tokenizer can't be written there ({brief(error)}): make room") from None
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def prune(folders: Iterable[Path]) -> None:
    """Remove the files in such folders as the module says, but no files in folders used within a day."""
    entries = list[tuple[float, int, list[Path]]]()
    for folder in folders:
        with suppress(OSError):  # another process may be removing them, too
            files = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
            used = max((file.st_mtime for file in files.values()), default=0.0)
            entries.append((used, sum(file.st_size for file in files.values()), [*files]))
    total = sum(size for _, size, _ in entries)
    for used, size, paths in sorted(entries):
        days = (time.time() - used) / 86400
        if days > UNUSED_DAYS or (days > 1 and total > MOST_BYTES):
            for path in paths:
                with suppress(OSError):
                    if path.name != LOCK:  # others may wait for the lock
                        path.unlink()
            total -= size


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made, against other processes of this machine; the system releases it at their end."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:  # its time says when it was last used
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that has {folder}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
