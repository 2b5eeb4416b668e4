"""Child processes that stay, so that several checkouts or methods can be warmed up and then timed in turns.

A child is the benchmark's own file, run as a script: it reads a seed from each line of its stdin and answers with a
line of JSON. Its first argument is the checkout whose code it measures.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from mllm.errors import UserError

ROOT = Path(__file__).resolve().parent.parent.parent
Child = subprocess.Popen[str]


def old_checkout(folder: Path) -> Path:
    """The folder of --old; UserError where it is no checkout of this project."""
    if not (folder / "mllm").is_dir():
        raise UserError(f"--old: {folder} holds no checkout of this project")
    return folder.resolve()


def start(script: str, folder: Path, *arguments: str) -> Child:
    """Start a child of this file that measures the code of a checkout."""
    command = [sys.executable, script, str(folder), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder)


def ask(name: str, child: Child, seed: int) -> dict[str, Any]:
    """The child's answer to a seed; UserError where it has ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{seed}\n")
    child.stdin.flush()
    for line in child.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise UserError(f"{name}: its process ended with exit code {child.wait()}; the lines above say why")
