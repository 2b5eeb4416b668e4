"""The head's methods, compiled for a TPU that isn't there: python tools/bench head --target v6e

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

What the listing says of each kernel stands below the table; listing.py says what the figures are. "?" stands for what
is unknown: loops whose length depends on data, or kernels that declare nothing; "-" says that no loop has a product.
Needs libtpu.
"""

import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mllm.errors import UserError
from mllm.plan import targets

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # the process that compiles starts in any folder
from tools.bench import listing
from tools.bench.frame import table, title
from tools.bench.listing import ListedKernel
from tools.bench.methods import (
    Call,
    chunked,
    fused,
    general_backward,
    optax_on_logits,
    value_and_gradients,
    value_only,
)
from tools.bench.work import Part, parts

CHUNK = 256
ONE_WAVE = 1 << 40  # bytes of workspace: more than there is, so that one wave takes all tokens
CALLS: dict[str, Call] = {
    "full logits": value_and_gradients(fused(impl="full_logits")),
    "optax on full logits": value_and_gradients(optax_on_logits),
    f"scan over {CHUNK} tokens, recomputed": value_and_gradients(chunked(CHUNK)),
    "fused, workspace 0": value_and_gradients(fused(impl="mosaic_tpu", workspace=0)),
    "fused, single pass in one wave": value_and_gradients(fused(impl="mosaic_tpu", workspace=ONE_WAVE)),
    "fused, any cotangents": general_backward(impl="mosaic_tpu"),
    "fused, value only": value_only(fused(impl="mosaic_tpu")),
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
"""A method, its figures by `COLUMNS` as far as it has them, and those of its kernels; or why it was refused."""


def run(target: str, shapes: Sequence[tuple[int, int, int]]) -> None:
    """Print a table for each shape, with a line for each kernel.

    Raises:
        UserError: there is no such chip, or libtpu isn't installed.
    """
    if target not in targets.CHIPS:
        raise UserError(f"--target: target {target!r}: there are {', '.join(targets.CHIPS)}")
    try:
        mesh = targets.mesh(target)
        print(f"{target} by its compiler, jax {jax.__version__}, bfloat16; nothing was run, and nothing is a time")
        for shape in shapes:
            print(f"\n{title(shape)}")
            rows = [compile_method(mesh, target, method, shape) for method in CALLS]
            show(rows)
    except ModuleNotFoundError as error:
        raise UserError(f"--target: {error}") from None


def program(mesh: Mesh, *, method: str, shape: Sequence[int]) -> tuple[Call, Sequence[Any]]:
    """A method at tokens, features, vocabulary, for `listing.read`."""
    tokens, features, vocabulary = shape
    array = jax.ShapeDtypeStruct
    weights = [array((tokens,), jnp.float32)] * 3
    hidden, weight = array((tokens, features), jnp.bfloat16), array((vocabulary, features), jnp.bfloat16)
    return CALLS[method], (hidden, weight, array((tokens,), jnp.int32), *weights)


def compile_method(mesh: Mesh, target: str, method: str, shape: Sequence[int]) -> Row:
    """The row of a method, which is compiled in a process of its own."""
    about: dict[str, Any] = {"method": method, "shape": list(shape)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            account, kernels = listing.read(target, f"{__file__}:program", Path(folder), **about)
        except ValueError as error:
            return {"method": method, "refused": str(error)}
        fusions = listing.read_folder(Path(folder), target, xla=True)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        work = parts(*program(mesh, **about))
    return row(method, target, shape, account, work, kernels, fusions)


def row(
    method: str,
    target: str,
    shape: Sequence[int],
    account: dict[str, int],
    work: Sequence[Part] | None,
    kernels: Sequence[ListedKernel],
    fusions: Sequence[ListedKernel] = (),
) -> Row:
    """A method's figures, from the compiler's account, the program's work, and the listing of what has products."""
    row: Row = {"method": method, "kernels": [dataclasses.asdict(kernel) for kernel in kernels]}
    row |= {f"{name} MiB": account[name] / 2**20 for name in ("temp", "peak")}
    if not work:
        return row
    tokens, features, vocabulary = shape
    row["products"] = sum(part.flops for part in work) / (2 * tokens * features * vocabulary)
    row["moved GB"] = sum(part.bytes for part in work) / 1e9
    busy = {kernel.name: kernel.mxu for kernel in kernels}
    if fusions:
        busy["XLA"] = len(fusions) / sum(1 / fusion.mxu for fusion in fusions)
    rate, bandwidth = targets.RATES[target]
    listed = [(part.flops, busy[part.name]) for part in work if part.name in busy]
    if listed:  # a share of cycles: a kernel takes as many cycles as its flops over its own share
        row["MXU"] = sum(n for n, _ in listed) / sum(n / mxu for n, mxu in listed)
    bounds = [max(part.flops / (rate * busy.get(part.name, 1.0)), part.bytes / bandwidth) for part in work]
    return row | {"bound ms": 1e3 * sum(bounds)}


def show(rows: Sequence[Row]) -> None:
    """Print the table, the reasons of refusals, and a line for each kernel."""
    titles = [f"{name} [{source}]" for name, (source, _) in COLUMNS.items()]
    print(table(["method", *titles], [[row["method"], *cells(row)] for row in rows if "refused" not in row]))
    for row in rows:
        if "refused" in row:
            print(f"{row['method']}: refused: {row['refused']}")
        for kernel in row.get("kernels", ()):
            figures = (f"{name} {x:.1%}" if isinstance(x, float) else f"{name} {x}" for name, x in kernel.items())
            print(f"{row['method']}: {', '.join(figures).removeprefix('name ')}")


def cells(row: Row) -> list[str]:
    """A row's figures; "-" where it has none, and "?" where the program's work isn't known."""
    none = "-" if "products" in row else "?"
    return [format(row[name], form) if name in row else none for name, (_, form) in COLUMNS.items()]
