"""Times the fused head beside what one would write without it; prints temporaries and errors in the same table.

Every method computes the cross-entropy of the same tokens and its gradients by hidden states and weight, but for those
that say "value only". Methods take turns, so that a busy machine slows all of them. Seconds are medians; the ratio is
the median, over rounds, of a method's time to that of full logits in the same round. `temp MiB` is what the compiled
program needs beside arguments and results, by the compiler's account. Errors are the largest difference to full logits
in float32 at the highest precision, relative to the largest magnitude there.

Leaves out: other libraries' kernels (but for optax), and several devices.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from kernels.lm_head import token_loss

CHUNK = 256

Loss = Callable[[Float[Array, "N D"], Float[Array, "V D"], Int[Array, "N"], Float[Array, "N"]], Float[Array, ""]]


def full_logits(hidden: Array, weight: Array, labels: Array, weights: Array) -> Array:
    logits = jnp.matmul(hidden, weight.T, preferred_element_type=jnp.float32)
    label = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.sum(weights * (jax.nn.logsumexp(logits, axis=1) - label))


def optax_on_logits(hidden: Array, weight: Array, labels: Array, weights: Array) -> Array:
    logits = jnp.matmul(hidden, weight.T, preferred_element_type=jnp.float32)
    return jnp.sum(weights * optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def chunked(hidden: Array, weight: Array, labels: Array, weights: Array) -> Array:
    """Full logits of `CHUNK` tokens at a time, computed again for the gradients."""

    @jax.checkpoint
    def step(total: Array, rows: tuple[Array, ...]) -> tuple[Array, None]:
        return total + full_logits(rows[0], weight, *rows[1:]), None

    rows = (x.reshape(-1, min(CHUNK, len(hidden)), *x.shape[1:]) for x in (hidden, labels, weights))
    return jax.lax.scan(step, jnp.float32(0), tuple(rows))[0]


def fused(**options: Any) -> Loss:
    def loss(hidden: Array, weight: Array, labels: Array, weights: Array) -> Array:
        return token_loss(hidden, weight, labels, negative_logprob, weights=weights, **options)[0]

    return loss


def negative_logprob(logprob: Array, entropy: Array) -> Array:
    return -logprob


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
    if tokens > CHUNK and tokens % CHUNK:
        raise argparse.ArgumentTypeError(f"{text!r}: more than {CHUNK} tokens must be a multiple of {CHUNK}")
    return tokens, features, vocabulary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape",
        type=shape_of,
        nargs="+",
        default=[(2048, 512, 32768)],
        metavar="N,D,V",
        help="tokens, hidden size, vocabulary; several are measured one after the other (default 2048,512,32768)",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of hidden and weight")
    parser.add_argument("--repeats", type=int, default=5, help="rounds timed, after one that is not (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"argument --repeats: {options.repeats} rounds give no time, 1 is the least")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"argument --json: there is no folder {options.json.parent}")

    device = jax.devices()[0]
    print(f"{device.platform} {device.device_kind}, jax {jax.__version__}, {options.dtype}, {options.repeats} rounds")
    results = []
    for shape in options.shape:
        print("\nN={}, D={}, V={}".format(*shape))
        rows = measure(shape, options.dtype, options.repeats, options.seed)
        show(rows)
        results.append({"N": shape[0], "D": shape[1], "V": shape[2], "methods": rows})
    if options.json:
        command = shlex.join(["python", *sys.argv])
        report = {"command": command, "device": device.device_kind, "jax": jax.__version__, "dtype": options.dtype}
        options.json.write_text(json.dumps(report | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
