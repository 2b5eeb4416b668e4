"""What a program will take of a device's memory, as soon as the compiler knows: minutes before it has written the code.

XLA assigns every buffer its place before it turns to the instructions, which take most of the time. So the compiler
runs in a process of its own (`targets.py`), leaves its account of the assignment in a folder (`--xla_dump_to`), and is
stopped there. Its total is what the compiler holds against a TPU's HBM: where it refuses a program, it names that very
figure. `memory_analysis()` adds up more temporaries where there are collectives, more than HBM of programs that the
compiler accepts. What is too large is accounted for all the same. For GPUs there are two compilations, see `gpus.py`.
Leaves out what comes later: whether each kernel finds room on chip.

Run as a program it is the compiler's process, which ends, and removes the folder, when the one that started it does.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mllm.plan import gpus, targets
from mllm.plan.targets import ENVIRONMENT

ROOT = Path(__file__).parent.parent.parent
PAUSE = 0.1
_TOTAL = re.compile(r"\(color=0\)\nTotal bytes: (\d+)")
_ARGUMENT = re.compile(r"^allocation \d+: size (\d+), .*\bparameter \d+", re.MULTILINE)
_HBM = re.compile(r"^allocation \d+: size (\d+), (?!color)(.*):$", re.MULTILINE)


class Files(NamedTuple):
    """How the names of what the compiler leaves end."""

    report: str
    assignment: str
    last: str
    """Written after the others, where a TPU has room; where it hasn't, the compiler ends by itself."""


OF_TPUS = Files(
    report=".after_optimizations-memory-usage-report.txt",
    assignment=".after_optimizations-buffer-assignment.txt",
    last=".after_optimizations_after_buffer_assignment.txt",
)
OF_GPUS = Files(
    report=".*_gpu_after_optimizations-memory-usage-report.txt",
    assignment=".*_gpu_after_optimizations-buffer-assignment.txt",
    last=".0.ir-no-opt.ll",  # the first kernel's code
)
"""With wildcards."""


class Account(NamedTuple):
    """Memory in bytes a device. Results that take an argument's place are among the arguments."""

    arguments: int
    temporaries: int
    peak: int
    """With results and constants."""


def read(target: str, program: str, axes: Mapping[str, int], **arguments: Any) -> Account:
    """The account of `program`, which gets a mesh of the target with these axes, and `arguments`, as JSON.

    Raises:
        ValueError: it can't be compiled; one line says why. A program that is too large can.
    """
    given = json.dumps({**arguments, "mesh": dict(axes)})
    if not gpus.named(target):
        return _read(target, program, given, OF_TPUS)
    found, refusals = [], []
    for flag in gpus.FLAGS:
        try:
            found.append(_read(target, program, given, OF_GPUS, flag))
        except ValueError as error:  # a product may suit only one of them
            refusals.append(error)
    if not found:
        raise refusals[0]
    return max(found, key=lambda account: account.peak)


def _read(target: str, program: str, arguments: str, files: Files, *flags: str) -> Account:
    with tempfile.TemporaryDirectory() as folder:
        set_already = os.environ.get("XLA_FLAGS", "")
        xla = " ".join([set_already, *flags, f"--xla_dump_to={folder}", "--xla_dump_hlo_as_text"])
        # A file, since a pipe that nobody reads would stop the compiler.
        with (
            (Path(folder) / "messages").open("w+") as messages,
            subprocess.Popen(
                [sys.executable, "-m", "mllm.plan.assignment", folder, target, program, arguments],
                cwd=ROOT,
                env={**ENVIRONMENT, **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla},
                stdin=subprocess.PIPE,
                stdout=messages,
                stderr=subprocess.STDOUT,
            ) as process,
        ):
            try:
                while process.poll() is None and find(Path(folder), files.last) is None:
                    time.sleep(PAUSE)
            finally:
                process.kill()
            messages.seek(0)
            said = messages.read()
        report, assignment = find(Path(folder), files.report), find(Path(folder), files.assignment)
        if report is None or assignment is None:
            raise ValueError(f"{program} on {target}: {reason(said)}")
        return account(report.read_text(), assignment.read_text())


def find(folder: Path, ending: str) -> Path | None:
    """The file with this ending, if it is there; those of the compiler for the CPU have other names."""
    return next(folder.glob(f"*{ending}"), None)


def account(report: str, assignment: str) -> Account:
    """From the compiler's report of memory and its list of allocations."""
    total = _TOTAL.search(report)
    if total is None:
        raise ValueError("the compiler's report has another form; is the compiler that of make aot or make aot-gpu?")
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


def end_with_parent(folder: str) -> None:
    """Wait until there is no one any more who could write to stdin, then leave nothing behind."""
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, args=sys.argv[1:2], daemon=True).start()
    targets.main(*sys.argv[2:])
