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

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lm_head import logits_logprobs
from mllm import errors
from tools.bench.frame import figures, in_turns, positive, shape, table

LARGE, SMALL = (2048, 151643), (64, 4096)
"""Rows and vocabulary: a first GRPO kernel's, and a CPU's."""
BLOCKS = (16, 64, 256, 512)
LOGPROB, GRADIENT = 1e-4, 2**-7
"""The errors that --check allows: in nats at logits of 10, and as a share of the largest gradient, in bfloat16."""
Call = Callable[..., Any]


def plain(logits: Array, labels: Array) -> Array:
    z = logits.astype(jnp.float64 if jax.config.values["jax_enable_x64"] else jnp.float32)
    return jnp.take_along_axis(jax.nn.log_softmax(z), labels[..., None], axis=-1)[..., 0]


def fused(logits: Array, labels: Array, **options: Any) -> Array:
    return logits_logprobs(logits, labels, **options).logprob


def differentiated(logprobs: Callable[..., Array]) -> Call:
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


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(__doc__, prog="python tools/bench logits")
    sizes = "rows, vocabulary (default on a CPU 64,4096, else 2048,151643)"
    parser.add_argument("--shape", type=shape("N,V"), metavar="N,V", help=sizes)
    parser.add_argument("--rounds", type=positive(int), default=5, help="rounds timed (default 5)")
    parser.add_argument("--check", action="store_true", help="compare with float64 in place of timing")
    options, platform = parser.parse_args(arguments), jax.default_backend()
    rows, vocabulary = options.shape or (SMALL if platform == "cpu" else LARGE)
    print(f"logits [1, {rows}, {vocabulary}], bfloat16, {jax.devices()[0].device_kind}")
    logprobs: dict[str, Callable[..., Array]] = {"plain JAX": plain, "xla": partial(fused, impl="xla")}
    if platform == "tpu":
        logprobs |= {f"kernels, time block {n}": partial(fused, impl="mosaic_tpu", block=n) for n in BLOCKS}
    calls, batch = {name: differentiated(function) for name, function in logprobs.items()}, problem(rows, vocabulary)
    if options.check:
        return check(calls, batch)
    programs = {name: jax.jit(call).lower(*batch).compile() for name, call in calls.items()}
    timed = {name: partial(program, *batch) for name, program in programs.items()}
    results = figures(in_turns(timed, options.rounds, 1), "plain JAX")
    for name, program in programs.items():
        analysis: Any = program.memory_analysis()
        results[name].append(f"{analysis.temp_size_in_bytes / 2**20:.1f}")
    print(table(("method", "ms", "/plain", "temp MiB"), ([name, *row] for name, row in results.items())))
    return 0


def check(calls: Mapping[str, Call], batch: tuple[Array, ...]) -> int:
    """Prints the largest differences to float64; 1 if a difference is too large."""
    with jax.enable_x64(True):
        right = [np.asarray(x, np.float64) for x in jax.jit(differentiated(plain))(batch[0].astype(float), *batch[1:])]
    limits, rows = (LOGPROB, GRADIENT * np.abs(right[1]).max()), []
    for name, call in calls.items():
        results = [np.asarray(x, np.float64) for x in jax.jit(call)(*batch)]
        off = [np.abs(mine - exact).max() for mine, exact in zip(results, right, strict=True)]
        well = all(error <= limit for error, limit in zip(off, limits, strict=True))  # no NaN is
        rows.append([name, f"{off[0]:.2g}", f"{off[1]:.2g}", "ok" if well else "FAILED"])
    print(table(("method", "logprob", "dlogits", ""), rows))
    return int(any(row[-1] == "FAILED" for row in rows))
