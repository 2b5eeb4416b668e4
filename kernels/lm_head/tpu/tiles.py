"""Tile sizes of the TPU kernels: the on-chip memory (VMEM) that each takes, term by term, and the best that fit.

A block of hidden states meets a tile of the weight; within a tile, the softmax takes `step` columns at a time.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kernels.lm_head.contract import Inputs, Options, gradient_dtypes
from kernels.lm_head.live_rows import round_up

KernelName = Literal["forward", "hidden", "weight", "kept"]
"""forward: statistics, with or without E_q[W]; hidden: dh; weight: dW; kept: dW from exponentials that were kept."""

LANES = 128
_MIB = 2**20
_RESERVE = 8 * _MIB  # of the chip's VMEM, for what the compiler and XLA put there
_ROWS = (1024, 512, 256, 128)
_COLUMNS = (2048, 1024, 512, 256, 128)
_LEAST_STEP = 256  # steps of fewer columns keep a matrix unit idle half of the time, by the listing
_CALL_ELEMENTS = 2**22
_MOST_TRAFFIC_LOSS = 1.25  # a tiling that moves at most so many times what the best moves counts as equal


@dataclasses.dataclass(frozen=True)
class Tiles:
    rows: int  # hidden states of a block
    columns: int  # rows of the weight in a tile
    step: int  # columns whose softmax is computed at a time

    def __post_init__(self) -> None:
        assert self.columns % self.step == 0
        assert self.columns // self.step <= 8  # the sublanes in which a tile's maxima are kept, one a step


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel, and the sizes and dtypes of its arguments: the choice of tiles depends on these."""

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


def case_of(inputs: Inputs, options: Options, kernel: KernelName, mean: Any = None, keep: bool = False) -> Case:
    """The case of a kernel that is given these arguments; `mean` is the dtype of E_q[W], None where there is none."""
    dh, dw = gradient_dtypes(inputs, options)
    gradient = {"forward": jnp.dtype(mean or dh), "hidden": dh}.get(kernel, dw)
    tokens, (vocabulary, features) = len(inputs.labels), inputs.weight.shape
    hidden, weight = jnp.dtype(inputs.hidden.dtype), jnp.dtype(inputs.weight.dtype)
    return Case(kernel, tokens, vocabulary, features, hidden, weight, options.dtype, gradient, mean is not None, keep)


_override: dict[KernelName | None, Tiles] = {}  # by kernel; None: for every kernel
_call_rows: int | None = None


@contextlib.contextmanager
def override(
    *, rows: int, columns: int, step: int | None = None, call: int | None = None, kernel: KernelName | None = None
) -> Iterator[None]:
    """Within the context, one kernel or all are traced with these tiles, `call` rows a call: for tests and trials."""
    global _override, _call_rows
    previous = _override, _call_rows
    _override, _call_rows = {kernel: Tiles(rows, columns, step or columns)}, call
    try:
        yield
    finally:
        _override, _call_rows = previous


def terms(case: Case, tiles: Tiles) -> dict[str, int]:
    """Bytes of VMEM that a kernel takes, by purpose. Blocks that stream in or out have two buffers."""
    rows, columns, features = tiles.rows, tiles.columns, round_up(case.features, LANES)
    row_vector, logits = 4 * 8 * rows, 4 * rows * tiles.step
    wide = 4 * rows * features
    found = {"hidden block": 2 * case.hidden.itemsize * rows * features, "labels and row vectors": 4 * row_vector}
    if case.kernel != "kept":
        found["weight tile"] = 2 * case.weight.itemsize * columns * features
    if case.hidden != case.product:
        found["hidden block as operand"] = case.product.itemsize * rows * features
    if case.kernel != "kept" and case.weight != case.product:
        found["weight tile as operand"] = case.product.itemsize * columns * features
    if case.product == jnp.float32:
        found["operands in parts"] = 2 * 4 * (rows + columns) * features  # of bfloat16, which the compiler spills
    if case.kernel == "forward":
        found["running sums"] = 3 * row_vector
        found["logits, exponentials and masks"] = 5 * logits
        if not case.mean and not case.keep:
            found["logits carried to the next tile"] = logits
        if case.mean:
            found["row vector, turned"] = 4 * rows * LANES
            found["sum of p W"] = wide
            found["product p W"] = wide
            found["E[W] block"] = 2 * case.gradient.itemsize * rows * features
        if case.keep:
            found["kept exponentials"] = 2 * case.product.itemsize * rows * columns
            found["kept maxima"] = 2 * row_vector
    elif case.kernel == "hidden":
        found["row vectors, turned"] = 6 * 4 * rows * LANES
        found["logits and slopes"] = 5 * logits
        found["sum of dh"] = 2 * wide
        found["dh block"] = 2 * case.gradient.itemsize * rows * features
    else:
        found["logits and slopes"] = 5 * logits
        found["sum of dW"] = 2 * 4 * columns * features
        found["dW tile"] = 2 * case.gradient.itemsize * columns * features
        if case.kernel == "kept":
            found["kept exponentials"] = 2 * case.product.itemsize * rows * columns
            found["dW tile so far"] = 2 * 4 * columns * features
    return found


def traffic(case: Case, tiles: Tiles, live: int | None = None) -> int:
    """Bytes that a kernel with this tiling moves between HBM and VMEM where `live` rows count (None: all)."""
    rows = case.tokens if live is None else live
    blocks, tiles_of_weight = -(-rows // tiles.rows), -(-case.vocabulary // tiles.columns)
    hidden, weight = rows * case.features * case.hidden.itemsize, case.vocabulary * case.features * case.weight.itemsize
    by_rows, by_columns = rows * case.features, case.vocabulary * case.features
    kept = rows * case.vocabulary * case.product.itemsize
    if case.kernel == "forward":
        return hidden + blocks * weight + case.mean * by_rows * case.gradient.itemsize + case.keep * kept
    if case.kernel == "hidden":
        return hidden + blocks * weight + by_rows * case.gradient.itemsize
    if case.kernel == "weight":
        return weight + tiles_of_weight * hidden + by_columns * case.gradient.itemsize
    return kept + tiles_of_weight * hidden + by_columns * case.gradient.itemsize


def products(case: Case) -> int:
    """Number of matrix products of 2 N V D flops each."""
    return {"forward": 1 + case.mean, "hidden": 2, "weight": 2, "kept": 1}[case.kernel]


def choose(case: Case) -> Tiles:
    """The tiles for a kernel on the TPU that is traced for; a ValueError names the largest term where none fit."""
    if found := _override.get(case.kernel) or _override.get(None):
        return found
    found = best(case, vmem())
    if found is None:
        smallest = terms(case, Tiles(_ROWS[-1], _COLUMNS[-1], _COLUMNS[-1]))
        name = max(smallest, key=lambda term: smallest[term])
        raise ValueError(
            f"hidden: with {case.features} features the {case.kernel} kernel's smallest tiles take "
            f"{sum(smallest.values()) / _MIB:.0f} MiB of VMEM, {smallest[name] / _MIB:.0f} of them for its {name}, and "
            f"the device has {vmem() / _MIB:.0f}; use impl='xla'"
        )
    return found


def call_rows(tokens: int, features: int, tile: Tiles) -> int:
    """Rows of one call of a kernel: a block for each core at least, so few that arrays beside it stay small."""
    if _call_rows is not None:
        return _call_rows
    rows = tile.rows * cores()
    while 2 * rows * features <= _CALL_ELEMENTS and rows < tokens:
        rows *= 2
    return rows


def kept_bytes(vocabulary: int, product: jnp.dtype, tile: Tiles) -> int:
    """Bytes that the forward kernel keeps of a row: exponentials, and maxima."""
    tiles_of_weight = -(-vocabulary // tile.columns)
    return tiles_of_weight * (tile.columns * product.itemsize + 4 * 8)


def obstacle(case: Case) -> str | None:
    """Why no tiles fit; None if some do."""
    try:
        choose(case)
    except ValueError as error:
        return str(error)
    return None


def best(case: Case, capacity: int) -> Tiles | None:
    """The tiles that best hide the softmax, among those that fit `capacity` bytes and move about the least."""
    fit = candidates(case, capacity)
    if not fit:
        return None
    fit = [tiles for tiles in fit if tiles.step >= _LEAST_STEP] or fit
    least = min(traffic(case, tiles) for tiles in fit)
    good = [tiles for tiles in fit if traffic(case, tiles) <= _MOST_TRAFFIC_LOSS * least]
    return max(good, key=_overlap)


def _overlap(tiles: Tiles) -> tuple[int, ...]:
    """Sort key: large operands for the MXU, and two steps, so that a softmax hides behind the other step's products."""
    return min(tiles.rows, 512), tiles.step, min(tiles.columns // tiles.step, 2), -tiles.rows * tiles.columns


def candidates(case: Case, capacity: int) -> list[Tiles]:
    """All tilings that fit, none larger than the case itself."""
    # Cores share out the blocks of rows, in the kernels of dW the tiles of columns.
    rows_needed = round_up(-(-case.tokens // cores()) if case.kernel in ("forward", "hidden") else case.tokens, LANES)
    columns_needed = round_up(case.vocabulary, LANES)
    fit = []
    for rows in _ROWS:
        for columns in _COLUMNS:
            too_large = rows // 2 >= rows_needed or columns // 2 >= columns_needed
            if too_large and (rows, columns) != (_ROWS[-1], _COLUMNS[-1]):
                continue
            for step in {min(columns, 512), min(columns, 256)}:
                tiles = Tiles(rows, columns, step)
                if _fits(case, tiles, capacity):
                    fit.append(tiles)
    return fit


def _fits(case: Case, tiles: Tiles, capacity: int) -> bool:
    # Exponentials are laid out in the forward kernel's tiles, so the kernel that reads them must fit these tiles, too.
    readers = [dataclasses.replace(case, kernel="kept", keep=False, gradient=jnp.dtype(jnp.float32))] * case.keep
    return all(sum(terms(each, tiles).values()) + _RESERVE <= capacity for each in (case, *readers))


def limit(case: Case, tiles: Tiles) -> int:
    """Bytes of VMEM to request from the compiler: the terms and half as much again, at most what the device has."""
    return min(vmem(), sum(terms(case, tiles).values()) * 3 // 2 + _RESERVE)


def vmem() -> int:
    """Bytes of VMEM of the TPU that is being traced for; where that isn't known, those of the smallest TPU."""
    found = _info()
    return 64 * _MIB if found is None else found.vmem_capacity_bytes


def cores() -> int:
    """Number of cores of the TPU that is being traced for, as JAX counts devices: a v4 and a v5p have two."""
    found = _info()
    return 1 if found is None else found.num_cores


def _info() -> Any:
    """The TPU that is being traced for: the mesh's, else the machine's own; None if JAX doesn't know it."""
    try:
        return pltpu.get_tpu_info()
    except ValueError:
        return None
