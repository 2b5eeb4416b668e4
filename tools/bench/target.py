"""The head and what one would write without it, compiled for a TPU that isn't there: `the bench --target v6e`.

Nothing runs, and no figure is a measured time. Each method gives the cross-entropy and its gradients by hidden states
and weight, in bfloat16, but for one that says "value only". Columns, with how they are obtained:

    products   of 2 N V D flops each, in the traced program; what a kernel says of itself           [arithmetic]
    moved GB   by kernels, as their tiles make them read and write again; by XLA's products, whose
               operands and results are counted once each. What XLA moves beside: not counted       [arithmetic]
    temp, peak MiB of HBM beside arguments and results, and with them                               [compiler]
    MXU        share of cycles that the matrix units are busy in the hot loops of the method's
               kernels, their mean by flops; all products of XLA are taken to be equally large       [listing]
    bound ms   sum over kernels and XLA's products of the larger of flops / (rate x MXU) and
               bytes / bandwidth, at the published rates: no run is faster                           [estimate]

Below it stands the MXU use of each kernel. "?" is what can't be told: loops whose length depends on data, or kernels
that don't say what they do; "-" that no loop has a product. Needs libtpu.
"""

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from mllm.plan import listing
from mllm.plan.listing import Kernel
from mllm.plan.work import Part

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # the process that compiles starts in any folder
from tools.bench.head_losses import CHUNK, Loss, chunked, full_logits, fused, optax_on_logits

ONE_WAVE = 1 << 40  # bytes of workspace: more than there is, so that one wave takes all tokens
RATES = {"v5e": (197e12, 819e9), "v5p": (459e12, 2765e9), "v6e": (918e12, 1640e9), "tpu7x": (1153.5e12, 3690e9)}
"""Of bfloat16 flop/s, and of HBM's byte/s: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm, by chip.

A core of tpu7x, which is a device of its own, has half of its chip's.
"""
LOSSES: dict[str, Loss] = {
    "full logits": full_logits,
    "optax on full logits": optax_on_logits,
    f"scan over {CHUNK} tokens, checkpointed": chunked(),
    "fused, workspace 0": fused(workspace=0, impl="mosaic_tpu"),
    "fused, single pass in one wave": fused(workspace=ONE_WAVE, impl="mosaic_tpu"),
    "fused, value only": fused(impl="mosaic_tpu"),
}
TOKAMAX = "tokamax"
"""https://github.com/openxla/tokamax, by its own TPU kernels."""
TOKAMAX_KERNELS = tuple(f"linear_softmax_cross_entropy_loss_{way}_pallas_mosaic_tpu" for way in ("fwd", "bwd"))


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
    """The MXU use of each, by the listing."""
    refused: str | None = None
    """What the compiler said instead of compiling."""


def methods() -> list[str]:
    return [*LOSSES, *([TOKAMAX] if importlib.util.find_spec("tokamax") else [])]


def program(
    mesh: Mesh, *, method: str, tokens: int, features: int, vocabulary: int
) -> tuple[Callable[..., Any], Sequence[jax.ShapeDtypeStruct]]:
    """For `mllm.plan.listing.read`. tokamax has the weight as it wants it, [D, V]."""
    shape = (features, vocabulary) if method == TOKAMAX else (vocabulary, features)
    arguments = (
        jax.ShapeDtypeStruct((tokens, features), jnp.bfloat16),
        jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
        jax.ShapeDtypeStruct((tokens,), jnp.float32),
    )
    if method == TOKAMAX:
        return of_tokamax(mesh), arguments
    loss = LOSSES[method]
    return (loss if "value only" in method else jax.value_and_grad(loss, (0, 1))), arguments


def of_tokamax(mesh: Mesh) -> Callable[..., Any]:
    """Its loss and gradients. It asks JAX's default device, forward and backward, whether its kernels can run."""
    import tokamax  # type: ignore[import-not-found]  # nothing here depends on it

    def loss(hidden: Array, weight: Array, labels: Array) -> Array:
        return tokamax.linear_softmax_cross_entropy_loss(hidden, labels, weight, implementation="mosaic_tpu")

    def loss_and_gradients(hidden: Array, weight: Array, labels: Array, _: Array) -> Any:
        with jax.default_device(mesh.devices.flat[0]):
            return jax.value_and_grad(loss, (0, 1))(hidden, weight, labels)

    return loss_and_gradients


def work_of_tokamax(shape: tuple[int, int, int], grids: Sequence[Sequence[int]]) -> list[Part]:
    """What its kernels don't say themselves, from their grids: blocks of tokens, of columns, and innermost of features.

    As of 0.0.12. Backward goes over the features twice, for the logits and for the gradients, and sums these in HBM.
    """
    tokens, features, vocabulary = shape
    of_tokens, of_columns, of_features = grids[0]
    hidden, weight, product = tokens * features, vocabulary * features, 2 * tokens * vocabulary * features
    # Features in one block stay where they are while nothing but the columns, or the pass, changes.
    passes, again = (2, of_columns) if of_features > 1 else (1, 1)
    operands = 2 * (again * hidden + of_tokens * weight)
    sums = 4 * ((2 * of_columns - 1) * hidden + (2 * of_tokens - 1) * weight)
    forward, backward = TOKAMAX_KERNELS
    return [Part(forward, product, operands), Part(backward, 3 * product, passes * operands + sums)]


def table(target: str, shape: tuple[int, int, int]) -> list[Row]:
    """Every method at tokens, features, vocabulary; each is compiled in a process of its own."""
    tokens, features, vocabulary = shape
    rows = []
    for method in methods():
        sizes = {"method": method, "tokens": tokens, "features": features, "vocabulary": vocabulary}
        with tempfile.TemporaryDirectory() as folder:
            try:
                account, kernels = listing.read(target, f"{__file__}:program", Path(folder), **sizes)
            except ValueError as error:
                rows.append(Row(method, refused=str(error)))
                continue
            fusions = listing.read_folder(Path(folder), target, xla=True)
        parts = account["parts"] and [Part(*part) for part in account["parts"]]
        if method == TOKAMAX:
            parts = work_of_tokamax(shape, account["grids"])
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
    rate, bandwidth = RATES[chip]
    flops = sum(part.flops for part in parts)
    listed = [(part.flops, busy[part.name]) for part in parts if part.name in busy]
    bounds = [max(part.flops / (rate * busy.get(part.name, 1.0)), part.bytes / bandwidth) for part in parts]
    return replace(
        known,
        products=flops / (2 * tokens * features * vocabulary),
        moved_bytes=sum(part.bytes for part in parts),
        # Of cycles: flops take as many as they are, over the share in which they run.
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
    figures = (
        (row.products, 1, ".2f"),
        (row.moved_bytes, 1e9, ".1f"),
        (row.temp_bytes, 2**20, ".1f"),
        (row.peak_bytes, 2**20, ".0f"),
        (row.mxu, 1, ".1%"),
        (row.bound_seconds, 1e-3, ".1f"),
    )
    none = "?" if row.products is None else "-"
    return [f"{none if value is None else format(value / unit, form):>14}" for value, unit, form in figures]
