"""The head and what one would write without it, compiled for a TPU that isn't there: `tools/bench.py --target v6e`.

Nothing runs, and no figure is a measured time. Each method gives the cross-entropy and its gradients by hidden states
and weight, in bfloat16, but for one that says "value only". Columns, with how they are obtained:

    products   of 2 N V D flops each, in the traced program; what a kernel says of itself           [arithmetic]
    moved GB   by kernels, as their tiles make them read and write again; by XLA's products, whose
               operands and results are counted once each. What XLA moves beside: not counted       [arithmetic]
    temp, peak MiB of HBM beside arguments and results, and with them                               [compiler]
    MXU        share of cycles that the matrix units are busy in the hot loops of the method's
               kernels, their mean by flops; "-" where products are XLA's                            [listing]
    bound ms   sum over kernels and XLA's products of the larger of flops / (rate x MXU), with 100 %
               for "-", and bytes / bandwidth, at the published rates: no run is faster              [estimate]

"?" is what can't be told: loops whose length depends on data, or kernels that don't say what they do. Needs libtpu.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from kernels.aot import listing, targets
from kernels.aot.listing import Kernel
from kernels.aot.work import Part

sys.path.insert(0, str(Path(__file__).parent.parent))  # the process that compiles starts in any folder
from tools.head_losses import CHUNK, Loss, chunked, full_logits, fused, optax_on_logits

ONE_WAVE = 1 << 40  # bytes of workspace: more than there is, so that one wave takes all tokens
RATES = {"v5e": (197e12, 819e9), "v5p": (459e12, 2765e9), "v6e": (918e12, 1640e9), "tpu7x": (1153.5e12, 3690e9)}
"""Of bfloat16 flop/s, and of HBM's byte/s: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm, by chip.

A core of tpu7x, which is a device of its own, has half of its chip's.
"""
LOSSES: dict[str, Loss] = {
    "full logits": full_logits,
    "optax on full logits": optax_on_logits,
    f"scan over {CHUNK} tokens, checkpointed": chunked,
    "fused, workspace 0": fused(workspace=0, impl="mosaic_tpu"),
    "fused, single pass in one wave": fused(workspace=ONE_WAVE, impl="mosaic_tpu"),
    "fused, value only": fused(impl="mosaic_tpu"),
}
TOKAMAX = "tokamax"  # https://github.com/openxla/tokamax, by its own TPU kernels


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
    refused: str | None = None
    """What the compiler said instead of compiling."""


def methods() -> list[str]:
    return [*LOSSES, *([TOKAMAX] if importlib.util.find_spec("tokamax") else [])]


def programme(
    mesh: Mesh, *, method: str, tokens: int, features: int, vocabulary: int
) -> tuple[Callable[..., Any], Sequence[jax.ShapeDtypeStruct]]:
    """For `kernels.aot.listing.read`. tokamax has the weight as it wants it, [D, V]."""
    shape = (features, vocabulary) if method == TOKAMAX else (vocabulary, features)
    arguments = (
        jax.ShapeDtypeStruct((tokens, features), jnp.bfloat16),
        jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
        jax.ShapeDtypeStruct((tokens,), jnp.float32),
    )
    loss = of_tokamax if method == TOKAMAX else LOSSES[method]
    return (loss if "value only" in method else jax.value_and_grad(loss, (0, 1))), arguments


def of_tokamax(hidden: Array, weight: Array, labels: Array, _: Array) -> Array:
    import tokamax  # type: ignore[import-not-found]  # nothing here depends on it

    return tokamax.linear_softmax_cross_entropy_loss(hidden, labels, weight, implementation="mosaic_tpu")


def table(target: str, shape: tuple[int, int, int]) -> list[Row]:
    """Every method at tokens, features, vocabulary; each is compiled in a process of its own."""
    tokens, features, vocabulary = shape
    rows = []
    for method in methods():
        try:
            account, kernels = listing.read(
                target,
                f"{__file__}:programme",
                method=method,
                tokens=tokens,
                features=features,
                vocabulary=vocabulary,
            )
        except ValueError as error:
            rows.append(Row(method, refused=str(error).splitlines()[-1]))
            continue
        parts = account["parts"] and [Part(*part) for part in account["parts"]]
        rows.append(row(method, targets.split(target)[0], shape, account, parts, kernels))
    return rows


def row(
    method: str,
    chip: str,
    shape: tuple[int, int, int],
    account: dict[str, Any],
    parts: Sequence[Part] | None,
    kernels: Sequence[Kernel],
) -> Row:
    """A method's figures, from the compiler's account, the program's parts, and its kernels by the listing."""
    of_memory = {"temp_bytes": account["temp"], "peak_bytes": account["peak"]}
    if not parts:
        return Row(method, **of_memory)
    tokens, features, vocabulary = shape
    rate, bandwidth = RATES[chip]
    busy = {kernel.name: kernel.mxu for kernel in kernels}
    flops = sum(part.flops for part in parts)
    listed = [(part.flops, busy[part.name]) for part in parts if part.name in busy]
    bounds = [max(part.flops / (rate * busy.get(part.name, 1.0)), part.bytes / bandwidth) for part in parts]
    return Row(
        method,
        products=flops / (2 * tokens * features * vocabulary),
        moved_bytes=sum(part.bytes for part in parts),
        # Of cycles: flops take as many as they are, over the share in which they run.
        mxu=sum(n for n, _ in listed) / sum(n / mxu for n, mxu in listed) if listed else None,
        bound_seconds=sum(bounds),
        **of_memory,
    )


def show(rows: Sequence[Row]) -> None:
    width = max(len(row.method) for row in rows)
    columns = ("products", "moved GB", "temp MiB", "peak MiB", "MXU", "bound ms")
    sources = ("[arithmetic]", "[arithmetic]", "[compiler]", "[compiler]", "[listing]", "[estimate]")
    for names in (columns, sources):
        print(f"{'':{width}}" + "".join(f"{name:>14}" for name in names))
    for row in rows:
        print(f"{row.method:{width}}" + (f"  refused: {row.refused}" if row.refused else "".join(cells(row))))


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
