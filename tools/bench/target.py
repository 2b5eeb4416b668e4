"""The head's methods, compiled for a TPU that isn't there: python tools/bench head --target v6e

Nothing runs, and no figure is a time. Each method gives the cross-entropy and its gradients by hidden states and
weight, in bfloat16, unless its name says otherwise. The table has the matrix products of 2 N V D flops each that a
method has to make, and the compiler's account of HBM: temporaries, beside arguments and results, and the peak, with
them. Below it stands what the compiler's listing says of each kernel, or of XLA's own products where a method has no
kernel; tools/bench/listing.py says what the figures are. Needs libtpu.
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
from tools.bench.frame import Shape, table, title
from tools.bench.methods import Call, Method, methods

COLUMNS = ("method", "products", "temp MiB", "peak MiB")


def run(target: str, shapes: Sequence[Shape], chosen: Sequence[Method]) -> None:
    """Print a table of the methods that run through JAX for each shape, with a line for each kernel.

    Raises:
        UserError: there is no such chip, or libtpu isn't installed.
    """
    if target not in targets.TPUS:
        raise UserError(f"--target: target {target!r}: there are {', '.join(targets.TPUS)}")
    try:
        targets.mesh(target)
    except ModuleNotFoundError as error:
        raise UserError(f"--target: {error}") from None
    print(f"{target} by its compiler, jax {jax.__version__}, bfloat16; nothing was run, and nothing is a time")
    for shape in shapes:
        rows, remarks = [], []
        for method in chosen:
            if method.torch or method.obstacle("tpu"):
                continue
            try:
                account, kernels = compile_method(target, method, shape)
            except ValueError as error:
                remarks.append(f"{method.name}: refused: {error}")
                continue
            sizes = [f"{account[name] / 2**20:.1f}" for name in ("temp", "peak")]
            rows.append([method.name, str(method.products), *sizes])
            for kernel in kernels:
                figures = dataclasses.asdict(kernel).items()
                shown = (f"{name} {x:.1%}" if isinstance(x, float) else f"{name} {x}" for name, x in figures)
                remarks.append(f"{method.name}: {', '.join(shown).removeprefix('name ')}")
        print("\n".join([f"\n{title(shape)}", table(COLUMNS, rows), *remarks]), flush=True)


def compile_method(target: str, method: Method, shape: Shape) -> tuple[dict[str, int], Sequence[listing.ListedKernel]]:
    """The compiler's account of a method, and its kernels or XLA's products; ValueError where it is refused."""
    with tempfile.TemporaryDirectory() as folder:
        about: dict[str, Any] = {"method": method.name, "shape": list(shape)}
        account, kernels = listing.read(target, f"{__file__}:program", Path(folder), **about)
        return account, kernels or listing.read_folder(Path(folder), target, xla=True)


def program(mesh: Mesh, *, method: str, shape: Sequence[int]) -> tuple[Call | None, Sequence[Any]]:
    """A method at tokens, features, vocabulary, for `listing.read`."""
    [found] = [known for known in methods("tpu") if known.name == method]
    tokens, features, vocabulary = shape
    array = jax.ShapeDtypeStruct
    weights = [array((tokens,), jnp.float32)] * 3
    sizes = (features, vocabulary) if found.transposed else (vocabulary, features)
    hidden, weight = array((tokens, features), jnp.bfloat16), array(sizes, jnp.bfloat16)
    return found.call, (hidden, weight, array((tokens,), jnp.int32), *weights)
