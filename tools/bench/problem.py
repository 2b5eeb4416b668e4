"""What the bench measures its methods on: shapes by name, random inputs from a seed, and the answer in float32.

Inputs and answer lie in files, so that every method, through whatever library, gets the same ones: normal logits of
unit variance, random labels, rows that count at random places, and random cotangents for the general backward. The
answer is found in float32 at the highest precision, some tokens at a time, so that it fits wherever the weight does.
The files lie where TMPDIR says: 9 GB for three shares at 8192 tokens of Qwen2.5-3B, 21 GB at the largest shape.

With a `peak` they are rather as a trained model has them: a word's logit falls with its rank, as Zipf's law has it, the
frequent words are the vocabulary's first, as in a tokenizer's order of merges, labels follow the ranks, and a hidden
state points to its label by as much as `peak` says, some more and some less.
"""

import argparse
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tools.bench.head_losses import CHUNK

VOCABULARY = 151936
MODELS = {"0.5B": 896, "3B": 2048, "7B": 3584}
"""Hidden sizes of Qwen2.5."""
TOKENS = tuple(1024 << i for i in range(7))
BLOCK = 4096
"""Rows of an input that one thread makes."""
ZIPF, NOISE, VARIES = 1.2, 1.5, 0.3
"""With a peak: the exponent of ranks; standard deviations of hidden states beside it, and of the peak itself."""

Shape = tuple[int, int, int]
"""Tokens, hidden size, vocabulary."""

PRESETS: dict[str, list[Shape]] = {
    "hopper": [
        (tokens, MODELS[model], VOCABULARY)
        for tokens, model in dict.fromkeys(
            [(8192, "3B"), (8192, "7B"), (8192, "0.5B"), (32768, "3B"), (1024, "3B"), (65536, "3B")]
            + [(tokens, model) for model in ("3B", "7B", "0.5B") for tokens in TOKENS]
        )
    ]
}
"""Lists of shapes, what matters most first: a run may be cut off."""


def shapes_of(text: str) -> list[Shape]:
    """For argparse: N,D,V or N,MODEL is one shape, MODEL alone those of 1024 to 65536 tokens."""
    head, _, tail = text.rpartition(",")
    if tail in MODELS:
        return [shape for n in ([head] if head else TOKENS) for shape in shapes_of(f"{n},{MODELS[tail]},{VOCABULARY}")]
    try:
        tokens, features, vocabulary = map(int, text.split(","))
    except ValueError:
        ways = f"three whole numbers; nor N,MODEL nor MODEL, of {', '.join(MODELS)}"
        raise argparse.ArgumentTypeError(f"{text!r} is not N,D,V: {ways}") from None
    if min(tokens, features, vocabulary) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a size below 1")
    if max(tokens, features, vocabulary) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} has a size that is no index of 32 bits")
    if tokens > CHUNK and tokens % CHUNK:
        raise argparse.ArgumentTypeError(f"{text!r}: more than {CHUNK} tokens must be a multiple of {CHUNK}")
    return [(tokens, features, vocabulary)]


class Problem(NamedTuple):
    shape: Shape
    dtype: str
    seed: int
    folder: str
    """Of the files, which `write_inputs` and `write_answer` leave there."""
    peak: float = 0.0
    """How far above the others a label's logit is; 0: no further, and all logits are normal."""

    @property
    def inputs(self) -> dict[str, tuple[Path, tuple[int, int], float]]:
        """Of weight and hidden states the file, the shape and the standard deviation."""
        tokens, features, vocabulary = self.shape
        folder = Path(self.folder)
        return {
            "weight": (folder / f"weight_{vocabulary}_{features}.npy", (vocabulary, features), features**-0.5),
            "hidden": (
                folder / f"hidden_{tokens}_{features}_{vocabulary}.npy",
                (tokens, features),
                NOISE if self.peak else 1.0,
            ),
        }

    def live_rows(self, live: float) -> int:
        return max(1, round(live * self.shape[0]))

    def labels(self) -> Int[np.ndarray, "N"]:
        random, (tokens, _, vocabulary) = np.random.default_rng([self.seed, 2]), self.shape
        if self.peak:  # an order of magnitude of ranks is as frequent as the next
            return np.minimum(vocabulary ** random.random(tokens), vocabulary - 1).astype(np.int32)
        return random.integers(0, vocabulary, tokens, dtype=np.int32)

    def weights(self, live: float) -> Float[np.ndarray, "N"]:
        """1 at the rows that count, else 0."""
        place = np.random.default_rng([self.seed, 3]).permutation(self.shape[0])
        return (place < self.live_rows(live)).astype(np.float32)

    def cotangents(self, general: bool, live: float) -> Float[np.ndarray, "2 N"]:
        """Of logprob and lse: random for the general backward, else those of the cross-entropy."""
        shape = (2, self.shape[0])
        normal = np.random.default_rng([self.seed, 4]).standard_normal(shape, np.float32)
        return self.weights(live) * (normal if general else np.array([[-1], [0]], np.float32))

    def read(self, name: str) -> np.ndarray:
        """`hidden` or `weight`; bfloat16 by numpy's extension."""
        raw = np.load(self.inputs[name][0])
        return raw.view(jnp.bfloat16) if self.dtype == "bfloat16" else raw

    def answer(self, general: bool, live: float) -> dict[str, Path]:
        """Files of logprob and lse [2, N], dh and dW."""
        folder = Path(self.folder) / "_".join(map(str, (*self.shape, "general" if general else "loss", live)))
        return {name: folder / f"{name}.npy" for name in ("value", "dh", "dW")}

    def expected(self, general: bool, live: float) -> dict[str, np.ndarray]:
        """The answer: the value (a loss, or for the general backward logprob and lse), dh and dW, read as needed."""
        found = {name: np.load(path, mmap_mode="r") for name, path in self.answer(general, live).items()}
        weights = self.weights(live)
        value = found["value"] * weights
        return found | {"value": value if general else -value[0].sum(dtype=np.float64).astype(np.float32)}


def write_inputs(problem: Problem) -> None:
    for part, name in enumerate(problem.inputs):
        if not problem.inputs[name][0].exists():
            _write(problem, name, [problem.seed, part])


def _write(problem: Problem, name: str, seed: list[int]) -> None:
    path, shape, scale = problem.inputs[name]
    stored = np.dtype(np.uint16 if problem.dtype == "bfloat16" else np.float32)
    file = np.lib.format.open_memmap(path, "w+", stored, shape)

    def fill(first: int) -> None:
        rows = file[first : first + BLOCK]
        random = np.random.default_rng([*seed, first // BLOCK])
        numbers = random.standard_normal(rows.shape, np.float32) * np.float32(scale)
        if problem.peak and name == "weight":
            numbers[:, 0] = -ZIPF * np.log(np.arange(first, first + len(rows)) + 1)
        elif problem.peak:
            height = problem.peak * (1 + VARIES * random.standard_normal((len(rows), 1), np.float32))
            numbers += height * problem.read("weight")[problem.labels()[first : first + BLOCK]].astype(np.float32)
            numbers[:, 0] = 1
        rows[...] = numbers.astype(problem.dtype).view(stored)

    with ThreadPoolExecutor() as pool:
        list(pool.map(fill, range(0, shape[0], BLOCK)))


def write_answer(problem: Problem, general: bool, live: float, hidden: Array, weight: Array, labels: Array) -> float:
    """The mean, over tokens, of the largest probability."""
    largest, *found = _answer(hidden, weight, labels, *problem.cotangents(general, live))
    for path, array in zip(problem.answer(general, live).values(), found, strict=True):
        path.parent.mkdir(exist_ok=True)
        np.save(path, np.asarray(array))
    return float(largest)


@jax.jit
def _answer(hidden: Array, weight: Array, labels: Array, by_logprob: Array, by_lse: Array) -> tuple[Array, ...]:
    """The mean largest probability, logprob and lse [2, N], and the gradients under these cotangents, in float32."""

    def total(hidden: Array, weight: Array) -> tuple[Array, Array]:
        @jax.checkpoint
        def step(total: Array, rows: tuple[Array, ...]) -> tuple[Array, Array]:
            h, label, by_logprob, by_lse = rows
            logits = jnp.matmul(h, weight.T, precision="highest")
            lse = jax.nn.logsumexp(logits, axis=1)
            logprob = jnp.take_along_axis(logits, label[:, None], axis=1)[:, 0] - lse
            largest = jnp.exp(logits.max(1) - lse)
            return total + jnp.sum(by_logprob * logprob + by_lse * lse), jnp.stack([largest, logprob, lse])

        rows = (x.reshape(-1, min(CHUNK, len(hidden)), *x.shape[1:]) for x in (hidden, labels, by_logprob, by_lse))
        sums, values = jax.lax.scan(step, jnp.float32(0), tuple(rows))
        return sums, jnp.moveaxis(values, 1, 0).reshape(3, -1)

    wide = hidden.astype(jnp.float32), weight.astype(jnp.float32)
    (dh, dw), (largest, *values) = jax.grad(total, (0, 1), has_aux=True)(*wide)
    return largest.mean(), jnp.stack(values), dh, dw


def largest_error(got: Any, expected: np.ndarray, compare: Callable[[Any, np.ndarray], tuple[float, float]]) -> float:
    """The largest difference over the largest magnitude expected; NaN if one is.

    Args:
        compare: both, of a part of the rows; some at a time, so that it takes little memory.
    """
    rows = max(1, 2**24 // max(1, expected[0].size)) if expected.ndim else 0
    edges = [*range(0, len(expected), rows), len(expected)] if rows else []
    parts = [compare(got[start:end], expected[start:end]) for start, end in itertools.pairwise(edges)]
    differences, magnitudes = zip(*parts or [compare(got, expected)], strict=True)
    return float(np.max(differences) / np.max(magnitudes))
