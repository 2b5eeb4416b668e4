"""Measures one method of the head's benchmark, in a process that tools/bench/head.py or tools/tune.py starts.

It answers with figures at each share of rows that count. Inputs are random: logits are normal with unit variance, and
the rows that count are at random places. A method is compiled once; for each share it is timed in turns with the bare
products h Wᵀ, g W and gᵀ h of as many rows as count, where g has the shape and the dtype of logits; then its result is
compared with plain JAX in float64 (float32 on TPUs).

Temporaries are the compiler's figure.

Another process lists for tools/tune.py the tiles of the kernels that fit this device; a method is traced with some.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lm_head.gpu import tiles as gpu
from lm_head.tpu import tiles as tpu
from tools.bench.frame import Figures, Shape, answer, in_turns
from tools.bench.methods import Method, methods

CHUNK = 256
"""Tokens that the reference takes at a time."""
SEED = 0
TPU_KERNELS: dict[str, tuple[Any, bool, bool, str]] = {
    "statistics": ("forward", False, False, "value only"),
    "mean": ("forward", True, False, "workspace 0"),
    "kept": ("forward", True, True, "workspace for all tokens"),
    "dh": ("hidden", False, False, "with entropy"),
    "dW": ("weight", False, False, "workspace 0"),
}
"""For each kernel: whose tiles it has, whether it sums p W, whether it keeps exponentials, and a way that runs it."""
GPU_CHUNKS = (8448, 6144, 4096, 3072, 2304, 2048, 1792, 1536, 1024)
"""Columns; some of them divide evenly among 132 multiprocessors."""


# --- the inputs, and what is right


@dataclass(frozen=True)
class Problem:
    """Inputs of a given shape; the same ones in every process."""

    shape: Shape
    dtype: str

    @cached_property
    def fixed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Hidden states [N, D] and weight [V, D], whose products have unit variance, and labels [N]."""
        rng, (tokens, features, vocabulary) = np.random.default_rng(SEED), self.shape
        sizes = (tokens, features), (vocabulary, features)
        hidden, weight = (rng.standard_normal(x, np.float32) * np.float32(features**-0.25) for x in sizes)
        labels = rng.integers(0, vocabulary, tokens, dtype=np.int32)
        return hidden.astype(self.dtype), weight.astype(self.dtype), labels

    def per_token(self, general: bool, live: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Weights [N], 1 at the rows that count; and cotangents of logprob and lse, random or the cross-entropy's."""
        rng, tokens = np.random.default_rng([SEED, 1]), self.shape[0]
        weights = (rng.permutation(tokens) < live_rows(tokens, live)).astype(np.float32)
        slopes = rng.standard_normal((2, tokens), np.float32) if general else np.array([[-1], [0]], np.float32)
        by_logprob, by_lse = weights * slopes
        return weights, by_logprob, by_lse

    def expected(self, general: bool, live: float) -> list[Array]:
        """Plain JAX's results in float32: the sum of what the cotangents weigh, dh and dW.

        The tests' oracle, in NumPy, would take hours at the sizes that are timed.
        """
        with jax.enable_x64(jax.default_backend() != "tpu"):
            hidden, weight, labels = map(jnp.asarray, self.fixed)
            slopes = map(jnp.asarray, self.per_token(general, live)[1:])
            value, gradients = _plain(hidden.astype(float), weight.astype(float), labels, *slopes)
            return [x.astype(jnp.float32) for x in (value, *gradients)]


def live_rows(tokens: int, live: float) -> int:
    """The number of rows that count."""
    return max(1, round(live * tokens))


@jax.jit
@partial(jax.value_and_grad, argnums=(0, 1))
def _plain(hidden: Array, weight: Array, labels: Array, by_logprob: Array, by_lse: Array) -> Array:
    """Sum of logprob and lse, each times its cotangent, from the logits of a row at a time."""

    @jax.checkpoint
    def of_row(row: tuple[Array, ...]) -> Array:
        hidden, label, by_logprob, by_lse = row
        logits = jnp.matmul(weight, hidden, precision="highest")
        lse = jax.nn.logsumexp(logits)
        return by_logprob * (logits[label] - lse) + by_lse * lse

    return jnp.sum(jax.lax.map(of_row, (hidden, labels, by_logprob, by_lse), batch_size=CHUNK))


# --- a method's program


class Program:
    """A method, compiled."""

    def __init__(self, method: Method, problem: Problem) -> None:
        if problem.dtype == "float32":  # else a GPU multiplies in less
            jax.config.update("jax_default_matmul_precision", "highest")
        self.method, self.problem = method, problem
        self.queue = 1 if jax.default_backend() == "cpu" else 2  # calls that may be under way while it is timed
        hidden, weight, labels = problem.fixed
        arguments = (hidden, np.ascontiguousarray(weight.T) if method.transposed else weight, labels)
        self.program = jax.jit(method.call).lower(*arguments, *problem.per_token(False, 1)).compile()
        self.fixed = [jnp.asarray(x) for x in arguments]

    def call(self, live: float) -> Callable[[], tuple[Any, ...]]:
        """The method at this share of rows that count."""
        return partial(self.program, *self.fixed, *map(jnp.asarray, self.problem.per_token(self.method.general, live)))

    def temporaries(self) -> int:
        """Bytes that a call takes beside arguments and results."""
        analysis: Any = self.program.memory_analysis()
        return analysis.temp_size_in_bytes

    def bare(self, rows: int) -> dict[str, Callable[[], Any]]:
        """The products h Wᵀ, g W and gᵀ h of so many rows, where g is the result of the first."""
        h, w = self.fixed[0][:rows], jnp.asarray(self.problem.fixed[1])
        hw, gw, gh = jax.jit(lambda h, w: h @ w.T), jax.jit(lambda g, w: g @ w), jax.jit(lambda g, h: g.T @ h)
        g = hw(h, w)
        return {"hW": partial(hw, h, w), "gW": partial(gw, g, w), "gh": partial(gh, g, h)}


# --- tiles


def tilings(task: Figures) -> Iterator[Figures]:
    """For a shape, at most so many tilings of a TPU's kernels that fit, all of a GPU's; nothing on other devices."""
    platform = jax.default_backend()
    if platform == "gpu":
        blocks = [(256, 2), (256, 1), (128, 1)]  # columns of a tile, and a cluster's blocks, which divide them
        tiles = [gpu.Tiles(columns=c, slots=s, cluster=n) for c, n in blocks for s in (6, 5, 4, 3)]
        tiles = sorted((x for x in tiles if gpu.shared_memory(x) <= gpu.SHARED_MEMORY), key=lambda x: x != gpu.Tiles())
        listed = [{"columns": x.columns, "slots": x.slots, "cluster": x.cluster, "chunk": 2048} for x in tiles]
        listed += [{**listed[0], "chunk": chunk} for chunk in GPU_CHUNKS if chunk != 2048]
        yield {"impl": "mosaic_gpu", "kernel": "loss", "way": "workspace 0", "tilings": listed}
    tokens, features, vocabulary = task["shape"]
    narrow, wide = jnp.dtype("bfloat16"), jnp.dtype("float32")
    for name, (kernel, mean, keep, way) in TPU_KERNELS.items() if platform == "tpu" else ():
        gradient = wide if kernel == "forward" else narrow
        case = tpu.Case(kernel, tokens, vocabulary, features, narrow, narrow, narrow, gradient, mean, keep)
        best = tpu.candidates(case, tpu.vmem())[: task["most"]]
        listed = [{"kernel": kernel, "rows": x.rows, "columns": x.columns, "step": x.step} for x in best]
        yield {"impl": "mosaic_tpu", "kernel": name, "way": way, "tilings": listed}


def traced_with(tiles: Figures) -> AbstractContextManager[None]:
    """Within the context, programs are traced with one of these tilings."""
    if "rows" in tiles:
        return tpu.override(**tiles)
    return gpu.override(gpu.Sizes(gpu.Tiles(**{x: tiles[x] for x in tiles if x != "chunk"}), tiles["chunk"]))


# --- the process


def main(task: Figures) -> Iterator[Figures]:
    """The figures of the method that a task names; without one the tilings for its shape, or what JAX runs on.

    A method's figures, at each share of rows that count, are seconds of each round, temporaries in bytes and errors.
    """
    if "most" in task:
        yield from tilings(task)
        return
    if "method" not in task:
        device = jax.devices()[0]
        figures = {"platform": device.platform, "kind": device.device_kind}
        yield figures | {"devices": jax.device_count(), "jax": jax.__version__}
        return
    [method] = [method for method in methods(jax.default_backend()) if method.name == task["method"]]
    problem = Problem(tuple(task["shape"]), task["dtype"])
    with traced_with(task["tiles"]) if "tiles" in task else nullcontext():
        program = Program(method, problem)
    for live in task["lives"]:
        rows, call = live_rows(problem.shape[0], live), program.call(live)
        calls = {"method": call, **program.bare(rows)}
        turns = {"rounds": task["rounds"], "least": task["least"], "queue": program.queue}
        seconds = in_turns(calls, jax.block_until_ready, **turns)
        results = [jnp.asarray(result) for result in call()]
        if method.transposed:
            results[2] = results[2].T
        errors = []  # the largest difference over the largest magnitude expected; NaN if a number is
        for result, expected in zip(results, problem.expected(method.general, live), strict=False):
            difference = jnp.abs(jnp.asarray(result).astype(jnp.float32) - expected)
            errors.append(float(jnp.max(difference) / jnp.max(jnp.abs(expected))))
        yield {"live": live, "rounds": seconds, "temp_bytes": program.temporaries(), "errors": errors}


if __name__ == "__main__":
    answer(main)
