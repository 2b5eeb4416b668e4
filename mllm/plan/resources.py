"""Reads what the compiler says of the Pallas kernels in a program for an H100: registers, spills, shared memory, PTX.

    python -m mllm.plan.resources mllm.plan.head_programs:loss workspace=0

The compilation has a process of its own, as Mosaic GPU is told by the environment to keep its PTX, ptxas's report and
its passes. Columns, of each kernel:

    registers   of a thread, before warpgroups hand them to each other (`setmaxnreg`)
    spilled     bytes that ptxas stores to and loads from local memory, and of stack
    shared      bytes of shared memory that a block asks for as it starts
    wgmma       instructions in the text, of one shape; a loop over slabs holds 4, for 64 of depth
    multicast   TMA loads that go to all blocks of a cluster
    setmaxnreg  instructions in the text

ptxas has to be on the PATH. Left out: times, and whether any of it runs.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mllm.plan.listing import cause


@dataclass(frozen=True)
class Kernel:
    """One kernel's figures; see the module's docstring for their meaning."""

    name: str
    registers: int
    spilled: int
    shared: int
    wgmma: dict[str, int]
    multicast: int
    setmaxnreg: int


def read_kernel(name: str, report: str, ptx: str, passes: str) -> Kernel:
    """The figures of one kernel, out of ptxas's report, the PTX, and the log of Mosaic's passes."""
    spilled = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    registers, shared = re.search(r"Used (\d+) registers", report), re.search(r", (\d+) bytes smem", report)
    asked = [int(size) for size in re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", passes)]
    if spilled is None or registers is None or not asked:
        raise ValueError(f"{name}: no resources in the compiler's report")
    shapes = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)", ptx)
    return Kernel(
        name=name,
        registers=int(registers[1]),
        spilled=sum(map(int, spilled.groups())),
        shared=max(asked) + (int(shared[1]) if shared else 0),
        wgmma={shape: shapes.count(shape) for shape in sorted(set(shapes))},
        multicast=len(re.findall(r"cp\.async\.bulk\.tensor\S*\.multicast::cluster", ptx)),
        setmaxnreg=len(re.findall(r"setmaxnreg\.\w+", ptx)),
    )


def read_folder(folder: Path) -> list[Kernel]:
    """The kernels whose reports lie in a folder, in the order of their compilation."""
    paths = sorted(folder.glob("*.ptxas"), key=lambda path: int(path.stem.rpartition("_")[2]))
    result = []
    for path in paths:
        ptx, passes = path.with_suffix(".ptx"), path.with_suffix(".mlir-passes.log")
        name = re.search(r"Compiling entry function '(\w+?)(?:_mosaic_gpu)?(?:_kernel)?'", path.read_text())
        found = name[1] if name else path.stem
        result.append(read_kernel(found, path.read_text(), ptx.read_text(), passes.read_text()))
    return result


def read(program: str, **arguments: Any) -> tuple[dict[str, Any], list[Kernel]]:
    """Compiles a program for an H100 in a process of its own and reads the reports of its Pallas kernels.

    Returns:
        The compiler's account of memory (bytes: argument, output, alias, temp, peak), and the kernels.

    Raises:
        ModuleNotFoundError: there is no ptxas.
        ValueError: the compiler refuses; the message is its cause, a line, and a note has all that was said.
    """
    if shutil.which("ptxas") is None:
        raise ModuleNotFoundError("ptxas, of the CUDA toolkit, isn't on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_TO": folder}
        environment |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # a program from the cache isn't compiled
        command = [sys.executable, "-m", "mllm.plan.targets", "h100", program, json.dumps(arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            refusal = ValueError(cause(done.stderr) or f"{program}: ended with code {done.returncode}")
            refusal.add_note(done.stderr)
            raise refusal
        return json.loads(done.stdout.splitlines()[-1]), read_folder(Path(folder))


def show(kernels: Sequence[Kernel]) -> None:
    width = max((len(kernel.name) for kernel in kernels), default=0)
    print(f"{'kernel':{width}}  registers  spilled   shared  multicast  setmaxnreg  wgmma")
    for k in kernels:
        shapes = ", ".join(f"{count} {shape}" for shape, count in k.wgmma.items())
        figures = f"{k.registers:9}  {k.spilled:7}  {k.shared:7}  {k.multicast:9}  {k.setmaxnreg:10}"
        print(f"{k.name:{width}}  {figures}  {shapes}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="package.module:function or file.py:function; see mllm/plan/targets.py")
    parser.add_argument("values", nargs="*", metavar="name=value", help="its arguments; a value is JSON or a word")
    options = parser.parse_args(arguments)
    values = {"impl": "mosaic_gpu"}
    try:
        for key, value in (text.split("=", 1) for text in options.values):
            values[key] = json.loads(value) if re.fullmatch(r"[\d.e+-]+|true|false|null", value) else value
        account, kernels = read(options.program, **values)
    except (ValueError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(kernels)
    print(", ".join(f"{key} {account[key] / 2**20:.1f} MiB" for key in ("argument", "output", "temp", "peak")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
