"""Reads the compiler's reports on the Pallas kernels in a program for an H100: registers, spills, shared memory, PTX.

They come from ptxas, which has to be on the PATH, from the PTX, and from the log of Mosaic's passes.
"""

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench import target


@dataclass(frozen=True)
class ReportedKernel:
    """A kernel's figures, all of them static."""

    name: str
    registers: int
    """Registers of a thread, before warpgroups hand them to each other (`setmaxnreg`)."""
    spilled: int
    """Bytes that ptxas stores to and loads from local memory, and bytes of stack."""
    shared: int
    """Bytes of shared memory that a block asks for as it starts."""
    wgmma: dict[str, int]
    """Instructions in the text, by their shape; a loop over slabs holds 4, for 64 of depth."""
    multicast: int
    """TMA loads that go to all blocks of a cluster."""
    setmaxnreg: int
    """Instructions in the text."""


def read(program: str, **arguments: Any) -> list[ReportedKernel]:
    """Compiles a program for an H100 in a process of its own; its kernels' figures, in the order of compilation."""
    with tempfile.TemporaryDirectory() as folder:
        dump = {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
        target.compile_in_child("h100", program, arguments, dump, Path(folder))
        result = []
        for path in sorted(Path(folder).glob("*.ptxas"), key=lambda path: int(path.stem.rpartition("_")[2])):
            report, ptx, passes = (path.with_suffix(end).read_text() for end in (".ptxas", ".ptx", ".mlir-passes.log"))
            name = re.search(r"Compiling entry function '(\w+?)(?:_mosaic_gpu)?(?:_kernel)?'", report)
            result.append(read_kernel(name[1] if name else path.stem, report, ptx, passes))
        return result


def read_kernel(name: str, report: str, ptx: str, passes: str) -> ReportedKernel:
    """The figures of one kernel, from ptxas's report, the PTX, and the log of Mosaic's passes."""
    spilled = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    registers, shared = re.search(r"Used (\d+) registers", report), re.search(r", (\d+) bytes smem", report)
    dynamic = [int(size) for size in re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", passes)]
    if spilled is None or registers is None or not dynamic:
        raise ValueError(f"{name}: no resources in the compiler's report")
    shapes = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)", ptx)
    return ReportedKernel(
        name=name,
        registers=int(registers[1]),
        spilled=sum(map(int, spilled.groups())),
        shared=max(dynamic) + (int(shared[1]) if shared else 0),
        wgmma={shape: shapes.count(shape) for shape in sorted(set(shapes))},
        multicast=len(re.findall(r"cp\.async\.bulk\.tensor\S*\.multicast::cluster", ptx)),
        setmaxnreg=len(re.findall(r"setmaxnreg\.\w+", ptx)),
    )
