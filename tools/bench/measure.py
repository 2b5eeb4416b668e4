"""Measures one method of the head's benchmark, in a process that tools/bench/head.py starts.

It answers with figures at each share of rows that count. Inputs are random from a seed: logits are normal with unit
variance, and the rows that count are at random places. A method is compiled once; for each share it is run once, for
its memory, then timed in turns with the bare products h Wᵀ, g W and gᵀ h of as many rows as count, where g has the
shape and the dtype of logits; then its result is compared with plain JAX in float64 (float32 on TPUs).

Memory is the device's own count where it has one (`peak_bytes_in_use`), else, as on CPUs, the compiler's temporaries.
Through torch, the bare products and the count of memory (`max_memory_allocated`) are torch's.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tools.bench.frame import MOST_CALLS, Figures, SkippedError, answer, in_turns
from tools.bench.methods import IGNORED, Method, methods

CHUNK = 256
"""Tokens that the reference takes at a time."""


# --- the inputs, and what is right


@dataclass(frozen=True)
class Problem:
    """Inputs of a given shape; the same ones in every process for a seed."""

    tokens: int
    features: int
    vocabulary: int
    dtype: str
    seed: int

    @cached_property
    def fixed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Hidden states [N, D] and weight [V, D], whose products have unit variance, and labels [N]."""
        rng = np.random.default_rng(self.seed)
        sizes = (self.tokens, self.features), (self.vocabulary, self.features)
        hidden, weight = (rng.standard_normal(x, np.float32) * np.float32(self.features**-0.25) for x in sizes)
        labels = rng.integers(0, self.vocabulary, self.tokens, dtype=np.int32)
        return hidden.astype(self.dtype), weight.astype(self.dtype), labels

    def per_token(self, general: bool, live: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Weights [N], 1 at the rows that count; and cotangents of logprob and lse, random or the cross-entropy's."""
        rng = np.random.default_rng([self.seed, 1])
        weights = (rng.permutation(self.tokens) < live_rows(self.tokens, live)).astype(np.float32)
        slopes = rng.standard_normal((2, self.tokens), np.float32) if general else np.array([[-1], [0]], np.float32)
        by_logprob, by_lse = weights * slopes
        return weights, by_logprob, by_lse

    def expected(self, general: bool, live: float) -> dict[str, Array]:
        """Plain JAX's results in float32: the sum of what the cotangents weigh, dh and dW.

        The tests' oracle, in NumPy, would take hours at the sizes that are timed.
        """
        with jax.enable_x64(jax.default_backend() != "tpu"):
            hidden, weight, labels = map(jnp.asarray, self.fixed)
            slopes = map(jnp.asarray, self.per_token(general, live)[1:])
            value, (dh, dw) = _plain(hidden.astype(float), weight.astype(float), labels, *slopes)
            return {name: x.astype(jnp.float32) for name, x in (("value", value), ("dh", dh), ("dW", dw))}


def live_rows(tokens: int, live: float) -> int:
    """The number of rows that count."""
    return max(1, round(live * tokens))


@jax.jit
@functools.partial(jax.value_and_grad, argnums=(0, 1))
def _plain(hidden: Array, weight: Array, labels: Array, by_logprob: Array, by_lse: Array) -> Array:
    """Sum of logprob and lse, each times its cotangent, from the logits of a row at a time."""

    @jax.checkpoint
    def of_row(row: tuple[Array, ...]) -> Array:
        hidden, label, by_logprob, by_lse = row
        logits = jnp.matmul(weight, hidden, precision="highest")
        lse = jax.nn.logsumexp(logits)
        return by_logprob * (logits[label] - lse) + by_lse * lse

    return jnp.sum(jax.lax.map(of_row, (hidden, labels, by_logprob, by_lse), batch_size=CHUNK))


def largest_error(got: Any, expected: Array) -> float:
    """The largest difference over the largest magnitude expected; NaN if a number is."""
    difference = jnp.abs(jnp.asarray(got).astype(jnp.float32) - expected)
    return float(jnp.max(difference) / jnp.max(jnp.abs(expected)))


# --- the libraries that methods run through


class Xla:
    """A method, compiled by JAX; SkippedError if its tracing says that it can't run here."""

    name = "XLA"

    def __init__(self, method: Method, problem: Problem) -> None:
        if problem.dtype == "float32":  # else a GPU multiplies in less
            jax.config.update("jax_default_matmul_precision", "highest")
        assert method.call is not None
        self.method, self.problem = method, problem
        self.queue = 1 if jax.default_backend() == "cpu" else 2  # calls that may be under way while it is timed
        hidden, weight, labels = problem.fixed
        given = (hidden, np.ascontiguousarray(weight.T) if method.transposed else weight, labels)
        try:
            traced = jax.jit(method.call).trace(*given, *problem.per_token(False, 1))
        except (NotImplementedError, ValueError) as error:
            raise SkippedError(str(error).splitlines()[0]) from None
        self.program = traced.lower().compile()
        self.before = device_peak()  # the compiler tries products on the device
        self.fixed = [jnp.asarray(x) for x in given]
        self.memory: Figures = {}

    def call(self, live: float) -> tuple[Callable[[], tuple[Any, ...]], Figures]:
        """The method at this share of rows that count, and what a call of it takes in memory."""
        call = partial(self.program, *self.fixed, *map(jnp.asarray, self.problem.per_token(self.method.general, live)))
        results = self.wait(call())
        if not self.memory:  # one program serves all shares, and later peaks have the reference's memory in them
            analysis: Any = self.program.memory_analysis()
            compiled = None if analysis is None else analysis.temp_size_in_bytes
            self.memory = memory_of(call.args, results, device_peak(), compiled, self.before)
        return call, self.memory

    def bare(self, rows: int) -> dict[str, Callable[[], Any]]:
        return bare_products(self.fixed[0][:rows], jnp.asarray(self.problem.fixed[1]))

    def wait(self, results: Any) -> Any:
        return jax.block_until_ready(results)

    def read(self, result: Any) -> Any:
        return jnp.asarray(result)


class Torch:
    """A method that runs through torch, with the same functions."""

    name = "torch"

    def __init__(self, method: Method, problem: Problem) -> None:
        import torch  # type: ignore[import-not-found]

        assert method.torch is not None
        self.torch, self.problem, self.loss = torch, problem, method.torch()
        self.gpu = torch.cuda.is_available()
        # torch can wait only for all calls, and their results take each other's place.
        self.queue = MOST_CALLS if self.gpu else 1
        place, dtype = torch.device("cuda" if self.gpu else "cpu"), getattr(torch, problem.dtype)
        arrays = (torch.from_numpy(x.astype(np.float32)) for x in problem.fixed[:2])
        self.hidden, self.weight = (x.to(place, dtype).requires_grad_() for x in arrays)

    def call(self, live: float) -> tuple[Callable[[], tuple[Any, ...]], Figures]:
        chosen = np.where(self.problem.per_token(False, live)[0] != 0, self.problem.fixed[2], IGNORED)
        labels = self.torch.from_numpy(chosen.astype(np.int64)).to(self.hidden.device)

        def call() -> tuple[Any, ...]:
            self.hidden.grad = self.weight.grad = None
            value = self.loss(self.hidden, self.weight, labels)
            value.backward()
            return value.detach(), self.hidden.grad, self.weight.grad

        if self.gpu:
            self.torch.cuda.reset_peak_memory_stats()
        results = self.wait(call())
        counted = self.torch.cuda.max_memory_allocated() if self.gpu else None
        return call, memory_of((self.hidden, self.weight, labels), results, counted)

    def bare(self, rows: int) -> dict[str, Callable[[], Any]]:
        h, w, product = self.hidden.detach()[:rows], self.weight.detach(), self.torch.matmul
        g = product(h, w.T)
        return {"hW": partial(product, h, w.T), "gW": partial(product, g, w), "gh": partial(product, g.T, h)}

    def wait(self, results: Any) -> Any:
        if self.gpu:
            self.torch.cuda.synchronize()
        return results

    def read(self, result: Any) -> Any:
        return result.float().cpu().numpy()


def device_peak() -> int | None:
    """The most bytes that the device has held so far, if it counts them."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def memory_of(
    arguments: Any, results: Any, counted: int | None, compiled: int | None = None, before: int | None = None
) -> Figures:
    """The device's peak in bytes, None where it doesn't count, and temporaries; without a count the compiler's.

    Where the device held as much before the call, the peak is only an upper bound.
    """
    held = sum(x.nbytes for tree in (arguments, results) for x in tree)
    temporaries = compiled if counted is None else max(0, counted - held)
    return {
        "peak_bytes": counted,
        "temp_bytes": temporaries,
        "peak_is_bound": counted is not None and counted == before,
    }


def bare_products(hidden: Float[Array, "R D"], weight: Float[Array, "V D"]) -> dict[str, Callable[[], Array]]:
    """The compiled products h Wᵀ, g W and gᵀ h, where g is the result of the first; all in the arrays' dtype."""
    slopes = jax.jit(lambda h, w: h @ w.T)(hidden, weight)
    products: dict[str, tuple[Callable[[Array, Array], Array], Array, Array]] = {
        "hW": (lambda h, w: h @ w.T, hidden, weight),
        "gW": (lambda g, w: g @ w, slopes, weight),
        "gh": (lambda g, h: g.T @ h, slopes, hidden),
    }
    return {name: partial(jax.jit(call).lower(a, b).compile(), a, b) for name, (call, a, b) in products.items()}


# --- the process


def measure(method: Method, problem: Problem, lives: Sequence[float], rounds: int, least: float) -> Iterator[Figures]:
    """The method's figures at each share of rows that count: memory, seconds of each round, errors."""
    library = (Torch if method.torch else Xla)(method, problem)
    for live in lives:
        call, memory = library.call(live)
        calls = {"method": call, **library.bare(live_rows(problem.tokens, live))}
        seconds = in_turns(calls, library.wait, rounds=rounds, least=least, queue=library.queue)
        errors, results = {}, call()
        for (name, right), found in zip(problem.expected(method.general, live).items(), results, strict=False):
            got = library.read(found)
            errors[name] = largest_error(got.T if method.transposed and name == "dW" else got, right)
        yield {"live": live, "through": library.name, "errors": errors, "rounds": seconds, **memory}


def device() -> Figures:
    """What JAX runs on by default."""
    found = jax.devices()[0]
    return {
        "platform": found.platform,
        "kind": found.device_kind,
        "memory_bytes": (found.memory_stats() or {}).get("bytes_limit"),
        "runtime": found.client.platform_version.splitlines()[0],
    }


def main(task: Figures) -> Iterator[Figures]:
    """The figures of the method that a task names; of none, what JAX runs on."""
    if "method" not in task:
        return iter([device()])
    [method] = [method for method in methods(jax.default_backend()) if method.name == task["method"]]
    return measure(method, Problem(**task["problem"]), task["lives"], task["rounds"], task["least"])


if __name__ == "__main__":
    answer(main, json.loads(sys.argv[1]))
