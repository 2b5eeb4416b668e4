"""A teacher's likeliest tokens at each learned token of some documents: tools/teacher.py writes them, training reads.

teacher.json             of which documents and teacher they are, and how many there are of each token
00000.arrayrecord, ...   the documents in order, `DOCUMENTS` a file: K ids of each learned token, int32, and then K
                         log-probabilities, float32, the likeliest first
"""

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
from mllm.model.folder import read_json
from mllm.store.bucket import is_bucket
from mllm.store.fetch import fetch
from mllm.store.folder import UNFINISHED, sync

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


def read_summary(folder: Path, key: str) -> dict[str, Any] | None:
    """What a folder holds; None where it is empty. UserError names `key` where other files are there."""
    if (path := folder / SUMMARY).is_file():
        return read_json(path)
    if folder.is_dir() and any(path.suffix != UNFINISHED for path in folder.iterdir()):
        raise UserError(f"{key}: {folder} has other files and no {SUMMARY}; give what tools/teacher.py has written")
    return None


def write_lists(path: Path, found: Iterable[Lists]) -> None:
    """Write a file as a whole or not at all."""
    unfinished = path.with_suffix(UNFINISHED)
    with closing(ArrayRecordWriter(str(unfinished), "group_size:1")) as writer:
        for ids, logprobs in found:
            writer.write(ids.astype(np.int32).tobytes() + logprobs.astype(np.float32).tobytes())
    sync(unfinished)
    unfinished.replace(path)


class TeacherLists:
    """What is stored of a teacher, by the indices of documents."""

    def __init__(self, place: str, documents: Documents) -> None:
        """UserError where something is missing, or they are of other documents than these."""
        key = "distill.teacher_logprobs"
        folder = fetch(place, [SUMMARY], key)[0].parent if is_bucket(place) else Path(place)
        summary = read_summary(folder, key)
        if summary is not None and is_bucket(place):
            fetch(place, names_of(summary), key)
        if summary is None or (missing := [name for name in names_of(summary) if not (folder / name).exists()]):
            fault = "there is nothing" if summary is None else f"{missing[0]} is missing"
            raise UserError(f"{key}: {place}: {fault}; tools/teacher.py writes it, and goes on where it was stopped")
        if (summary["content"], summary["documents"]) != (documents.content, len(documents)):
            numbers = f"{summary['documents']} then, {len(documents)} now"
            raise UserError(f"{key}: {place} is of other examples, tokens or data.max_length than data's ({numbers})")
        self.place, self.top_k, self.sizes = place, summary["top_k"], documents.sizes
        self.content = f"{self.top_k} of {summary['checksum']}"
        """What the lists are known by: their lengths, and the teacher's parameters."""
        self.records = grain.sources.ArrayRecordDataSource([str(folder / name) for name in names_of(summary)])
        self.lock = threading.Lock()

    def read(self, indices: Sequence[int]) -> list[Lists]:
        """The lists of these documents; UserError where they are damaged."""
        try:
            with self.lock:
                records = self.records.__getitems__(indices) if indices else ()
            shapes = [(2, self.sizes[index][1], self.top_k) for index in indices]
            found = [np.frombuffer(x, np.int32).reshape(shape) for x, shape in zip(records, shapes, strict=True)]
        except (RuntimeError, ValueError, IndexError) as error:
            fault = f"{self.place} is damaged ({brief(error)})"
            raise UserError(f"distill.teacher_logprobs: {fault}: have tools/teacher.py write it again") from None
        return [(both[0], both[1].view(np.float32)) for both in found]
