"""Reads the TPU compiler's bundle listing of each Pallas kernel in a program: how busy are the MXUs in its hot loop?

    python -m mllm.plan.listing --target v6e mllm.plan.head_programs:general features=2048

A bundle is what one TensorCore issues in a cycle. The hot loop is the one whose own bundles (outside inner loops) hold
the most `vmatmul`s. One `vmatmul` takes 16 rows of bfloat16 (8 of float32) through an MXU; how many cycles that keeps
the MXU busy, `CYCLES`, follows from the published rate and the clock. Its figures, all of them static:

    bundles    in one turn of the hot loop, without those that a branch can skip and that hold no vmatmul: first and
               last visits, DMAs that are not always started
    vmatmuls   in one turn, over all MXUs
    mxu        busy cycles / cycles, where a bundle that finds its MXU busy waits for it (so never above 100 %)
    spills     stores of vector registers to VMEM in the hot loop

With --target h100 it prints the figures of `resources.py` instead.
Leaves out: HBM that doesn't keep up, queues that hide a stall, the loop's first and last turns.
"""

import argparse
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mllm.config.load import apply_override
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


@dataclass(frozen=True)
class Kernel:
    """One kernel's figures, as in the module's docstring."""

    name: str
    bundles: int
    vmatmuls: int
    mxu: float
    spills: int


# --- the listing ----------------------------------------------------------------------------------------------------

_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +(?:[A-Z]{2})? *: >* ?\{", re.MULTILINE)
_MATMUL = re.compile(r"vmatmul\.\S*?(bf16|f32)\S*?mxu(\d)")
_BRANCH = re.compile(r"sbr\.rel \(\S+\) target = \$region(\d+)")
_REGION = re.compile(r"(?:Start|Start/End empty) region (\d+)")
_SPILL = re.compile(r"= vst \[vmem:\[#allocation\d+_spill\]")


def branches(code: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of bundles: where a conditional branch is, and where it leads."""
    regions = {int(region): i for i, bundle in enumerate(code) for region in _REGION.findall(bundle)}
    found = ((i, int(region)) for i, bundle in enumerate(code) for region in _BRANCH.findall(bundle))
    return [(i, regions[region]) for i, region in found if region in regions]


def own(loop: range, loops: Sequence[range]) -> list[int]:
    """The bundles of a loop that are in no loop inside it."""
    inner = [other for other in loops if other != loop and loop.start <= other.start and other.stop <= loop.stop]
    return [i for i in loop if not any(i in other for other in inner)]


def mxu_use(code: Sequence[str], chip: str) -> float:
    """The share of cycles in which the MXUs are busy, their mean, while a loop of these bundles runs."""
    free: dict[str, float] = {}
    now = total = 0.0
    for bundle in code:
        now += 1
        for kind, unit in _MATMUL.findall(bundle):
            time = CYCLES[chip] * (0.5 if kind == "f32" else 1.0)
            now = max(now, free.get(unit, 0.0))
            free[unit] = now + time
            total += time
    # The next turn begins where this one ends, and waits for MXUs that are still busy.
    return total / MXUS[chip] / max(now, total / MXUS[chip])


def read_kernel(name: str, listing: str, chip: str) -> Kernel | None:
    """The figures of one kernel from its `final_bundles` file; None if no loop of it holds a `vmatmul`."""
    code = _BUNDLE.split(listing)[1:]  # in the order of their addresses
    jumps = branches(code)
    loops = [range(to, min(i + 1 + DELAY_SLOTS, len(code))) for i, to in jumps if to <= i]
    count = [len(_MATMUL.findall(bundle)) for bundle in code]
    body = max((own(loop, loops) for loop in loops), key=lambda body: sum(count[i] for i in body), default=[])
    if not sum(count[i] for i in body):
        return None
    blocks = [range(branch + 1 + DELAY_SLOTS, to) for branch, to in jumps if to > branch]
    skipped = {i for block in blocks if not any(count[i] for i in block) for i in block}
    taken = [code[i] for i in body if i not in skipped]
    return Kernel(
        name=name,
        bundles=len(taken),
        vmatmuls=sum(count[i] for i in body),
        mxu=mxu_use(taken, chip),
        spills=len(_SPILL.findall("".join(taken))),
    )


# --- the compiler's files -------------------------------------------------------------------------------------------


def read_folder(folder: Path, chip: str, *, xla: bool = False) -> list[Kernel]:
    """The Pallas kernels with products in a folder of listings; with `xla`, XLA's own kernels with products instead."""
    pallas: set[str] = set()
    for path in folder.glob("*-TLP-hlo.txt"):
        pallas.update(re.findall(r"%(\S+) = .*custom_call_target=\"tpu_custom_call\"", path.read_text()))
    result = []
    for path in sorted(folder.glob("*-final_bundles.txt")):
        match = re.fullmatch(r"\d+-(.+)-\d\d-final_bundles\.txt", path.name)
        if match and (match[1] in pallas) != xla:
            kernel = read_kernel(own_name(match[1]), path.read_text(), chip)
            result += [kernel] if kernel else []
    return result


def own_name(name: str) -> str:
    """A kernel's name from that in a program, where XLA numbers it and JAX marks what it differentiates."""
    return re.sub(r"^(?:transpose_|jvp_)*(.*?)_*(?:\.\d+)*$", r"\1", name)


def read(
    target: str, program: str, folder: Path | None = None, **arguments: Any
) -> tuple[dict[str, Any], list[Kernel]]:
    """Compiles a program for a chip in a process of its own; its account of memory, and its Pallas kernels' figures.

    The compiler's files stay in `folder`, which must be empty, if one is given. ValueError is raised if there is no
    such target, or the compiler refuses; see `targets.compile_in_child`.
    """
    chip, _ = targets.split(target)
    with tempfile.TemporaryDirectory() as temporary:
        dump = folder or Path(temporary)
        flags = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
        account = targets.compile_in_child(target, program, arguments, {"LIBTPU_INIT_ARGS": flags}, dump)
        return account, read_folder(dump, chip)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="package.module:function or file.py:function; see mllm/plan/targets.py")
    parser.add_argument("values", nargs="*", metavar="name=value", help="its arguments")
    parser.add_argument("--target", default="v6e", help="v5e, v5p, v6e or tpu7x; or h100 (default v6e)")
    options = parser.parse_args(arguments)
    target, values = options.target, dict[str, Any]()
    for value in options.values:
        apply_override(values, value)
    account: dict[str, Any]
    kernels: Sequence[Any]
    try:
        if gpus.is_gpu(target):
            account, kernels = resources.read(options.program, **values)
        else:
            account, kernels = read(target, options.program, **values)
    except (ValueError, ModuleNotFoundError) as error:
        raise UserError(str(error)) from None
    for kernel in kernels:
        figures = {name: f"{x:.1%}" if isinstance(x, float) else x for name, x in asdict(kernel).items()}
        print(", ".join(f"{name} {figure}" for name, figure in figures.items()))
    print(", ".join(f"{key} {account[key] / 2**20:.1f} MiB" for key in ("argument", "output", "temp", "peak")))
    return 0


if __name__ == "__main__":
    run_main(main)
