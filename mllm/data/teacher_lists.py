"""A teacher's likeliest tokens at each learned token of some documents: tools/teacher.py writes them, training reads.

teacher.json             of which documents and teacher they are, and how many there are of each token
00000.arrayrecord, ...   the documents in order, `DOCUMENTS` a file: K ids of each learned token, int32, and then K
                         log-probabilities, float32, the likeliest first
"""

import json
import tempfile
import threading
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from jaxtyping import Float32, Int32

from mllm.data.tokenizing import Documents
from mllm.errors import UserError, brief
from mllm.store.bucket import is_bucket
from mllm.store.fetch import fetch
from mllm.store.run_store import RunStore

SUMMARY = "teacher.json"
DOCUMENTS = 1024
Lists = tuple[Int32[np.ndarray, "L K"], Float32[np.ndarray, "L K"]]
"""Ids and log-probabilities at each of a document's learned tokens."""


def summarize(documents: Documents, top_k: int, teacher: str, checksum: str) -> dict[str, Any]:
    """What teacher.json holds."""
    about = {"content": documents.content, "documents": len(documents), "documents_a_file": DOCUMENTS}
    return about | {"top_k": top_k, "teacher": teacher, "checksum": checksum}


def names_of(summary: dict[str, Any]) -> list[str]:
    """The names of all files with lists."""
    return [f"{number:05}.arrayrecord" for number in range(-(-summary["documents"] // summary["documents_a_file"]))]


def read_summary(store: RunStore, key: str) -> dict[str, Any] | None:
    """What a place holds; None where it is empty. UserError names `key` where other files are there."""
    content = store.read(SUMMARY)
    if content is None and any(not name.endswith(".tmp") for name in store.entries()):
        raise UserError(f"{key}: {store} has other files and no {SUMMARY}; give what tools/teacher.py has written")
    return None if content is None else json.loads(content)


def write_lists(store: RunStore, name: str, found: Iterable[Lists]) -> None:
    """Write a file as a whole or not at all."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        with closing(ArrayRecordWriter(str(path), "group_size:1")) as writer:
            for ids, logprobs in found:
                writer.write(ids.astype(np.int32).tobytes() + logprobs.astype(np.float32).tobytes())
        store.write(name, path.read_bytes())


class TeacherLists:
    """What is stored of a teacher, by the indices of documents."""

    def __init__(self, place: str, documents: Documents) -> None:
        """UserError where something is missing, or they are of other documents than these."""
        key, store = "distill.teacher_logprobs", RunStore(place)
        summary = read_summary(store, key)
        if summary is None or (missing := {*names_of(summary)} - {*store.entries()}):
            fault = "there is nothing" if summary is None else f"{min(missing)} is missing"
            raise UserError(f"{key}: {store}: {fault}; tools/teacher.py writes it, and goes on where it was stopped")
        if (summary["content"], summary["documents"]) != (documents.content, len(documents)):
            numbers = f"{summary['documents']} then, {len(documents)} now"
            raise UserError(f"{key}: {store} is of other examples, tokens or data.max_length than data's ({numbers})")
        names = names_of(summary)
        paths = fetch(store.url, names, key) if is_bucket(place) else [Path(store.url, name) for name in names]
        self.store, self.top_k, self.sizes = store, summary["top_k"], documents.sizes
        self.records = grain.sources.ArrayRecordDataSource([str(path) for path in paths])
        self.lock = threading.Lock()

    def read(self, indices: Sequence[int]) -> list[Lists]:
        """The lists of these documents; UserError where they are damaged."""
        try:
            with self.lock:
                records = self.records.__getitems__(indices) if indices else ()
            shapes = [(2, self.sizes[index][1], self.top_k) for index in indices]
            found = [np.frombuffer(x, np.int32).reshape(shape) for x, shape in zip(records, shapes, strict=True)]
        except (RuntimeError, ValueError, IndexError) as error:
            fault = f"{self.store} is damaged ({brief(error)})"
            raise UserError(f"distill.teacher_logprobs: {fault}: have tools/teacher.py write it again") from None
        return [(both[0], both[1].view(np.float32)) for both in found]
