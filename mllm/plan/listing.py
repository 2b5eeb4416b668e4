"""Reads the TPU compiler's bundle listing of each Pallas kernel in a program: how busy are the MXUs in its hot loop?

    python -m mllm.plan.listing --target v6e mllm.plan.head_programs:general features=2048

A bundle is what one TensorCore issues in a cycle. The hot loop is the one whose own bundles (outside inner loops) hold
the most `vmatmul`s. One `vmatmul` takes 16 rows of bfloat16 (8 of float32) through an MXU; how many cycles that keeps
the MXU busy, `CYCLES`, follows from the published rate and the clock. Columns, all of them static:

    bundles       in one turn of the hot loop, without those that a branch can skip and that hold no vmatmul
    skippable     bundles of the latter kind: first and last visits, DMAs that are not always started
    vmatmuls      in one turn, over all MXUs
    mxu           busy cycles / cycles, where a bundle that finds its MXU busy waits for it (so never above 100 %)
    spills        stores of vector registers to VMEM in the hot loop
    fills         loads of such registers
    vmem          bytes that the kernel keeps on chip, by the compiler's report
    vmem_spilled  how many of them are for spills

With --target h100 it prints the figures of `resources.py` instead.
Leaves out: HBM that doesn't keep up, queues that hide a stall, the loop's first and last turns.
"""

import argparse
import dataclasses
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mllm.errors import ArgumentParser, UserError, command, run_main
from mllm.plan import gpus, resources, targets

CYCLES = {"v5e": 16, "v5p": 16, "v6e": 8, "tpu7x": 8}
"""Cycles that 16 rows of bfloat16 keep an MXU busy, = 16 / (rate / (2 · MXUs · side² · clock)).

v5e: 197 TFLOP/s, 4 MXUs of 128², 1.5 GHz; v5p (a core): 229.5, 4 of 128², 1.75 GHz; v6e: 918, 2 of 256², 1.75 GHz;
tpu7x (a core): 1153, 2 of 256², 2.2 GHz. The clocks are inferred; on v6e XLA's own matrix product confirms it, with a
vmatmul on each MXU in every 8 bundles.
"""
MXUS = {"v5e": 4, "v5p": 4, "v6e": 2, "tpu7x": 2}
DELAY_SLOTS = 4
"""Bundles behind a branch that still belong to its block."""


class Loop(NamedTuple):
    """The bundles from `start` to the one before `end`."""

    start: int
    end: int


@dataclass(frozen=True)
class Kernel:
    """One kernel's figures; see the module's docstring for their meaning."""

    name: str
    bundles: int
    skippable: int
    vmatmuls: int
    mxu: float
    spills: int
    fills: int
    vmem: int
    vmem_spilled: int


# --- the listing ----------------------------------------------------------------------------------------------------

_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +(?:[A-Z]{2})? *: >* ?\{", re.MULTILINE)
_MATMUL = re.compile(r"vmatmul\.\S*?(bf16|f32)\S*?mxu(\d)")
_BRANCH = re.compile(r"sbr\.rel \(\S+\) target = \$region(\d+)")
_REGION = re.compile(r"(?:Start|Start/End empty) region (\d+)")


def bundles(listing: str) -> list[str]:
    """The bundles of a `final_bundles` file, in the order of their addresses."""
    return _BUNDLE.split(listing)[1:]


def branches(code: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of bundles: where a conditional branch is, and where it leads."""
    regions = {int(region): i for i, bundle in enumerate(code) for region in _REGION.findall(bundle)}
    found = ((i, int(region)) for i, bundle in enumerate(code) for region in _BRANCH.findall(bundle))
    return [(i, regions[region]) for i, region in found if region in regions]


def own(loop: Loop, loops: Sequence[Loop]) -> list[int]:
    """The bundles of a loop that are in no loop inside it."""
    inner = [other for other in loops if other != loop and loop.start <= other.start and other.end <= loop.end]
    return [i for i in range(loop.start, loop.end) if not any(other.start <= i < other.end for other in inner)]


def busy(bundle: str, chip: str) -> list[tuple[int, float]]:
    """The MXUs that a bundle starts, and for how many cycles."""
    return [(int(unit), CYCLES[chip] * (0.5 if kind == "f32" else 1.0)) for kind, unit in _MATMUL.findall(bundle)]


def mxu_use(code: Sequence[str], chip: str) -> float:
    """The share of cycles in which the MXUs are busy, their mean, while a loop of these bundles runs."""
    free: dict[int, float] = {}
    now = total = 0.0
    for bundle in code:
        now += 1
        for unit, time in busy(bundle, chip):
            now = max(now, free.get(unit, 0.0))
            free[unit] = now + time
            total += time
    # The next turn begins where this one ends, and waits for MXUs that are still busy.
    return total / MXUS[chip] / max(now, total / MXUS[chip])


def read_kernel(name: str, listing: str, chip: str, vmem: dict[str, Any] | None = None) -> Kernel | None:
    """The figures of one kernel; None if no loop of it holds a `vmatmul`."""
    code = bundles(listing)
    jumps = branches(code)
    loops = [Loop(to, min(i + 1 + DELAY_SLOTS, len(code))) for i, to in jumps if to <= i]
    count = [len(busy(bundle, chip)) for bundle in code]
    body = max((own(loop, loops) for loop in loops), key=lambda body: sum(count[i] for i in body), default=[])
    if not sum(count[i] for i in body):
        return None
    skipped: set[int] = set()
    for branch, target in jumps:
        block = range(branch + 1 + DELAY_SLOTS, target)
        if target > branch and not any(count[i] for i in block):
            skipped.update(block)
    taken = [code[i] for i in body if i not in skipped]
    text = "".join(taken)
    blocks = [part for block in (vmem or {}).get("blocks", ()) for part in block.get("allocations", ())]
    return Kernel(
        name=name,
        bundles=len(taken),
        skippable=len(body) - len(taken),
        vmatmuls=sum(count[i] for i in body),
        mxu=mxu_use(taken, chip),
        spills=len(re.findall(r"= vst \[vmem:\[#allocation\d+_spill\]", text)),
        fills=len(re.findall(r"= vld \[vmem:\[#allocation\d+_spill\]", text)),
        vmem=(vmem or {}).get("total_size", 0),
        vmem_spilled=sum(part["size"] for part in blocks if "SPILL" in part.get("tag", "")),
    )


# --- the compiler's files -------------------------------------------------------------------------------------------


def read_folder(folder: Path, chip: str, *, xla: bool = False) -> list[Kernel]:
    """The Pallas kernels with products in a folder of listings; with `xla`, XLA's own kernels with products instead."""
    pallas, vmem = set(), {}
    for path in folder.glob("*-TLP-hlo.txt"):
        calls = re.findall(r"%(\S+) = .*custom_call_target=\"tpu_custom_call\"", path.read_text())
        pallas.update(calls)
    for path in folder.glob("*vmem_report.html"):
        start = path.read_text().partition("const DATA =")[2]
        vmem.update(json.JSONDecoder().raw_decode(start)[0]["hlo_breakdowns"])
    result = []
    for path in sorted(folder.glob("*-final_bundles.txt")):
        match = re.fullmatch(r"\d+-(.+)-\d\d-final_bundles\.txt", path.name)
        if match and (match[1] in pallas) != xla:
            kernel = read_kernel(own_name(match[1]), path.read_text(), chip, vmem.get(match[1]))
            result += [kernel] if kernel else []
    return result


def own_name(name: str) -> str:
    """A kernel's name from that in a program, where XLA numbers it and JAX marks what it differentiates."""
    return re.sub(r"^(?:transpose_|jvp_)*(.*?)_*(?:\.\d+)*$", r"\1", name)


def read(
    target: str, program: str, folder: Path | None = None, **arguments: Any
) -> tuple[dict[str, Any], list[Kernel]]:
    """Compiles a program in a process of its own and reads the listings of its Pallas kernels.

    Args:
        target: a chip, as in "v6e".
        program: as `targets.py` describes it.
        folder: where the compiler's files stay; None: they are deleted.
        arguments: for the program.

    Returns:
        What `targets.main` prints, with the compiler's account of memory, and the kernels.

    Raises:
        ValueError: there is no such target, or the compiler refuses; see `targets.compile_in_child`.
    """
    chip, _ = targets.split(target)
    with tempfile.TemporaryDirectory() as temporary:
        dump = folder or Path(temporary)
        dump.mkdir(parents=True, exist_ok=True)
        flags = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
        environment = targets.ENVIRONMENT | {"LIBTPU_INIT_ARGS": flags}
        account = targets.compile_in_child(target, program, environment, **arguments)
        return account, read_folder(dump, chip)


def table(kernels: Sequence[Any]) -> str:
    """A line for each kernel, a column for each of its figures."""
    names = [field.name for field in dataclasses.fields(kernels[0])] if kernels else []
    lines = [names, *([show(getattr(kernel, name)) for name in names] for kernel in kernels)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def show(figure: Any) -> str:
    """A figure of a kernel as text: a share in percent, counts by name as "4 m64n256k16"."""
    if isinstance(figure, dict):
        return ", ".join(f"{count} {name}" for name, count in figure.items()) or "0"
    return f"{figure:.1%}" if isinstance(figure, float) else str(figure)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="package.module:function or file.py:function; see mllm/plan/targets.py")
    parser.add_argument(
        "values", nargs="*", type=named_value, metavar="name=value", help="its arguments; a value is JSON or a word"
    )
    parser.add_argument("--target", default="v6e", help="v5e, v5p, v6e or tpu7x; or h100 (default v6e)")
    parser.add_argument("--dump", type=Path, metavar="FOLDER", help="keep the TPU compiler's files there")
    options = parser.parse_args(arguments)
    on_tpu = partial(read, options.target, folder=options.dump)
    read_kernels = resources.read if gpus.is_gpu(options.target) else on_tpu
    try:
        account, kernels = read_kernels(options.program, **dict(options.values))
    except (ValueError, ModuleNotFoundError) as error:
        raise UserError(str(error)) from None
    print(table(kernels))
    print(", ".join(f"{key} {account[key] / 2**20:.1f} MiB" for key in ("argument", "output", "temp", "peak")))
    return 0


def named_value(text: str) -> tuple[str, Any]:
    """The name and the value of `name=value`; a value that is no JSON is a text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}: expected name=value")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


if __name__ == "__main__":
    run_main(main)
