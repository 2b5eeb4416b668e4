"""The head's use of memory on Hopper GPUs: of which rows and columns forward keeps logits for backward."""

from typing import NamedTuple

import jax.numpy as jnp

from kernels.lm_head.contract import Inputs, Options, gradient_dtypes
from kernels.lm_head.gpu.tiles import Sizes, choose, kept_bytes
from kernels.lm_head.live_rows import round_up

_MOST_SPARE = 100 * 2**20  # bytes of a workspace, at most, for larger chunks


class Plan(NamedTuple):
    """How rows and columns are divided, and which logits forward keeps."""

    sizes: Sizes
    rows: int  # rows of a wave
    kept_columns: int = 0  # number of the vocabulary's first columns whose logits are kept
    kept_chunk: int = 0  # number of these that backward takes at a time

    def chunk(self, vocabulary: int) -> int:
        """Number of columns that are taken at a time of those that are left."""
        return min(self.sizes.chunk, round_up(max(1, vocabulary - self.kept_columns), self.sizes.tiles.columns))

    def with_workspace(self, inputs: Inputs, room: int) -> "Plan":
        """The plan with as many columns as `room` bytes keep, in chunks of one size that take the least time.

        Of the room a part is for dy, so that chunks may be larger: half of what all columns leave, or an eighth.
        """
        (vocabulary, features), rows = inputs.weight.shape, self.rows
        width = self.sizes.tiles.columns
        bytes_a_tile = rows * kept_bytes(width, self.sizes.tiles)
        beyond = room - bytes_a_tile * -(-vocabulary // width)
        spare = min(beyond // 2 if beyond >= 0 else room // 8, _MOST_SPARE)
        sizes, fitting = choose(rows, vocabulary, features, spare), (room - spare) // bytes_a_tile * width

        def kept(chunk: int) -> int:
            return min(-(-vocabulary // chunk), fitting // chunk) * chunk

        def cost(chunk: int) -> int:
            again = sizes.cost(rows, features, max(0, vocabulary - kept(chunk)), sizes.chunk)
            return sizes.cost(rows, features, kept(chunk), chunk, products=2) + again

        # Where there is room for all columns, all are kept, even if a few less would make fewer rounds.
        chunks = [chunk for chunk in range(width, sizes.chunk + 1, width) if kept(chunk) >= vocabulary or beyond < 0]
        chunk = min(chunks, key=cost)
        return self._replace(sizes=sizes, kept_columns=kept(chunk), kept_chunk=chunk if kept(chunk) else 0)


def make_plan(inputs: Inputs, options: Options) -> Plan:
    """All columns of all rows if there is room; else all columns of some rows or some columns of all, by their cost."""
    vocabulary, features = inputs.weight.shape
    sizes = choose(len(inputs.labels), vocabulary, features)
    tiles, rows = sizes.tiles, sizes.rows(len(inputs.labels))
    bytes_a_row = kept_bytes(round_up(vocabulary, tiles.columns), tiles)
    room = sizes.default_rows * bytes_a_row if options.workspace is None else options.workspace
    plan = Plan(sizes, rows).with_workspace(inputs, room)
    if plan.kept_columns >= vocabulary or not options.wants_weight:
        return plan
    # Several waves are summed in float32, which is an array beside dW unless dW is float32 itself.
    if gradient_dtypes(inputs, options)[1] != jnp.float32:
        room = 0 if options.workspace is None else max(0, room - 4 * inputs.weight.size)
    most = min(room // bytes_a_row, sizes.most_rows) // tiles.cluster_rows * tiles.cluster_rows
    cost = sizes.wave_cost + (0 if inputs.weight.dtype == options.dtype else sizes.cast_cost)
    if not most or -(-rows // most) * cost >= rows * (1 - plan.kept_columns / vocabulary):
        return plan
    return Plan(sizes, round_up(-(-rows // -(-rows // most)), tiles.cluster_rows)).with_workspace(inputs, room)
