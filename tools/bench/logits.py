"""Times a GRPO loss of logits that exist, and its gradient: lm_head.logits_logprobs beside plain JAX.

Both take log-probabilities of the labels and the clipped ratio, and give one array of gradients. A row of the table is
plain JAX, the engine in plain XLA, or, on a TPU, the kernels with so many rows ("time block") held at a time.

    ms         median of the rounds, of calls that keep the device busy          [host's clock]
    /plain     the median, over rounds, of the ratio to plain JAX in the same round
    temp MiB   memory beside arguments and results                               [the compiler's figure]

With --check nothing is timed: log-probabilities and gradients are compared with float64's, and the largest differences
are printed.

Exit codes: 0 done, 1 the check failed, 2 an error in one line.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lm_head import logits_logprobs
from mllm import errors
from tools.bench.frame import in_turns, positive, table

LARGE, SMALL = (2048, 151643), (64, 4096)
"""Rows and vocabulary: a first GRPO kernel's, and a CPU's."""
BLOCKS = (16, 64, 256, 512)
LOGPROB, GRADIENT = 1e-4, 2**-7
"""What --check allows: in nats at logits of 10, and of the largest gradient, which is bfloat16."""


def plain(logits: Array, labels: Array) -> Array:
    z = logits.astype(jnp.float64 if jax.config.values["jax_enable_x64"] else jnp.float32)
    return jnp.take_along_axis(jax.nn.log_softmax(z), labels[..., None], axis=-1)[..., 0]


def fused(logits: Array, labels: Array, **options: Any) -> Array:
    return logits_logprobs(logits, labels, **options).logprob


def differentiated(logprobs: Callable[..., Array]) -> Callable[..., Any]:
    """(logits, labels, old log-probabilities, advantages) to the log-probabilities and the loss's gradient."""

    def loss(logits: Array, labels: Array, old: Array, advantage: Array) -> tuple[Array, Array]:
        logprob = logprobs(logits, labels)
        ratio = jnp.exp(logprob - old)
        return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean(), logprob

    def run(*arguments: Array) -> tuple[Array, Array]:
        (_, logprob), gradient = jax.value_and_grad(loss, has_aux=True)(*arguments)
        return logprob, gradient

    return run


def problem(rows: int, vocabulary: int) -> tuple[Array, ...]:
    """bfloat16 logits [1, rows, vocabulary] with a standard deviation of 3, and old log-probabilities near the new."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(3 * rng.standard_normal((1, rows, vocabulary), np.float32), jnp.bfloat16)
    labels = jnp.asarray(rng.integers(0, vocabulary, (1, rows)), jnp.int32)
    noise, advantage = (rng.standard_normal((1, rows), np.float32) for _ in range(2))
    return logits, labels, plain(logits, labels) + 0.1 * noise, jnp.asarray(advantage)


def methods(platform: str) -> dict[str, Callable[..., Any]]:
    """Each row's function, by its name."""
    chosen: dict[str, Callable[..., Array]] = {"plain JAX": plain, "xla": partial(fused, impl="xla")}
    if platform == "tpu":
        chosen |= {f"kernels, time block {n}": partial(fused, impl="mosaic_tpu", block=n) for n in BLOCKS}
    return {name: differentiated(function) for name, function in chosen.items()}


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    platform = jax.default_backend()
    rows, vocabulary = options.shape or (SMALL if platform == "cpu" else LARGE)
    print(f"logits [1, {rows}, {vocabulary}], bfloat16, {jax.devices()[0].device_kind}")
    functions, inputs = methods(platform), problem(rows, vocabulary)
    if options.check:
        return check(functions, inputs)
    programs = {name: jax.jit(function).lower(*inputs).compile() for name, function in functions.items()}
    calls = {name: partial(program, *inputs) for name, program in programs.items()}
    seconds = in_turns(calls, jax.block_until_ready, rounds=options.rounds, least=0.05, queue=1)
    lines = []
    for name, program in programs.items():
        ratios = [x / y for x, y in zip(seconds[name], seconds["plain JAX"], strict=True)]
        figures = f"{1e3 * statistics.median(seconds[name]):.2f}", f"{statistics.median(ratios):.2f}"
        analysis: Any = program.memory_analysis()
        lines.append([name, *figures, f"{analysis.temp_size_in_bytes / 2**20:.1f}"])
    print(table(("method", "ms", "/plain", "temp MiB"), lines))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    known = errors.ArgumentParser(__doc__, prog="python tools/bench logits")
    add = known.add_argument
    add("--shape", type=shape_of, metavar="N,V", help="rows, vocabulary (default on a CPU 64,4096, else 2048,151643)")
    add("--rounds", type=positive(int), default=5, help="rounds timed (default 5)")
    add("--check", action="store_true", help="compare with float64 in place of timing")
    return known.parse_args(arguments)


def shape_of(text: str) -> tuple[int, int]:
    """For argparse: N,V as numbers."""
    sizes = text.split(",")
    if len(sizes) != 2 or not all(x.isdecimal() and int(x) for x in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not N,V: two whole numbers")
    return int(sizes[0]), int(sizes[1])


def check(functions: dict[str, Callable[..., Any]], batch: tuple[Array, ...]) -> int:
    """Prints the largest differences to float64; 1 if one is too large."""
    with jax.enable_x64(True):
        right = [np.asarray(x, np.float64) for x in jax.jit(differentiated(plain))(batch[0].astype(float), *batch[1:])]
    largest, lines, failed = np.abs(right[1]).max(), [], False
    for name, function in functions.items():
        off = [
            np.abs(np.asarray(x, np.float64) - y).max() for x, y in zip(jax.jit(function)(*batch), right, strict=True)
        ]
        well = off[0] <= LOGPROB and off[1] <= GRADIENT * largest and not any(map(math.isnan, off))
        failed |= not well
        lines.append([name, f"{off[0]:.2g}", f"{off[1]:.2g}", "ok" if well else "FAILED"])
    print(table(("method", "logprob", "dlogits", ""), lines))
    return int(failed)
