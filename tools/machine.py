"""What a measurement ran on: versions of packages, the driver of a GPU; and whether memory was what it lacked."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of Python and of those packages that are installed."""
    found = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def driver() -> str | None:
    """An NVIDIA GPU's driver, highest clock, memory and power limit, if nvidia-smi tells them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version,clocks.max.sm,memory.total,power.limit", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def is_out_of_memory(message: str) -> bool:
    """Whether an error's message says that a device or the host ran out of memory.

    A kernel that asks for more shared memory than a GPU's block can have exhausts a resource, too, and is no such case.
    """
    found = re.search(r"resource_exhausted|out.?of.?memory|memoryerror|bad_alloc|killed by sigkill", message.lower())
    return found is not None and "shared memory" not in message.lower()
