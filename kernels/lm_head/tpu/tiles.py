"""Tile sizes of the TPU kernels: the on-chip memory (VMEM) that each takes, term by term, and the best that fit.

A block of hidden states meets a tile of the weight; within a tile, the softmax takes `step` columns at a time.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ..contract import Inputs, Options, gradient_dtypes
from ..live_rows import round_up

KernelName = Literal["forward", "hidden", "weight", "kept"]
"""forward: statistics, with or without E_q[W]; hidden: dh; weight: dW; kept: dW from exponentials that were kept."""

LANES = 128
_MIB = 2**20
_RESERVE = 8 * _MIB  # of the chip's VMEM, for the compiler's and XLA's own buffers
_ROWS = (1024, 512, 256, 128)
_COLUMNS = (2048, 1024, 512, 256, 128)
_LEAST_STEP = 256  # steps of fewer columns keep a matrix unit idle half of the time, by the listing
_CALL_ELEMENTS = 2**22
_MOST_TRAFFIC_LOSS = 1.25  # a tiling with at most so many times the least traffic counts as equal


@dataclasses.dataclass(frozen=True)
class Tiles:
    rows: int  # hidden states of a block
    columns: int  # rows of the weight in a tile
    step: int  # columns of a softmax at a time

    def __post_init__(self) -> None:
        assert self.columns % self.step == 0
        assert self.columns // self.step <= 8  # a tile's maxima are kept in sublanes, a sublane for each step


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel with the sizes and dtypes of its arguments, which the choice of tiles depends on."""

    kernel: KernelName
    tokens: int
    vocabulary: int
    features: int
    hidden: jnp.dtype
    weight: jnp.dtype
    product: jnp.dtype
    gradient: jnp.dtype  # dtype of the gradient that is returned
    mean: bool = False  # forward: whether it computes E_q[W]
    keep: bool = False  # forward: whether it keeps exponentials

    @property
    def by_rows(self) -> bool:
        """Whether a block of rows stays on the chip while the weight passes by; else a tile of the weight stays."""
        return self.kernel in ("forward", "hidden")


def case_of(inputs: Inputs, options: Options, kernel: KernelName, mean: Any = None, keep: bool = False) -> Case:
    """The case of a kernel with these arguments; `mean` is the dtype of E_q[W], or None without E_q[W]."""
    dh, dw = gradient_dtypes(inputs, options)
    gradient = {"forward": jnp.dtype(mean or dh), "hidden": dh}.get(kernel, dw)
    tokens, (vocabulary, features) = len(inputs.labels), inputs.weight.shape
    hidden, weight = jnp.dtype(inputs.hidden.dtype), jnp.dtype(inputs.weight.dtype)
    return Case(kernel, tokens, vocabulary, features, hidden, weight, options.dtype, gradient, mean is not None, keep)


def turned(features: int) -> bool:
    """Whether XLA keeps a matrix [V, D] transposed, as it does where its rows would be padded to whole lanes.

    Kernels then take its tiles, and give dW's tiles, as [D, V], and turn them on the chip: XLA copies nothing.
    """
    return features % LANES != 0


_override: tuple[KernelName | None, Tiles, int | None] | None = None


@contextlib.contextmanager
def override(
    *, rows: int, columns: int, step: int | None = None, call: int | None = None, kernel: KernelName | None = None
) -> Iterator[None]:
    """A context that traces one kernel, or every kernel, with these tiles and `call` rows a call, for tests."""
    global _override
    previous, _override = _override, (kernel, Tiles(rows, columns, step or columns), call)
    try:
        yield
    finally:
        _override = previous


def overridden() -> bool:
    return _override is not None


def terms(case: Case, tiles: Tiles) -> dict[str, int]:
    """Bytes of VMEM that a kernel takes, by purpose. Blocks that stream in or out have two buffers."""
    forward, from_kept = case.kernel == "forward", case.kernel == "kept"
    features = round_up(case.features, LANES)
    by_rows, by_columns, product = tiles.rows * features, tiles.columns * features, case.product.itemsize
    vectors = 4 + 3 * forward + 2 * case.keep
    across_lanes = 6 if case.kernel == "hidden" else int(case.mean)  # row vectors
    logits = 6 if forward and not (case.mean or case.keep) else 5  # with masks, and logits carried to the next tile
    result = by_rows if case.by_rows else by_columns
    return {
        "hidden block": 2 * case.hidden.itemsize * by_rows,
        "weight tile": 0 if from_kept else 2 * case.weight.itemsize * by_columns,
        "hidden block as operand": product * by_rows if case.hidden != case.product else 0,
        "weight tile as operand": product * by_columns * (case.weight != case.product or turned(case.features))
        if not from_kept
        else 0,
        # Operands in parts, of bfloat16, which the compiler spills.
        "float32 operands": 8 * (by_rows + by_columns) if case.product == jnp.float32 else 0,
        "row vectors": 4 * tiles.rows * (8 * vectors + LANES * across_lanes),
        "logits and slopes": logits * 4 * tiles.rows * tiles.step,
        "sums and result": 0 if forward and not case.mean else 2 * (4 + case.gradient.itemsize) * result,
        "kept exponentials": 2 * product * tiles.rows * tiles.columns if case.keep or from_kept else 0,
        "dW tile so far": 8 * by_columns if from_kept else 0,
    }


def traffic(case: Case, tiles: Tiles) -> int:
    """Bytes that a kernel with this tiling moves between HBM and VMEM; waves add to a dW that they read."""
    by_rows, by_columns = case.tokens * case.features, case.vocabulary * case.features
    hidden, weight = by_rows * case.hidden.itemsize, by_columns * case.weight.itemsize
    kept = case.tokens * case.vocabulary * case.product.itemsize
    if case.by_rows:
        result = by_rows * case.gradient.itemsize if case.mean or case.kernel == "hidden" else 0
        return hidden + -(-case.tokens // tiles.rows) * weight + result + case.keep * kept
    result = by_columns * case.gradient.itemsize * (1 + (case.kernel == "kept"))
    return (kept if case.kernel == "kept" else weight) + -(-case.vocabulary // tiles.columns) * hidden + result


def products(case: Case) -> int:
    """Number of matrix products of 2 N V D flops each."""
    return {"forward": 1 + case.mean, "hidden": 2, "weight": 2, "kept": 1}[case.kernel]


def seconds(case: Case, tiles: Tiles) -> float:
    """A kernel's estimated time: of its products or of its memory traffic, the longer; 0 for an unknown TPU."""
    if (info := _info()) is None:
        return 0.0
    passes = 6 if case.product == jnp.float32 else 1  # of the matrix units, for a product
    flops = 2 * passes * products(case) * case.tokens * case.vocabulary * case.features
    moved = traffic(case, tiles)
    return max(flops / info.bf16_ops_per_second, moved / info.mem_bw_bytes_per_second) / info.num_cores


def choose(case: Case) -> Tiles:
    """The tiles for a kernel on the TPU that is traced for; a ValueError names the largest term where none fit."""
    if _override is not None and _override[0] in (None, case.kernel):
        return _override[1]
    if fit := candidates(case, vmem()):
        return fit[0]
    smallest = terms(case, Tiles(_ROWS[-1], _COLUMNS[-1], _COLUMNS[-1]))
    name = max(smallest, key=lambda term: smallest[term])
    raise ValueError(
        f"hidden: with {case.features} features the {case.kernel} kernel's smallest tiles take "
        f"{sum(smallest.values()) / _MIB:.0f} MiB of VMEM, {smallest[name] / _MIB:.0f} of them for its {name}, and "
        f"the device has {vmem() / _MIB:.0f}; use impl='xla'"
    )


def candidates(case: Case, capacity: int) -> list[Tiles]:
    """All tilings that fit `capacity` bytes, none larger than the case itself; the best first.

    The best tiling has steps that fill a matrix unit, moves about the least bytes, and hides the softmax best. It has
    large operands, and two steps: a softmax hides behind the other step's products.
    """
    # Cores share out the blocks of rows, in the kernels of dW the tiles of columns.
    rows_needed = round_up(-(-case.tokens // cores()) if case.by_rows else case.tokens, LANES)
    columns_needed = round_up(case.vocabulary, LANES)
    # Exponentials are laid out in the forward kernel's tiles, so the kernel that reads them must fit the same tiles.
    readers = [dataclasses.replace(case, kernel="kept", keep=False, gradient=jnp.dtype(jnp.float32))] * case.keep
    tilings = (
        Tiles(rows, columns, step)
        for rows in _ROWS
        if rows // 2 < rows_needed
        for columns in _COLUMNS
        if columns // 2 < columns_needed
        for step in {min(columns, 512), min(columns, 256)}
    )
    fit = [
        tiles
        for tiles in tilings
        if all(sum(terms(user, tiles).values()) + _RESERVE <= capacity for user in (case, *readers))
    ]
    full = [tiles for tiles in fit if tiles.step >= _LEAST_STEP] or fit
    least = min((traffic(case, tiles) for tiles in full), default=0)

    def key(tiles: Tiles) -> tuple[int, ...]:
        good = tiles in full and traffic(case, tiles) <= _MOST_TRAFFIC_LOSS * least
        steps = min(tiles.columns // tiles.step, 2)
        return good, min(tiles.rows, 512), tiles.step, steps, -tiles.rows * tiles.columns

    return sorted(fit, key=key, reverse=True)


def call_rows(tokens: int, features: int, tile: Tiles) -> int:
    """Rows of one call of a kernel: a block for each core at least, so few that arrays beside it stay small."""
    if _override is not None and _override[2] is not None:
        return _override[2]
    rows = tile.rows * cores()
    while 2 * rows * features <= _CALL_ELEMENTS and rows < tokens:
        rows *= 2
    return rows


def kept_bytes(vocabulary: int, product: jnp.dtype, tile: Tiles) -> int:
    """Bytes that the forward kernel keeps of a row: exponentials, and maxima."""
    tiles_of_weight = -(-vocabulary // tile.columns)
    return tiles_of_weight * (tile.columns * product.itemsize + 4 * 8)


def limit(case: Case, tiles: Tiles) -> int:
    """Bytes of VMEM to request from the compiler: 1.5 times the terms, at most the device's VMEM."""
    return min(vmem(), sum(terms(case, tiles).values()) * 3 // 2 + _RESERVE)


def vmem() -> int:
    """Bytes of VMEM of the TPU that is being traced for; where that isn't known, of the smallest TPU."""
    info = _info()
    return 64 * _MIB if info is None else info.vmem_capacity_bytes


def cores() -> int:
    """Number of cores of the TPU that is being traced for, as JAX counts devices: a v4 and a v5p have two."""
    info = _info()
    return 1 if info is None else info.num_cores


def _info() -> Any:
    """The TPU that is being traced for: the mesh's, else the machine's own; None if JAX doesn't know it."""
    try:
        return pltpu.get_tpu_info()
    except ValueError:
        return None
