"""The head's use of a workspace on Hopper GPUs: logits of columns or rows that are kept, and larger chunks.

What the workspace keeps comes on top of what the memory of dW does (`kept_logits.py`).
"""

from typing import NamedTuple

import jax.numpy as jnp

from kernels.lm_head.contract import Inputs, Options, gradient_dtypes
from kernels.lm_head.gpu.kept_logits import Layout, choose_idle, choose_layout
from kernels.lm_head.gpu.tiles import Sizes, choose, dy_bytes, kept_bytes
from kernels.lm_head.live_rows import round_up

_CHUNK_SHARE, _MOST_SPARE = 8, 100 * 2**20  # an eighth of a workspace, and at most so many bytes, is for larger chunks


class Plan(NamedTuple):
    """How rows and columns are divided, and which logits forward keeps."""

    sizes: Sizes
    rows: int  # rows of a wave
    layout: Layout = Layout()  # the vocabulary's first columns, whose logits are kept in the memory of dW
    workspace_columns: int = 0  # number of columns after these whose logits are kept in the workspace
    workspace_chunk: int = 0  # number of these that backward takes at a time
    idle: Layout = Layout()  # columns after these, whose logits aren't kept, and whose dy is in the memory of dW

    def chunk(self, vocabulary: int) -> int:
        """Number of columns that are taken at a time of those that are left."""
        others = vocabulary - self.layout.columns - self.workspace_columns - self.idle.columns
        return min(self.sizes.chunk, round_up(max(1, others), self.sizes.tiles.columns))


def make_plan(inputs: Inputs, options: Options) -> Plan:
    vocabulary, features = inputs.weight.shape
    sizes = choose(len(inputs.labels), vocabulary, features)
    tiles = sizes.tiles
    bytes_a_row = kept_bytes(round_up(vocabulary, tiles.columns), tiles)
    room = sizes.default_rows * bytes_a_row if options.workspace is None else options.workspace
    rows = sizes.rows(len(inputs.labels))
    without = Plan(sizes, rows, choose_layout(inputs, options, sizes, rows))
    if found := _keep_all_columns(inputs, without, room):
        return found
    spare = min(room // _CHUNK_SHARE, _MOST_SPARE)
    columns = (room - spare) // (rows * kept_bytes(tiles.columns, tiles)) * tiles.columns
    if options.wants_weight:
        # Several waves are summed in float32, which is an array beside dW unless dW is float32 itself.
        no_array = gradient_dtypes(inputs, options)[1] == jnp.float32
        left = room if no_array else 0 if options.workspace is None else room - 4 * inputs.weight.size
        most = min(max(left, 0) // bytes_a_row, sizes.most_rows) // tiles.cluster_rows * tiles.cluster_rows
        cost = sizes.wave_cost + (0 if inputs.weight.dtype == options.dtype else sizes.cast_cost)
        if most and -(-rows // most) * cost < rows * (1 - (without.layout.columns + columns) / vocabulary):
            wave = round_up(-(-rows // -(-rows // most)), tiles.cluster_rows)
            if found := _keep_all_columns(inputs, Plan(sizes, wave), left):
                return found
    found = _keep_columns(inputs, without, columns, spare)
    assert found is not None
    first = found.layout.columns + found.workspace_columns
    return found._replace(idle=choose_idle(inputs, options, found.sizes, rows, first))


def _keep_all_columns(inputs: Inputs, plan: Plan, room: int) -> Plan | None:
    """The plan with all columns kept, the rest of `room` bytes spent on larger chunks; None if `room` is too small."""
    (vocabulary, features), rows = inputs.weight.shape, plan.rows
    tiles = choose(rows, vocabulary, features).tiles
    columns = round_up(vocabulary - plan.layout.columns, tiles.columns)
    left = room - rows * kept_bytes(columns, tiles)
    for eighths in range(8, -1, -1) if left >= 0 else ():
        found = _keep_columns(inputs, plan, columns, left * eighths // 8, room)
        if found is not None:
            return found
    return None


def _keep_columns(inputs: Inputs, plan: Plan, columns: int, spare: int, room: int | None = None) -> Plan | None:
    """The plan with about so many columns kept, in chunks of one size, as large as `spare` bytes allow.

    Logits and chunks may take `room` bytes together; None if that is known to hold.
    """
    (vocabulary, features), rows = inputs.weight.shape, plan.rows
    spare = min(spare, _MOST_SPARE)
    sizes = choose(rows, vocabulary, features, spare)
    vocabulary -= plan.layout.columns
    if columns <= 0 or vocabulary <= 0:
        return plan._replace(sizes=sizes)
    tiles, width, block = columns // sizes.tiles.columns, sizes.tiles.columns, sizes.block(rows)
    always = dy_bytes(block, features)

    def divided(chunks: int) -> tuple[int, int]:
        """Number of columns that are kept in so many chunks, and of those in a chunk."""
        chunk = (-(-tiles // chunks) if columns >= vocabulary else tiles // chunks) * width
        return chunks * chunk, chunk

    def fits(chunks: int) -> bool:
        kept, chunk = divided(chunks)
        more_dy = max(0, 2 * block * max(chunk, sizes.chunk) - always)
        return room is None or rows * kept_bytes(kept, sizes.tiles) + more_dy <= room

    def cost(chunks: int) -> int:
        kept, chunk = divided(chunks)
        recomputed = sizes.cost(rows, features, max(0, vocabulary - kept), sizes.chunk)
        return sizes.cost(rows, features, kept, chunk, products=2) + recomputed

    least = -(-columns // max(sizes.chunk, spare // (2 * block)))
    chunks = min(filter(fits, range(least, tiles + 1)), key=cost, default=None)
    if chunks is None:
        return None
    kept, chunk = divided(chunks)
    return plan._replace(sizes=sizes, workspace_columns=kept, workspace_chunk=chunk)
