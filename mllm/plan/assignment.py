"""The memory that a program will take on a device, as soon as the compiler knows it: minutes before it has the code.

XLA assigns every buffer its place before it generates instructions. So the compiler runs in a process of its own
(`targets.py`), writes its account of the assignment into a folder (`--xla_dump_to`), and is stopped there. Its total is
what the compiler holds against a TPU's HBM; `memory_analysis()` adds up more temporaries where there are collectives. A
program that is too large has an account, too.

Without a GPU nothing can be timed, so XLA keeps its first choice for each matrix product, a Triton kernel, which may
not exist. With one, it may find cuBLAS faster, and then the operations before a product are stored first, which takes
more memory (docs/log.md): a plan has cuBLAS for all. What it holds outside XLA's share of the memory is left out.
"""

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mllm.plan import targets

TPU_FILES = (".after_optimizations", ".after_optimizations_after_buffer_assignment.txt", "")
GPU_FILES = (".*_gpu_after_optimizations", ".0.ir-no-opt.ll", "--xla_gpu_enable_triton_gemm=false")
"""How the names of the two files with the account begin, behind the module's name; the file that is written after them
(on GPUs the first kernel's code), unless a program is too large for a TPU: then the compiler ends by itself; a flag."""
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
    begin, last, flag = TPU_FILES if targets.split(target)[0] in targets.TPUS else GPU_FILES
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inherited = os.environ.get("XLA_FLAGS", "")
        flags = {"XLA_FLAGS": " ".join([inherited, flag, f"--xla_dump_to={folder}", "--xla_dump_hlo_as_text"])}
        given = {**arguments, "mesh": dict(axes)}
        ended = targets.run_child(target, program, given, flags, folder, until=lambda: any(folder.glob(f"*{last}")))
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
