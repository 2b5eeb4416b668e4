"""Tiles of the kernels for Hopper, and the shared memory that they take."""

import dataclasses
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from kernels.lm_head import target
from kernels.lm_head.live_rows import round_up

KEPT = jnp.dtype(jnp.float16)
"""Of the logits that forward keeps."""
MULTIPLIERS = 2
"""Warpgroups of a block that multiply."""
SHARED_MEMORY = 227 * 1024
"""Bytes that a block can have: CUDA C++ programming guide, technical specifications of compute capability 9.0."""
_VECTORS = 2048  # for numbers of rows on their way out
_MOST_STRIP = 32  # tiles
_ALWAYS, _LEAST = 64 * 2**20, 32 * 2**20  # bytes: beside one array of hidden's shape; of dy, at least
_MOST_TILES = 66  # of a chunk
_SHARED_ROWS = 16 * 2**20  # bytes of hidden states that clusters share in the L2 cache
_LAUNCHES = 1700  # slabs' worth of depth that a chunk's launches take: 20 us, an estimate
_STAGE = 64 * 128  # bytes of a piece of a tile on its way out: 64 rows of 128 bytes
STAGES = 2
"""Such pieces that a warpgroup has on their way."""
_override: "Sizes | None" = None
_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text())


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Of a product; a cluster's blocks lie below each other."""

    rows: int = 128
    columns: int = 256
    depth: int = 64
    slots: int = 4
    cluster: int = 2

    def __post_init__(self) -> None:
        assert self.rows_each == 64  # as one wgmma has, and what is stored at a time
        assert self.columns % 128 == 0  # stages are taken in turn, and each tile begins with the first
        assert self.columns % self.cluster_rows == 0  # columns are rows of dW

    @property
    def cluster_rows(self) -> int:
        return self.rows * self.cluster

    @property
    def rows_each(self) -> int:
        """Of a warpgroup."""
        return self.rows // MULTIPLIERS


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Options the work is cut."""

    tiles: Tiles
    chunk: int
    """Columns of the vocabulary that backward takes at a time; whole tiles."""
    most_rows: int = 8192
    """Rows that it takes at a time, at most."""
    default_rows: int = 1024
    """Rows kept where nothing is said of a workspace."""
    wave_cost: int = 900
    """Rows whose product takes as long as a sum of dW is read and written: 8 V D bytes, against 2 V D flops a row, at
    an H100's 3.35 TB/s and 750 TFLOP/s. Arithmetic, nothing was timed."""
    cast_cost: int = 1350
    """The same for reading a float32 weight twice and writing it in bfloat16."""

    def __post_init__(self) -> None:
        assert self.chunk % self.tiles.columns == 0

    def block(self, rows: int) -> int:
        """Rows that backward takes at a time, of so many: all blocks are nearly full."""
        blocks = -(-max(rows, 1) // self.most_rows)
        return round_up(-(-max(rows, 1) // blocks), self.tiles.cluster_rows)

    def rows(self, rows: int) -> int:
        """These, filled up to whole blocks."""
        return round_up(max(rows, 1), self.block(rows))

    def strip(self, rows: int, columns: int) -> int:
        """Tiles of a strip: so many that no cluster has much more to do than others, then as many as may be."""
        blocks, tiles = -(-rows // self.tiles.cluster_rows), -(-columns // self.tiles.columns)

        def longest(strip: int) -> int:
            return _rounds(self.tiles, blocks * -(-tiles // strip)) * strip

        return min(range(1, min(tiles, _MOST_STRIP) + 1), key=lambda strip: (longest(strip), -strip))

    def cost(self, rows: int, features: int, columns: int, chunk: int, products: int = 3) -> int:
        """Of backward over so many columns in chunks: depth that a cluster sums, over all its tiles, launches included.

        Args:
            products: 2 where logits aren't computed again.
        """
        whole, rest = divmod(columns, chunk)
        tiles, block = self.tiles, self.block(rows)
        blocks, across = block // tiles.cluster_rows, -(-features // tiles.columns)

        def one(columns: int) -> int:
            in_chunk = -(-columns // tiles.columns)
            hidden = _rounds(tiles, blocks * across) * columns
            weight = _rounds(tiles, in_chunk * across) * block
            again = _rounds(tiles, blocks * in_chunk) * features if products == 3 else 0
            return hidden + weight + again + _LAUNCHES

        return whole * one(chunk) + (one(rest) if rest else 0)


def _rounds(tiles: Tiles, number: int) -> int:
    """Tiles, or strips, of the cluster that has most of them."""
    return -(-number // (target.multiprocessors() // tiles.cluster))


def choose(rows: int, vocabulary: int, features: int, spare: int = 0) -> Sizes:
    """The sizes for so many rows at a time on the GPU that is being traced for.

    Args:
        spare: bytes that dy of a chunk may take beside those that it may always.
    """
    if _override is not None:
        return _override
    noted = _measured(features) or {}
    tiles = Tiles(**noted.get("tiles", {}))
    sizes = Sizes(tiles, tiles.columns)
    block = sizes.block(rows)
    room = always(block, features) + spare
    if "chunk" in noted:  # smaller than the arithmetic's, and found faster
        room = min(room, 2 * noted["shape"][0] * noted["chunk"])
    most = min(room // (2 * block * tiles.columns), _MOST_TILES, -(-vocabulary // tiles.columns))
    chunks = [tiles.columns * number for number in range(1, max(most, 1) + 1)]
    return Sizes(tiles, min(chunks, key=lambda chunk: sizes.cost(rows, features, vocabulary, chunk)))


def always(block: int, features: int) -> int:
    """Bytes that dy may take of any chunk. dh is summed in twice an array of hidden's shape."""
    return max(_ALWAYS - 2 * block * features, _LEAST)


def shared_blocks(tiles: Tiles, features: int) -> int:
    """Blocks of a cluster's rows that are gone through column by column, so that the L2 cache has them all."""
    return max(1, _SHARED_ROWS // (2 * features * tiles.cluster_rows))


def faster(features: int) -> bool:
    """Whether the kernels were timed on such a GPU, and took less time than plain XLA."""
    found = _measured(features)
    return found is not None and found["seconds"] < found["streaming_seconds"]


def _measured(features: int) -> dict[str, Any] | None:
    """What `tools/tune.py` noted on such a GPU, for the next hidden size in proportion."""
    kind = target.device_kind()
    noted = [x for x in _TABLE if x["engine"] == "mosaic_gpu" and x["device"] == kind]
    return min(noted, key=lambda x: abs(math.log(x["features"] / features)), default=None)


def overridden() -> bool:
    return _override is not None


@contextmanager
def override(sizes: Sizes) -> Iterator[None]:
    """In it, every kernel is traced with these sizes: for tests, and for trying sizes."""
    global _override
    previous, _override = _override, sizes
    try:
        yield
    finally:
        _override = previous


def kept_bytes(columns: int, tiles: Tiles) -> int:
    """Bytes of a row of what forward keeps: logits, and maxima."""
    return KEPT.itemsize * columns + 4 * -(-columns // tiles.columns)


def shared_memory(tiles: Tiles) -> int:
    """Bytes that a block takes, of operands of 2 bytes."""
    slabs = tiles.slots * 2 * tiles.depth * (tiles.rows + tiles.columns)
    return slabs + MULTIPLIERS * STAGES * _STAGE + _VECTORS + 2 * 8 * tiles.slots
