"""Files of a checkpoint that are still in a bucket: a process takes only those that it reads.

A folder that stands for such a checkpoint holds the list of its files, as the bucket has it, and the bucket's URL.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mllm.bucket import Bucket, Part
from mllm.run.checksum import Damaged

LIST = "in_bucket.json"
SENDING = "sending"
"""The folder, beside that of the checkpoints, of those that are yet to be sent."""
CHUNK = re.compile(r"\w+/((?!d/)[^/]+/\d+(\.\d+)*)")
"""The file of an array's chunk: item, array and place; `d` is OCDBT's folder, which earlier versions wrote."""


def stand_in(folder: Path, url: str, manifest: dict[str, Any]) -> None:
    """Make the folder of a checkpoint all of whose files are in the bucket; the list is empty if it is damaged."""
    folder.mkdir(parents=True)
    (folder / LIST).write_text(json.dumps({"url": url, "prefix": "", "files": {}, **manifest}))


class RemoteFiles:
    """The files of a checkpoint that its folder may lack; there are none if it does not stand for one in a bucket.

    Both methods raise Damaged where a part of a file is missing or has changed, and UserError where the bucket fails.
    """

    def __init__(self, folder: Path) -> None:
        """Raises Damaged where the list is."""
        self.documents: list[str] = []
        self.chunks: dict[str, str] = {}
        if not (folder / LIST).exists():
            return
        listed = json.loads((folder / LIST).read_text())
        self.folder, self.bucket = folder, Bucket(listed["url"])
        self.prefix, self.files = listed["prefix"], listed["files"]
        if not self.files:
            raise Damaged("the checksum of its list differs")
        for name in self.files:
            if found := CHUNK.fullmatch(name):
                self.chunks[found[1]] = name
            else:
                self.documents.append(name)

    def fetch_documents(self) -> None:
        """Copy all files but the arrays' chunks."""
        self.fetch(self.documents)

    def fetch_chunk(self, array: str, place: str) -> None:
        """Copy a chunk, unless the bucket has none: chunks of zeros are not stored."""
        if name := self.chunks.get(f"{array}/{place}"):
            self.fetch([name])

    def fetch(self, names: Iterable[str]) -> None:
        files = {}
        for name in names:
            process, parts = self.files[name]
            files[f"{self.prefix}/{process}/{name}"] = self.folder / name, [Part(**part) for part in parts]
        if files:
            self.bucket.fetch_files(files, lambda name: Damaged(f"{name} is missing or has changed"))
