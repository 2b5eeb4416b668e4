"""The ways of taking a token's statistics, as tests run them on a CPU: small tiles, strict interpreters, odd shapes.

Tiles of the Pallas kernels are the smallest that the hardware takes. On a TPU 300 rows make three blocks: two
blocks in the first call of a kernel, a block in the next call. 499 columns make two tiles of two steps each, the last
not full. On a Hopper GPU 200 rows make two blocks, 296 columns three tiles in two chunks, and 128 features two slabs.
The last tile and the last chunk are not full. In plain XLA 90 rows make six blocks, and 301 columns three tiles. The
last tile overlaps the tile before. Chunks of logits are four, the last not full.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strict_tpu
from cases import Problem, random_problem
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from lm_head import chunked_logits, xla
from lm_head.gpu import tiles as gpu_tiles
from lm_head.gpu.tiles import Sizes, Tiles
from lm_head.tpu import tiles as tpu_tiles

BF16, F32 = jnp.bfloat16, jnp.float32
CHIP = AbstractDevice("TPU v6 lite", num_cores=1, platform="tpu")
V6E = AbstractMesh((1,), ("chip",), (AxisType.Auto,), abstract_device=CHIP)
"""For tracing: a program traced under this mesh is for a TPU."""
TPU_TILES = {"rows": 128, "columns": 256, "step": 128, "call": 256}
GPU_SIZES = Sizes(Tiles(columns=128, slots=2, cluster=1), chunk=256, wave_rows=(0, 0))
XLA_SIZES = {"_CPU_BLOCK": 16, "_BLOCK": 16, "_TILE": 128, "_LEAST_WAVE": 8}
CHUNK_SIZES = {"_CPU_ROWS": 24, "_ROWS": 24, "_LEAST_ROWS": 16}
needs_interpreter = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="no interpreter before jax 0.12")


class Engine(NamedTuple):
    """An engine of the head, with a dtype of its inputs."""

    impl: str
    dtype: Any
    shape: tuple[int, int, int]
    """N, V and D."""
    waves: int = 0
    """Bytes of a workspace that is room for some of the rows or columns."""

    @contextlib.contextmanager
    def strictly(self, **strictness: Any) -> Iterator[None]:
        """A program traced and run in this context has small tiles, and its kernels are interpreted strictly."""
        with contextlib.ExitStack() as stack:
            if self.impl == "mosaic_gpu":
                from strict_gpu import strict_interpreter

                stack.enter_context(gpu_tiles.override(GPU_SIZES))
                stack.enter_context(strict_interpreter(**strictness))
            elif self.impl == "mosaic_tpu":
                stack.enter_context(tpu_tiles.override(**TPU_TILES))
                stack.enter_context(strict_tpu.strict_interpreter(**strictness))
            else:
                stack.enter_context(mock.patch.multiple(xla, **XLA_SIZES))
                stack.enter_context(mock.patch.multiple(chunked_logits, **CHUNK_SIZES))
            yield

    def problem(self, scale: float = 3.0) -> Problem:
        """Logits with a standard deviation of `scale`."""
        return random_problem(self.shape, scale, self.dtype)

    def live(self, which: str) -> np.ndarray:
        """A mask [N] of rows that count."""
        row = np.arange(self.shape[0])
        block = {"mosaic_tpu": 256, "mosaic_gpu": 128}.get(self.impl, 16)
        random = np.random.default_rng(5).random(len(row))
        return {
            "none": row < 0,
            "the last": row == row[-1],
            "few": random < min(0.3, block / len(row) / 2),
            "most": random < 0.8,
            "a block and one": row < min(block, 128) + 1,
            "every": row >= 0,
        }[which]

    def bytes_of(self, workspace: str) -> int:
        return {"none": 0, "some": self.waves, "all": 1 << 30}[workspace]


XLA = Engine("xla", F32, (90, 301, 16), 40 * 384 * 4)
FULL = XLA._replace(impl="full_logits")
CHUNKED = XLA._replace(impl="chunked_logits")
XLA_BF16 = XLA._replace(dtype=BF16, waves=XLA.waves + 4 * 301 * 16)
FULL_BF16, CHUNKED_BF16 = FULL._replace(dtype=BF16), CHUNKED._replace(dtype=BF16)
TPU_F32 = Engine("mosaic_tpu", F32, (300, 499, 128), 200_000 + 4 * 499 * 128)
TPU = Engine("mosaic_tpu", BF16, (300, 499, 64), 200_000 + 4 * 499 * 64)
"""Its `waves`: exponentials of 128 rows, and a float32 sum of dW."""
GPU = Engine("mosaic_gpu", BF16, (200, 296, 128), 77_000)
"""Its `waves`: logits of a tile of columns."""
PLAIN, NARROW = (FULL, CHUNKED, XLA), (FULL_BF16, CHUNKED_BF16, XLA_BF16)
EVERY = (*PLAIN, *NARROW, TPU_F32, TPU, GPU)
KERNELS = ("mosaic_tpu", "mosaic_gpu")


def parameter(engine: Engine, *others: Any, nightly: bool = False, slow: bool = False) -> Any:
    """The engine, and other arguments, as one case of a test."""
    marks = [needs_interpreter] * (engine.impl == "mosaic_gpu")
    marks += [pytest.mark.nightly] * nightly + [pytest.mark.slow] * slow
    names = [f"{engine.impl} {jnp.dtype(engine.dtype).name}", *(getattr(one, "__name__", str(one)) for one in others)]
    return pytest.param(engine, *others, id=", ".join(names), marks=marks)


def every(ways: Sequence[Any], *rows: Any, kernels: str = "slow") -> list[Any]:
    """Cases of every way, an engine or a tuple that begins with one, with every row, which is a tuple of arguments.

    FAST has all rows with xla, with its ways in turns, and the first row with the other engines. Interpreted kernels
    take seconds: the last way of each has the first row, which is quick, slow or nightly, and all else is nightly.
    """
    ways, rows = [way if type(way) is tuple else (way,) for way in ways], rows or ((),)
    plain = [way for way in ways if way[0].impl == "xla"]
    first = {way[0].impl: way for way in reversed(ways)} | {way[0].impl: way for way in ways if way[0].impl in KERNELS}

    def marks(way: Any, row: int) -> dict[str, bool]:
        engine, is_first = way[0], row == 0 and first[way[0].impl] == way
        if engine.impl in KERNELS:
            return {"slow": kernels == "slow", "nightly": kernels == "nightly" or not is_first}
        if engine.impl == "xla":
            return {"slow": row % len(plain) != plain.index(way)}
        return {"slow": not is_first or engine.dtype == BF16, "nightly": row > 0 and engine.dtype == BF16}

    return [parameter(*way, *row, **marks(way, number)) for number, row in enumerate(rows) for way in ways]
