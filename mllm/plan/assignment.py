"""The memory that a program will take on a device, as soon as the compiler knows it: minutes before it has the code.

XLA assigns every buffer its place before it generates instructions, which takes most of the time. So the compiler runs
in a process of its own (`targets.py`), writes its account of the assignment into a folder (`--xla_dump_to`), and is
stopped there. Its total is what the compiler holds against a TPU's HBM: a refusal names that very figure.
`memory_analysis()` adds up more temporaries where there are collectives, and exceeds HBM for programs that the compiler
accepts. A program that is too large has an account, too. For GPUs there are two compilations, see `gpus.py`.
Leaves out what the compiler finds out later: whether each kernel finds room on chip.

Run as a program it is the compiler's process, which ends with its parent and then removes the folder.
"""

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mllm import child_process
from mllm.plan import gpus, targets

ROOT = Path(__file__).parent.parent.parent
_TOTAL = re.compile(r"\(color=0\)\nTotal bytes: (\d+)")
_ARGUMENT = re.compile(r"^allocation \d+: size (\d+), .*\bparameter \d+", re.MULTILINE)
_HBM = re.compile(r"^allocation \d+: size (\d+), (?!color)(.*):$", re.MULTILINE)


class Files(NamedTuple):
    """The files that the compiler writes, by the ends of their names, with wildcards."""

    report: str
    assignment: str
    last: str
    """Written after the others, unless a program is too large for a TPU; then the compiler ends by itself."""


TPU_FILES = Files(
    report=".after_optimizations-memory-usage-report.txt",
    assignment=".after_optimizations-buffer-assignment.txt",
    last=".after_optimizations_after_buffer_assignment.txt",
)
GPU_FILES = Files(
    report=".*_gpu_after_optimizations-memory-usage-report.txt",
    assignment=".*_gpu_after_optimizations-buffer-assignment.txt",
    last=".0.ir-no-opt.ll",  # the first kernel's code
)


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
    if not gpus.is_gpu(target):
        return _read(target, program, given, TPU_FILES)
    found, refusals = [], []
    for flag in gpus.FLAGS:
        try:
            found.append(_read(target, program, given, GPU_FILES, flag))
        except ValueError as error:  # a product may suit only one of them
            refusals.append(error)
    if not found:
        raise refusals[0]
    return max(found, key=lambda account: account.peak)


def _read(target: str, program: str, arguments: str, files: Files, *flags: str) -> Account:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inherited = os.environ.get("XLA_FLAGS", "")
        xla = " ".join([inherited, *flags, f"--xla_dump_to={folder}", "--xla_dump_hlo_as_text"])
        ended = child_process.run(
            [sys.executable, "-m", "mllm.plan.assignment", name, target, program, arguments],
            cwd=ROOT,
            env={**targets.ENVIRONMENT, **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla},
            until=lambda: find(folder, files.last) is not None,
        )
        report, assignment = find(folder, files.report), find(folder, files.assignment)
        if report is None or assignment is None:
            raise ValueError(f"{program} on {target}: {ended.reason or 'the compiler left no report'}")
        return account(report.read_text(), assignment.read_text())


def find(folder: Path, ending: str) -> Path | None:
    """The file with this ending, or None; files of the compiler for the CPU have other names."""
    return next(folder.glob(f"*{ending}"), None)


def account(report: str, assignment: str) -> Account:
    """The account, from the compiler's report of memory and its list of allocations."""
    total = _TOTAL.search(report)
    if total is None:
        raise ValueError("the compiler's report has another form; is the compiler that of make aot or make aot-gpu?")
    kinds = _HBM.findall(assignment)
    return Account(
        arguments=sum(map(int, _ARGUMENT.findall(assignment))),
        temporaries=sum(int(size) for size, kind in kinds if "preallocated-temp" in kind),
        peak=int(total[1]),
    )


if __name__ == "__main__":
    child_process.end_with_parent(lambda: shutil.rmtree(sys.argv[1], ignore_errors=True))
    targets.main(*sys.argv[2:])
