"""The memory of dW until dW is written, on Hopper: logits that forward keeps for backward, then dy of large chunks.

As float16 [V, W], the memory holds at its end the maxima of tiles (float32, bit by bit, each tile's maxima in whole
rows), and before them logits less these maxima, in groups of W columns of the vocabulary; a group takes as many rows of
the memory as there are rows of hidden states. The logits are those of the vocabulary's first columns: backward reads a
chunk's logits before it writes the chunk's rows of dW, and these rows end before the logits begin that are still to be
read. After them, dy of a chunk (bfloat16 [V, D], in groups of D columns) takes the last rows, as long as the chunk's
own rows of dW end before it.

Suffixes: V vocabulary, D features, W float16 numbers in a row of dW; R rows of hidden states, U tiles, C columns.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt, UInt16

from kernels.lm_head.contract import Inputs, Options, gradient_dtypes
from kernels.lm_head.gpu.products import Folded, Ref
from kernels.lm_head.gpu.tiles import KEPT_DTYPE, Sizes
from kernels.lm_head.manual_axes import vary, varying_axes

_CLEARLY = 0.99  # share of the time that larger chunks may take at most
_ALIGNED = 8  # rows: Pallas stores whole tiles of shared memory of 8 rows where it knows that they begin at such a one


class Layout(NamedTuple):
    """Columns whose logits, or dy, are in the memory of dW, and where; known while tracing."""

    columns: int = 0  # number of columns; those whose logits are kept are the vocabulary's first
    chunk: int = 0  # number of these that backward takes at a time; of kept logits, a multiple or a divisor of W
    first_row: int = 0  # the row of dW where they begin
    rows: int = 0  # number of rows of hidden states


def choose_layout(inputs: Inputs, options: Options, sizes: Sizes, rows: int) -> Layout:
    """The layout with the most columns that fit, in chunks that take the least time by `Sizes.cost`."""
    vocabulary, features = inputs.weight.shape
    if not _is_whole(inputs, options):
        return Layout()
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
    return Layout(kept, chunk, first_row(kept), rows) if kept else Layout()


def choose_idle(inputs: Inputs, options: Options, sizes: Sizes, rows: int, first: int) -> Layout:
    """Columns from `first` on that backward takes in larger chunks, with dy in rows of dW that are written later.

    The chunk is the one that takes the least time by `Sizes.cost`. There are none if weight or dW isn't of dy's dtype,
    if a group isn't whole tiles wide, if dW is summed over blocks of rows, or if hardly any time is saved.
    """
    (vocabulary, features), width = inputs.weight.shape, sizes.tiles.columns
    none, dtypes = Layout(chunk=sizes.chunk), {inputs.weight.dtype, gradient_dtypes(inputs, options)[1], options.dtype}
    if len(dtypes) > 1 or features % sizes.tiles.rows or rows > sizes.block(rows) or not _is_whole(inputs, options):
        return none

    def layout(chunk: int) -> Layout:
        first_row = (vocabulary - -(-chunk // features) * rows) // _ALIGNED * _ALIGNED
        return Layout(max(0, first_row - first) // chunk * chunk, chunk, first_row, rows)

    def cost(found: Layout) -> int:
        others = max(0, vocabulary - first - found.columns)
        return sizes.cost(rows, features, found.columns, found.chunk) + sizes.cost(rows, features, others, sizes.chunk)

    best = min(map(layout, range(sizes.chunk, sizes.most_chunk + 1, width)), key=cost, default=none)
    return best if cost(best) < _CLEARLY * cost(none) else none


def _is_whole(inputs: Inputs, options: Options) -> bool:
    """Whether there is a dW, and every row of it is written: rows of padding aren't."""
    return options.wants_weight and inputs.columns is None


def _width(inputs: Inputs, options: Options) -> int:
    return inputs.weight.shape[1] * gradient_dtypes(inputs, options)[1].itemsize // KEPT_DTYPE.itemsize


def _rows_of_tops(rows: int, width: int) -> int:
    """Rows of the memory that one tile's maxima take."""
    return -(-2 * rows // width)


# --- forward --------------------------------------------------------------------------------------------------------


def allocate(inputs: Inputs, options: Options, layout: Layout) -> Folded | None:
    """Logits less their tiles' maxima, [R, V], in float16 [V, W], not filled with anything; None if none are kept."""
    if not layout.columns:
        return None
    memory_VW = lax.empty((len(inputs.weight), _width(inputs, options)), KEPT_DTYPE)
    return Folded(jax.new_ref(vary(memory_VW, varying_axes(inputs.hidden))), layout.first_row, layout.rows)


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


def read_logits(dw: Ref, layout: Layout, first: Array, row: Array, rows: int) -> Float[Array, "R C"]:
    """Logits less their tile's maximum, of `rows` rows from `row` on, and of the chunk from column `first` on."""
    bits, together = _bits(dw)
    width = dw.shape[1] * together
    columns = min(layout.chunk, width)
    start, column = layout.first_row + first // width * layout.rows + row, first % width // together

    def group(number: int) -> Float[Array, "R C"]:
        place = start + number * layout.rows, column
        found_RC = lax.dynamic_slice(bits, place, (rows, columns // together))
        if together == 2:  # by shifts, which XLA fuses with what follows; a cast would need an array of its own
            shifts_C = 16 * (jnp.arange(columns, dtype=bits.dtype) % 2)
            found_RC = (jnp.repeat(found_RC, 2, axis=1) >> shifts_C).astype(jnp.uint16)
        return lax.bitcast_convert_type(found_RC, KEPT_DTYPE)

    return jnp.concatenate([group(number) for number in range(layout.chunk // columns)], axis=1)


def read_tops(dw: Ref, layout: Layout, first: Array, width: int) -> Float[Array, "U R"]:
    """Maxima of the tiles, of `width` columns each, of the chunk from column `first` on."""
    bits, together = _bits(dw)
    rows, tiles = _rows_of_tops(layout.rows, dw.shape[1] * together), layout.chunk // width
    found = lax.dynamic_slice_in_dim(bits, len(bits) - (layout.columns - first) // width * rows, tiles * rows)
    numbers = found.reshape(tiles, -1) if together == 2 else found.reshape(tiles, -1, 2)
    return lax.bitcast_convert_type(numbers, jnp.float32)[:, : layout.rows]


def _bits(dw: Ref) -> tuple[UInt[Array, "V D"], int]:
    """dW as unsigned integers, as XLA may change a half that looks like a NaN, and the number of float16 in each."""
    size = dw.dtype.itemsize
    return lax.bitcast_convert_type(dw[...], f"uint{8 * size}"), size // KEPT_DTYPE.itemsize
