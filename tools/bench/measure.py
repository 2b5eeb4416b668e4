"""Measures one method of the head's benchmark, in a process that tools/bench/head.py starts.

The task is JSON; the answers are lines of JSON, one for each share of rows that count. Inputs are random from a seed:
logits are normal with unit variance, and the rows that count are at random places. A method is compiled and run once,
for its memory; then it is timed in turns with the bare products h Wᵀ, g W and gᵀ h of as many rows as count, where g
has the shape and the dtype of logits; then its result is compared with plain JAX in float64 (float32 on TPUs).

Memory is the device's own count where it has one (`peak_bytes_in_use`), else, as on CPUs, the compiler's temporaries.
Through torch, the bare products and the count of memory (`max_memory_allocated`) are torch's.
"""

import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mllm import child_process
from tools.bench.methods import IGNORED, Method, methods, torch_loss

CHUNK = 256
"""Tokens that the reference takes at a time."""
MOST_CALLS = 1000
"""Calls in a turn."""


@dataclass(frozen=True)
class Problem:
    """Inputs of a given shape; the same ones in every process for a seed."""

    tokens: int
    features: int
    vocabulary: int
    dtype: str
    seed: int

    @cached_property
    def hidden(self) -> Float[np.ndarray, "N D"]:
        return self._normal(1, self.tokens)

    @cached_property
    def weight(self) -> Float[np.ndarray, "V D"]:
        return self._normal(0, self.vocabulary)

    @cached_property
    def labels(self) -> Int[np.ndarray, "N"]:
        return np.random.default_rng([self.seed, 2]).integers(0, self.vocabulary, self.tokens, dtype=np.int32)

    def weights(self, live: float) -> Float[np.ndarray, "N"]:
        """1 at the rows that count, else 0."""
        place = np.random.default_rng([self.seed, 3]).permutation(self.tokens)
        return (place < live_rows(self.tokens, live)).astype(np.float32)

    def cotangents(self, general: bool, live: float) -> Float[np.ndarray, "2 N"]:
        """The cotangents of logprob and lse: random for the general backward, else the cross-entropy's."""
        normal = np.random.default_rng([self.seed, 4]).standard_normal((2, self.tokens), np.float32)
        return self.weights(live) * (normal if general else np.array([[-1], [0]], np.float32))

    def _normal(self, part: int, rows: int) -> np.ndarray:
        """Numbers such that the products of two such rows have unit variance."""
        numbers = np.random.default_rng([self.seed, part]).standard_normal((rows, self.features), np.float32)
        return (numbers * np.float32(self.features**-0.25)).astype(self.dtype)

    def expected(self, general: bool, live: float) -> dict[str, Array]:
        """Plain JAX's results, rounded to float32: the value (a loss, or logprob and lse [2, N]), dh and dW."""
        arrays = (self.hidden, self.labels, *self.cotangents(general, live))
        weight, value, dh, dw = jnp.asarray(self.weight, jnp.float32), [], [], jnp.float32(0)
        for first in range(0, self.tokens, CHUNK):
            rows = (jnp.asarray(x[first : first + CHUNK]) for x in arrays)
            values, (own, share) = _reference(weight, *rows)
            value.append(values)
            dh.append(own)
            dw += share
        found = jnp.concatenate(value, axis=1) * self.weights(live)
        return {"value": found if general else -found[0].sum(), "dh": jnp.concatenate(dh), "dW": dw}


def live_rows(tokens: int, live: float) -> int:
    """The number of rows that count."""
    return max(1, round(live * tokens))


def _reference(weight: Array, hidden: Array, labels: Array, by_logprob: Array, by_lse: Array) -> Any:
    """logprob and lse [2, R] of some rows, and their gradients; tests/kernels/oracle.py would take hours."""
    with jax.enable_x64(jax.default_backend() != "tpu"):
        return _reference_program(weight, hidden.astype(jnp.float32), labels, by_logprob, by_lse)


@jax.jit
def _reference_program(weight: Array, hidden: Array, labels: Array, by_logprob: Array, by_lse: Array) -> Any:
    def outputs(hidden: Array, weight: Array) -> Array:
        logits = jnp.matmul(hidden.astype(float), weight.astype(float).T, precision="highest")
        lse = jax.nn.logsumexp(logits, axis=1)
        logprob = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0] - lse
        return jnp.stack([logprob, lse]).astype(jnp.float32)

    values, pull = jax.vjp(outputs, hidden, weight)
    return values, pull(jnp.stack([by_logprob, by_lse]))


# --- one method


class Trial(NamedTuple):
    """A compiled method at one share of rows that count."""

    live: float
    through: str
    """The library that makes the bare products."""
    call: Callable[[], tuple[Any, ...]]
    bare: Mapping[str, Callable[[], Any]]
    wait: Callable[[Any], Any]
    read: Callable[[Any], Any]
    """One of the call's results -> a JAX or numpy array."""
    queue: int
    """Calls that may be under way while the method is timed."""
    memory: dict[str, Any]


def measure(method: Method, problem: Problem, lives: list[float], rounds: int, least: float) -> Iterator[Any]:
    """The method's figures at each share of rows that count: memory, seconds of each round, errors."""
    for trial in (jax_trials if method.call else torch_trials)(method, problem, lives):
        calls = {"method": trial.call, **trial.bare}
        seconds = in_turns(calls, trial.wait, rounds=rounds, least=least, queue=trial.queue)
        errors, result = {}, trial.call()
        for (name, right), found in zip(problem.expected(method.general, trial.live).items(), result, strict=False):
            got = trial.read(found)
            errors[name] = largest_error(got.T if method.transposed and name == "dW" else got, right)
        yield {"live": trial.live, "through": trial.through, "errors": errors, "rounds": seconds, **trial.memory}


def largest_error(got: Any, expected: Array) -> float:
    """The largest difference over the largest magnitude expected; NaN if a number is."""
    difference = jnp.abs(jnp.asarray(got).astype(jnp.float32) - expected)
    return float(jnp.max(difference) / jnp.max(jnp.abs(expected)))


def jax_trials(method: Method, problem: Problem, lives: list[float]) -> Iterator[Trial]:
    if problem.dtype == "float32":  # else a GPU multiplies in less
        jax.config.update("jax_default_matmul_precision", "highest")
    assert method.call is not None
    hidden, weight, labels = problem.hidden, problem.weight, problem.labels
    given = np.ascontiguousarray(weight.T) if method.transposed else weight
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (hidden, given, labels, *[problem.weights(1)] * 3)]
    program = jax.jit(method.call).lower(*shapes).compile()
    before = device_peak()  # the compiler tries products on the device
    fixed = [jnp.asarray(x) for x in (hidden, given, labels)]
    memory: dict[str, Any] = {}
    for live in lives:  # one program serves them all, so its memory is measured once
        own = [jnp.asarray(x) for x in (problem.weights(live), *problem.cotangents(method.general, live))]
        call = partial(program, *fixed, *own)
        result = jax.block_until_ready(call())
        analysis: Any = program.memory_analysis()
        compiled = None if analysis is None else analysis.temp_size_in_bytes
        memory = memory or memory_of([*fixed, *own], result, compiled, before, device_peak())
        del result
        rows = fixed[0][: live_rows(problem.tokens, live)]
        bare = bare_products(rows, jnp.asarray(weight) if method.transposed else fixed[1])
        queue = 1 if jax.default_backend() == "cpu" else 2
        yield Trial(live, "XLA", call, bare, jax.block_until_ready, jnp.asarray, queue, memory)


def device_peak() -> int | None:
    """The most bytes that the device has held so far, if it counts them."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def memory_of(arguments: Any, results: Any, compiled: int | None, before: int | None, after: int | None) -> Any:
    """Bytes, from the device's peaks before and after a call, or else the compiler's temporaries.

    Where the device held as much before the call as after it, the peak is only an upper bound.
    """
    arguments_bytes, results_bytes = (sum(x.nbytes for x in tree) for tree in (arguments, results))
    return {
        "arguments_bytes": arguments_bytes,
        "results_bytes": results_bytes,
        "compiled_temp_bytes": compiled,
        "peak_bytes": after,
        "peak_is_bound": after is not None and after == before,
        "temp_bytes": compiled if after is None else max(0, after - arguments_bytes - results_bytes),
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


def torch_trials(method: Method, problem: Problem, lives: list[float]) -> Iterator[Trial]:
    import torch  # type: ignore[import-not-found]

    gpu = torch.cuda.is_available()
    place = torch.device("cuda" if gpu else "cpu")
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[problem.dtype]
    hidden, weight = (
        torch.from_numpy(x.astype(np.float32)).to(place, dtype).requires_grad_()
        for x in (problem.hidden, problem.weight)
    )
    loss = torch_loss(method.name)

    def wait(_: Any) -> None:
        if gpu:
            torch.cuda.synchronize()

    def read(result: Any) -> np.ndarray:
        return result.float().cpu().numpy()

    for live in lives:
        chosen = np.where(problem.weights(live) != 0, problem.labels, IGNORED).astype(np.int64)
        labels = torch.from_numpy(chosen).to(place)

        def call(labels: Any = labels) -> tuple[Any, ...]:
            hidden.grad = weight.grad = None
            value = loss(hidden, weight, labels)
            value.backward()
            return value.detach(), hidden.grad, weight.grad

        if gpu:
            torch.cuda.reset_peak_memory_stats()
        results = call()
        wait(results)
        peak = torch.cuda.max_memory_allocated() if gpu else None
        memory = memory_of((hidden, weight, labels), results, None, None, peak)
        del results
        h, w = hidden.detach()[: live_rows(problem.tokens, live)], weight.detach()
        bare = {"hW": partial(torch.matmul, h, w.T)}
        g = bare["hW"]()
        bare |= {"gW": partial(torch.matmul, g, w), "gh": partial(torch.matmul, g.T, h)}
        # torch can wait only for all calls, and their results take each other's place.
        yield Trial(live, "torch", call, bare, wait, read, MOST_CALLS if gpu else 1, memory)


def in_turns(
    functions: Mapping[str, Callable[[], Any]],
    wait: Callable[[Any], Any],
    *,
    rounds: int,
    least: float,
    queue: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of a call, one figure for each round, by the host's clock; the functions take turns in every round.

    Args:
        wait: returns when what a function has returned is there.
        least: seconds that a turn takes; it has as many calls as fill them.
        queue: calls that may be under way. With two, the device goes on while the host hears of the first, so that the
            device's own time shows; more would hold more results.
    """

    def turn(function: Callable[[], Any], calls: int) -> float:
        under_way: deque[Any] = deque()
        start = clock()
        for _ in range(calls):
            under_way.append(function())
            if len(under_way) == queue:
                wait(under_way.popleft())
        for result in under_way:
            wait(result)
        return (clock() - start) / calls

    calls = {}
    for name, function in functions.items():
        turn(function, 1)
        once = max(turn(function, 1), 1e-9)
        calls[name] = max(1, min(MOST_CALLS, math.ceil(least / once)))
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            seconds[name].append(turn(function, calls[name]))
    return seconds


# --- the process


def device() -> dict[str, Any]:
    """What JAX runs on by default."""
    found = jax.devices()[0]
    return {
        "platform": found.platform,
        "kind": found.device_kind,
        "memory_bytes": (found.memory_stats() or {}).get("bytes_limit"),
        "runtime": found.client.platform_version.splitlines()[0],
    }


def main(task: dict[str, Any]) -> None:
    if task["task"] == "device":
        return child_process.answer(device())
    [method] = [method for method in methods(task["platform"]) if method.name == task["method"]]
    try:
        for figures in measure(method, Problem(**task["problem"]), task["lives"], task["rounds"], task["least"]):
            child_process.answer(figures)
    except (NotImplementedError, ValueError) as error:
        if isinstance(error, ValueError) and not str(error).startswith("impl"):
            raise
        child_process.answer({"skipped": str(error).splitlines()[0]})  # by its own words, it can't run here
    return None


if __name__ == "__main__":
    child_process.end_with_parent()
    main(json.loads(sys.argv[1]))
