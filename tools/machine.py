"""What a measurement ran on: versions of packages, the driver of a GPU."""

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Iterable


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Python's, and those of the packages that are installed."""
    found = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def driver() -> str | None:
    """That of an NVIDIA GPU, its highest clock, its memory and its power limit, if its tool tells."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version,clocks.max.sm,memory.total,power.limit", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None
