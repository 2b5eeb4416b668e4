"""The head's methods, compiled for a TPU that isn't there: python tools/bench head --target v6e

Nothing runs, and no figure is a measured time. Each method gives the cross-entropy and its gradients by hidden states
and weight, in bfloat16; "value only" gives no gradients. The columns, and how their figures are obtained:

    products   matrix products of 2 N V D flops each, in the traced program; a kernel declares its own  [arithmetic]
    moved GB   what kernels read and write by their tiles, and operands and results of XLA's products,
               counted once each; what XLA moves beside these is not counted                            [arithmetic]
    temp, peak MiB of HBM beside arguments and results, and with them                                   [compiler]
    MXU        share of cycles that the matrix units are busy in the hot loops of the method's kernels,
               averaged by flops; all products of XLA are taken to be equally large                     [listing]
    bound ms   sum over kernels and XLA's products of the larger of flops / (rate x MXU) and
               bytes / bandwidth, at the published rates: no run is faster                              [estimate]

The MXU use of each kernel stands below the table. "?" stands for what is unknown: loops whose length depends on data,
or kernels that declare nothing; "-" says that no loop has a product. Needs libtpu.
"""

import importlib.util
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mllm.errors import UserError
from mllm.plan import listing, targets
from mllm.plan.listing import Kernel
from mllm.plan.work import Part

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # the process that compiles starts in any folder
from tools import figures
from tools.bench.methods import Loss, chunked, fused, optax_on_logits
from tools.bench.report import title

CHUNK = 256
ONE_WAVE = 1 << 40  # bytes of workspace: more than there is, so that one wave takes all tokens
LOSSES: dict[str, Loss] = {
    "full logits": fused(impl="full_logits"),
    "optax on full logits": optax_on_logits,
    f"scan over {CHUNK} tokens, recomputed": chunked(CHUNK),
    "fused, workspace 0": fused(workspace=0, impl="mosaic_tpu"),
    "fused, single pass in one wave": fused(workspace=ONE_WAVE, impl="mosaic_tpu"),
    "fused, value only": fused(impl="mosaic_tpu"),
}


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
"""A method, its figures by `COLUMNS` as far as it has them, and the MXU use of its kernels; or why it was refused."""


def run(target: str, shapes: Sequence[tuple[int, int, int]], json: Path | None) -> None:
    """Print a table for each shape, and write the figures to `json`.

    Raises:
        UserError: there is no such chip, or libtpu isn't installed.
    """
    if target not in targets.CHIPS:
        raise UserError(f"--target: {target!r} is none of {', '.join(targets.CHIPS)}")
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("--target: libtpu, the TPU compiler, isn't installed; make aot does")
    print(f"{target} by its compiler, jax {jax.__version__}, bfloat16; nothing was run, and nothing is a time")
    results = []
    for shape in shapes:
        print(f"\n{title(shape)}")
        rows = table(target, shape)
        show(rows)
        results.append(dict(zip("NDV", shape, strict=True)) | {"methods": rows})
    about = {"command": shlex.join(["python", *sys.argv]), "target": target, "jax": jax.__version__}
    figures.write(json, {**about, "dtype": "bfloat16", "results": results})


def program(
    mesh: Mesh, *, method: str, tokens: int, features: int, vocabulary: int
) -> tuple[Callable[..., Any], Sequence[jax.ShapeDtypeStruct]]:
    """The program of a method for `mllm.plan.listing.read`."""
    arguments = (
        jax.ShapeDtypeStruct((tokens, features), jnp.bfloat16),
        jax.ShapeDtypeStruct((vocabulary, features), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
        jax.ShapeDtypeStruct((tokens,), jnp.float32),
    )
    loss = LOSSES[method]
    return (loss if "value only" in method else jax.value_and_grad(loss, (0, 1))), arguments


def table(target: str, shape: tuple[int, int, int]) -> list[Row]:
    """A row for every method at tokens, features, vocabulary; each is compiled in a process of its own."""
    sizes = dict(zip(("tokens", "features", "vocabulary"), shape, strict=True))
    rows = []
    for method in LOSSES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                account, kernels = listing.read(target, f"{__file__}:program", Path(folder), method=method, **sizes)
            except ValueError as error:
                rows.append({"method": method, "refused": str(error)})
                continue
            fusions = listing.read_folder(Path(folder), target, xla=True)
        parts = account["parts"] and [Part(*part) for part in account["parts"]]
        rows.append(row(method, target, shape, account, parts, kernels, fusions))
    return rows


def row(
    method: str,
    chip: str,
    shape: tuple[int, int, int],
    account: dict[str, Any],
    parts: Sequence[Part] | None,
    kernels: Sequence[Kernel],
    fusions: Sequence[Kernel] = (),
) -> Row:
    """A method's figures, from the compiler's account, the program's parts, and the listing of what has products."""
    busy = {kernel.name: kernel.mxu for kernel in kernels}
    row: Row = {"method": method, "kernels": dict(busy)}
    row |= {f"{name} MiB": account[name] / 2**20 for name in ("temp", "peak")}
    if not parts:
        return row
    if fusions:
        busy["XLA"] = len(fusions) / sum(1 / fusion.mxu for fusion in fusions)
    tokens, features, vocabulary = shape
    rate, bandwidth = targets.RATES[chip]
    listed = [(part.flops, busy[part.name]) for part in parts if part.name in busy]
    if listed:  # a share of cycles: a kernel takes as many cycles as its flops over its own share
        row["MXU"] = sum(n for n, _ in listed) / sum(n / mxu for n, mxu in listed)
    bounds = [max(part.flops / (rate * busy.get(part.name, 1.0)), part.bytes / bandwidth) for part in parts]
    row["products"] = sum(part.flops for part in parts) / (2 * tokens * features * vocabulary)
    return row | {"moved GB": sum(part.bytes for part in parts) / 1e9, "bound ms": 1e3 * sum(bounds)}


def show(rows: Sequence[Row]) -> None:
    width = max(len(row["method"]) for row in rows)
    print(" " * width + "".join(f"{name:>14}" for name in COLUMNS))
    print(" " * width + "".join(f"{f'[{source}]':>14}" for source, _ in COLUMNS.values()))
    for row in rows:
        print(f"{row['method']:{width}}" + (f"  refused: {row['refused']}" if "refused" in row else cells(row)))
    for row in rows:
        if kernels := row.get("kernels"):
            print(f"{row['method']}: " + ", ".join(f"{name} {mxu:.1%}" for name, mxu in kernels.items()))


def cells(row: Row) -> str:
    """A row's figures; "-" where it has none, and "?" where the program's work isn't known."""
    none = "-" if "products" in row else "?"
    shown = (format(row[name], form) if name in row else none for name, (_, form) in COLUMNS.items())
    return "".join(f"{cell:>14}" for cell in shown)
