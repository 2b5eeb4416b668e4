"""Times the fused head beside what one would write without it; prints temporaries and errors in the same table.

Every method computes the cross-entropy of the same tokens and its gradients by hidden states and weight, but for those
that say "value only". Methods take turns, so that a busy machine slows all of them. Seconds are medians; the ratio is
the median, over rounds, of a method's time to that of full logits in the same round. `temp MiB` is what the compiled
program needs beside arguments and results, by the compiler's account. Errors are the largest difference to full logits
in float32 at the highest precision, relative to the largest magnitude there.

With `--target`, the same for a TPU that isn't there, compiled and not run: see bench_target.py.

Leaves out: other libraries' kernels (but for optax), and several devices.

Exit codes: 0 done, 2 something that you can mend (one line says what).
"""

import argparse
import importlib.util
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kernels.aot.targets import CHIPS
from mllm.errors import ArgumentParser, UserError

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script sees only its own folder
from tools import bench_target, figures
from tools.head_losses import CHUNK, Loss, chunked, full_logits, fused, optax_on_logits


class Method(NamedTuple):
    name: str
    loss: Loss
    live: float = 1.0
    """The share of rows that count; the weights of the others are 0."""
    gradients: bool = True


METHODS = (
    Method("full logits", full_logits),
    Method("optax on full logits", optax_on_logits),
    Method(f"scan over {CHUNK} tokens, checkpointed", chunked),
    Method("fused, workspace 0", fused(workspace=0)),
    Method("fused, default workspace", fused()),
    Method("fused, half of the rows live", fused(), live=0.5),
    Method("fused, a quarter of the rows live", fused(), live=0.25),
    Method("full logits, value only", full_logits, gradients=False),
    Method("fused, value only", fused(), gradients=False),
)


def problem(shape: tuple[int, int, int], dtype: str, seed: int) -> tuple[Array, Array, Array]:
    """Logits of unit variance, and random labels."""
    tokens, features, vocabulary = shape
    h, w, y = jax.random.split(jax.random.key(seed), 3)
    hidden = jax.random.normal(h, (tokens, features), dtype)
    weight = (jax.random.normal(w, (vocabulary, features)) * features**-0.5).astype(dtype)
    return hidden, weight, jax.random.randint(y, (tokens,), 0, vocabulary)


def weights_of(live: float, tokens: int) -> Array:
    chosen = np.random.default_rng(0).permutation(tokens) < round(live * tokens)
    return jnp.asarray(chosen, jnp.float32)


def error(got: Any, expected: Any) -> list[float]:
    def largest(a: Array, b: Array) -> float:
        return float(jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.max(jnp.abs(b)))

    return [largest(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)]


def measure(shape: tuple[int, int, int], dtype: str, repeats: int, seed: int) -> list[dict[str, Any]]:
    arrays = problem(shape, dtype, seed)
    rows: list[dict[str, Any]] = []
    calls: list[tuple[jax.stages.Compiled, tuple[Array, ...], list[float]]] = []
    for method in METHODS:
        function = jax.value_and_grad(method.loss, (0, 1)) if method.gradients else method.loss
        args: tuple[Array, ...] = (*arrays, weights_of(method.live, shape[0]))
        compiled = jax.jit(function).lower(*args).compile()
        memory: Any = compiled.memory_analysis()
        rows.append({"method": method.name, "live": method.live, "temp_bytes": memory.temp_size_in_bytes})
        calls.append((compiled, args, []))
    for _ in range(repeats + 1):
        for compiled, args, seconds in calls:
            start = time.perf_counter()
            jax.block_until_ready(compiled(*args))
            seconds.append(time.perf_counter() - start)
    for row, (_, _, seconds) in zip(rows, calls, strict=True):
        row["seconds"] = statistics.median(seconds[1:])
        # Of what ran in the same round, so that a slow spell of the machine cancels.
        row["ratio"] = statistics.median(a / b for a, b in zip(seconds[1:], calls[0][2][1:], strict=True))
    wide = [x.astype(jnp.float32) for x in arrays[:2]]
    for live in {method.live for method in METHODS}:
        reference = jax.jit(jax.value_and_grad(fused(impl="reference"), (0, 1)))
        expected = reference(*wide, arrays[2], weights_of(live, shape[0]))
        for method, row, (compiled, args, _) in zip(METHODS, rows, calls, strict=True):
            if method.live == live:
                want = expected if method.gradients else expected[0]
                row["errors"] = dict(zip(("loss", "dh", "dW"), error(compiled(*args), want), strict=False))
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    width = max(len(row["method"]) for row in rows)
    print(f"{'':{width}}  seconds  ratio  temp MiB     loss       dh       dW   (largest relative errors)")
    for row in rows:
        errors = " ".join(f"{x:8.1e}" for x in row["errors"].values())
        figures = f"{row['seconds']:7.3f}  {row['ratio']:5.2f}  {row['temp_bytes'] / 2**20:8.1f} {errors}"
        print(f"{row['method']:{width}}  {figures}")


def shape_of(text: str) -> tuple[int, int, int]:
    try:
        tokens, features, vocabulary = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not N,D,V: three whole numbers") from None
    if min(tokens, features, vocabulary) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a size below 1")
    if max(tokens, features, vocabulary) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} has a size that is no index of 32 bits")
    if tokens > CHUNK and tokens % CHUNK:
        raise argparse.ArgumentTypeError(f"{text!r}: more than {CHUNK} tokens must be a multiple of {CHUNK}")
    return tokens, features, vocabulary


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape",
        type=shape_of,
        nargs="+",
        metavar="N,D,V",
        help="tokens, hidden size, vocabulary; several are measured one after the other "
        "(default 2048,512,32768, for a target 8192,2048,151936)",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of hidden and weight")
    parser.add_argument(
        "--target",
        choices=sorted(CHIPS),
        help="compile for this TPU instead and time nothing, in bfloat16; needs libtpu, which make aot installs",
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds timed, after one that is not (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    try:
        options = parser.parse_args(arguments)
        if options.repeats < 1:
            raise UserError(f"--repeats: {options.repeats} rounds give no time, 1 is the least")
        if not 0 <= options.seed < 2**31:
            raise UserError(f"--seed: {options.seed} is not from 0 to {2**31 - 1}")
        figures.check(options.json)
        if options.target:
            if importlib.util.find_spec("libtpu") is None:
                raise UserError("--target: libtpu, the TPU compiler, isn't installed; make aot does")
            report = of_target(options.target, options.shape or [(8192, 2048, 151936)])
        else:
            report = of_device(options.shape or [(2048, 512, 32768)], options.dtype, options.repeats, options.seed)
        figures.write(options.json, {"command": shlex.join(["python", *sys.argv])} | report)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        if "RESOURCE_EXHAUSTED" not in reason:
            raise
        print(f"error: --shape: too large for this device: {reason}", file=sys.stderr)
        return 2
    return 0


def of_device(shapes: Sequence[tuple[int, int, int]], dtype: str, repeats: int, seed: int) -> dict[str, Any]:
    device = jax.devices()[0]
    print(f"{device.platform} {device.device_kind}, jax {jax.__version__}, {dtype}, {repeats} rounds")
    results = []
    for shape in shapes:
        print("\nN={}, D={}, V={}".format(*shape))
        rows = measure(shape, dtype, repeats, seed)
        show(rows)
        results.append(dict(zip("NDV", shape, strict=True)) | {"methods": rows})
    return {"device": device.device_kind, "jax": jax.__version__, "dtype": dtype, "results": results}


def of_target(target: str, shapes: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    print(f"{target} by its compiler, jax {jax.__version__}, bfloat16; nothing was run, and nothing is a time")
    results = []
    for shape in shapes:
        print("\nN={}, D={}, V={}".format(*shape))
        rows = bench_target.table(target, shape)
        bench_target.show(rows)
        results.append(dict(zip("NDV", shape, strict=True)) | {"methods": [asdict(row) for row in rows]})
    return {"target": target, "jax": jax.__version__, "dtype": "bfloat16", "results": results}


if __name__ == "__main__":
    sys.exit(main())
