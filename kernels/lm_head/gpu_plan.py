"""What a workspace is spent on by the head on Hopper GPUs: columns or rows that are kept, and larger chunks.

Left out: what is done with it (`gpu_passes.py`).
"""

from typing import NamedTuple

import jax.numpy as jnp

from kernels.lm_head import gpu_tiles
from kernels.lm_head.contract import How, Inputs
from kernels.lm_head.gpu_tiles import Sizes
from kernels.lm_head.live_rows import round_up

_SHARE_OF_CHUNK, _MOST_SPARE = 8, 100 * 2**20  # of a workspace, one part in so many, and bytes: for larger chunks


class Plan(NamedTuple):
    sizes: Sizes
    rows: int
    """Of a wave."""
    keep: int
    """Columns whose exponentials are kept."""
    kept_chunk: int
    """Columns that are taken of them at a time."""


def plan(inputs: Inputs, how: How) -> Plan:
    """What to spend the workspace on."""
    vocabulary, features = inputs.weight.shape
    sizes = gpu_tiles.choose(len(inputs.labels), vocabulary, features)
    tiles = sizes.tiles
    bytes_a_row = gpu_tiles.kept_bytes(vocabulary, tiles)
    room = sizes.default_rows * bytes_a_row if how.workspace is None else how.workspace
    rows, most_columns = sizes.rows(len(inputs.labels)), round_up(vocabulary, tiles.columns)
    if rows * bytes_a_row <= room:
        return _cut(inputs, rows, most_columns, room - rows * bytes_a_row)
    spare = min(room // _SHARE_OF_CHUNK, _MOST_SPARE)
    columns = (room - spare) // (rows * gpu_tiles.kept_bytes(tiles.columns, tiles)) * tiles.columns
    if how.wants_weight:
        # Several waves are summed in float32, which is no gradient then but one more array.
        no_array = gradient_dtypes(inputs, how)[1] == jnp.float32
        left = room if no_array else 0 if how.workspace is None else room - 4 * inputs.weight.size
        most = min(max(left, 0) // bytes_a_row, sizes.most_rows) // tiles.cluster_rows * tiles.cluster_rows
        cost = sizes.wave_cost + (0 if inputs.weight.dtype == how.dtype else sizes.cast_cost)
        if most and -(-rows // most) * cost < rows * (1 - columns / vocabulary):
            wave = round_up(-(-rows // -(-rows // most)), tiles.cluster_rows)
            return _cut(inputs, wave, most_columns, left - wave * bytes_a_row)
    return _cut(inputs, rows, columns, spare)


def _cut(inputs: Inputs, rows: int, keep: int, spare: int) -> Plan:
    """With chunks as large as `spare` bytes allow, those that are kept all of one size."""
    vocabulary, features = inputs.weight.shape
    sizes = gpu_tiles.choose(rows, vocabulary, features, min(spare, _MOST_SPARE))
    if not keep:
        return Plan(sizes, rows, 0, 0)
    tiles, width = keep // sizes.tiles.columns, sizes.tiles.columns
    least = -(-keep // max(sizes.chunk, spare // (2 * sizes.block(rows))))

    def kept(chunks: int) -> tuple[int, int]:
        """Of the columns, those kept, and of these those of a chunk."""
        chunk = (-(-tiles // chunks) if keep >= vocabulary else tiles // chunks) * width
        return chunks * chunk, chunk

    def cost(chunks: int) -> int:
        keep, chunk = kept(chunks)
        again = sizes.cost(rows, features, max(0, vocabulary - keep), sizes.chunk)
        return sizes.cost(rows, features, keep, chunk, products=2) + again

    return Plan(sizes, rows, *kept(min(range(least, min(2 * least + 4, tiles) + 1), key=cost)))


def gradient_dtypes(inputs: Inputs, how: How) -> tuple[jnp.dtype, jnp.dtype]:
    """Of dh and of dW."""
    dh, dw = how.hidden_gradient, how.weight_gradient
    return jnp.dtype(dh or inputs.hidden.dtype), jnp.dtype(dw or inputs.weight.dtype)
