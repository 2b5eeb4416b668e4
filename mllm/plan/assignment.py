"""The memory that a program will take on a device, as soon as the compiler knows it: minutes before it has the code.

XLA assigns every buffer its place before it generates instructions. So the compiler runs in a process of its own
(`targets.py`), writes its account of the assignment into a folder (`--xla_dump_to`), and is stopped there. Its total is
what the compiler holds against a TPU's HBM; `memory_analysis()` adds up more temporaries where there are collectives. A
program that is too large has an account, too.

Without a GPU nothing can be timed, so XLA keeps its first choice for each matrix product, a Triton kernel. With one, it
may find cuBLAS faster, and then the operations before a product are stored first. `GPU_FLAGS` make either choice for
all products, and the larger account counts. What the libraries hold outside XLA's share of the memory is left out.
"""

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mllm.plan import targets

TPU_FILES = (".after_optimizations", ".after_optimizations_after_buffer_assignment.txt")
GPU_FILES = (".*_gpu_after_optimizations", ".0.ir-no-opt.ll")
"""How the names of the two files with the account begin, behind the module's name; and the file that is written after
them (on GPUs the first kernel's code), unless a program is too large for a TPU: then the compiler ends by itself."""
GPU_FLAGS = ("--xla_gpu_enable_triton_gemm=true", "--xla_gpu_enable_triton_gemm=false")
_TOTAL = re.compile(r"\(color=0\)\nTotal bytes: (\d+)")
_TEMPORARY = re.compile(r"^allocation \d+: size (\d+), (?!color).*preallocated-temp", re.MULTILINE)


class Account(NamedTuple):
    """Memory in bytes a device; the peak has arguments and results, too."""

    temporaries: int
    peak: int


def read(target: str, program: str, axes: Mapping[str, int], **arguments: Any) -> Account:
    """The account of `program`, which gets a mesh of the target with these axes, and `arguments`, as JSON.

    ValueError, which says why in one line, is raised if it can't be compiled. A program that is too large can.
    """
    given = {**arguments, "mesh": dict(axes)}
    if targets.split(target)[0] in targets.TPUS:
        return _read(target, program, given, TPU_FILES)
    found, refusals = [], []
    for flag in GPU_FLAGS:
        try:
            found.append(_read(target, program, given, GPU_FILES, flag))
        except ValueError as error:  # a product may suit only one of them
            refusals.append(error)
    if not found:
        raise refusals[0]
    return max(found, key=lambda account: account.peak)


def _read(target: str, program: str, arguments: Mapping[str, Any], files: tuple[str, str], *flags: str) -> Account:
    begin, last = files
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inherited = os.environ.get("XLA_FLAGS", "")
        xla = " ".join([inherited, *flags, f"--xla_dump_to={folder}", "--xla_dump_hlo_as_text"])
        ended = targets.run_child(
            target, program, arguments, {"XLA_FLAGS": xla}, folder, until=lambda: any(folder.glob(f"*{last}"))
        )
        # Files of the compiler for the CPU have other names.
        report, assignment = (
            next(folder.glob(f"*{begin}-{file}.txt"), None) for file in ("memory-usage-report", "buffer-assignment")
        )
        if report is None or assignment is None:
            raise ValueError(f"{program} on {target}: {ended.reason or 'the compiler left no report'}")
        return account(report.read_text(), assignment.read_text())


def account(report: str, assignment: str) -> Account:
    """The account, from the compiler's report of memory and its list of allocations."""
    total = _TOTAL.search(report)
    if total is None:
        raise ValueError("the compiler's report has another form; is the compiler that of make aot or make aot-gpu?")
    return Account(sum(map(int, _TEMPORARY.findall(assignment))), int(total[1]))
