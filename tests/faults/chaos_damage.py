"""What storage does to a run while nobody looks: damaged checkpoints, torn logs, a full disk."""

import os
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from chaos_process import ROOT

LOGS = ("metrics.jsonl", "samples.jsonl", "timings.jsonl")


def checkpoints(run_dir: Path) -> list[int]:
    """The steps of the checkpoints that are complete by their names, in order."""
    folder = run_dir / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []


def half_written(run_dir: Path) -> bool:
    """Whether a checkpoint is there under its temporary name."""
    return any((run_dir / "checkpoints").glob("[0-9]*.*"))


def truncated(folder: Path, rng: random.Random) -> str:
    """Cut a file of the checkpoint off somewhere."""
    path = chosen(folder, rng)
    size = rng.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"{path.relative_to(folder)} cut to {size} bytes"


def flipped(folder: Path, rng: random.Random) -> str:
    """Flip a bit of a file of the checkpoint."""
    path = chosen(folder, rng)
    content = bytearray(path.read_bytes())
    place = rng.randrange(len(content))
    content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"a bit of byte {place} of {path.relative_to(folder)} flipped"


def zeroed(folder: Path, rng: random.Random) -> str:
    """Write zeros over the end of a file, as a power cut leaves it on some file systems."""
    path = chosen(folder, rng)
    content = path.read_bytes()
    place = rng.randrange(len(content))
    path.write_bytes(content[:place] + bytes(len(content) - place))
    return f"{path.relative_to(folder)} zeroed from byte {place}"


def halved(folder: Path, rng: random.Random) -> str:
    """Delete half of the checkpoint's files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    gone = rng.sample(files, len(files) // 2)
    for path in gone:
        path.unlink()
    return f"{len(gone)} of {len(files)} files deleted"


def chosen(folder: Path, rng: random.Random) -> Path:
    """A file of the checkpoint that holds something; half of the time the largest, which holds the arrays."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    return max(files, key=lambda path: path.stat().st_size) if rng.random() < 0.5 else rng.choice(files)


DAMAGES: dict[str, Callable[[Path, random.Random], str]] = {
    "truncated": truncated,
    "a bit flipped": flipped,
    "zeroed": zeroed,
    "half deleted": halved,
}
"""What can happen to a checkpoint's folder; each says what it did."""


def tear_logs(run_dir: Path, rng: random.Random) -> str:
    """End a log in half a line, or in zeros: a machine that went down."""
    path = run_dir / rng.choice(LOGS)
    tail = rng.choice([b'{"step": 1', b'{"step": 99, "lo', b"\0" * 512, b"\n"])
    with path.open("ab") as file:
        file.write(tail)
    return f"{path.name} ends in {tail[:16]!r}"


class Unavailable(Exception):
    """This machine grants no file system of one's own: no user namespaces, or not Linux."""


class SmallDisk(NamedTuple):
    """A file system of a few MiB in a mount namespace of its own."""

    within: list[str]
    """The command that runs another one where the file system can be seen."""
    inside: Path
    """Its path there."""
    outside: Path
    """Its path for everybody else."""

    def fill(self, spare: int) -> None:
        """Leave `spare` bytes of it, or less where somebody takes them meanwhile."""
        with (self.outside / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        os.truncate(self.outside / "filler", max(0, (self.outside / "filler").stat().st_size - spare))

    def empty(self) -> None:
        (self.outside / "filler").unlink()


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[SmallDisk]:
    """A tmpfs at `folder`.

    Raises:
        Unavailable
    """
    mount = f'mount -t tmpfs -o size={mebibytes}m chaos "$0" && echo mounted && exec sleep 86400'
    try:
        holder = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except FileNotFoundError:
        raise Unavailable("there is no command unshare") from None
    assert holder.stdout is not None
    assert holder.stderr is not None
    try:
        if holder.stdout.readline() != "mounted\n":
            raise Unavailable(" ".join(holder.stderr.read().split()))
        enter = ["nsenter", "--preserve-credentials", "--user", "--mount", "--target", str(holder.pid)]
        outside = Path(f"/proc/{holder.pid}/root", *folder.parts[1:])
        outside.stat()
        yield SmallDisk([*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(ROOT)], folder, outside)
    finally:
        holder.kill()
        holder.communicate()
