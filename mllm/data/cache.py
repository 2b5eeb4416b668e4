"""A cache of tokenized examples on disk.

A cache is two files: an ArrayRecord file of documents, and their sizes with a summary. Their name is a hash of the
sources' content, the tokenizer with its template, and the settings that change tokens. The files are written under
other names and renamed, the summary last, so a cache with a summary is complete. Processes that write the same cache
at the same time write equal files.
"""

import hashlib
import json
import logging
import os
import tempfile
import threading
import zipfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from jaxtyping import Int32, UInt64
from tqdm import tqdm

from mllm.config.data import DataConfig
from mllm.config.task import Form
from mllm.data.records import Origin, sound_records
from mllm.data.tokenizing import Document, Documents, Encoded, Pair, Skipped, encode_records
from mllm.errors import UserError, brief
from mllm.model.tokenizer import Renderer, Tokenizer
from mllm.parallel.processes import gather_objects
from mllm.storage import cache_folder

log = logging.getLogger(__name__)

VERSION = 9
"""The version of the cache's format and of formats.py's results; part of the hash."""
RECORDS, SUMMARY = ".arrayrecord", ".npz"
"""The file endings of a cache."""
Found: TypeAlias = tuple[Int32[np.ndarray, "N 2"], UInt64[np.ndarray, "N"], dict[str, Any]]
"""The sizes and hashes of a cache's documents, and a summary."""


def cached_documents(origin: Origin, config: DataConfig, renderer: Renderer, pairs: bool = False) -> Documents:
    """All examples, or `pairs`, of files or a hub id, read from the cache or tokenized into it.

    A warning counts skipped and cut examples. All processes must call this. UserError is raised if the source can't be
    read, differs between processes, has no example, or has a bad line.
    """
    caches, content = folder_of(config), origin.content()
    contents = gather_objects(content)
    if differing := [process for process, other in enumerate(contents) if other != contents[0]]:
        difference = f"process {differing[0]} and process 0 have different examples"
        raise UserError(f"{origin.key}: {difference}: give all the same data")
    try:
        tokens = [tokenizer_digest(renderer.tokenizer), renderer.rule]
        settings = [VERSION, content, *tokens, config.max_length, pairs, config.columns]
        cache = caches / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]
        if (entry := read_summary(cache)) is None:
            encoded = encode_records(renderer, config.max_length, origin.records(), pairs, config.columns)
            entry = make(cache, origin, encoded)
    except (OSError, RuntimeError) as error:  # array_record raises RuntimeErrors
        reason = getattr(error, "strerror", None) or brief(error)
        way_out = "make room, or set data.cache to another folder"
        raise UserError(f"data.cache: {caches} can't be written ({reason}): {way_out}") from None
    sizes, hashes, summary = entry
    counts = {"cut at data.max_length": summary["cut"]}
    counts |= {f"left out: {reason}": count for reason, count in summary["skipped"].items()}
    for outcome, count in counts.items():
        if count:
            log.warning("%s: %s: %d examples were %s", origin.key, origin.source, count, outcome)
    form: Form = "texts" if summary["texts"] == len(sizes) else "chats"
    return Documents(sizes, hashes, reader(cache.with_suffix(RECORDS), pairs), summary["content"], form)


def folder_of(config: DataConfig) -> Path:
    """The folder of all caches."""
    return Path(os.path.expanduser(config.cache)) if config.cache else cache_folder()


def reader(path: Path, pairs: bool) -> Callable[[Sequence[int]], list[Document | Pair]]:
    """A function that reads the documents of these indices; UserError where the file is damaged."""
    with whole(path):
        records = grain.sources.ArrayRecordDataSource([str(path)])
    lock = threading.Lock()  # training's thread reads ahead while validation reads

    def read(indices: Sequence[int]) -> list[Document | Pair]:
        with whole(path), lock:
            # A process may have no row of a last batch, and the reader takes no empty list.
            stored = records.__getitems__(indices) if indices else ()
            return [unsigned(np.frombuffer(record, np.int32), pairs) for record in stored]

    return read


@contextmanager
def whole(path: Path) -> Iterator[None]:
    """Turn checksum errors of ArrayRecord or zip into a UserError that names the damaged file."""
    try:
        yield
    except (RuntimeError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"data.cache: {path} is damaged ({brief(error)}): delete it") from None


def read_summary(cache: Path) -> Found | None:
    """The summary of a cache's documents; None without a cache."""
    path = cache.with_suffix(SUMMARY)
    if not path.exists():
        return None
    with whole(path), np.load(path) as file:
        return file["sizes"], file["hashes"], json.loads(file["summary"].item())


def make(cache: Path, origin: Origin, encoded: Iterator[Encoded]) -> Found:
    """Write the cache of a source."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache.parent, prefix="unfinished-") as folder:
        records, summarized = (Path(folder, f"cache{ending}") for ending in (RECORDS, SUMMARY))
        sizes, hashes, summary = write_documents(records, origin, encoded)
        np.savez(summarized, sizes=sizes, hashes=hashes, summary=json.dumps(summary))
        records.replace(cache.with_suffix(RECORDS))
        summarized.replace(cache.with_suffix(SUMMARY))
    return sizes, hashes, summary


def write_documents(path: Path, origin: Origin, encoded: Iterator[Encoded]) -> Found:
    """Write the documents.

    Returns the documents' sizes and hashes, and a summary. The summary has a hash of all documents and the numbers of
    texts, of cut documents, and of skipped records by reason.
    """
    content, skipped, cut, texts = hashlib.sha256(), Counter[str](), 0, 0
    sizes, hashes = array("i"), array("Q")
    bar = tqdm(encoded, "tokenizing", unit=" records", dynamic_ncols=True, delay=1, disable=None)
    with closing(ArrayRecordWriter(str(path), "group_size:1")) as writer:
        sound: Iterator[tuple[str, tuple[Document | Pair, bool, bool] | Skipped]] = sound_records(iter(bar), origin.key)
        for _, result in sound:
            if isinstance(result, Skipped):
                skipped[result.reason] += 1
                continue
            document, complete, is_text = result
            record = signed(document).tobytes()
            writer.write(record)
            content.update(record)
            sizes.extend(document.size)
            hashes.append(hash_of(document))
            cut += not complete
            texts += is_text
    if not sizes:
        why = f" that can be learned: {'; '.join(skipped)}" if skipped else " in it"
        raise UserError(f"{origin.key}: {origin.source}: there is no example{why}")
    summary = {"content": content.hexdigest(), "skipped": skipped, "cut": cut, "texts": texts}
    return np.array(sizes, np.int32).reshape(-1, 2), np.array(hashes, np.uint64), summary


def signed(document: Document | Pair) -> Int32[np.ndarray, " T"]:
    """A document's tokens, with inverted bits at learned tokens. A pair begins with the chosen sequence's length."""
    if isinstance(document, Pair):
        header = np.array([len(document.chosen.tokens)], np.int32)
        return np.concatenate([header, signed(document.chosen), signed(document.rejected)])
    return np.where(document.counts, ~document.tokens, document.tokens)


def hash_of(document: Document | Pair) -> int:
    """A hash of 64 bits that equal documents share."""
    return int.from_bytes(hashlib.blake2b(signed(document).tobytes(), digest_size=8).digest(), "little")


def unsigned(stored: Int32[np.ndarray, " T"], pairs: bool = False) -> Document | Pair:
    """The document or pair from `signed` tokens."""

    def document(stored: Int32[np.ndarray, " T"]) -> Document:
        return Document(np.where(stored < 0, ~stored, stored), stored < 0)

    end = 1 + stored[0]
    return Pair(document(stored[1:end]), document(stored[end:])) if pairs else document(stored)


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """A hash of the tokenizer with its special tokens and its templates."""
    parts = tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map, tokenizer.chat_template
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()
