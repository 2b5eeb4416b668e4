"""The Pallas engines as tests run them on a CPU: small tiles, a strict interpreter, and shapes off every tile.

Tiles are the smallest that the hardware takes. On a TPU 300 rows make three blocks, two of them in one call of a kernel
and one in the next, and 499 columns two tiles of two steps each, the last not full. On a Hopper GPU 200 rows make two
blocks, 296 columns three tiles in two chunks, of each the last not full, and 128 features two slabs.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import strict_gpu
import strict_tpu
from lm_head_cases import Problem, random_problem

from kernels.lm_head.gpu import tiles as gpu_tiles
from kernels.lm_head.gpu.tiles import Sizes, Tiles
from kernels.lm_head.tpu import tiles as tpu_tiles

GPU_SIZES = Sizes(Tiles(columns=128, slots=2, cluster=1), chunk=256, wave_cost=0, cast_cost=0)


class Engine(NamedTuple):
    """An engine with a dtype of its inputs."""

    impl: str
    dtype: Any
    shape: tuple[int, int, int]
    """N, V and D."""

    @contextlib.contextmanager
    def strictly(self) -> Iterator[None]:
        """Kernels that are traced and run in this context have small tiles and are interpreted."""
        if self.impl == "mosaic_tpu":
            with tpu_tiles.override(rows=128, columns=256, step=128, call=256), strict_tpu.strict_interpreter():
                yield
        else:
            with gpu_tiles.override(GPU_SIZES), strict_gpu.strict_interpreter():
                yield

    @property
    def tile_columns(self) -> int:
        """Columns of a tile."""
        return 256 if self.impl == "mosaic_tpu" else GPU_SIZES.tiles.columns

    def problem(self, scale: float = 3.0, shape: tuple[int, int, int] | None = None) -> Problem:
        return random_problem(shape or self.shape, scale, self.dtype)

    def live(self, which: str) -> np.ndarray:
        """A mask [N] of rows that count."""
        row = np.arange(self.shape[0])
        return {
            "none": row < 0,
            "the last": row == row[-1],
            "scattered, less than a block": np.random.default_rng(5).random(len(row)) < 0.3,
            "scattered, of several blocks": np.random.default_rng(5).random(len(row)) < 0.8,
            "a block": row % 2 * (row < 256) == 1 if self.impl == "mosaic_tpu" else row < 128,
            "a block and one": row < 129,
            "every": row >= 0,
        }[which]


TPU_F32 = Engine("mosaic_tpu", jnp.float32, (300, 499, 64))
TPU = TPU_F32._replace(dtype=jnp.bfloat16)
GPU = Engine("mosaic_gpu", jnp.bfloat16, (200, 296, 128))

_GPU_PARAM = pytest.param(GPU, id="gpu", marks=strict_gpu.needs_interpreter)
every_engine = pytest.mark.parametrize("engine", [pytest.param(TPU, id="tpu"), _GPU_PARAM])
every_engine_and_dtype = pytest.mark.parametrize(
    "engine", [pytest.param(TPU_F32, id="tpu float32"), pytest.param(TPU, id="tpu bfloat16"), _GPU_PARAM]
)
