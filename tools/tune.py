"""Sweeps tile sizes of the head's kernels on this machine's TPU or Hopper GPU, and prints a table for each kernel.

    python tools/tune.py --shape 8192,2048,151936

A row is the line of `tools/bench head` for a call that runs the kernel with these tiles: its time over the bare
products', and its errors. A failing row names the reason. On a TPU the other kernels keep their tiles. On a GPU all
kernels have the same tiles, and then chunks of the vocabulary of several sizes are tried. Nothing is noted: sizes that
win belong into kernels/lm_head/tpu/tiles.py or gpu/tiles.py.

Only bfloat16, one device, and rows that all count are tried. Exit codes: 0 done, 2 an error in one line.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a script sees only its own folder
from lm_head.gpu import tiles as gpu
from lm_head.tpu import tiles as tpu
from mllm import errors
from mllm.errors import UserError
from tools.bench.frame import positive, shape
from tools.bench.head import LARGE, Problem, measured
from tools.bench.methods import methods

TPU_KERNELS: dict[str, tuple[tpu.KernelName, bool, bool, str]] = {
    "statistics": ("forward", False, False, "value only"),
    "mean": ("forward", True, False, "workspace 0"),
    "kept": ("forward", True, True, "workspace for all tokens"),
    "dh": ("hidden", False, False, "with entropy"),
    "dW": ("weight", False, False, "workspace 0"),
}
"""For each kernel: the kernel with its tiles, whether it sums p W, whether it keeps exponentials, and a call that runs
it."""
GPU_CHUNKS = (2048, 8448, 6144, 4096, 3072, 2304, 1792, 1536, 1024)
"""Columns, the engine's own choice first; some of them divide evenly among 132 multiprocessors."""


class Tiling(NamedTuple):
    kernel: str
    way: str
    """The method of the benchmark that runs the kernel."""
    name: str
    override: AbstractContextManager[None]
    """Within it, programs are traced with these tiles."""


def gpu_tilings() -> Iterator[Tiling]:
    """All tiles that fit, the engine's own first, and with these all chunks."""
    blocks = [(256, 2), (256, 1), (128, 1)]  # columns of a tile, and a cluster's blocks, which divide them
    tiles = [gpu.Tiles(columns=c, slots=s, cluster=n) for c, n in blocks for s in (6, 5, 4, 3)]
    tiles = sorted((x for x in tiles if gpu.shared_memory(x) <= gpu.SHARED_MEMORY), key=lambda x: x != gpu.Tiles())
    for x, chunk in [(x, GPU_CHUNKS[0]) for x in tiles] + [(tiles[0], chunk) for chunk in GPU_CHUNKS[1:]]:
        name = f"columns={x.columns}, slots={x.slots}, cluster={x.cluster}, chunk={chunk}"
        yield Tiling("loss", "mosaic_gpu, workspace 0", name, gpu.override(gpu.Sizes(x, chunk)))


def tpu_tilings(shape: tuple[int, ...], most: int) -> Iterator[Tiling]:
    """For each kernel at most so many tilings that fit, the engine's own first."""
    narrow, wide, (tokens, features, vocabulary) = jnp.dtype("bfloat16"), jnp.dtype("float32"), shape
    for name, (kernel, mean, keep, way) in TPU_KERNELS.items():
        gradient = wide if kernel == "forward" else narrow
        case = tpu.Case(kernel, tokens, vocabulary, features, narrow, narrow, narrow, gradient, mean, keep)
        for x in tpu.candidates(case, tpu.vmem())[:most]:
            override = tpu.override(kernel=kernel, rows=x.rows, columns=x.columns, step=x.step)
            yield Tiling(name, f"mosaic_tpu, {way}", f"rows={x.rows}, columns={x.columns}, step={x.step}", override)


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(__doc__)
    sizes = "tokens, hidden size, vocabulary (default {},{},{})".format(*LARGE)
    parser.add_argument("--shape", type=shape("N,D,V"), default=LARGE, metavar="N,D,V", help=sizes)
    most = "tilings of each of a TPU's kernels (default 8)"
    parser.add_argument("--most", type=positive(int), default=8, metavar="K", help=most)
    options, platform = parser.parse_args(arguments), jax.default_backend()
    if platform == "cpu":
        raise UserError("there is no TPU or Hopper GPU here, and tile sizes are found by timing them")
    problem, known = Problem(options.shape, "bfloat16"), methods(platform)
    for tiling in gpu_tilings() if platform == "gpu" else tpu_tilings(options.shape, options.most):
        jax.clear_caches()  # traced with other tiles
        with tiling.override:
            rows = measured(problem, {tiling.name: known[tiling.way]}, 1.0, rounds=5)
        print(f"\n{tiling.kernel}, by {tiling.way}\n{rows}", flush=True)
    return 0


if __name__ == "__main__":
    errors.run_main(main)
