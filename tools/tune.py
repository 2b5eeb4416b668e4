"""Sweeps tile sizes of the head's kernels on this machine's TPU or Hopper GPU, and prints a table.

    python tools/tune.py --shape 8192,2048,151936

Each tiling is checked and timed by `tools/bench kernels --tiles`, in processes of its own: its results at a few tokens
and words beside float64, then its milliseconds at the shape and their ratio to those of the bare products. One that is
wrong, fails or hangs is listed with the reason. On a TPU each kernel has tiles of its own; on a GPU the loss without a
workspace is timed, with each tiling, and then with chunks of the vocabulary of several sizes. Nothing is noted: sizes
that win belong into kernels/lm_head/tpu/tiles.py or gpu/tiles.py, with the table beside the change.

bfloat16 only; not tried are several devices, and rows that don't count. Exit codes: 0 done, 2 an error in one line.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a script sees only its own folder
from mllm import child_process, errors
from mllm.errors import UserError
from tools.bench.frame import Shape, shape_of

ROOT = Path(__file__).resolve().parent.parent
TPU_KERNELS: dict[str, tuple[Any, bool, bool]] = {
    "statistics": ("forward", False, False),
    "mean": ("forward", True, False),
    "kept": ("forward", True, True),
    "dh": ("hidden", False, False),
    "dW": ("weight", False, False),
}
"""For each kernel of `tools/bench kernels`: whose tiles it has, whether it sums p W, whether it keeps exponentials."""
CHUNKS = (8448, 6144, 4096, 3072, 2304, 2048, 1792, 1536, 1024)
"""Columns; some of them divide evenly among 132 multiprocessors."""
SMALL = (512, 1496)
"""Tokens and words of a check."""
PATIENCE = 180.0
"""Seconds that a process may take, with compiling."""
Tiling = dict[str, int]


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, shape = parser.add_argument, "8192,2048,151936"
    add("--shape", type=shape_of, default=shape, metavar="N,D,V", help=f"tokens, hidden size, vocabulary ({shape})")
    add("--kernel", nargs="+", choices=TPU_KERNELS, metavar="X", help=f"on TPUs; of {', '.join(TPU_KERNELS)}")
    add("--most", type=int, default=8, metavar="K", help="tilings to try of each of a TPU's kernels (default 8)")
    add("--limit", type=float, default=math.inf, metavar="SECONDS", help="begin no tiling after so long")
    add("--list", action="store_true", help="print the tilings of each kernel as a line of JSON, and end")
    options = parser.parse_args(arguments)
    for name in ("most", "limit"):
        if not getattr(options, name) > 0:
            raise UserError(f"--{name}: {getattr(options, name):g} is not a number above 0")
    if options.list:
        child_process.answer(tilings(options.shape, options.kernel or list(TPU_KERNELS), options.most))
        return 0
    deadline = time.monotonic() + options.limit
    given = list(sys.argv[1:] if arguments is None else arguments)
    # A process that has looked at a TPU keeps it from all others.
    listed = start([__file__, *given, "--list"])
    if not isinstance(listed, dict):
        raise UserError(listed.removeprefix("error: "))
    impl = listed.pop("impl")
    for kernel, candidates in listed.items():
        print(f"{impl}, {kernel}: N,D,V = {','.join(map(str, options.shape))}", flush=True)
        found: list[tuple[float, Tiling]] = []
        for number, tiling in enumerate(candidates):
            if time.monotonic() > deadline:
                print(f"--limit: {len(candidates) - number} tilings were left out")
                break
            said, ms = trial(impl, kernel, options.shape, tiling)
            found += [(ms, tiling)]
            print(f"  {shown(tiling):46}{said}", flush=True)
        if right := [each for each in found if each[0] < math.inf]:
            print(f"  fastest: {shown(min(right, key=lambda each: each[0])[1])}")
    return 0


def tilings(shape: Shape, kernels: Sequence[str], most: int) -> dict[str, Any]:
    """The engine's name as `impl`, and for each kernel the tilings that fit the device, first those it would take."""
    import jax
    import jax.numpy as jnp

    from kernels.lm_head.gpu import tiles as gpu
    from kernels.lm_head.tpu import tiles as tpu

    platform = jax.default_backend()
    if platform not in ("tpu", "gpu"):
        raise UserError("there is no TPU or Hopper GPU here, and tile sizes are found by timing them on one")
    if platform == "gpu":
        blocks = [(256, 2), (256, 1), (128, 1)]  # columns of a tile, and a cluster's blocks, which divide them
        each = [gpu.Tiles(columns=c, slots=s, cluster=n) for c, n in blocks for s in (6, 5, 4, 3)]
        each = sorted((x for x in each if gpu.shared_memory(x) <= gpu.SHARED_MEMORY), key=lambda x: x != gpu.Tiles())
        found = [{"columns": x.columns, "slots": x.slots, "cluster": x.cluster, "chunk": 2048} for x in each]
        found += [{**found[0], "chunk": chunk} for chunk in CHUNKS if chunk != 2048]
        return {"impl": "mosaic_gpu", "loss": found}
    tokens, features, vocabulary = shape
    narrow, wide = jnp.dtype("bfloat16"), jnp.dtype("float32")
    result: dict[str, Any] = {"impl": "mosaic_tpu"}
    for name in kernels:
        kind, mean, keep = TPU_KERNELS[name]
        gradient = wide if kind == "forward" else narrow
        case = tpu.Case(kind, tokens, vocabulary, features, narrow, narrow, narrow, gradient, mean, keep)
        default, fitting = tpu.best(case, tpu.vmem()), tpu.candidates(case, tpu.vmem())
        fitting.sort(key=lambda x: (x != default, tpu.traffic(case, x), -x.step))
        result[name] = [{"rows": x.rows, "columns": x.columns, "step": x.step} for x in fitting[:most]]
    return result


def trial(impl: str, kernel: str, shape: Shape, tiling: Tiling) -> tuple[str, float]:
    """What to say of a tiling, and its milliseconds; infinite where it is refused."""
    tokens, features, vocabulary = shape
    run = ["tools/bench", "kernels", "--impl", impl, "--kernel", kernel, "--tiles", shown(tiling).replace(" ", "")]
    run += ["--workspace", "0"] * (kernel == "loss")
    errors_found = start([*run, "--shape", f"{SMALL[0]},{features},{SMALL[1]}"])
    times = errors_found
    if isinstance(errors_found, dict):
        times = start([*run, "--shape", f"{tokens},{features},{vocabulary}", "--timed"])
    if not isinstance(errors_found, dict) or not isinstance(times, dict):
        return f"refused: {times}", math.inf
    figures = f"{times['ms']:9.2f} ms{times['of bare products']:7.2f} of bare products"
    return f"{figures}, errors up to {max(errors_found.values()):.1e}", times["ms"]


def start(command: Sequence[str]) -> dict[str, Any] | str:
    """The answer of a process, or why there is none."""
    ended = child_process.run([sys.executable, *command], seconds=PATIENCE, cwd=ROOT)
    return ended.answer if ended.code == 0 and ended.answer else ended.reason or "it gave no answer"


def shown(tiling: Tiling) -> str:
    return ", ".join(f"{name}={size}" for name, size in tiling.items())


if __name__ == "__main__":
    errors.run_main(main)
