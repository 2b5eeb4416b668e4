"""The head's use of memory on Hopper GPUs: of which rows and columns forward keeps logits for backward.

What the workspace keeps comes on top of what the memory of dW does (`kept_logits.py`).
"""

from typing import NamedTuple

import jax.numpy as jnp

from kernels.lm_head.contract import Inputs, Options, gradient_dtypes
from kernels.lm_head.gpu.kept_logits import KeptColumns, keep_in_dw
from kernels.lm_head.gpu.tiles import Sizes, choose, kept_bytes
from kernels.lm_head.live_rows import round_up

_CHUNK_SHARE, _MOST_SPARE = 8, 100 * 2**20  # an eighth of a workspace, and at most so many bytes, is for larger chunks


class Plan(NamedTuple):
    """How rows and columns are divided, and which logits forward keeps."""

    sizes: Sizes
    rows: int  # rows of a wave
    in_dw: KeptColumns = KeptColumns()  # the vocabulary's first columns, whose logits are kept in the memory of dW
    workspace_columns: int = 0  # number of columns after these whose logits are kept in the workspace
    workspace_chunk: int = 0  # number of these that backward takes at a time

    @property
    def kept_columns(self) -> int:
        return self.in_dw.columns + self.workspace_columns

    def chunk(self, vocabulary: int) -> int:
        """Number of columns that are taken at a time of those that are left."""
        return min(self.sizes.chunk, round_up(max(1, vocabulary - self.kept_columns), self.sizes.tiles.columns))

    def with_workspace(self, inputs: Inputs, columns: int, spare: int, room: int) -> "Plan | None":
        """The plan with about so many columns more, in chunks of one size, as large as `spare` bytes for dy allow.

        Logits and `spare` take `room` bytes at most; None where they would take more.
        """
        (vocabulary, features), rows = inputs.weight.shape, self.rows
        sizes = choose(rows, vocabulary, features, spare)
        left, width = vocabulary - self.in_dw.columns, sizes.tiles.columns
        if columns <= 0 or left <= 0:
            return self._replace(sizes=sizes)

        def divided(chunks: int) -> tuple[int, int]:
            """Number of columns that are kept in so many chunks, and of those in a chunk."""
            chunk = round_up(-(-columns // chunks), width) if columns >= left else columns // chunks // width * width
            return chunks * chunk, chunk

        def cost(chunks: int) -> int:
            kept, chunk = divided(chunks)
            again = sizes.cost(rows, features, max(0, left - kept), sizes.chunk)
            return sizes.cost(rows, features, kept, chunk, products=2) + again

        numbers = range(-(-columns // sizes.chunk), columns // width + 1)
        fitting = [n for n in numbers if rows * kept_bytes(divided(n)[0], sizes.tiles) + spare <= room]
        if not fitting:
            return None
        kept, chunk = divided(min(fitting, key=cost))
        return self._replace(sizes=sizes, workspace_columns=kept, workspace_chunk=chunk)


def make_plan(inputs: Inputs, options: Options) -> Plan:
    """All columns of all rows if there is room; else all columns of some rows or some columns of all, by their cost."""
    vocabulary, features = inputs.weight.shape
    sizes = choose(len(inputs.labels), vocabulary, features)
    tiles, rows = sizes.tiles, sizes.rows(len(inputs.labels))
    bytes_a_row = kept_bytes(round_up(vocabulary, tiles.columns), tiles)
    room = sizes.default_rows * bytes_a_row if options.workspace is None else options.workspace
    without = Plan(sizes, rows, keep_in_dw(inputs, options, sizes, rows))
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
        if most and -(-rows // most) * cost < rows * (1 - (without.in_dw.columns + columns) / vocabulary):
            wave = round_up(-(-rows // -(-rows // most)), tiles.cluster_rows)
            if found := _keep_all_columns(inputs, Plan(sizes, wave), left):
                return found
    found = without.with_workspace(inputs, columns, spare, room)
    assert found is not None
    return found


def _keep_all_columns(inputs: Inputs, plan: Plan, room: int) -> Plan | None:
    """The plan with all columns kept, half of what is left of `room` bytes for larger chunks; None without room."""
    tiles = plan.sizes.tiles
    columns = round_up(len(inputs.weight) - plan.in_dw.columns, tiles.columns)
    left = room - plan.rows * kept_bytes(columns, tiles)
    for spare in (min(left // 2, _MOST_SPARE), 0) if left >= 0 else ():
        if found := plan.with_workspace(inputs, columns, spare, room):
            return found
    return None
