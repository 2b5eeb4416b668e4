"""Documents on disk: the examples of files or of a hub id, tokenized once and found again by what they are made of.

A cache is a folder, named by a hash of the sources' content, the tokenizer with its template, and the settings that
change tokens: documents in an ArrayRecord file, their sizes, mapped into memory, and a summary with checksums, which is
written last, and compared whenever the cache is opened. A lock lets one process of a host make it while others wait.
The processes of a run each tokenize a share of the records, and pass it on to all. Whenever a cache is made, those that
nothing has used for long are removed, by the limits of `mllm.store.fetch`.
"""

import hashlib
import json
import logging
import os
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from jax import process_count, process_index
from jax.errors import JaxRuntimeError
from jaxtyping import Int32
from tqdm import tqdm

from mllm.algorithms.dpo.settings import PreferenceForm
from mllm.config.data import DataConfig
from mllm.data.records import BadRecord, Origin, bad_lines
from mllm.data.tokenizing import Document, Documents, Encoded, Preference, encode_blocks, mismatched
from mllm.errors import UserError, brief
from mllm.model.tokenizer import Renderer, Tokenizer
from mllm.parallel.processes import gather_objects
from mllm.store.bucket import cache_folder
from mllm.store.fetch import LOCK, locked, prune

log = logging.getLogger(__name__)

VERSION = 3
"""The format of the cache and of what formats make of records; another one doesn't find older caches."""
RECORDS, SIZES, SUMMARY = "documents.arrayrecord", "sizes.int32", "summary"
MOST_BAD = 10_000
LABELS = (None, True, False)


def cached_documents(
    origin: Origin, config: DataConfig, renderer: Renderer, form: PreferenceForm | None = None
) -> Documents:
    """All examples of files or a hub id, with a `form` preferences; a warning counts those that were skipped or cut.

    All processes must call it inside of `raise_everywhere`. UserError is raised if the source can't be read or differs
    between processes, has no example, or a line of it is bad and not to be skipped.
    """
    caches, content = folder_of(config), origin.content()
    contents = gather_objects(content)
    if odd := [process for process, other in enumerate(contents) if other != contents[0]]:
        which = f"process {odd[0]} and process 0 have different examples"
        raise UserError(f"{origin.key}: {which}: give all the same data")
    try:
        tokens = [tokenizer_digest(renderer.tokenizer), renderer.rule]
        settings = [VERSION, content, *tokens, config.max_length, config.on_bad_line, *filter(None, [form])]
        folder = caches / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]
        while not all(gather_objects((summary := read_summary(folder)) is not None)):
            make_together(folder, origin, config, renderer, content, form)
    except JaxRuntimeError:  # another process was lost
        raise
    except (OSError, RuntimeError) as error:  # array_record's are RuntimeErrors
        reason = getattr(error, "strerror", None) or brief(error)
        way_out = "make room, or set data.cache to another folder"
        raise UserError(f"data.cache: {caches} can't be written ({reason}): {way_out}") from None
    assert summary is not None
    with suppress(OSError):  # it may be another user's
        (folder / LOCK).touch()  # its time is that of the last use
    for name, what in (("skipped", "bad lines were skipped"), ("cut", "examples were cut at data.max_length")):
        if summary[name]:
            log.warning("%s: %s: %d %s", origin.key, origin.source, summary[name], what)
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
                found = records.__getitems__(indices) if indices else ()
                return [unsigned(np.frombuffer(record, np.int32), form) for record in found]
        except (RuntimeError, ValueError) as error:
            raise UserError(f"data.cache: {folder} is damaged ({brief(error)}): delete it") from None

    return Documents(sizes, read, summary["content"], "texts" if summary["texts"] == len(sizes) else "chats", form)


def make_together(
    folder: Path, origin: Origin, config: DataConfig, renderer: Renderer, content: str, form: PreferenceForm | None
) -> None:
    """Make the cache that some process lacks, each process a share of it, or wait for another run that makes it.

    One process of each machine writes it.
    """
    own = islice(origin.blocks(), process_index(), None, process_count())
    encoded = exchange(encode_blocks(renderer, config.max_length, own, form), form)
    if form == "labelled":
        encoded = mismatched(encoded, config.max_length)
    with locked(folder, wait=False) as has_lock:
        if has_lock and read_summary(folder) is None:
            prune(place for place in folder.parent.glob("[0-9a-f]" * 32) if (place / LOCK).exists())
            make(folder, origin, config, encoded, content)
        elif process_count() > 1:
            deque(encoded, maxlen=0)
    gather_objects(None)  # the caches of this run are made
    if not has_lock:
        with locked(folder):
            pass


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a cache; None where there is none, or its files are damaged."""
    try:
        found, _, text = (folder / SUMMARY).read_text().partition("\n")
        return json.loads(text) if found == checksum(folder, text) else None
    except (OSError, UnicodeDecodeError):
        return None


def checksum(folder: Path, summary: str) -> str:
    """A hash of a cache's files and its summary."""
    parts = [summary.encode(), *(file_digest(folder / name).encode() for name in (RECORDS, SIZES))]
    return hashlib.sha256(b"\n".join(parts)).hexdigest()


def make(folder: Path, origin: Origin, config: DataConfig, encoded: Iterator[Encoded], content: str) -> None:
    """Write the cache of a source with this content, in place of a damaged one or what a killed process left."""
    if (folder / SUMMARY).exists():
        log.warning("data.cache: %s is damaged, and made again", folder)
    clear(folder)
    with ExitStack() as failed:
        failed.callback(clear, folder)
        summary = write_documents(folder, origin, config, encoded)
        if origin.content() != content:
            raise UserError(f"{origin.key}: {origin.source} has changed while it was read: start again")
        text = json.dumps(summary)
        (folder / SUMMARY).write_text(f"{checksum(folder, text)}\n{text}")
        failed.pop_all()


def clear(folder: Path) -> None:
    for name in (SUMMARY, RECORDS, SIZES):
        (folder / name).unlink(missing_ok=True)


def write_documents(folder: Path, origin: Origin, config: DataConfig, encoded: Iterator[Encoded]) -> dict[str, Any]:
    """Write documents and sizes. Returns a hash of the documents and how many are texts, were skipped or cut."""
    content, bad, cut, texts = hashlib.sha256(), list[tuple[str, UserError]](), 0, 0
    bar = tqdm(encoded, "tokenizing", unit=" records", dynamic_ncols=True, delay=1, disable=None)
    with (
        closing(ArrayRecordWriter(str(folder / RECORDS), "group_size:1")) as writer,
        (folder / SIZES).open("wb") as sizes,
    ):
        for place, found in bar:
            if isinstance(found, UserError):
                bad.append((place, found))
                if config.on_bad_line == "error" and len(bad) == MOST_BAD:
                    break
                continue
            document, complete, is_text = found
            record = signed(document).tobytes()
            writer.write(record)
            content.update(record)
            sizes.write(np.array(document.size, np.int32).tobytes())
            cut += not complete
            texts += is_text
        documents = sizes.tell()
    if bad and (config.on_bad_line == "error" or not documents):
        raise bad_lines(bad, origin.key)
    if not documents:
        raise UserError(f"{origin.key}: {origin.source}: there is no example in it")
    return {"content": content.hexdigest(), "skipped": len(bad), "cut": cut, "texts": texts}


def exchange(own: Iterator[list[Encoded]], form: PreferenceForm | None = None) -> Iterator[Encoded]:
    """The documents of all blocks, in their order, of which each process, all of which must call this, encodes its own.

    They wait for each other by `gather_objects`.
    """
    if process_count() == 1:
        yield from chain.from_iterable(own)
        return
    blocks = (shareable(block) for block in own)
    while parts := [part for part in gather_objects(next(blocks, None)) if part is not None]:
        for place, found, *about in chain.from_iterable(parts):
            yield place, BadRecord(found, *about) if isinstance(found, str) else (unsigned(found, form), *about)


def shareable(block: list[Encoded]) -> list[Any]:
    """The documents of a block as `gather_objects` takes them: signed tokens, or an error's line and fields."""
    return [
        [place, str(found), found.fields] if isinstance(found, BadRecord) else [place, signed(found[0]), *found[1:]]
        for place, found in block
    ]


def signed(document: Document | Preference) -> Int32[np.ndarray, " T"]:
    """A document's tokens, with all bits inverted where one is learned.

    Those of a preference stand behind its label's index in `LABELS` and the length of its first sequence.
    """
    if isinstance(document, Preference):
        first, second, label = document
        head = np.array([LABELS.index(label), len(first.tokens)], np.int32)
        return np.concatenate([head, signed(first), signed(second)])
    return np.where(document.learned, ~document.tokens, document.tokens)


def unsigned(stored: Int32[np.ndarray, " T"], form: PreferenceForm | None = None) -> Document | Preference:
    """The document of signed tokens, or with a `form` the preference."""

    def document(stored: Int32[np.ndarray, " T"]) -> Document:
        return Document(np.where(stored < 0, ~stored, stored), stored < 0)

    if form is None:
        return document(stored)
    end = 2 + stored[1]
    return Preference(document(stored[2:end]), document(stored[end:]), LABELS[stored[0]])


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
