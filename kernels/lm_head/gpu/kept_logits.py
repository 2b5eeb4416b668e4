"""What forward keeps for backward in dW's own memory, on Hopper: until its rows are written, chunk by chunk.

Seen as float16 [V, W], it holds, from the end: the maxima of tiles, float32 bit by bit, each tile's in whole rows; and
logits below these maxima, in groups of W columns of the vocabulary, of which each takes as many rows as there are rows
of hidden states. It is the first columns that are lent memory: backward takes a chunk's logits before it writes the
chunk's rows of dW, and these rows end before the logits begin that are still to be read.

So N rows of hidden states of D features save about V D / N columns, of a bfloat16 dW, from being multiplied again,
without a byte of workspace; nearly all of them where N is at most D.

Suffixes: V vocabulary, D features, W float16 of a row of dW; R rows of hidden states, U tiles, C columns.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, UInt, UInt16

from kernels.lm_head.contract import Inputs, Options, gradient_dtypes, zeros
from kernels.lm_head.gpu.products import PIECE, Ref, Scalar
from kernels.lm_head.gpu.tiles import KEPT, Sizes

_ALIGNED = 8  # rows: Pallas stores whole tiles of shared memory of 8 rows where it knows that they begin at such a one


class Loan(NamedTuple):
    """Options dW's memory is used; known while tracing."""

    columns: int = 0
    """Those of the vocabulary that have it, its first."""
    chunk: int = 0
    """Options many of them backward takes at a time: a multiple of W, or a divisor."""
    first: int = 0
    """The row of dW where their logits begin."""
    rows: int = 0
    """Rows of hidden states."""


def largest(inputs: Inputs, options: Options, sizes: Sizes, rows: int) -> Loan:
    """As many columns as may be, in chunks that take the least time, by the arithmetic of `Sizes.cost`."""
    vocabulary, features = inputs.weight.shape
    if not options.wants_weight or inputs.columns is not None:  # rows of padding would not be written
        return Loan()
    width, columns = _width(inputs, options), sizes.tiles.columns

    def begin(lent: int) -> int:
        free = vocabulary - lent // columns * _rows_of_tops(rows, width) - lent // width * rows
        return free // _ALIGNED * _ALIGNED

    def free(lent: int, chunk: int) -> bool:
        """Whether, when the chunks up to any are written, what is still to be read begins behind them."""
        return all(end <= begin(lent) + end // width * rows for end in range(0, lent + 1, chunk))

    def most(chunk: int) -> int:
        step = math.lcm(chunk, width)
        return next(lent for lent in range(vocabulary // step * step, -1, -step) if not lent or free(lent, chunk))

    def cost(lent: int, chunk: int) -> int:
        again = sizes.cost(rows, features, vocabulary - lent, sizes.chunk)
        return sizes.cost(rows, features, lent, chunk, products=2) + again

    chunks = (chunk for chunk in range(columns, sizes.chunk + 1, columns) if not chunk % width or not width % chunk)
    lent, chunk = min(((most(chunk), chunk) for chunk in chunks), key=lambda found: cost(*found), default=(0, 0))
    return Loan(lent, chunk, begin(lent), rows) if lent else Loan()


def _width(inputs: Inputs, options: Options) -> int:
    return inputs.weight.shape[1] * gradient_dtypes(inputs, options)[1].itemsize // KEPT.itemsize


def _rows_of_tops(rows: int, width: int) -> int:
    return -(-2 * rows // width)


# --- forward --------------------------------------------------------------------------------------------------------


class Lent(NamedTuple):
    """The memory, as a kernel writes it."""

    ref: Ref
    """float16 [V, W]."""
    loan: Loan

    def place(self, column: Scalar, row: Scalar) -> Ref:
        """Of the logits of 64 rows from `row` on, and of 64 columns from `column` of the vocabulary on."""
        pieces = jnp.int32(self.ref.shape[1] // PIECE)
        piece = lax.div(column, jnp.int32(PIECE))
        first = self.loan.first + lax.div(piece, pieces) * self.loan.rows + row
        return self.ref.at[pl.ds(first, 64), pl.ds(lax.rem(piece, pieces) * PIECE, PIECE)]


def lend(inputs: Inputs, options: Options, loan: Loan) -> Lent | None:
    if not loan.columns:
        return None
    return Lent(jax.new_ref(zeros(inputs, len(inputs.weight), _width(inputs, options), dtype=KEPT)), loan)


def given_back(lent: Lent, top_UR: Float[Array, "U R"]) -> UInt16[Array, "V W"]:
    """The memory, with the logits that a kernel has written there, and the maxima of their tiles."""
    width = lent.ref.shape[1]
    rows = _rows_of_tops(top_UR.shape[1], width)
    padded = jnp.pad(top_UR, ((0, 0), (0, rows * width // 2 - top_UR.shape[1])))
    tops = lax.bitcast_convert_type(padded, jnp.uint16).reshape(-1, width)
    memory = lax.bitcast_convert_type(jax.freeze(lent.ref), jnp.uint16)
    return lax.dynamic_update_slice_in_dim(memory, tops, len(memory) - len(tops), 0)


# --- backward -------------------------------------------------------------------------------------------------------


def as_gradient(memory: UInt16[Array, "V W"], dtype: jnp.dtype) -> Float[Array, "V D"]:
    """The same memory: what is side by side makes one number."""
    together = dtype.itemsize // memory.dtype.itemsize
    return lax.bitcast_convert_type(memory if together == 1 else memory.reshape(len(memory), -1, together), dtype)


def logits_of(dw: Ref, loan: Loan, first: Array, row: Array, rows: int) -> Float[Array, "R C"]:
    """Of `rows` from `row` on and the chunk that begins at column `first`: logits less their tile's maximum."""
    bits, together = _bits(dw)
    width = dw.shape[1] * together
    columns = min(loan.chunk, width)
    start, column = loan.first + first // width * loan.rows + row, first % width // together

    def group(number: int) -> Float[Array, "R C"]:
        place = start + number * loan.rows, column
        found_RC = lax.dynamic_slice(bits, place, (rows, columns // together))
        if together == 2:  # by shifts, which XLA fuses with what follows; a cast would need an array of its own
            shifts_C = 16 * (jnp.arange(columns, dtype=bits.dtype) % 2)
            found_RC = (jnp.repeat(found_RC, 2, axis=1) >> shifts_C).astype(jnp.uint16)
        return lax.bitcast_convert_type(found_RC, KEPT)

    return jnp.concatenate([group(number) for number in range(loan.chunk // columns)], axis=1)


def tops_of(dw: Ref, loan: Loan, first: Array, width: int) -> Float[Array, "U R"]:
    """Maxima of the chunk's tiles, each of `width` columns."""
    bits, together = _bits(dw)
    rows, tiles = _rows_of_tops(loan.rows, dw.shape[1] * together), loan.chunk // width
    found = lax.dynamic_slice_in_dim(bits, len(bits) - (loan.columns - first) // width * rows, tiles * rows)
    numbers = found.reshape(tiles, -1) if together == 2 else found.reshape(tiles, -1, 2)
    return lax.bitcast_convert_type(numbers, jnp.float32)[:, : loan.rows]


def _bits(dw: Ref) -> tuple[UInt[Array, "V D"], int]:
    """As integers, each of so many float16: a half of a float32 may look like a NaN, which XLA may write otherwise."""
    size = dw.dtype.itemsize
    return lax.bitcast_convert_type(dw[...], f"uint{8 * size}"), size // KEPT.itemsize
