"""Reads the compiler's reports on the Pallas kernels in a program for an H100: registers, spills, shared memory, PTX.

    python -m mllm.plan.listing --target h100 mllm.plan.head_programs:loss impl=mosaic_gpu workspace=0

Its figures, for each kernel:

    registers   of a thread, before warpgroups hand them to each other (`setmaxnreg`)
    spilled     bytes that ptxas stores to and loads from local memory, and of stack
    shared      bytes of shared memory that a block asks for as it starts
    wgmma       instructions in the text, by their shape; a loop over slabs holds 4, for 64 of depth
    multicast   TMA loads that go to all blocks of a cluster
    setmaxnreg  instructions in the text

ptxas has to be on the PATH. Leaves out: times, and whether any of it runs.
"""

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mllm.plan import targets


@dataclass(frozen=True)
class Kernel:
    """One kernel's figures, as in the module's docstring."""

    name: str
    registers: int
    spilled: int
    shared: int
    wgmma: dict[str, int]
    multicast: int
    setmaxnreg: int


def read_kernel(name: str, report: str, ptx: str, passes: str) -> Kernel:
    """The figures of one kernel, from ptxas's report, the PTX, and the log of Mosaic's passes."""
    spilled = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    registers, shared = re.search(r"Used (\d+) registers", report), re.search(r", (\d+) bytes smem", report)
    dynamic = [int(size) for size in re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", passes)]
    if spilled is None or registers is None or not dynamic:
        raise ValueError(f"{name}: no resources in the compiler's report")
    shapes = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)", ptx)
    return Kernel(
        name=name,
        registers=int(registers[1]),
        spilled=sum(map(int, spilled.groups())),
        shared=max(dynamic) + (int(shared[1]) if shared else 0),
        wgmma={shape: shapes.count(shape) for shape in sorted(set(shapes))},
        multicast=len(re.findall(r"cp\.async\.bulk\.tensor\S*\.multicast::cluster", ptx)),
        setmaxnreg=len(re.findall(r"setmaxnreg\.\w+", ptx)),
    )


def read_folder(folder: Path) -> list[Kernel]:
    """The kernels with reports in a folder, in the order of their compilation."""
    result = []
    for path in sorted(folder.glob("*.ptxas"), key=lambda path: int(path.stem.rpartition("_")[2])):
        report, ptx, passes = (path.with_suffix(end).read_text() for end in (".ptxas", ".ptx", ".mlir-passes.log"))
        name = re.search(r"Compiling entry function '(\w+?)(?:_mosaic_gpu)?(?:_kernel)?'", report)
        result.append(read_kernel(name[1] if name else path.stem, report, ptx, passes))
    return result


def read(program: str, **arguments: Any) -> tuple[dict[str, Any], list[Kernel]]:
    """As `listing.read`, for an H100; ModuleNotFoundError where there is no ptxas."""
    if shutil.which("ptxas") is None:
        raise ModuleNotFoundError("ptxas, of the CUDA toolkit, isn't on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        environment = {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
        account = targets.compile_in_child("h100", program, arguments, environment, Path(folder))
        return account, read_folder(Path(folder))
