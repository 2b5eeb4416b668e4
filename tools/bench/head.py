"""Time, memory and errors of the LM head's engines beside bare matrix products and other implementations.

Every method computes the cross-entropy of the same tokens and its gradients by hidden states and weight, unless its
name says otherwise. Logits are normal with unit variance, and the rows that count are at random places. A method that
fails is named with the reason.

    ms         median of the rounds, of calls that keep the device busy                      [host's clock]
    /three     the median, over rounds, of the ratio to the time of h Wᵀ, g W and gᵀ h, as XLA
               multiplies them in the same round, at the rows that count
    temp MiB   memory beside arguments and results                                           [the compiler's figure]
    logprob    the largest error of a log-probability at the rows that count, in nats; empty where a library returns
               the loss alone
    loss ...   the largest error, relative to the largest magnitude expected; for the general backward, "loss" compares
               the sum of logprob and lse

Errors are differences to plain JAX in float64, on TPUs to float32 at the highest precision.

Methods named "float32 master" are the trainer's case: the weight is the bfloat16 copy of a float32 master, which gets a
float32 gradient. In other methods the gradient has the weight's dtype.

Leaves out several devices. Exit codes: 0 done, 2 an error that one line explains.
"""

import importlib.metadata
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from mllm import errors
from mllm.errors import UserError
from tools.bench.frame import figures, in_turns, positive, shape, table
from tools.bench.methods import Method, methods

LARGE, SMALL = (8192, 2048, 151936), (1024, 256, 16384)
"""Tokens, hidden size and vocabulary: the head of Qwen2.5-3B, and a CPU's."""
COLUMNS = ("method", "ms", "/three", "temp MiB", "loss", "logprob", "dh", "dW")
PACKAGES = ("jax", "jaxlib", "optax", "tokamax", "google-tunix")
"""The packages to print versions of, if installed."""
BARE = "3 bare products"
CHUNK = 256
"""Tokens that the reference takes at a time."""


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(__doc__, prog="python tools/bench head")
    add = parser.add_argument
    sizes = "tokens, hidden size, vocabulary (default on a CPU 1024,256,16384, else 8192,2048,151936)"
    add("--shape", type=shape("N,D,V"), metavar="N,D,V", help=sizes)
    add("--dtype", choices=("float32", "bfloat16"), help="default on a CPU float32, else bfloat16")
    shares = "shares of rows that count (default 1 0.25)"
    add("--live", type=positive(float, most=1), nargs="+", default=[1.0, 0.25], metavar="SHARE", help=shares)
    add("--methods", nargs="+", metavar="TEXT", help="only the methods with one of the texts in their name")
    add("--repeats", type=positive(int), help="rounds timed, after one that is not (default on a CPU 5, else 10)")
    options = parser.parse_args(arguments)
    platform = jax.default_backend()
    cpu, known = platform == "cpu", methods(platform)
    chosen = {
        name: method
        for name, method in known.items()
        if not options.methods or any(text.lower() in name.lower() for text in options.methods)
    }
    if not chosen:
        raise UserError(f"--methods: no name has that in it; there are: {'; '.join(known)}")
    problem = Problem(options.shape or (SMALL if cpu else LARGE), options.dtype or ("float32" if cpu else "bfloat16"))
    installed = {package.name.replace("_", "-"): package.version for package in importlib.metadata.distributions()}
    versions = [f"{name} {installed[name]}" for name in PACKAGES if name in installed]
    for live in options.live:
        print("\nN={}, D={}, V={}".format(*problem.shape), f"{problem.dtype}, {live:.0%} of the rows count", sep=", ")
        print(f"{jax.devices()[0].device_kind}, {', '.join(versions)}")
        print(measured(problem, chosen, live, options.repeats or (5 if cpu else 10)), flush=True)
    return 0


def measured(problem: "Problem", methods: Mapping[str, Method], live: float, rounds: int) -> str:
    """The table of the methods at a share of rows that count, and a line for each failing method."""
    calls, beside, failed = {BARE: problem.bare_products(live)}, {BARE: list[str]()}, []
    for name, method in methods.items():
        print(f"{name}: compiling", file=sys.stderr)
        try:
            with jax.default_matmul_precision("highest") if problem.dtype == "float32" else nullcontext():
                program = problem.compiled(method)
            calls[name] = partial(program, *problem.arguments(method.transposed), *problem.per_token(method, live))
            analysis: Any = program.memory_analysis()
            off = ["" if error is None else f"{error:.1e}" for error in problem.errors(calls[name](), method, live)]
            beside[name] = [f"{analysis.temp_size_in_bytes / 2**20:.1f}", *off]
        except Exception as error:  # a library may fail in any way
            calls.pop(name, None)
            failed.append(f"failed: {name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}")
    queue = 1 if jax.default_backend() == "cpu" else 2
    timed = figures(in_turns(calls, rounds, queue), BARE)
    return "\n".join([table(COLUMNS, ([name, *timed[name], *beside[name]] for name in calls)), *failed])


class Problem:
    """Inputs of a given shape (N, D, V), and their right results."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, dtype
        rng, (tokens, features, vocabulary) = np.random.default_rng(0), shape
        sizes = (tokens, features), (vocabulary, features)
        # Products have unit variance.
        hidden, weight = (rng.standard_normal(x, np.float32) * np.float32(features**-0.25) for x in sizes)
        self.hidden, self.weight = (jnp.asarray(x, dtype) for x in (hidden, weight))
        self.labels = jnp.asarray(rng.integers(0, vocabulary, tokens, dtype=np.int32))
        self.expected = cache(self.plain)

    def arguments(self, transposed: bool) -> tuple[Array, Array, Array]:
        return self.hidden, self.weight.T if transposed else self.weight, self.labels

    def per_token(self, method: Method, live: float) -> tuple[Array, Array, Array]:
        """Weights [N], 1 at the rows that count; and cotangents of logprob and lse, random or the cross-entropy's."""
        rng, tokens = np.random.default_rng(1), self.shape[0]
        weights = (rng.permutation(tokens) < live_rows(tokens, live)).astype(np.float32)
        slopes = rng.standard_normal((2, tokens), np.float32) if method.general else np.array([[-1], [0]], np.float32)
        by_logprob, by_lse = weights * slopes
        return jnp.asarray(weights), jnp.asarray(by_logprob), jnp.asarray(by_lse)

    def compiled(self, method: Method) -> jax.stages.Compiled:
        return jax.jit(method.call).lower(*self.arguments(method.transposed), *self.per_token(method, 1)).compile()

    def bare_products(self, live: float) -> Callable[[], Any]:
        """h Wᵀ, g W and gᵀ h of the rows that count, where g is the result of the first."""
        hw, gw, gh = jax.jit(lambda h, w: h @ w.T), jax.jit(lambda g, w: g @ w), jax.jit(lambda g, h: g.T @ h)
        with jax.default_matmul_precision("highest") if self.dtype == "float32" else nullcontext():
            h, w = self.hidden[: live_rows(self.shape[0], live)], self.weight
            g = hw(h, w)
            products = hw.lower(h, w).compile(), gw.lower(g, w).compile(), gh.lower(g, h).compile()
        return lambda: (products[0](h, w), products[1](g, w), products[2](g, h))

    def plain(self, general: bool, live: float) -> list[Array]:
        """Plain JAX's results in float32: the sum weighted by the cotangents, log-probabilities, dh and dW.

        The tests' oracle, in NumPy, would take hours at the sizes that are timed.
        """
        _, *cotangents = self.per_token(Method(tuple, general), live)
        with jax.enable_x64(jax.default_backend() != "tpu"):
            values, gradients = _plain(self.hidden.astype(float), self.weight.astype(float), self.labels, *cotangents)
            return [x.astype(jnp.float32) for x in (*values, *gradients)]

    def errors(self, results: Sequence[Array | None], method: Method, live: float) -> list[float | None]:
        """The largest error of each result, NaN if a number is; None for results that a method doesn't return.

        Log-probabilities are compared at the rows that count, in nats. Other errors are over the largest magnitude
        expected.
        """
        errors: list[float | None] = []
        counts = self.per_token(method, live)[0] != 0
        for name, result, right in zip(COLUMNS[4:], results, self.expected(method.general, live), strict=False):
            if result is None:
                errors.append(None)
                continue
            result = jnp.asarray(result).T if method.transposed and name == "dW" else jnp.asarray(result)
            off = jnp.abs(result.astype(jnp.float32) - right)
            errors.append(float(jnp.max(off[counts]) if name == "logprob" else jnp.max(off) / jnp.max(jnp.abs(right))))
        return errors


def live_rows(tokens: int, live: float) -> int:
    """The number of rows that count."""
    return max(1, round(live * tokens))


@jax.jit
@partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
def _plain(hidden: Array, weight: Array, labels: Array, by_logprob: Array, by_lse: Array) -> tuple[Array, Array]:
    """Sum of logprob and lse, each times its cotangent, and logprob, from the logits of a row at a time."""

    @jax.checkpoint
    def of_row(row: tuple[Array, ...]) -> tuple[Array, Array]:
        hidden, label, by_logprob, by_lse = row
        logits = jnp.matmul(weight, hidden, precision="highest")
        lse = jax.nn.logsumexp(logits)
        logprob = logits[label] - lse
        return by_logprob * logprob + by_lse * lse, logprob

    sums, logprobs = jax.lax.map(of_row, (hidden, labels, by_logprob, by_lse), batch_size=CHUNK)
    return jnp.sum(sums), logprobs
