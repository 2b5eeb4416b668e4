"""The head's methods, compiled for a device that isn't there: python tools/bench head --target v6e, or h100

Nothing runs, and no figure is a measured time. Each method gives the cross-entropy and its gradients by hidden states
and weight, in bfloat16, unless its name says otherwise. The columns, and how their figures are obtained:

    products   matrix products of 2 N V D flops each, in the traced program; a kernel declares its own  [arithmetic]
    moved GB   what kernels read and write by their tiles, and operands and results of XLA's products,
               counted once each; what XLA moves beside these is not counted                            [arithmetic]
    temp, peak MiB of HBM beside arguments and results, and with them                                   [compiler]
    MXU        share of cycles that the matrix units are busy in the hot loops of the method's kernels,
               averaged by flops; all products of XLA are taken to be equally large                     [listing]
    bound ms   sum over kernels and XLA's products of the larger of flops / (rate x MXU) and
               bytes / bandwidth, at the published rates: no run is faster                              [estimate]

What the compiler reports of each kernel stands below the table; listing.py says what the figures are. "?" stands for
what is unknown: loops whose length depends on data, or kernels that declare nothing; "-" says that no loop has a
product, or that the target is a GPU. A TPU's needs libtpu, a GPU's needs XLA's plugin and ptxas.
"""

import dataclasses
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mllm.errors import UserError
from mllm.plan import gpus, targets

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # the process that compiles starts in any folder
from tools import figures
from tools.bench import listing
from tools.bench.listing import GpuKernel, TpuKernel
from tools.bench.methods import (
    Call,
    chunked,
    fused,
    general_backward,
    optax_on_logits,
    value_and_gradients,
    value_only,
)
from tools.bench.report import title
from tools.bench.work import Part, parts

CHUNK = 256
ONE_WAVE = 1 << 40  # bytes of workspace: more than there is, so that one wave takes all tokens
COLUMNS = {
    "products": ("arithmetic", ".2f"),
    "moved GB": ("arithmetic", ".1f"),
    "temp MiB": ("compiler", ".1f"),
    "peak MiB": ("compiler", ".0f"),
    "MXU": ("listing", ".1%"),
    "bound ms": ("estimate", ".1f"),
}
"""For each figure of a method its source and format."""
Row = dict[str, Any]
"""A method, its figures by `COLUMNS` as far as it has them, and those of its kernels; or why it was refused."""


def calls(mesh: Mesh) -> dict[str, Call]:
    """The methods by their names, with the kernels for the mesh's devices."""
    impl = "mosaic_gpu" if mesh.devices.flat[0].platform == "gpu" else "mosaic_tpu"
    return {
        "full logits": value_and_gradients(fused(impl="full_logits")),
        "optax on full logits": value_and_gradients(optax_on_logits),
        f"scan over {CHUNK} tokens, recomputed": value_and_gradients(chunked(CHUNK)),
        "fused, workspace 0": value_and_gradients(fused(impl=impl, workspace=0)),
        "fused, single pass in one wave": value_and_gradients(fused(impl=impl, workspace=ONE_WAVE)),
        "fused, any cotangents": general_backward(impl=impl),
        "fused, value only": value_only(fused(impl=impl)),
    }


def run(target: str, shapes: Sequence[tuple[int, int, int]], json: Path | None) -> None:
    """Print a table for each shape, and write the figures to `json`.

    Raises:
        UserError: there is no such device, or its compiler isn't installed.
    """
    if ":" in target:
        raise UserError(f"--target: {target!r} is a slice; this compiles for one device, as in v6e or h100")
    try:
        mesh = targets.mesh(target)
        print(f"{target} by its compiler, jax {jax.__version__}, bfloat16; nothing was run, and nothing is a time")
        results = []
        for shape in shapes:
            print(f"\n{title(shape)}")
            rows = [compile_method(mesh, target, method, shape) for method in calls(mesh)]
            show(rows)
            results.append(dict(zip("NDV", shape, strict=True)) | {"methods": rows})
    except (ValueError, ModuleNotFoundError) as error:
        raise UserError(f"--target: {error}") from None
    about = {"command": shlex.join(["python", *sys.argv]), "target": target, "jax": jax.__version__}
    figures.write(json, {**about, "dtype": "bfloat16", "results": results})


def program(mesh: Mesh, *, method: str, shape: Sequence[int]) -> tuple[Call, Sequence[Any]]:
    """A method at tokens, features, vocabulary, for `listing.read`."""
    tokens, features, vocabulary = shape
    array = jax.ShapeDtypeStruct
    weights = [array((tokens,), jnp.float32)] * 3
    hidden, weight = array((tokens, features), jnp.bfloat16), array((vocabulary, features), jnp.bfloat16)
    return calls(mesh)[method], (hidden, weight, array((tokens,), jnp.int32), *weights)


def compile_method(mesh: Mesh, target: str, method: str, shape: Sequence[int]) -> Row:
    """The row of a method, which is compiled in a process of its own."""
    about: dict[str, Any] = {"method": method, "shape": list(shape)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            account, kernels = listing.read(target, f"{__file__}:program", Path(folder), **about)
        except ValueError as error:
            return {"method": method, "refused": str(error)}
        fusions = [] if gpus.is_gpu(target) else listing.read_tpu_folder(Path(folder), target, xla=True)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        work = parts(*program(mesh, **about))
    return row(method, target, shape, account, work, kernels, fusions)


def row(
    method: str,
    target: str,
    shape: Sequence[int],
    account: dict[str, int],
    work: Sequence[Part] | None,
    kernels: Sequence[TpuKernel | GpuKernel],
    fusions: Sequence[TpuKernel] = (),
) -> Row:
    """A method's figures, from the compiler's account, the program's work, and the listing of what has products."""
    row: Row = {"method": method, "kernels": [dataclasses.asdict(kernel) for kernel in kernels]}
    row |= {f"{name} MiB": account[name] / 2**20 for name in ("temp", "peak")}
    if not work:
        return row
    tokens, features, vocabulary = shape
    row["products"] = sum(part.flops for part in work) / (2 * tokens * features * vocabulary)
    row["moved GB"] = sum(part.bytes for part in work) / 1e9
    if gpus.is_gpu(target):
        return row
    busy = {kernel.name: kernel.mxu for kernel in kernels if isinstance(kernel, TpuKernel)}
    if fusions:
        busy["XLA"] = len(fusions) / sum(1 / fusion.mxu for fusion in fusions)
    rate, bandwidth = targets.RATES[target]
    listed = [(part.flops, busy[part.name]) for part in work if part.name in busy]
    if listed:  # a share of cycles: a kernel takes as many cycles as its flops over its own share
        row["MXU"] = sum(n for n, _ in listed) / sum(n / mxu for n, mxu in listed)
    bounds = [max(part.flops / (rate * busy.get(part.name, 1.0)), part.bytes / bandwidth) for part in work]
    return row | {"bound ms": 1e3 * sum(bounds)}


def show(rows: Sequence[Row]) -> None:
    """Print the table, and a line for each kernel."""
    width = max(len(row["method"]) for row in rows)
    print(" " * width + "".join(f"{name:>14}" for name in COLUMNS))
    print(" " * width + "".join(f"{f'[{source}]':>14}" for source, _ in COLUMNS.values()))
    for row in rows:
        print(f"{row['method']:{width}}" + (f"  refused: {row['refused']}" if "refused" in row else cells(row)))
    for row in rows:
        for kernel in row.get("kernels", ()):
            figures = (f"{name} {x:.1%}" if isinstance(x, float) else f"{name} {x}" for name, x in kernel.items())
            print(f"{row['method']}: {', '.join(figures).removeprefix('name ')}")


def cells(row: Row) -> str:
    """A row's figures; "-" where it has none, and "?" where the program's work isn't known."""
    none = "-" if "products" in row else "?"
    shown = (format(row[name], form) if name in row else none for name, (_, form) in COLUMNS.items())
    return "".join(f"{cell:>14}" for cell in shown)
