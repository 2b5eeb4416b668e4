"""The head's methods, compiled for a TPU or an H100 that isn't there: python tools/bench head --target v6e

Nothing runs, and no figure is a time; bfloat16. The columns are

    products       the matrix products of 2 N V D flops each that a method has to make
    cycles /three  for TPUs, the cycles of its hot loops over those of three products that keep the MXUs busy, as if
                   each of its kernels made as many products
    25%            the same where a quarter of the rows counts, over (three) products of these rows alone: by
                   arithmetic, from whether a method leaves the other rows out
    GB, loops once for TPUs, what operations read and write, by the compiler, which counts a loop's body once and a
                   kernel by its own estimate: what it says of a method without loops is all
    temp, peak     the compiler's account of HBM: beside arguments and results, and with them

Below it stands, for TPUs, how busy the MXUs are in the hot loop of each Pallas kernel, or of XLA's own products where a
method has no kernel, by the compiler's listing. It lists bundles, of which a TensorCore issues one in a cycle. The hot
loop is the one whose own bundles (outside inner loops) hold the most `vmatmul`s. One `vmatmul` takes 16 rows of
bfloat16 (8 of float32) through an MXU; how many cycles that keeps the MXU busy, `CYCLES`, follows from the published
rate and the clock. Left out are HBM that doesn't keep up, queues that hide a stall, and a loop's first and last turns.
"""

import re
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mllm.errors import UserError
from mllm.plan import targets
from tools.bench.frame import Shape, table, title
from tools.bench.methods import Call, Method, methods

CYCLES = {"v5e": 16, "v5p": 16, "v6e": 8, "tpu7x": 8}
"""Cycles that 16 rows of bfloat16 keep an MXU busy, = 16 / (rate / (2 · MXUs · side² · clock)).

v5e: 197 TFLOP/s, 4 MXUs of 128², 1.5 GHz; v5p (a core): 229.5, 4 of 128², 1.75 GHz; v6e: 918, 2 of 256², 1.75 GHz;
tpu7x (a core): 1153, 2 of 256², 2.2 GHz. The clocks are inferred; on v6e XLA's own matrix product confirms it, with a
vmatmul on each MXU in every 8 bundles.
"""
MXUS = {"v5e": 4, "v5p": 4, "v6e": 2, "tpu7x": 2}
DELAY_SLOTS = 4
COLUMNS = ("method", "products", "25%", "cycles /three", "25%", "GB, loops once", "temp MiB", "peak MiB")

Kernel = tuple[int, int, float, int]
"""A kernel's figures, all of them static: bundles, vmatmuls, mxu and spills, as `read_kernel` says."""


# --- the table


def run(target: str, shape: Shape, chosen: Sequence[Method]) -> None:
    """Print a table of the methods that run through JAX, with a line for each kernel.

    UserError is raised if the compiler isn't installed.
    """
    try:
        targets.mesh(target)
    except ModuleNotFoundError as error:
        raise UserError(f"--target: {error}") from None
    print(f"{target} by its compiler, jax {jax.__version__}, bfloat16; nothing was run, and nothing is a time")
    rows, remarks = [], []
    for method in chosen:
        if method.obstacle(platform(target)) or "torch" in method.needs:
            continue
        about = {"method": method.name, "shape": list(shape)}
        with tempfile.TemporaryDirectory() as folder:
            try:
                account = compile_listed(target, "tools.bench.target:program", about, Path(folder))
            except ValueError as error:
                remarks.append(f"{method.name}: refused: {error}")
                continue
            kernels = read_folder(Path(folder), target)
        cycles = [method.products / 3 / mxu for _, (_, _, mxu, _) in kernels]
        quarter = 1 if method.skips else 4
        row = [method.name, str(method.products), str(quarter * method.products)]
        row += [f"{times * statistics.mean(cycles):.2f}" if cycles else "" for times in (1, quarter)]
        sizes = (f"{account[name] / 2**20:.1f}" for name in ("temp", "peak"))
        rows.append([*row, f"{account['bytes'] / 1e9:.1f}" if account["bytes"] else "", *sizes])
        for name, (bundles, vmatmuls, mxu, spills) in kernels:
            figures = f"bundles {bundles}, vmatmuls {vmatmuls}, mxu {mxu:.1%}, spills {spills}"
            remarks.append(f"{method.name}: {name}, {figures}")
    print("\n".join([f"\n{title(shape)}", table(COLUMNS, rows), *remarks]))


def platform(target: str) -> str:
    """`tpu` or `gpu`; UserError is raised if there is no such chip."""
    if target not in targets.CHIPS:
        raise UserError(f"--target: target {target!r}: there are {', '.join(targets.CHIPS)}")
    return "tpu" if target in targets.TPUS else "gpu"


def program(mesh: Mesh, *, method: str, shape: Sequence[int]) -> tuple[Call | None, Sequence[Any]]:
    """A method at tokens, features, vocabulary, for the process that compiles it."""
    [found] = [known for known in methods(mesh.devices.flat[0].platform) if known.name == method]
    tokens, features, vocabulary = shape
    array = jax.ShapeDtypeStruct
    weights = [array((tokens,), jnp.float32)] * 3
    sizes = (features, vocabulary) if found.transposed else (vocabulary, features)
    hidden, weight = array((tokens, features), jnp.bfloat16), array(sizes, jnp.bfloat16)
    return found.call, (hidden, weight, array((tokens,), jnp.int32), *weights)


def compile_listed(chip: str, program: str, arguments: Mapping[str, Any], folder: Path) -> dict[str, int]:
    """A program's account of memory, compiled for a chip in a process of its own.

    The compiler's listing of its kernels stays in `folder`, which must be empty. ValueError is raised if there is no
    such chip, or the compiler refuses.
    """
    options = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
    environment = {"LIBTPU_INIT_ARGS": options} if chip in targets.TPUS else {"XLA_FLAGS": targets.GPU_FILES[2]}
    ended = targets.run_child(chip, program, arguments, environment, folder)
    if ended.reason:
        raise ValueError(ended.reason)
    return ended.answer


# --- the listing


_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +(?:[A-Z]{2})? *: >* ?\{", re.MULTILINE)
_MATMUL = re.compile(r"vmatmul\.\S*?(bf16|f32)\S*?mxu(\d)")
_BRANCH = re.compile(r"sbr\.rel \(\S+\) target = \$region(\d+)")
_REGION = re.compile(r"(?:Start|Start/End empty) region (\d+)")
_SPILL = re.compile(r"= vst \[vmem:\[#allocation\d+_spill\]")


def read_folder(folder: Path, chip: str) -> list[tuple[str, Kernel]]:
    """The Pallas kernels with products in a folder of listings; where there is none, XLA's own kernels."""
    programs = "\n".join(path.read_text() for path in folder.glob("*-TLP-hlo.txt"))
    pallas = re.findall(r"%(\S+) = .*custom_call_target=\"tpu_custom_call\"", programs)
    found: dict[bool, list[tuple[str, Kernel]]] = {True: [], False: []}
    for path in sorted(folder.glob("*-final_bundles.txt")):
        match = re.fullmatch(r"\d+-(.+)-\d\d-final_bundles\.txt", path.name)
        if match and (kernel := read_kernel(path.read_text(), chip)):
            found[match[1] in pallas].append((own_name(match[1]), kernel))
    return found[True] or found[False]


def own_name(name: str) -> str:
    """A kernel's name from that in a program, where XLA numbers it and JAX marks what it differentiates."""
    return re.sub(r"^(?:transpose_|jvp_)*(.*?)_*(?:\.\d+)*$", r"\1", name)


def read_kernel(listing: str, chip: str) -> Kernel | None:
    """The figures of one kernel from its `final_bundles` file; None if no loop of it holds a `vmatmul`.

    Bundles are those of a turn of the hot loop, without those that a branch can skip and that hold no vmatmul: first
    and last visits, DMAs that are not always started. Then come the products in a turn, over all MXUs; busy cycles
    over cycles, where a bundle that finds its MXU busy waits for it (so never above 1); and stores of vector registers
    to VMEM in the hot loop.
    """
    code = _BUNDLE.split(listing)[1:]  # in the order of their addresses
    regions = {region: i for i, bundle in enumerate(code) for region in _REGION.findall(bundle)}
    targeted = ((i, region) for i, bundle in enumerate(code) for region in _BRANCH.findall(bundle))
    jumps = [(i, regions[region]) for i, region in targeted if region in regions]
    loops = [range(to, min(i + 1 + DELAY_SLOTS, len(code))) for i, to in jumps if to <= i]
    count = [len(_MATMUL.findall(bundle)) for bundle in code]
    body = max((outside_inner(loop, loops) for loop in loops), key=lambda body: sum(count[i] for i in body), default=[])
    if not sum(count[i] for i in body):
        return None
    blocks = [range(branch + 1 + DELAY_SLOTS, to) for branch, to in jumps if to > branch]
    skipped = {i for block in blocks if not any(count[i] for i in block) for i in block}
    taken = [code[i] for i in body if i not in skipped]
    return len(taken), sum(count[i] for i in body), mxu_use(taken, chip), len(_SPILL.findall("".join(taken)))


def outside_inner(loop: range, loops: Sequence[range]) -> list[int]:
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
