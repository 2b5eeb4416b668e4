"""Files of records in blocks, so that each of several processes reads a share of them.

A file of JSON lines is divided every `BLOCK_BYTES`; a line belongs to the block in which it begins. A parquet file's
blocks are its row groups, or parts of large ones. A .gz can only be decompressed from its beginning, and a hub's data
set is a table in memory: every process reads all of it, and uses its own runs of records.
"""

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jax import process_count, process_index

from mllm.data.records import Placed, Wanted, lines, open_lines, open_parquet, parquet_blocks
from mllm.errors import UserError
from mllm.parallel.processes import gather_inside

BLOCK_BYTES = 2**16
RUN = 64
"""Records in a block of what every process reads."""


class Content(NamedTuple):
    """What is in some files."""

    digest: str
    records: int
    """About how many records there are; 0 where that is not known."""
    newlines: list[list[int]]
    """The number of line ends in each block of each file."""
    stamps: list[tuple[int, ...]]
    """What differs when a file of this machine has been written since."""


def read_content(paths: list[Path], key: str) -> Content:
    """The content of files, of whose bytes each process reads a share; the same for any number of processes.

    All processes must call it inside of `raise_everywhere`. UserError, which names the setting `key`, is raised where
    a file can't be read, or differs between processes in its size, its first or its last block. Other differences of
    copies are not looked for: who reads a block gives it to all.
    """
    me, count, records = process_index(), process_count(), 0
    stamps, ends, own = stamps_of(paths, key), list[Any](), list[list[tuple[bytes, int]]]()
    for path in paths:
        if path.suffix == ".parquet":
            with open_parquet(path, key) as table:
                records += table.metadata.num_rows
        with open_lines(path, key, compressed=True) as file:
            size = os.fstat(file.fileno()).st_size

            def read(number: int, file: Any = file) -> bytes:
                file.seek(number * BLOCK_BYTES)
                return file.read(BLOCK_BYTES)

            blocks = range(-(-size // BLOCK_BYTES))
            ends.append((size, [hashlib.sha256(read(number)).digest() for number in (*blocks[:1], *blocks[-1:])]))
            pieces = map(read, blocks[me::count])
            own.append([(hashlib.sha256(piece).digest(), piece.count(b"\n")) for piece in pieces])
    others = gather_inside(ends)
    if odd := [str(process) for process, found in enumerate(others) if found != others[0]]:
        which = f"process{'es' * (len(odd) > 1)} {', '.join(odd)}"
        raise UserError(f"{key}: {which} and process 0 have different examples: give all the same data")
    digest, newlines, shares = hashlib.sha256(), list[list[int]](), gather_inside(own)
    for number, (path, (size, _)) in enumerate(zip(paths, ends, strict=True)):
        found = [shares[block % count][number][block // count] for block in range(-(-size // BLOCK_BYTES))]
        kind = path.suffix if path.suffix in (".gz", ".parquet") else ""  # the same bytes, read in another way
        digest.update(hashlib.sha256(b"".join([kind.encode(), *(block for block, _ in found)])).digest())
        newlines.append([ended for _, ended in found])
        records += sum(newlines[-1]) if path.suffix not in (".parquet", ".gz") else 0
    return Content(digest.hexdigest(), records, newlines, stamps)


def stamps_of(paths: list[Path], key: str) -> list[tuple[int, ...]]:
    """What differs when one of the files has been written or replaced; UserError where one can't be opened."""
    stamps: list[tuple[int, ...]] = []
    for path in paths:
        with open_lines(path, key, compressed=True) as file:
            found = os.fstat(file.fileno())
        stamps.append((found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino))
    return stamps


def share(index: int, count: int) -> Wanted:
    """Every so many blocks, from that one on."""
    return (turn % count == index for turn in itertools.count())


def file_blocks(paths: list[Path], newlines: list[list[int]], key: str, wanted: Wanted) -> Iterator[list[Placed]]:
    """The records of the wanted blocks of files; UserError, which names the setting `key`, where one can't be read."""
    for path, ended in zip(paths, newlines, strict=True):
        if path.suffix == ".parquet":
            yield from parquet_blocks(path, key, wanted)
        else:
            with open_lines(path, key) as file:
                if path.suffix == ".gz":
                    numbered = enumerate(lines(file), start=1)
                    yield from runs(((f"{path}:{number}", line) for number, line in numbered if line.strip()), wanted)
                else:
                    for block, before in enumerate(itertools.accumulate(ended[:-1], initial=0)):
                        if next(wanted):
                            yield block_lines(file, path, block, before)


def block_lines(file: Any, path: Path, block: int, before: int) -> list[Placed]:
    """The lines that begin in a block of a file of JSON lines, `before` which so many have ended."""
    start, number = block * BLOCK_BYTES, before + 1
    if block:
        file.seek(start - 1)
        end_of_line = file.readline(BLOCK_BYTES + 1)
        if not end_of_line.endswith(b"\n"):
            return []
        number += end_of_line != b"\n"
    found: list[Placed] = []
    following = lines(file)
    while file.tell() < start + BLOCK_BYTES and (line := next(following, None)) is not None:
        if line.strip():
            found.append((f"{path}:{number}", line))
        number += 1
    return found


def runs(records: Iterable[Placed], wanted: Wanted) -> Iterator[list[Placed]]:
    """The wanted ones of blocks of `RUN` records."""
    left = iter(records)
    while run := list(itertools.islice(left, RUN)):
        if next(wanted):
            yield run
