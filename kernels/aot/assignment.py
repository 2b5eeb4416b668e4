"""What a program will take of a TPU's memory, as soon as the compiler knows: minutes before it has written the code.

XLA assigns every buffer its place before it turns to the instructions, which take most of the time. So the compiler
runs in a process of its own (`targets.py`), leaves its account of the assignment in a folder (`--xla_dump_to`), and is
stopped there. Its total is what the compiler holds against HBM: where it refuses a program, it names that very figure.
`memory_analysis()` adds up more temporaries where there are collectives, more than HBM of programs that the compiler
accepts. What is too large is accounted for all the same. Leaves out what comes later: whether each kernel finds room on
chip.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kernels.aot.targets import ENVIRONMENT

ROOT = Path(__file__).parent.parent.parent
REPORT = ".after_optimizations-memory-usage-report.txt"
ASSIGNMENT = ".after_optimizations-buffer-assignment.txt"
LAST = ".after_optimizations_after_buffer_assignment.txt"
"""Written after the others, where the program fits; where it does not, the compiler ends by itself."""
PAUSE = 0.1
_TOTAL = re.compile(r"\(color=0\)\nTotal bytes: (\d+)")
_ARGUMENT = re.compile(r"^allocation \d+: size (\d+), .*\bparameter \d+", re.MULTILINE)
_HBM = re.compile(r"^allocation \d+: size (\d+), (?!color)(.*):$", re.MULTILINE)


class Account(NamedTuple):
    """HBM in bytes a device. Results that take an argument's place are among the arguments."""

    arguments: int
    temporaries: int
    peak: int
    """With results and constants."""


def read(target: str, programme: str, axes: Mapping[str, int], **arguments: Any) -> Account:
    """The account of `programme`, which gets a mesh of the target with these axes, and `arguments`, as JSON.

    Raises:
        ValueError: it can't be compiled; one line says why. A program that is too large can.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_hlo_as_text"
        command = [sys.executable, "-m", "kernels.aot.targets", target, programme]
        # A file, since a pipe that nobody reads would stop the compiler.
        with (
            (Path(folder) / "messages").open("w+") as messages,
            subprocess.Popen(
                [*command, json.dumps({**arguments, "mesh": dict(axes)})],
                cwd=ROOT,
                env={**ENVIRONMENT, **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
                stdout=messages,
                stderr=subprocess.STDOUT,
            ) as process,
        ):
            try:
                while process.poll() is None and find(Path(folder), LAST) is None:
                    time.sleep(PAUSE)
            finally:
                process.kill()
            messages.seek(0)
            said = messages.read()
        report, assignment = find(Path(folder), REPORT), find(Path(folder), ASSIGNMENT)
        if report is None or assignment is None:
            raise ValueError(f"{programme} on {target}: {reason(said)}")
        return account(report.read_text(), assignment.read_text())


def find(folder: Path, ending: str) -> Path | None:
    """The file with this ending, if it is there; those of the compiler for the CPU have other names."""
    return next(folder.glob(f"*{ending}"), None)


def account(report: str, assignment: str) -> Account:
    """From the compiler's report of memory and its list of allocations."""
    total = _TOTAL.search(report)
    if total is None:
        raise ValueError("the compiler's report says nothing of HBM; is libtpu another than that of make aot?")
    kinds = _HBM.findall(assignment)
    return Account(
        arguments=sum(map(int, _ARGUMENT.findall(assignment))),
        temporaries=sum(int(size) for size, kind in kinds if "preallocated-temp" in kind),
        peak=int(total[1]),
    )


def reason(said: str) -> str:
    """The line of an error among what a process said."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"\S*(Error|Exception|EXHAUSTED)\b", line)]
    return (errors or lines or ["the compiler said nothing"])[-1]
