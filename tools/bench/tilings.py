"""Tile sizes of the head's kernels for tools/tune.py: those that fit this device, and a context that traces with them.

As a process it answers with the engine's name as `impl` and, for each kernel, the tilings, first the engine's own.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp

from kernels.lm_head.gpu import tiles as gpu
from kernels.lm_head.tpu import tiles as tpu
from tools.bench.frame import Figures, answer

TPU_KERNELS: dict[str, tuple[Any, bool, bool, str]] = {
    "statistics": ("forward", False, False, "value only"),
    "mean": ("forward", True, False, "workspace 0"),
    "kept": ("forward", True, True, "workspace for all tokens"),
    "dh": ("hidden", False, False, "with entropy"),
    "dW": ("weight", False, False, "workspace 0"),
}
"""For each kernel: whose tiles it has, whether it sums p W, whether it keeps exponentials, and a way that runs it."""
CHUNKS = (8448, 6144, 4096, 3072, 2304, 2048, 1792, 1536, 1024)
"""Columns; some of them divide evenly among 132 multiprocessors."""


def tilings(task: Figures) -> Iterator[Figures]:
    """For a shape, at most so many tilings of a TPU's kernels that fit, all of a GPU's; nothing on other devices."""
    platform = jax.default_backend()
    if platform == "gpu":
        blocks = [(256, 2), (256, 1), (128, 1)]  # columns of a tile, and a cluster's blocks, which divide them
        each = [gpu.Tiles(columns=c, slots=s, cluster=n) for c, n in blocks for s in (6, 5, 4, 3)]
        each = sorted((x for x in each if gpu.shared_memory(x) <= gpu.SHARED_MEMORY), key=lambda x: x != gpu.Tiles())
        found = [{"columns": x.columns, "slots": x.slots, "cluster": x.cluster, "chunk": 2048} for x in each]
        found += [{**found[0], "chunk": chunk} for chunk in CHUNKS if chunk != 2048]
        yield {"impl": "mosaic_gpu", "kernel": "loss", "way": "workspace 0", "tilings": found}
    tokens, features, vocabulary = task["shape"]
    narrow, wide = jnp.dtype("bfloat16"), jnp.dtype("float32")
    for name, (kernel, mean, keep, way) in TPU_KERNELS.items() if platform == "tpu" else ():
        gradient = wide if kernel == "forward" else narrow
        case = tpu.Case(kernel, tokens, vocabulary, features, narrow, narrow, narrow, gradient, mean, keep)
        best = tpu.candidates(case, tpu.vmem())[: task["most"]]
        found = [{"kernel": kernel, "rows": x.rows, "columns": x.columns, "step": x.step} for x in best]
        yield {"impl": "mosaic_tpu", "kernel": name, "way": way, "tilings": found}


def traced_with(tiles: Figures) -> AbstractContextManager[None]:
    """Within the context, programs are traced with one of these tilings."""
    if "rows" in tiles:
        return tpu.override(**tiles)
    return gpu.override(gpu.Sizes(gpu.Tiles(**{x: tiles[x] for x in tiles if x != "chunk"}), tiles["chunk"]))


if __name__ == "__main__":
    answer(tilings)
