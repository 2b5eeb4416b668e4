"""Documents on disk: the examples of files or of a hub id, tokenized once and found again by what they are made of.

A cache is a folder, named by a hash of the sources' content, the tokenizer with its template, and the settings that
change tokens: documents in an ArrayRecord file, and their sizes, mapped into memory. It is made under another name and
renamed; a lock lets one process of a host make it while others wait. Checksums are compared whenever it is opened.
The processes of a run each tokenize a share of the records, and pass it on to all.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from jax import process_count, process_index
from jax.errors import JaxRuntimeError
from tqdm import tqdm

from mllm.config.data import DataConfig
from mllm.data.documents import Documents, Size
from mllm.data.records import Content, Origin, bad_lines
from mllm.data.tokenizing import FEW, Document, Encoded, encode_blocks
from mllm.errors import UserError, brief
from mllm.model.tokenizer import Tokenizer
from mllm.parallel.processes import gather_inside

log = logging.getLogger(__name__)

VERSION = 1
"""The format of the cache and of what formats make of records; another one doesn't find older caches."""
RECORDS, SIZES, SUMMARY = "documents.arrayrecord", "sizes.int32", "summary"
LEARNED = np.uint32(1 << 31)
"""A stored token's bit that says that the token after it is learned."""
MOST_BAD = 10_000


class CachedDocuments(Documents):
    """The documents in a cache's folder; UserError where one of them can't be read."""

    def __init__(self, folder: Path, summary: dict[str, Any]) -> None:
        self.folder = folder
        self.content = summary["content"]
        self.sizes = np.memmap(folder / SIZES, np.int32, "r").reshape(-1, 2)
        self.records = grain.sources.ArrayRecordDataSource([str(folder / RECORDS)])
        self.lock = threading.Lock()  # training reads ahead in a thread while validation may read, too

    def __len__(self) -> int:
        return len(self.sizes)

    def size(self, index: int) -> Size:
        return Size(*self.sizes[index].tolist())

    def tokens(self) -> int:
        return int(self.sizes[:, 0].sum(dtype=np.int64))

    def read(self, indices: Sequence[int]) -> list[Document]:
        try:
            with self.lock:
                # A process may have no row of a last batch, and the reader takes no empty list.
                return [unpacked(record) for record in (self.records.__getitems__(indices) if indices else ())]
        except (RuntimeError, ValueError) as error:
            raise UserError(f"data.cache: {self.folder} is damaged ({brief(error)}): delete it") from None


def cached_documents(origin: Origin, config: DataConfig, tokenizer: Tokenizer) -> CachedDocuments:
    """All examples of files or a hub id; a warning counts those that were skipped or cut.

    All processes must call it inside of `raise_everywhere`. UserError is raised if the source can't be read or differs
    between processes, has no example, or a line of it is bad and not to be skipped.
    """
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "mllm")
    caches = Path(os.path.expanduser(config.cache or default))
    content = origin.content()
    contents = gather_inside(content)
    if odd := [process for process, other in enumerate(contents) if other != contents[0]]:
        which = f"process {odd[0]} and process 0 have different examples"
        raise UserError(f"{origin.key}: {which}: give all the same data")
    settings = [VERSION, content.digest, tokenizer_digest(tokenizer), config.max_length, config.on_bad_line]
    folder = caches / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]
    summary = read_summary(folder)
    while not all(gather_inside(summary is not None)):
        try:
            make_together(folder, origin, config, tokenizer, content)
        except JaxRuntimeError:  # another process was lost
            raise
        except (OSError, RuntimeError) as error:  # array_record's are RuntimeErrors
            reason = getattr(error, "strerror", None) or brief(error)
            raise UserError(
                f"data.cache: {caches} can't be written ({reason}): make room, or set data.cache to another folder"
            ) from None
        summary = read_summary(folder)
    assert summary is not None
    for name, what in (("skipped", "bad lines were skipped"), ("cut", "examples were cut at data.max_length")):
        if summary[name]:
            log.warning("%s: %s: %d %s", origin.key, origin.source, summary[name], what)
    return CachedDocuments(folder, summary)


def make_together(folder: Path, origin: Origin, config: DataConfig, tokenizer: Tokenizer, content: Content) -> None:
    """Make the cache that some process lacks, each process a share of it, or wait for another run that makes it.

    One process of each machine writes it.
    """
    own = islice(origin.blocks(), process_index(), None, process_count())
    encoded = exchange(encode_blocks(tokenizer, config.max_length, own))
    with locked(folder, wait=False) as has_lock:
        if has_lock and read_summary(folder) is None:
            make(folder, origin, config, encoded, content)
        elif process_count() > 1:
            deque(encoded, maxlen=0)
    gather_inside(None)  # the caches of this run are made
    if not has_lock:
        with locked(folder, wait=True):
            pass


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a cache; None where there is none, or its files are damaged."""
    try:
        checksum, _, text = (folder / SUMMARY).read_text().partition("\n")
        summary: dict[str, Any] = json.loads(text)
        intact = checksum == hashlib.sha256(text.encode()).hexdigest()
        if intact and all(file_digest(folder / name) == summary["digests"][name] for name in (RECORDS, SIZES)):
            return summary
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def make(folder: Path, origin: Origin, config: DataConfig, encoded: Iterator[Encoded], content: Content) -> None:
    """Write the cache of a source with this content, in place of a damaged one."""
    if folder.exists():
        log.warning("data.cache: %s is damaged, and made again", folder)
    if content.lines > FEW:
        print(f"{origin.key}: tokenizing {content.lines:,} lines of {origin.source} into {folder}", file=sys.stderr)
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # what a killed process left
    unfinished.mkdir()
    try:
        summary = write_documents(unfinished, origin, config, encoded, content.lines)
        if origin.content() != content:
            raise UserError(f"{origin.key}: {origin.source} has changed while it was read: start again")
        text = json.dumps(summary | {"digests": {name: file_digest(unfinished / name) for name in (RECORDS, SIZES)}})
        (unfinished / SUMMARY).write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_documents(
    folder: Path, origin: Origin, config: DataConfig, encoded: Iterator[Encoded], lines: int
) -> dict[str, Any]:
    """Write documents and sizes. Returns a hash of the documents and how many records were skipped or cut."""
    content, bad, cut = hashlib.sha256(), list[tuple[str, UserError]](), 0
    bar = tqdm(encoded, "tokenizing", lines or None, unit=" records", dynamic_ncols=True, delay=1, disable=None)
    with ExitStack() as stack:
        writer = stack.enter_context(closing(ArrayRecordWriter(str(folder / RECORDS), "group_size:1")))
        sizes = stack.enter_context((folder / SIZES).open("wb"))
        for place, document, complete in bar:
            if isinstance(document, UserError):
                bad.append((place, document))
                if config.on_bad_line == "error" and len(bad) == MOST_BAD:
                    break
                continue
            record = packed(document)
            writer.write(record)
            content.update(record)
            sizes.write(np.array([len(document), document[:, 2].sum()], np.int32).tobytes())
            cut += not complete
        documents = sizes.tell()
    if bad and config.on_bad_line == "error":
        raise bad_lines(bad, origin.key)
    if not documents:
        none = f"all {len(bad)} lines are bad, the first: {bad[0][1]}" if bad else "there is no example in it"
        raise UserError(f"{origin.key}: {origin.source}: {none}")
    return {"content": content.hexdigest(), "skipped": len(bad), "cut": cut}


def exchange(own: Iterator[list[Encoded]]) -> Iterator[Encoded]:
    """The documents of all blocks, in their order, of which each process, all of which must call this, encodes its own.

    They wait for each other by `gather_inside`.
    """
    while parts := [part for part in gather_inside(next(own, None)) if part is not None]:
        yield from chain.from_iterable(parts)


@contextmanager
def locked(folder: Path, wait: bool) -> Iterator[bool]:
    """Hold the cache's lock, which the system releases when the process ends, however it ends.

    Unless it is to `wait`, it may not get the lock: the value says whether it has.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                yield False
                return
            print(f"data.cache: waiting for the process that makes {folder}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield True


def packed(document: Document) -> bytes:
    """A document as it is stored: its tokens, with a bit that says whether the next one is learned."""
    return (document[:, 0].astype(np.uint32) | LEARNED * document[:, 2].astype(np.uint32)).tobytes()


def unpacked(record: bytes) -> Document:
    stored = np.frombuffer(record, np.uint32)
    tokens, learned = (stored & ~LEARNED).astype(np.int32), (stored >> 31).astype(np.int32)
    return np.stack([tokens, np.append(tokens[1:], 0), learned], axis=1).astype(np.int32)


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """A hash of the files that the tokenizer and its template are saved as; UserError where they can't be."""
    digest = hashlib.sha256()
    try:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
                digest.update(f"{path.name} {file_digest(path)}".encode())
    except Exception as error:  # those of the package tokenizers are no OSErrors
        raise UserError(f"TMPDIR: the tokenizer can't be written there ({brief(error)}): make room") from None
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
