"""Reads the TPU compiler's bundle listing of each Pallas kernel in a program: how busy are the MXUs in its hot loop?

    python -m mllm.plan.listing --target v6e mllm.plan.head_programs:general features=2048

A bundle is what one TensorCore issues in a cycle. The hot loop is the one whose own bundles (those of no inner loop)
hold the most `vmatmul`s. One `vmatmul` takes 16 rows of bfloat16 (8 of float32) through an MXU; how many cycles that
keeps the MXU, `CYCLES`, follows from the published rate and the clock. Columns, all of them static:

    bundles    of one turn of the hot loop, without those that a branch can skip and that hold no vmatmul
    skippable  those: first and last visits, DMAs that are not always started
    vmatmul    in one turn, over all MXUs
    MXU        busy cycles / cycles, where a bundle that finds its MXU busy waits for it (so never above 100 %)
    step       the same over one turn of the loop around it, where the number of turns is known; all bundles count
    spills     vector registers stored to and loaded from VMEM in the hot loop
    VMEM MiB   what the kernel keeps on chip, by the compiler's report; of it for spills

What it can't see: HBM that doesn't keep up, queues that hide a stall, the loop's first and last turns.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mllm.plan.targets import ENVIRONMENT, split

CYCLES = {"v5e": 16, "v5p": 16, "v6e": 8, "tpu7x": 8}
"""Cycles that 16 rows of bfloat16 keep an MXU, = 16 / (rate / (2 · MXUs · side² · clock)).

v5e: 197 TFLOP/s, 4 MXUs of 128², 1.5 GHz; v5p (a core): 229.5, 4 of 128², 1.75 GHz; v6e: 918, 2 of 256², 1.75 GHz;
tpu7x (a core): 1153, 2 of 256², 2.2 GHz. The clocks are inferred; on v6e XLA's own matrix product confirms it, with a
vmatmul on each MXU in every 8 bundles.
"""
MXUS = {"v5e": 4, "v5p": 4, "v6e": 2, "tpu7x": 2}
DELAY_SLOTS = 4
"""Bundles behind a branch that still belong to its block."""


class Bundle(NamedTuple):
    text: str
    depth: int
    loop_header: bool


class Loop(NamedTuple):
    start: int
    end: int
    """The first bundle behind it."""
    turns: int | None


@dataclass(frozen=True)
class Kernel:
    """One kernel's figures; see the module's docstring for their meaning."""

    name: str
    bundles: int
    skippable: int
    vmatmuls: int
    mxu: float
    step: float | None
    spills: int
    fills: int
    vmem: int
    vmem_spilled: int


# --- the listing ----------------------------------------------------------------------------------------------------

_BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|0) +(?:([A-Z]{2}))? *: (>*) ?\{", re.MULTILINE)
_MATMUL = re.compile(r"vmatmul\.\S*?(bf16|f32)\S*?mxu(\d)")
_BRANCH = re.compile(r"sbr\.rel \(\S+\) target = \$region(\d+)")
_REGION = re.compile(r"(?:Start|Start/End empty) region (\d+)")
_TURNS = re.compile(r"scmp\.ge\.s32\.totalorder \S+ (\d+) /\* loop exit test \*/")


def bundles(listing: str) -> list[Bundle]:
    """The bundles of a `final_bundles` file, in the order of their addresses."""
    heads = list(_BUNDLE.finditer(listing))
    ends = [head.start() for head in heads[1:]] + [len(listing)]
    return [
        Bundle(listing[head.end() : end], len(head[3]), head[2] == "LB") for head, end in zip(heads, ends, strict=True)
    ]


def branches(code: Sequence[Bundle]) -> list[tuple[int, int]]:
    """Pairs of bundles: where a conditional branch is, and where it leads."""
    regions = {int(region): i for i, bundle in enumerate(code) for region in _REGION.findall(bundle.text)}
    found = ((i, int(region)) for i, bundle in enumerate(code) for region in _BRANCH.findall(bundle.text))
    return [(i, regions[region]) for i, region in found if region in regions]


def loops(code: Sequence[Bundle]) -> list[Loop]:
    """A loop is a branch back to a loop header; its number of turns stands in its exit test, if it is constant."""
    result = []
    for branch, start in branches(code):
        if start <= branch:
            end = min(branch + 1 + DELAY_SLOTS, len(code))
            tests = [turns for bundle in code[start:end] for turns in _TURNS.findall(bundle.text)]
            result.append(Loop(start, end, int(tests[-1]) if tests else None))
    return result


def own(loop: Loop, all_loops: Sequence[Loop]) -> list[int]:
    """The bundles of a loop that are in no loop inside it."""
    inner = [other for other in all_loops if other != loop and loop.start <= other.start and other.end <= loop.end]
    return [i for i in range(loop.start, loop.end) if not any(other.start <= i < other.end for other in inner)]


def busy(bundle: Bundle, chip: str) -> list[tuple[int, float]]:
    """The MXUs that a bundle starts, and for how many cycles."""
    return [(int(unit), CYCLES[chip] * (0.5 if kind == "f32" else 1.0)) for kind, unit in _MATMUL.findall(bundle.text)]


def cycles(code: Sequence[Bundle], chip: str) -> tuple[float, float]:
    """Cycles of a stretch of bundles in which the MXUs are busy (their mean), and of all of it."""
    free: dict[int, float] = {}
    now = total = 0.0
    for bundle in code:
        now += 1
        for unit, time in busy(bundle, chip):
            now = max(now, free.get(unit, 0.0))
            free[unit] = now + time
            total += time
    # Of the next turn, which begins where this one ends.
    return total / MXUS[chip], max(now, total / MXUS[chip])


def read_kernel(name: str, listing: str, chip: str, vmem: dict[str, Any] | None = None) -> Kernel | None:
    """The figures of one kernel; None if no loop of it holds a `vmatmul`."""
    code = bundles(listing)
    everything = loops(code)
    count = [len(busy(bundle, chip)) for bundle in code]
    bodies = {loop: own(loop, everything) for loop in everything}
    hot = max(bodies, key=lambda loop: sum(count[i] for i in bodies[loop]), default=None)
    if hot is None or not sum(count[i] for i in bodies[hot]):
        return None
    skipped: set[int] = set()
    for branch, target in branches(code):
        block = range(branch + 1 + DELAY_SLOTS, target)
        if target > branch and not any(count[i] for i in block):
            skipped.update(block)
    taken = [code[i] for i in bodies[hot] if i not in skipped]
    busy_cycles, all_cycles = cycles(taken, chip)
    text = "".join(bundle.text for bundle in taken)
    blocks = [part for block in (vmem or {}).get("blocks", ()) for part in block.get("allocations", ())]
    return Kernel(
        name=name,
        bundles=len(taken),
        skippable=len(bodies[hot]) - len(taken),
        vmatmuls=sum(count[i] for i in bodies[hot]),
        mxu=busy_cycles / all_cycles,
        step=_step(code, hot, everything, bodies, chip),
        spills=len(re.findall(r"= vst \[vmem:\[#allocation\d+_spill\]", text)),
        fills=len(re.findall(r"= vld \[vmem:\[#allocation\d+_spill\]", text)),
        vmem=(vmem or {}).get("total_size", 0),
        vmem_spilled=sum(part["size"] for part in blocks if "SPILL" in part.get("tag", "")),
    )


def _step(
    code: Sequence[Bundle], hot: Loop, everything: Sequence[Loop], bodies: dict[Loop, list[int]], chip: str
) -> float | None:
    around = [loop for loop in everything if loop != hot and loop.start <= hot.start and hot.end <= loop.end]
    if not around:
        return None
    outer = max(around, key=lambda loop: loop.start)
    inner = [loop for loop in everything if loop != outer and outer.start <= loop.start and loop.end <= outer.end]
    if any(loop.turns is None for loop in inner):
        return None
    parts = [(1, cycles([code[i] for i in bodies[outer]], chip))]
    parts += [(loop.turns or 0, cycles([code[i] for i in bodies[loop]], chip)) for loop in inner]
    return sum(turns * part[0] for turns, part in parts) / sum(turns * part[1] for turns, part in parts)


# --- the compiler's files -------------------------------------------------------------------------------------------


def read_folder(folder: Path, chip: str, *, xla: bool = False) -> list[Kernel]:
    """The Pallas kernels among the programs whose listings lie in a folder; or XLA's own, those with products."""
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
    """A kernel's, of that in a program: XLA numbers it, and JAX wraps the names of what it differentiates."""
    return re.sub(r"^(?:transpose_|jvp_)*(.*?)_*(?:\.\d+)*$", r"\1", name)


def read(
    target: str, program: str, folder: Path | None = None, **arguments: Any
) -> tuple[dict[str, Any], list[Kernel]]:
    """Compiles a program in a process of its own and reads the listings of its Pallas kernels.

    Args:
        target: a chip, as in "v6e".
        program: as `targets.py` describes it.
        folder: where the compiler's files stay; none: they are thrown away.
        arguments: of the program.

    Returns:
        The compiler's account of memory (bytes: argument, output, alias, temp, peak), and the kernels.

    Raises:
        ValueError: there is no such target, or the compiler refuses; the message is its cause, a line, and a note has
            all that was said.
    """
    chip, _ = split(target)
    with tempfile.TemporaryDirectory() as temporary:
        dump = folder or Path(temporary)
        dump.mkdir(parents=True, exist_ok=True)
        flags = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
        environment = os.environ | ENVIRONMENT | {"LIBTPU_INIT_ARGS": flags}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # a program from the cache isn't compiled, so not listed
        command = [sys.executable, "-m", "mllm.plan.targets", target, program, json.dumps(arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            refusal = ValueError(cause(done.stderr) or f"{program} for {target}: ended with code {done.returncode}")
            refusal.add_note(done.stderr)
            raise refusal
        return json.loads(done.stdout.splitlines()[-1]), read_folder(dump, chip)


def cause(errors: str) -> str:
    """Of what Python says as it ends, the line with the exception: frames stand before it, JAX's remarks behind."""
    last = errors.rpartition("Traceback (most recent call last):\n")[2]
    return next((line for line in last.splitlines() if line.strip() and not line.startswith(" ")), "")


def show(kernels: Sequence[Kernel]) -> None:
    width = max((len(kernel.name) for kernel in kernels), default=0)
    print(f"{'kernel':{width}}  bundles  skippable  vmatmul    MXU   step  spills  fills  VMEM MiB  spilled")
    for k in kernels:
        step = "     -" if k.step is None else f"{k.step:6.1%}"
        figures = f"{k.bundles:7}  {k.skippable:9}  {k.vmatmuls:7} {k.mxu:6.1%} {step} {k.spills:7} {k.fills:6}"
        print(f"{k.name:{width}}  {figures}  {k.vmem / 2**20:8.2f} {k.vmem_spilled / 2**20:8.2f}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="package.module:function or file.py:function; see mllm/plan/targets.py")
    parser.add_argument("values", nargs="*", metavar="name=value", help="its arguments; a value is JSON or a word")
    parser.add_argument("--target", default="v6e", help="v5e, v5p, v6e or tpu7x (default v6e)")
    parser.add_argument("--dump", type=Path, metavar="FOLDER", help="keep the compiler's files there")
    options = parser.parse_args(arguments)
    try:
        values = dict(value.split("=", 1) for value in options.values)
        account, kernels = read(
            options.target, options.program, options.dump, **{key: _value(text) for key, text in values.items()}
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(kernels)
    print(", ".join(f"{key} {account[key] / 2**20:.1f} MiB" for key in ("argument", "output", "temp", "peak")))
    return 0


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


if __name__ == "__main__":
    sys.exit(main())
