"""What a workspace is spent on by the head on Hopper GPUs: columns or rows that are kept, and larger chunks.

What it keeps comes on top of what dW's own memory does (`gpu_loan.py`).

Left out: what is done with it (`gpu_passes.py`).
"""

from typing import NamedTuple

import jax.numpy as jnp

from kernels.lm_head.contract import Inputs, Options, gradient_dtypes
from kernels.lm_head.gpu import kept_logits as gpu_loan
from kernels.lm_head.gpu import tiles as gpu_tiles
from kernels.lm_head.gpu.kept_logits import Loan
from kernels.lm_head.gpu.tiles import Sizes
from kernels.lm_head.live_rows import round_up

_SHARE_OF_CHUNK, _MOST_SPARE = 8, 100 * 2**20  # of a workspace, one part in so many, and bytes: for larger chunks


class Plan(NamedTuple):
    sizes: Sizes
    rows: int
    """Of a wave."""
    loan: Loan = Loan()
    """Of dW's memory, to the vocabulary's first columns."""
    keep: int = 0
    """The columns behind these that the workspace keeps."""
    kept_chunk: int = 0
    """Columns that are taken of them at a time."""

    def chunk(self, vocabulary: int) -> int:
        """Columns that are taken at a time of those that aren't kept."""
        others = round_up(max(1, vocabulary - self.loan.columns - self.keep), self.sizes.tiles.columns)
        return min(self.sizes.chunk, others)

    def products(self, vocabulary: int) -> float:
        """Products of N V D that loss and gradients take of these: 4, less the share of columns that are kept."""
        return 4 - min(self.loan.columns + self.keep, vocabulary) / vocabulary


def plan(inputs: Inputs, options: Options) -> Plan:
    """What to spend the workspace on."""
    vocabulary, features = inputs.weight.shape
    sizes = gpu_tiles.choose(len(inputs.labels), vocabulary, features)
    tiles = sizes.tiles
    bytes_a_row = gpu_tiles.kept_bytes(round_up(vocabulary, tiles.columns), tiles)
    room = sizes.default_rows * bytes_a_row if options.workspace is None else options.workspace
    rows = sizes.rows(len(inputs.labels))
    lent = Plan(sizes, rows, gpu_loan.largest(inputs, options, sizes, rows))
    if found := _whole(inputs, lent, room):
        return found
    spare = min(room // _SHARE_OF_CHUNK, _MOST_SPARE)
    columns = (room - spare) // (rows * gpu_tiles.kept_bytes(tiles.columns, tiles)) * tiles.columns
    if options.wants_weight:
        # Several waves are summed in float32, which is no gradient then but one more array.
        no_array = gradient_dtypes(inputs, options)[1] == jnp.float32
        left = room if no_array else 0 if options.workspace is None else room - 4 * inputs.weight.size
        most = min(max(left, 0) // bytes_a_row, sizes.most_rows) // tiles.cluster_rows * tiles.cluster_rows
        cost = sizes.wave_cost + (0 if inputs.weight.dtype == options.dtype else sizes.cast_cost)
        if most and -(-rows // most) * cost < rows * (1 - (lent.loan.columns + columns) / vocabulary):
            wave = round_up(-(-rows // -(-rows // most)), tiles.cluster_rows)
            if found := _whole(inputs, Plan(sizes, wave), left):
                return found
    found = _cut(inputs, lent, columns, spare)
    assert found is not None
    return found


def _whole(inputs: Inputs, lent: Plan, room: int) -> Plan | None:
    """With all columns kept, if that fits, and what is left spent on larger chunks."""
    (vocabulary, features), rows = inputs.weight.shape, lent.rows
    tiles = gpu_tiles.choose(rows, vocabulary, features).tiles
    columns = round_up(vocabulary - lent.loan.columns, tiles.columns)
    left = room - rows * gpu_tiles.kept_bytes(columns, tiles)
    for eighths in range(8, -1, -1) if left >= 0 else ():
        found = _cut(inputs, lent, columns, left * eighths // 8, room)
        if found is not None:
            return found
    return None


def _cut(inputs: Inputs, lent: Plan, keep: int, spare: int, room: int | None = None) -> Plan | None:
    """With chunks as large as `spare` bytes allow, those that are kept all of one size; within `room`, if it can be."""
    (vocabulary, features), rows = inputs.weight.shape, lent.rows
    spare = min(spare, _MOST_SPARE)
    sizes = gpu_tiles.choose(rows, vocabulary, features, spare)
    vocabulary -= lent.loan.columns
    if keep <= 0 or vocabulary <= 0:
        return lent._replace(sizes=sizes)
    tiles, width, block = keep // sizes.tiles.columns, sizes.tiles.columns, sizes.block(rows)
    always = gpu_tiles.always(block, features)

    def kept(chunks: int) -> tuple[int, int]:
        """Of the columns, those kept, and of these those of a chunk."""
        chunk = (-(-tiles // chunks) if keep >= vocabulary else tiles // chunks) * width
        return chunks * chunk, chunk

    def fits(chunks: int) -> bool:
        keep, chunk = kept(chunks)
        beside = max(0, 2 * block * max(chunk, sizes.chunk) - always)
        return room is None or rows * gpu_tiles.kept_bytes(keep, sizes.tiles) + beside <= room

    def cost(chunks: int) -> int:
        keep, chunk = kept(chunks)
        again = sizes.cost(rows, features, max(0, vocabulary - keep), sizes.chunk)
        return sizes.cost(rows, features, keep, chunk, products=2) + again

    least = -(-keep // max(sizes.chunk, spare // (2 * block)))
    chunks = min(filter(fits, range(least, tiles + 1)), key=cost, default=None)
    if chunks is None:
        return None
    keep, chunk = kept(chunks)
    return lent._replace(sizes=sizes, keep=keep, kept_chunk=chunk)
