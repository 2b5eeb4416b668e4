"""Finds tile sizes for the head's kernels and, on request, notes the best in kernels/lm_head/ (gpu_)tiles.json.

    python tools/tune.py --shape 8192,2048,151936 --write                   on a TPU or a Hopper GPU: by time
    python tools/tune.py --shape 8192,2048,151936 --target v6e --write      without one: by the compiler's listing

Candidates are tilings that fit the chip's VMEM by kernels/lm_head/tpu/tiles.py, the one taken without a table among
them. Without a TPU each is compiled for the target (`make aot` installs the compiler), and they are ranked by

    bound = max(flops / (rate x MXU use in the listing), bytes that the tiling moves / bandwidth),

which no TPU has confirmed; what was timed is never replaced by such a rank. An entry is for a chip, a kernel, a dtype
and a hidden size.

On a GPU the sizes of kernels/lm_head/gpu/tiles.py are tried instead, of all kernels together: see tune_gpu.py. An entry
is for a device and a hidden size.

Leaves out weights of another dtype than the hidden states, whose tiles must be smaller: tiles.py checks that they fit.

Exit codes: 0 done, 2 something that you can mend (one line says what).
"""

import argparse
import dataclasses
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jaxtyping import Array
from tqdm import tqdm

from kernels.lm_head.tpu import tiles
from kernels.lm_head.tpu.backward import RowFactors, hidden_gradient, kept_weight_gradient, weight_gradient
from kernels.lm_head.tpu.forward import forward
from kernels.lm_head.tpu.tiles import Case, Kernel, Tiles
from mllm.errors import ArgumentParser, UserError
from mllm.plan import gpus, listing, targets

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script sees only its own folder
from tools import tune_gpu, tune_table

KINDS: dict[str, tuple[Kernel, bool, bool]] = {
    "statistics": ("forward", False, False),
    "forward": ("forward", True, False),
    "wave": ("forward", True, True),
    "hidden": ("hidden", False, False),
    "weight": ("weight", False, False),
}
"""The kernel, whether it sums p W, and whether it keeps a wave's probabilities: then the kernel that takes them, which
has no choice of tiles, is part of the trial."""
WAVE = 1024  # rows, which is mosaic_tpu's default
PASSES = {"bfloat16": 1, "float32": 6}
"""Products of bfloat16 that one at the dtype's highest precision is made of."""
CALLS = 5  # timed of each tiling
SUBJECT = ("device", "kernel", "mean", "keep", "dtype", "features")
"""Keys of an entry that say what it is for."""


class Chip(NamedTuple):
    name: str
    vmem: int
    flops: float
    """bfloat16, a second, of a core; as published."""
    bandwidth: float
    """Of HBM, bytes a second."""


class Trial(NamedTuple):
    tiles: Tiles
    seconds: float
    """Timed, or the bound; infinite where the compiler refused."""
    mxu: float | None = None
    """By the listing; of two kernels, their mean by flops."""
    refusal: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = parse(arguments)
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a GPU's memory is for the trials' process
        if options.target is None and jax.default_backend() == "gpu":
            tune_gpu.run(options, sizes_of(options.shape))
        else:
            run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8192,2048,151936", metavar="N,D,V", help="tokens, hidden size, vocabulary")
    parser.add_argument("--dtype", default="bfloat16", metavar="X", help="bfloat16 (default) or float32")
    parser.add_argument("--kernel", nargs="+", metavar="X", help=f"on TPUs; of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--target", metavar="CHIP", help=f"{', '.join(targets.CHIPS)}; default: this machine's device")
    parser.add_argument("--most", type=int, metavar="K", help="tilings to try of each kernel (default 8, on GPUs all)")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="on GPUs: begin no trial that would end later")
    parser.add_argument("--write", action="store_true", help="note the best in the table")
    parser.add_argument("--table", type=Path, metavar="FILE", help="default: that which the kernels read")
    options = parser.parse_args(arguments)
    if options.most is not None and options.most < 1:
        raise UserError(f"--most: {options.most} tilings are none")
    if options.limit is not None and not 0 < options.limit < math.inf:
        raise UserError(f"--limit: {options.limit} is no number of seconds above 0")
    return options


def run(options: argparse.Namespace) -> None:
    by = "time" if options.target is None else "listing"
    table = options.table or Path(tiles.__file__).with_suffix(".json")
    cases = cases_of(options.shape, options.dtype, options.kernel or list(KINDS))
    noted = tune_table.read(table, SUBJECT)
    if not os.path.isdir(table.parent):
        raise UserError(f"--table: there is no folder {table.parent}")
    if options.limit is not None:
        raise UserError("--limit: is for GPUs; here --most bounds the work")
    chip = chip_of(options.target)
    source = "time" if by == "time" else "the compiler's listing; nothing was timed"
    print(f"{chip.name}, {options.dtype}, N,D,V = {options.shape}, by {source}")
    best = []
    for kind, case in cases.items():
        trials = tune(kind, case, chip, options.target, options.most or 8)
        print("\n".join(lines(kind, case, trials, by)), flush=True)
        if trials and math.isfinite(trials[0].seconds):
            best.append(entry(case, chip, trials[0], by))
    if options.write:
        tune_table.write(table, tune_table.merged(noted, best, SUBJECT))
        print(f"\nnoted in {table}")


def sizes_of(shape: str) -> tuple[int, int, int]:
    sizes = [int(size) if re.fullmatch("[0-9]{1,10}", size) else 0 for size in shape.split(",")]
    if len(sizes) != 3 or not 1 <= min(sizes) <= max(sizes) < 2**31:
        raise UserError(f"--shape: {shape!r} is not N,D,V: three whole numbers from 1 to 2147483647")
    tokens, features, vocabulary = sizes
    return tokens, features, vocabulary


def cases_of(shape: str, dtype: str, kinds: Sequence[str]) -> dict[str, Case]:
    tokens, features, vocabulary = sizes_of(shape)
    if dtype not in PASSES:
        raise UserError(f"--dtype: {dtype!r} is not {' or '.join(PASSES)}")
    for kind in kinds:
        if kind not in KINDS:
            raise UserError(f"--kernel: there is no {kind!r}; there are {', '.join(KINDS)}")
    return {kind: case_of(kind, tokens, features, vocabulary, dtype) for kind in kinds}


def case_of(kind: str, tokens: int, features: int, vocabulary: int, dtype: str) -> Case:
    kernel, mean, keep = KINDS[kind]
    rows, product = min(tokens, WAVE) if keep else tokens, jnp.dtype(dtype)
    gradient = jnp.dtype(jnp.float32) if kernel == "forward" else product
    return Case(kernel, rows, vocabulary, features, product, product, product, gradient, mean, keep)


def chip_of(target: str | None) -> Chip:
    """The target, or this machine's TPU.

    Raises:
        UserError: there is no such target, no compiler, or no TPU.
    """
    if target is not None and gpus.is_gpu(target):
        raise UserError(f"--target: {target}: GPUs can't be ranked without one; run this on it, without --target")
    if target is None and jax.default_backend() != "tpu":
        raise UserError(f"--target: there is no TPU or GPU here; name a TPU to compile for: {', '.join(targets.CHIPS)}")
    try:
        mesh = None if target is None else targets.mesh(target)
    except (ValueError, ModuleNotFoundError) as error:
        raise UserError(f"--target: {error}") from None
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if mesh else nullcontext():
        info = pltpu.get_tpu_info()
        return Chip(str(tiles.chip()), tiles.vmem(), info.bf16_ops_per_second, info.mem_bw_bytes_per_second)


# --- trials ---------------------------------------------------------------------------------------------------------


def tune(kind: str, case: Case, chip: Chip, target: str | None, most: int) -> list[Trial]:
    """The best first."""
    chosen = promising(case, chip)[:most]
    with tqdm(chosen, desc=kind, unit="tiling", leave=False, dynamic_ncols=True) as bar:
        trials = [timed(case, tile) if target is None else listed(kind, case, tile, chip, target) for tile in bar]
    return sorted(trials, key=lambda trial: trial.seconds)


def promising(case: Case, chip: Chip) -> list[Tiles]:
    """All that fit, what tiles.py takes first; then by bound and size of step, and by traffic."""
    default = tiles.best(case, chip.vmem)

    def rank(tile: Tiles) -> tuple[Any, ...]:
        traffic = sum(tiles.traffic(part, tile) for part in kernels(case))
        return tile != default, bound(case, tile, chip), -tile.step, traffic

    return sorted(tiles.candidates(case, chip.vmem), key=rank)


def kernels(case: Case) -> list[Case]:
    """Those that share the tiles."""
    heir = dataclasses.replace(case, kernel="kept", mean=False, keep=False, gradient=jnp.dtype(jnp.float32))
    return [case, heir] if case.keep else [case]


def flops(case: Case) -> int:
    """In products of bfloat16."""
    return 2 * tiles.products(case) * case.tokens * case.vocabulary * case.features * PASSES[str(case.product)]


def bound(case: Case, tile: Tiles, chip: Chip, use: Sequence[float] = (1.0, 1.0)) -> float:
    """Seconds, at each kernel's MXU use: no run is faster."""
    return sum(
        max(flops(part) / (chip.flops * share), tiles.traffic(part, tile) / chip.bandwidth)
        for part, share in zip(kernels(case), use, strict=False)
    )


def listed(kind: str, case: Case, tile: Tiles, chip: Chip, target: str) -> Trial:
    sizes = {"tokens": case.tokens, "features": case.features, "vocabulary": case.vocabulary}
    arguments: dict[str, Any] = sizes | {"kind": kind, "dtype": str(case.product), "tile": dataclasses.asdict(tile)}
    try:
        _, found = listing.read(target, f"{Path(__file__).resolve()}:program", **arguments)
    except ValueError as error:
        return Trial(tile, math.inf, refusal=str(error))
    by_name = {kernel.name: kernel.mxu for kernel in found}
    use = [next(x for name, x in by_name.items() if name.startswith(f"head_{part.kernel}")) for part in kernels(case)]
    work = [flops(part) for part in kernels(case)]
    mean = sum(work) / sum(part / share for part, share in zip(work, use, strict=True))
    return Trial(tile, bound(case, tile, chip, use), mean)


def timed(case: Case, tile: Tiles) -> Trial:
    """The median of some calls on the default device, for random inputs."""
    hidden, weight, labels, by_row = shapes_of(case, tile)
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = (
        jax.random.normal(keys[0], hidden.shape, hidden.dtype),
        jax.random.normal(keys[1], weight.shape, weight.dtype) * case.features**-0.5,
        jax.random.randint(keys[2], labels.shape, 0, case.vocabulary),
        jnp.ones(by_row.shape, by_row.dtype),
    )
    try:
        program = jax.jit(call_of(case, tile)).lower(*arrays).compile()
    except jax.errors.JaxRuntimeError as error:
        return Trial(tile, math.inf, refusal=str(error).splitlines()[0])
    seconds = []
    for _ in range(CALLS + 1):
        start = time.perf_counter()
        jax.block_until_ready(program(*arrays))
        seconds.append(time.perf_counter() - start)
    return Trial(tile, statistics.median(seconds[1:]))


def program(
    mesh: Mesh, *, kind: str, tokens: int, features: int, vocabulary: int, dtype: str, tile: dict[str, int]
) -> tuple[Callable[..., Any], Sequence[jax.ShapeDtypeStruct]]:
    """For mllm/plan/listing.py, which calls it in a process of its own."""
    case = case_of(kind, tokens, features, vocabulary, dtype)
    return call_of(case, Tiles(**tile)), shapes_of(case, Tiles(**tile))


def call_of(case: Case, tile: Tiles) -> Callable[..., Any]:
    """What runs the kernel: a function of arrays of the shapes that `shapes_of` gives."""

    def call(hidden: Array, weight: Array, labels: Array, by_row: Array) -> Any:
        number, columns, one = jnp.int32(len(hidden)), jnp.int32(len(weight)), jnp.float32(1)
        slopes = RowFactors(*by_row)
        options: dict[str, Any] = {"tile": tile, "softcap": None, "dtype": case.product}
        if case.kernel == "hidden":
            return hidden_gradient(
                hidden, weight, labels, number, columns, one, slopes, gradient=case.gradient, **options
            )
        without_entropy = slopes._replace(at_p_log_p=None)
        if case.kernel == "weight":
            return weight_gradient(
                hidden, weight, labels, number, one, without_entropy, gradient=case.gradient, **options
            )
        mean = case.gradient if case.mean else None
        sums, mean_MD, kept = forward(
            hidden, weight, labels, number, columns, one, mean=mean, keep=case.keep, **options
        )
        if kept is None:
            return sums, mean_MD
        size: dict[str, Any] = {"vocabulary": case.vocabulary, "gradient": jnp.dtype(jnp.float32)}
        return sums, mean_MD, kept_weight_gradient(hidden, kept, labels, number, one, without_entropy, None, **size)

    return call


def shapes_of(case: Case, tile: Tiles) -> list[jax.ShapeDtypeStruct]:
    """Hidden states, weight, labels, and what slopes are made of; of whole blocks of rows."""
    rows = -(-case.tokens // tile.rows) * tile.rows
    return [
        jax.ShapeDtypeStruct((rows, case.features), case.hidden),
        jax.ShapeDtypeStruct((case.vocabulary, case.features), case.weight),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((len(RowFactors._fields), rows), jnp.float32),
    ]


# --- what is told, and what is noted --------------------------------------------------------------------------------


def lines(kind: str, case: Case, trials: Sequence[Trial], by: str) -> Iterator[str]:
    yield ""
    if not trials:
        yield f"{kind}: no tiling fits the chip's VMEM"
        return
    yield f"{kind:12} rows  columns  step  VMEM MiB  moved GB    MXU  {'bound ms' if by == 'listing' else 'ms':>8}"
    for trial in trials:
        tile = trial.tiles
        vmem = sum(tiles.terms(case, tile).values()) / 2**20
        moved = sum(tiles.traffic(part, tile) for part in kernels(case)) / 1e9
        use = "-" if trial.mxu is None else f"{trial.mxu:.1%}"
        result = f"refused: {trial.refusal}" if trial.refusal else f"{use:>6} {1e3 * trial.seconds:9.2f}"
        yield f"{'':11} {tile.rows:5}  {tile.columns:7} {tile.step:5}  {vmem:8.1f}  {moved:8.2f} {result}"


def entry(case: Case, chip: Chip, trial: Trial, by: str) -> dict[str, Any]:
    """As tiles.py reads it: what it is for, and the tiles; then how they were found."""
    return {
        "device": chip.name,
        "kernel": case.kernel,
        "mean": case.mean,
        "keep": case.keep,
        "dtype": str(case.product),
        "features": case.features,
        "tiles": dataclasses.asdict(trial.tiles),
        "by": by,
        "tokens": case.tokens,
        "vocabulary": case.vocabulary,
        "milliseconds": round(1e3 * trial.seconds, 3),
    }


if __name__ == "__main__":
    sys.exit(main())
