"""Sizes of the Hopper kernels' tiles, chunks and strips, and the rows and columns with kept logits.

They follow from a table for GPUs of 132 multiprocessors, bounds on memory, and a workspace.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .. import target
from ..contract import Inputs, Options, gradient_dtypes
from ..live_rows import round_up
from ..shapes import Array, Int

KEPT_DTYPE = jnp.dtype(jnp.float16)  # dtype of the logits that forward keeps
MULTIPLIERS = 2  # number of warpgroups of a block that multiply
SHARED_MEMORY = 227 * 1024
"""Bytes that a block can have: CUDA C++ programming guide, technical specifications of compute capability 9.0."""
_VECTOR_STAGES = 2048  # bytes of shared memory for vectors that are being stored
_MOST_STRIP = 32  # tiles
_DY_AND_DH, _LEAST_DY = 64 * 2**20, 32 * 2**20  # bytes: of dy and one array of hidden's shape together; of dy, at least
_CHUNKS = {
    512: (1, 2, 4, 8, 13, 14, 28, 30, 32, 33, 66),
    768: (1, 2, 4, 8, 11, 13, 14, 15, 16, 22, 44, 66),
    1024: (1, 2, 4, 8, 12, 13, 14, 15, 16, 32, 33, 49, 64, 66),
    1280: (1, 2, 4, 8, 11, 12, 13, 26, 39, 52, 66),
    1536: (1, 2, 4, 8, 10, 11, 21, 22, 33, 44, 55, 63, 66),
    2048: (1, 2, 4, 8, 16, 24, 33, 41, 56, 57, 64, 66),
    2560: (1, 2, 4, 6, 13, 19, 26, 33, 39, 46, 52, 57, 59, 66),
    3072: (1, 2, 4, 5, 11, 16, 22, 27, 33, 44, 49, 55, 60, 65, 66),
    3584: (1, 2, 4, 8, 9, 14, 18, 28, 33, 36, 50, 55, 56, 63, 66),
    4096: (1, 2, 4, 8, 12, 16, 28, 32, 33, 48, 53, 56, 61, 66),
}
"""For up to so many features, the tiles of columns that a chunk may have: dW's then keep 66 clusters busy to the end.

An H200 ran 16 tiles at 2048 features (docs/log.md). A 17th tile, which takes one more round, made it 5 % slower.
"""
_STAGE = 64 * 128  # bytes of a piece of a tile that is being stored: 64 rows of 128 bytes
STAGES = 2  # number of pieces that a warpgroup stores at a time
_MOST_SPARE = 100 * 2**20  # bytes of a workspace, at most, for larger chunks
_override: "Sizes | None" = None


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile of a product C = A B, as one block computes it."""

    rows: int = 128
    columns: int = 256
    depth: int = 64  # depth of a slab
    slots: int = 4  # slabs of A and of B that shared memory holds
    cluster: int = 2  # blocks of a cluster; their tiles follow each other in the direction of the rows

    def __post_init__(self) -> None:
        assert self.rows_each == 64  # the rows of one wgmma, and of one store
        assert self.columns % 128 == 0  # stages are taken in turn, and each tile begins with the first
        assert self.columns % self.cluster_rows == 0  # columns are rows of dW

    @property
    def cluster_rows(self) -> int:
        return self.rows * self.cluster

    @property
    def rows_each(self) -> int:
        """Rows of a warpgroup."""
        return self.rows // MULTIPLIERS


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How rows and columns are divided."""

    tiles: Tiles
    chunk: int  # columns of the vocabulary that backward takes at a time; whole tiles
    most_rows: int = 8192  # rows that backward takes at a time, at most
    default_rows: int = 2048  # rows with kept logits where the caller names no workspace
    wave_rows: tuple[int, int] = (896, 2239)  # rows as slow as a wave's sum of dW: bfloat16 weight, float32 weight

    def __post_init__(self) -> None:
        assert self.chunk % self.tiles.columns == 0

    def block(self, rows: int) -> int:
        """Rows that backward takes at a time, of `rows`: blocks have one size and are nearly full."""
        blocks = -(-max(rows, 1) // self.most_rows)
        return round_up(-(-max(rows, 1) // blocks), self.tiles.cluster_rows)

    def rows(self, rows: int) -> int:
        """`rows`, rounded up to whole blocks."""
        return round_up(max(rows, 1), self.block(rows))

    def strip(self, rows: int | Int[Array, ""], columns: int) -> Any:
        """Tiles of a strip: the number that gives the busiest cluster the least to do, and of these the largest."""
        blocks, tiles = -(-rows // self.tiles.cluster_rows), -(-columns // self.tiles.columns)
        clusters, most = target.multiprocessors() // self.tiles.cluster, min(tiles, _MOST_STRIP)
        lengths = np.arange(most, 0, -1, dtype=np.int32)
        longest = -(-(blocks * -(-tiles // lengths)) // clusters) * lengths
        return most - longest.argmin()


def choose(rows: int, vocabulary: int, features: int, spare: int = 0) -> Sizes:
    """The sizes for so many rows at a time; dy of a chunk may take `spare` bytes more than without a workspace."""
    if _override is not None:
        return _override
    tiles = Tiles()
    sizes = Sizes(tiles, tiles.columns)
    block = sizes.block(rows)
    # dh is summed in twice an array of hidden's shape, which is once more than the gradient itself.
    room = max(_DY_AND_DH - 2 * block * features, _LEAST_DY) + spare
    most = min(room // (2 * block), round_up(vocabulary, tiles.columns)) // tiles.columns
    allowed = next((counts for width, counts in _CHUNKS.items() if features <= width), _CHUNKS[4096])
    return Sizes(tiles, tiles.columns * max((count for count in allowed if count <= most), default=1))


def overridden() -> bool:
    return _override is not None


@contextmanager
def override(sizes: Sizes) -> Iterator[None]:
    """Within the context, every kernel is traced with these sizes: for tests, and for trying sizes."""
    global _override
    previous, _override = _override, sizes
    try:
        yield
    finally:
        _override = previous


def kept_bytes(columns: int, tiles: Tiles) -> int:
    """Bytes that forward keeps of a row: logits of so many columns, and their tiles' maxima."""
    return KEPT_DTYPE.itemsize * columns + 4 * -(-columns // tiles.columns)


def shared_memory(tiles: Tiles) -> int:
    """Bytes of shared memory that a block takes, with operands of 2 bytes."""
    slabs = tiles.slots * 2 * tiles.depth * (tiles.rows + tiles.columns)
    return slabs + MULTIPLIERS * STAGES * _STAGE + _VECTOR_STAGES + 2 * 8 * tiles.slots


# --- workspaces -----------------------------------------------------------------------------------------------------


class WavePlan(NamedTuple):
    """How rows and columns are divided, and which logits forward keeps."""

    sizes: Sizes
    rows: int  # rows of a wave
    kept_columns: int = 0  # number of the vocabulary's first columns with kept logits
    kept_chunk: int = 0  # kept columns that backward takes at a time
    whole: bool = False  # backward takes all columns at once, in plain products

    def chunk(self, vocabulary: int) -> int:
        """Number of the columns left that are taken at a time."""
        return min(self.sizes.chunk, round_up(max(1, vocabulary - self.kept_columns), self.sizes.tiles.columns))

    def with_workspace(self, inputs: Inputs, options: Options, room: int) -> "WavePlan":
        """The plan with as many columns as `room` bytes keep: all at once, or in chunks of one size.

        All columns of several waves, or of a small one, are taken at once. Otherwise some of the room is for dy, so
        that chunks may be larger: half of the room that every column leaves, or an eighth.
        """
        (vocabulary, features), width = inputs.weight.shape, self.sizes.tiles.columns
        needed, bytes_a_tile = -(-vocabulary // width), self.rows * kept_bytes(width, self.sizes.tiles)
        beyond = room - bytes_a_tile * needed
        small = self.rows < len(inputs.labels) or self.rows <= self.sizes.default_rows
        if beyond >= 0 and small and inputs.weight.dtype == options.dtype:
            return self._replace(kept_columns=needed * width, kept_chunk=needed * width, whole=True)
        spare = min(beyond // 2 if beyond >= 0 else room // 8, _MOST_SPARE)
        sizes, fitting = choose(self.rows, vocabulary, features, spare), (room - spare) // bytes_a_tile
        chunks = -(-min(needed, fitting) // (sizes.chunk // width))
        if not chunks:
            return self._replace(sizes=sizes, kept_columns=0, kept_chunk=0)
        evenly = -(-needed // chunks)
        chunk = width * (evenly if evenly * chunks <= fitting else fitting // chunks)
        return self._replace(sizes=sizes, kept_columns=chunks * chunk, kept_chunk=chunk)


def make_plan(inputs: Inputs, options: Options) -> WavePlan:
    """Keep every logit if there is room; else every column of some rows, or some columns of every row, by cost."""
    vocabulary, features = inputs.weight.shape
    sizes = choose(len(inputs.labels), vocabulary, features)
    tiles, rows = sizes.tiles, sizes.rows(len(inputs.labels))
    bytes_a_row = kept_bytes(round_up(vocabulary, tiles.columns), tiles)
    room = sizes.default_rows * bytes_a_row if options.workspace is None else options.workspace
    plan = WavePlan(sizes, rows).with_workspace(inputs, options, room)
    if plan.kept_columns >= vocabulary:
        return plan
    cost = sizes.wave_rows[inputs.weight.dtype != options.dtype]
    if not options.wants_weight:
        cost -= sizes.wave_rows[0]
    elif gradient_dtypes(inputs, options)[1] != jnp.float32:
        # Several waves are summed in float32, which is an array beside dW unless dW is float32 itself.
        room = 0 if options.workspace is None else max(0, room - 4 * inputs.weight.size)
    most = min(room // bytes_a_row, sizes.most_rows) // tiles.cluster_rows * tiles.cluster_rows
    if not most or -(-rows // most) * cost >= rows * (1 - plan.kept_columns / vocabulary):
        return plan
    wave = round_up(-(-rows // -(-rows // most)), tiles.cluster_rows)
    return WavePlan(sizes, wave).with_workspace(inputs, options, room)
