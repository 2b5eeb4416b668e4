"""Logits that forward keeps for backward in the memory of dW, until dW is written there, on Hopper.

As float16 [V, W], the memory holds at its end the maxima of tiles (float32, bit by bit, each tile's maxima in whole
rows), and before them logits less these maxima, in groups of W columns of the vocabulary; a group takes as many rows of
the memory as there are rows of hidden states. The logits are those of the vocabulary's first columns: backward reads a
chunk's logits before it writes the chunk's rows of dW, and these rows end before the logits begin that are still to be
read.

Suffixes: V vocabulary, D features, W float16 numbers in a row of dW; R rows of hidden states, U tiles, C columns.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, UInt, UInt16

from kernels.lm_head.contract import Inputs, Options, gradient_dtypes
from kernels.lm_head.gpu.products import PIECE, Ref, Scalar
from kernels.lm_head.gpu.tiles import KEPT_DTYPE, Sizes
from kernels.lm_head.target import vary, varying_axes

_ALIGNED = 8  # rows: Pallas stores whole tiles of shared memory of 8 rows where it knows that they begin at such a one


class KeptColumns(NamedTuple):
    """The vocabulary's first columns, whose logits are in the memory of dW, and where; known while tracing."""

    columns: int = 0
    chunk: int = 0  # number of these columns that backward takes at a time, a multiple or a divisor of W
    first_row: int = 0  # the row of dW where the logits begin
    rows: int = 0  # number of rows of hidden states


@dataclasses.dataclass(frozen=True)
class Folded:
    """A matrix in the memory of a narrower array: groups of as many columns as that has, one group below the other."""

    array: Ref
    first_row: int  # the array's row where the first group begins
    rows: int  # rows of the matrix

    def piece(self, row: Scalar, column: Scalar) -> Ref:
        """The ref of 64 rows from `row` on and of PIECE columns from `column` on, a multiple of PIECE."""
        piece, pieces = lax.div(column, jnp.int32(PIECE)), jnp.int32(self.array.shape[1] // PIECE)
        first = self.first_row + lax.div(piece, pieces) * self.rows + row
        return self.array.at[pl.ds(first, 64), pl.ds(lax.rem(piece, pieces) * PIECE, PIECE)]


def keep_in_dw(inputs: Inputs, options: Options, sizes: Sizes, rows: int) -> KeptColumns:
    """The most columns that fit into the memory of dW, in chunks that take the least time by `Sizes.cost`."""
    vocabulary, features = inputs.weight.shape
    if not options.wants_weight or inputs.columns is not None:  # rows of padding are not written
        return KeptColumns()
    width, columns = _width(inputs, options), sizes.tiles.columns

    def first_row(kept: int) -> int:
        free = vocabulary - kept // columns * _rows_of_tops(rows, width) - kept // width * rows
        return free // _ALIGNED * _ALIGNED

    def fits(kept: int, chunk: int) -> bool:
        """Whether, when the chunks up to any are written, what is still to be read begins behind them."""
        return all(end <= first_row(kept) + end // width * rows for end in range(0, kept + 1, chunk))

    def most(chunk: int) -> int:
        step = math.lcm(chunk, width)
        return next(kept for kept in range(vocabulary // step * step, -1, -step) if not kept or fits(kept, chunk))

    def cost(kept: int, chunk: int) -> int:
        recomputed = sizes.cost(rows, features, vocabulary - kept, sizes.chunk)
        return sizes.cost(rows, features, kept, chunk, products=2) + recomputed

    chunks = (chunk for chunk in range(columns, sizes.chunk + 1, columns) if not chunk % width or not width % chunk)
    kept, chunk = min(((most(chunk), chunk) for chunk in chunks), key=lambda found: cost(*found), default=(0, 0))
    return KeptColumns(kept, chunk, first_row(kept), rows) if kept else KeptColumns()


def _width(inputs: Inputs, options: Options) -> int:
    return inputs.weight.shape[1] * gradient_dtypes(inputs, options)[1].itemsize // KEPT_DTYPE.itemsize


def _rows_of_tops(rows: int, width: int) -> int:
    """Rows of the memory that one tile's maxima take."""
    return -(-2 * rows // width)


# --- forward --------------------------------------------------------------------------------------------------------


def allocate(inputs: Inputs, options: Options, kept: KeptColumns) -> Folded | None:
    """Logits less their tiles' maxima, [R, V], in float16 [V, W], not filled with anything; None if none are kept."""
    if not kept.columns:
        return None
    memory_VW = lax.empty((len(inputs.weight), _width(inputs, options)), KEPT_DTYPE)
    return Folded(jax.new_ref(vary(memory_VW, varying_axes(inputs.hidden))), kept.first_row, kept.rows)


def with_tops(buffer: Folded, top_UR: Float[Array, "U R"]) -> UInt16[Array, "V W"]:
    """The buffer's contents after the forward kernel, with the maxima of tiles at its end."""
    width = buffer.array.shape[1]
    rows = _rows_of_tops(top_UR.shape[1], width)
    padded = jnp.pad(top_UR, ((0, 0), (0, rows * width // 2 - top_UR.shape[1])))
    tops = lax.bitcast_convert_type(padded, jnp.uint16).reshape(-1, width)
    memory = lax.bitcast_convert_type(jax.freeze(buffer.array), jnp.uint16)
    return lax.dynamic_update_slice_in_dim(memory, tops, len(memory) - len(tops), 0)


# --- backward -------------------------------------------------------------------------------------------------------


def as_dw(memory: UInt16[Array, "V W"], dtype: jnp.dtype) -> Float[Array, "V D"]:
    """The same memory as an array of dW's dtype: neighbouring float16 numbers make one of them."""
    together = dtype.itemsize // memory.dtype.itemsize
    return lax.bitcast_convert_type(memory if together == 1 else memory.reshape(len(memory), -1, together), dtype)


def read_logits(dw: Ref, kept: KeptColumns, first: Array, row: Array, rows: int) -> Float[Array, "R C"]:
    """Logits less their tile's maximum, of `rows` rows from `row` on, and of the chunk from column `first` on."""
    bits, together = _bits(dw)
    width = dw.shape[1] * together
    columns = min(kept.chunk, width)
    start, column = kept.first_row + first // width * kept.rows + row, first % width // together

    def group(number: int) -> Float[Array, "R C"]:
        place = start + number * kept.rows, column
        found_RC = lax.dynamic_slice(bits, place, (rows, columns // together))
        if together == 2:  # by shifts, which XLA fuses with what follows; a cast would need an array of its own
            shifts_C = 16 * (jnp.arange(columns, dtype=bits.dtype) % 2)
            found_RC = (jnp.repeat(found_RC, 2, axis=1) >> shifts_C).astype(jnp.uint16)
        return lax.bitcast_convert_type(found_RC, KEPT_DTYPE)

    return jnp.concatenate([group(number) for number in range(kept.chunk // columns)], axis=1)


def read_tops(dw: Ref, kept: KeptColumns, first: Array, width: int) -> Float[Array, "U R"]:
    """Maxima of the tiles, of `width` columns each, of the chunk from column `first` on."""
    bits, together = _bits(dw)
    rows, tiles = _rows_of_tops(kept.rows, dw.shape[1] * together), kept.chunk // width
    found = lax.dynamic_slice_in_dim(bits, len(bits) - (kept.columns - first) // width * rows, tiles * rows)
    numbers = found.reshape(tiles, -1) if together == 2 else found.reshape(tiles, -1, 2)
    return lax.bitcast_convert_type(numbers, jnp.float32)[:, : kept.rows]


def _bits(dw: Ref) -> tuple[UInt[Array, "V D"], int]:
    """dW as unsigned integers, as XLA may change a half that looks like a NaN, and the number of float16 in each."""
    size = dw.dtype.itemsize
    return lax.bitcast_convert_type(dw[...], f"uint{8 * size}"), size // KEPT_DTYPE.itemsize
