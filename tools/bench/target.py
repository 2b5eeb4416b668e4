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

The MXU use of each kernel stands below the table. "?" is what can't be told: loops whose length depends on data, or
kernels that declare nothing; "-" says that no loop has a product. Needs libtpu.
"""

import importlib.util
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
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


@dataclass(frozen=True)
class Row:
    """A method's figures; None where there are none."""

    method: str
    products: float | None = None
    moved_bytes: int | None = None
    temp_bytes: int | None = None
    peak_bytes: int | None = None
    mxu: float | None = None
    bound_seconds: float | None = None
    kernels: dict[str, float] = field(default_factory=dict)
    """The MXU use of each kernel, by the listing."""
    refused: str | None = None
    """The compiler's reason, where it compiled nothing."""


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
        results.append(dict(zip("NDV", shape, strict=True)) | {"methods": [asdict(row) for row in rows]})
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
                rows.append(Row(method, refused=str(error)))
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
    known = Row(method, temp_bytes=account["temp"], peak_bytes=account["peak"], kernels=dict(busy))
    if not parts:
        return known
    if fusions:
        busy["XLA"] = len(fusions) / sum(1 / fusion.mxu for fusion in fusions)
    tokens, features, vocabulary = shape
    rate, bandwidth = targets.RATES[chip]
    flops = sum(part.flops for part in parts)
    listed = [(part.flops, busy[part.name]) for part in parts if part.name in busy]
    bounds = [max(part.flops / (rate * busy.get(part.name, 1.0)), part.bytes / bandwidth) for part in parts]
    return replace(
        known,
        products=flops / (2 * tokens * features * vocabulary),
        moved_bytes=sum(part.bytes for part in parts),
        # A share of cycles: a kernel takes as many cycles as its flops over its own share.
        mxu=sum(n for n, _ in listed) / sum(n / mxu for n, mxu in listed) if listed else None,
        bound_seconds=sum(bounds),
    )


def show(rows: Sequence[Row]) -> None:
    width = max(len(row.method) for row in rows)
    columns = ("products", "moved GB", "temp MiB", "peak MiB", "MXU", "bound ms")
    sources = ("[arithmetic]", "[arithmetic]", "[compiler]", "[compiler]", "[listing]", "[estimate]")
    for names in (columns, sources):
        print(f"{'':{width}}" + "".join(f"{name:>14}" for name in names))
    for row in rows:
        print(f"{row.method:{width}}" + (f"  refused: {row.refused}" if row.refused else "".join(cells(row))))
    for row in rows:
        if row.kernels:
            print(f"{row.method}: " + ", ".join(f"{name} {mxu:.1%}" for name, mxu in row.kernels.items()))


def cells(row: Row) -> list[str]:
    """A row's figures in the table's units."""
    columns = (
        (row.products, 1, ".2f"),
        (row.moved_bytes, 1e9, ".1f"),
        (row.temp_bytes, 2**20, ".1f"),
        (row.peak_bytes, 2**20, ".0f"),
        (row.mxu, 1, ".1%"),
        (row.bound_seconds, 1e-3, ".1f"),
    )
    none = "?" if row.products is None else "-"
    return [f"{none if value is None else format(value / unit, form):>14}" for value, unit, form in columns]
