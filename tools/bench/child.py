"""The process that tools/bench/head.py starts for one method at one shape: python -m tools.bench_child TASK FILE.

The task is JSON, and so is what comes into the file. A method is compiled and run once, for its memory; its result is
compared with the answer in float32; then it is timed in turns with the bare products h Wᵀ, g W and gᵀ h of as many rows
as count, g being random. One program serves all shares of rows that count, so its memory is measured once.

Memory is the device's own count where it has one (`peak_bytes_in_use`), else, as on CPUs, the compiler's temporaries.

Other tasks: what device this is, and files of inputs and answers. A process that dies has left its reason on stderr and
in the file what it had by then.
"""

import functools
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tools.bench import methods as bench_methods
from tools.bench import timing as bench_timing
from tools.bench import torch_methods as bench_torch
from tools.bench.methods import Method
from tools.bench.problem import Problem, Shape, largest_error, write_answer, write_inputs


def device() -> dict[str, Any]:
    """What JAX runs on by default."""
    found = jax.devices()[0]
    memory = found.memory_stats() or {}
    return {
        "platform": found.platform,
        "kind": found.device_kind,
        "memory_bytes": memory.get("bytes_limit"),
        "runtime": found.client.platform_version.splitlines()[0],
    }


def prepare(problem: Problem, lives: list[float], methods: list[Method]) -> dict[str, Any]:
    """Leaves the files; tells by name what can't run here, and why, and how peaked the inputs are."""
    obstacles = {method.name: bench_methods.obstacle(method, problem) for method in methods}
    able = [method for method in methods if obstacles[method.name] is None]
    write_inputs(problem)
    arrays = [jnp.asarray(x) for x in (problem.read("hidden"), problem.read("weight"), problem.labels())]
    largest = None
    for general in {method.general for method in able}:
        for live in lives:
            largest = write_answer(problem, general, live, *arrays)
    return {
        "obstacles": {name: reason for name, reason in obstacles.items() if reason is not None},
        "largest_probability": largest,
    }


def measure(
    method: Method, problem: Problem, lives: list[float], rounds: int, least: float
) -> Iterator[dict[str, Any]]:
    """A method's figures at each share of rows that count, in JAX."""
    hidden, weight = (problem.read(name) for name in ("hidden", "weight"))
    given = weight.T if method.transposed else weight
    by_token = [problem.labels(), *[problem.weights(1)] * 3]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (hidden, given, *by_token)]
    assert method.call is not None
    program = jax.jit(method.call).lower(*shapes).compile()
    before = peak()  # the compiler tries products on the device
    fixed = [jnp.asarray(x) for x in (hidden, np.ascontiguousarray(given), by_token[0])]
    memory: dict[str, Any] = {}
    for live in lives:
        own = [jnp.asarray(x) for x in (problem.weights(live), *problem.cotangents(method.general, live))]
        arguments = [*fixed, *own]
        result = jax.block_until_ready(program(*arguments))
        memory = memory or memory_of(program, arguments, result, before)
        errors = errors_of(method, result, problem.expected(method.general, live))
        del result
        calls = {"method": functools.partial(program, *arguments)}
        bare = fixed[0][: problem.live_rows(live)], jnp.asarray(weight) if method.transposed else fixed[1]
        seconds = timed(calls, *bare, rounds, least)
        yield {"live": live, "through": "XLA", "errors": errors, "rounds": seconds, **memory}


def timed(
    calls: Mapping[str, Callable[[], Any]], hidden: Array, weight: Array, rounds: int, least: float
) -> dict[str, list[float]]:
    queue = 1 if jax.default_backend() == "cpu" else 2
    together = {**calls, **bare_products(hidden, weight)}
    return bench_timing.in_turns(together, jax.block_until_ready, rounds=rounds, least=least, queue=queue)


def peak() -> int | None:
    """The most bytes that the device has held so far, if it counts them."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def memory_of(program: jax.stages.Compiled, arguments: Any, result: Any, before: int | None) -> dict[str, Any]:
    """Bytes. Where the compiler, before the run, held as much as the run, the peak is no more than a bound."""
    arguments_bytes, results_bytes = (sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (arguments, result))
    analysis: Any = program.memory_analysis()
    temporaries = None if analysis is None else analysis.temp_size_in_bytes
    found = {"arguments_bytes": arguments_bytes, "results_bytes": results_bytes, "compiled_temp_bytes": temporaries}
    after = peak()
    if after is None or before is None:
        return {**found, "peak_bytes": None, "peak_is_bound": False, "temp_bytes": temporaries}
    temporaries = max(0, after - arguments_bytes - results_bytes)
    return {**found, "peak_bytes": after, "peak_is_bound": after == before, "temp_bytes": temporaries}


def errors_of(method: Method, result: tuple[Array, ...], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """By the names of the answer; of what the method gives."""
    errors = {}
    for name, got in zip(expected, result, strict=False):
        errors[name] = largest_error(got.T if method.transposed and name == "dW" else got, expected[name], compare)
    return errors


def compare(got: Array, expected: np.ndarray) -> tuple[float, float]:
    wide = jnp.asarray(expected)
    return float(jnp.max(jnp.abs(got.astype(jnp.float32) - wide))), float(jnp.max(jnp.abs(wide)))


def bare_products(hidden: Float[Array, "R D"], weight: Float[Array, "V D"]) -> dict[str, Callable[[], Array]]:
    """Compiled, with random slopes g [R, V] in the arrays' dtype, which is the results' too."""
    slopes = random_slopes(len(hidden), len(weight), hidden.dtype)
    products: dict[str, tuple[Callable[[Array, Array], Array], Array, Array]] = {
        "hW": (lambda h, w: h @ w.T, hidden, weight),
        "gW": (lambda g, w: g @ w, slopes, weight),
        "gh": (lambda g, h: g.T @ h, slopes, hidden),
    }
    return {
        name: functools.partial(jax.jit(call).lower(a, b).compile(), a, b) for name, (call, a, b) in products.items()
    }


def random_slopes(rows: int, columns: int, dtype: Any) -> Float[Array, "R V"]:
    """Made a block at a time, so that it takes no more memory than it has."""
    block = math.gcd(rows, 256)
    keys = jax.random.split(jax.random.key(0), rows // block)
    make = jax.jit(lambda keys: jax.lax.map(lambda key: jax.random.normal(key, (block, columns), dtype), keys))
    return make(keys).reshape(rows, columns)


def main(task: dict[str, Any], file: Path) -> None:
    if task["task"] == "device":
        return write(file, device())
    shape: Shape = tuple(task["shape"])
    problem = Problem(shape, task["dtype"], task["seed"], task["folder"], task["peak"])
    methods = [method for method in bench_methods.methods(task["platform"]) if method.name in task["methods"]]
    if task["task"] == "prepare":
        return write(file, prepare(problem, task["lives"], methods))
    if problem.dtype == "float32":  # else a GPU multiplies in less
        jax.config.update("jax_default_matmul_precision", "highest")
    (method,) = methods
    run = measure if method.call else bench_torch.measure
    found = []
    for figures in run(method, problem, task["lives"], task["rounds"], task["least"]):
        found.append(figures)
        write(file, found)
    return None


def write(file: Path, content: Any) -> None:
    draft = file.with_suffix(".part")
    draft.write_text(json.dumps(content))
    draft.replace(file)


def end_with_parent() -> None:
    """Wait until there is no one any more who could write to stdin: an orphan would keep the device."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
