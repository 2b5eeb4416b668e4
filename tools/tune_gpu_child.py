"""The process in which tools/tune_gpu.py tries sizes: python -m tools.tune_gpu_child TASK. A line of JSON answers each:

    {"try": candidate}           -> {"errors": {...}, "same": bool, "seconds": {program: ...}}, or {"refusal": why}
    {"turns": [candidate, ...]}  -> {"seconds": [streaming's, and of each]}, by program, timed in turns

Data is random: logits of unit variance, and every other label beyond the vocabulary, where it hits nothing. In rows
whose label counts, and in that label's row of the weight, the label's part of a gradient hides all others; so rows
with and without one are compared apart.

After a failure on the device nothing that this process finds can be relied upon: the answer says that it is spoilt.
"""

import functools
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels.lm_head import TokenLogprobs, token_loss
from kernels.lm_head.gpu.tiles import Tiles
from tools.bench import timing as bench_timing
from tools.tune_gpu import Candidate, taken

ROUNDS = 7
LEAST = 0.05
"""Seconds of a turn."""
OPTIONS: dict[str, dict[str, Any]] = {"no workspace": {"workspace": 0}, "workspace": {}, "value": {}}

Arrays = tuple[Float[Array, "N D"], Float[Array, "V D"], Int[Array, "N"]]


class Trials:
    def __init__(self, shape: tuple[int, int, int], workspace: int, engine: str = "mosaic_gpu") -> None:
        self.arrays, self.engine = random_arrays(shape), engine
        self.options = OPTIONS | {"workspace": {"workspace": workspace}}
        self.compiled: dict[tuple[str, Candidate | None], Any] = {}
        self.right = jax.block_until_ready(self.program("no workspace", None)(*self.arrays))

    def program(self, name: str, candidate: Candidate | None) -> Any:
        """Compiled, of a candidate; None: of streaming."""
        if (name, candidate) not in self.compiled:
            options = self.options[name] | {"impl": "xla" if candidate is None else self.engine}

            def loss(hidden: Array, weight: Array, labels: Array) -> tuple[Array, TokenLogprobs]:
                return token_loss(hidden, weight, labels, lambda logprob, entropy: -logprob, **options)

            run = loss if name == "value" else jax.value_and_grad(loss, (0, 1), has_aux=True)
            jax.clear_caches()  # nothing that was traced for another
            with taken(candidate or Candidate(Tiles())):
                self.compiled[name, candidate] = jax.jit(run).lower(*self.arrays).compile()
        return self.compiled[name, candidate]

    def calls(self, candidate: Candidate | None) -> dict[str, Callable[[], Any]]:
        return {name: functools.partial(self.program(name, candidate), *self.arrays) for name in self.options}

    def try_one(self, candidate: Candidate) -> dict[str, Any]:
        """Raises whatever the compiler and the device raise."""
        calls = self.calls(candidate)
        found = {name: jax.block_until_ready(call()) for name, call in calls.items()}
        labels, vocabulary = self.arrays[2], len(self.arrays[1])
        errors = [compared(x, self.right, labels, vocabulary) for x in found.values()]
        worst = {key: max(e[key] for e in errors if key in e) for key in errors[0]}
        same = all(equal(found[name], call()) for name, call in calls.items())
        del found
        return {"errors": worst, "same": same, "seconds": medians(calls)}

    def in_turns(self, candidates: list[Candidate]) -> list[dict[str, float]]:
        """Streaming's seconds, then those of each."""
        calls = {(i, name): call for i, s in enumerate([None, *candidates]) for name, call in self.calls(s).items()}
        seconds = medians(calls)
        return [{name: seconds[i, name] for name in self.options} for i in range(1 + len(candidates))]


def medians(calls: dict[Any, Callable[[], Any]]) -> dict[Any, float]:
    found = bench_timing.in_turns(calls, jax.block_until_ready, rounds=ROUNDS, least=LEAST, queue=2)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def random_arrays(shape: tuple[int, int, int]) -> Arrays:
    tokens, features, vocabulary = shape

    @jax.jit
    def make(keys: Array) -> Arrays:
        hidden = jax.random.normal(keys[0], (tokens, features), jnp.bfloat16)
        weight = jax.random.normal(keys[1], (vocabulary, features), jnp.bfloat16) * features**-0.5
        labels = jax.random.randint(keys[2], (tokens,), 0, vocabulary)
        return hidden, weight.astype(jnp.bfloat16), jnp.where(jnp.arange(tokens) % 2 == 0, labels, vocabulary)

    found: Arrays = jax.block_until_ready(make(jax.random.split(jax.random.key(0), 3)))
    return found


def compared(found: Any, right: Any, labels: Int[Array, "N"], vocabulary: int) -> dict[str, float]:
    """The errors by name; of the value alone, without those of gradients."""
    value, gradients = found if isinstance(found[0], tuple) else (found, None)
    (loss, tokens), right_gradients = right[0], right[1]
    every = jnp.ones(labels.shape, bool)
    result = {
        "loss": relative(value[0][None, None], loss[None, None], every[:1]),
        "statistics": max(relative(a[:, None], b[:, None], every) for a, b in zip(value[1], tokens, strict=True)),
    }
    if gradients is not None:
        labelled = {"dh": labels < vocabulary, "dW": jnp.zeros(vocabulary, bool).at[labels].set(True, mode="drop")}
        for (name, rows), a, b in zip(labelled.items(), gradients, right_gradients, strict=True):
            result[name] = max(relative(a, b, rows), relative(a, b, ~rows))
    return result


def relative(found: Float[Array, "R C"], right: Float[Array, "R C"], rows: Bool[Array, "R"]) -> float:
    """The largest difference over the largest magnitude among these rows, or of their root mean squares, if more;
    infinite where something is NaN."""
    off, whole = _norms(found, right, rows)
    ratios = [0.0 if a == 0 else float(a / b) for a, b in zip(off, whole, strict=True)]
    return max(math.inf if math.isnan(x) else x for x in ratios)


@jax.jit
def _norms(found: Float[Array, "R C"], right: Float[Array, "R C"], rows: Bool[Array, "R"]) -> Any:
    found, right = (jnp.where(rows[:, None], x.astype(jnp.float32), 0) for x in (found, right))
    return [(jnp.abs(x).max(), jnp.sqrt((x**2).sum())) for x in (found - right, right)]


def equal(found: Any, again: Any) -> bool:
    return all(bool(jnp.array_equal(a, b)) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True))


def read(candidate: dict[str, Any]) -> Candidate:
    return Candidate(Tiles(**candidate["tiles"]), candidate["chunk"])


def answer(trials: Trials, request: dict[str, Any]) -> dict[str, Any]:
    try:
        if "try" in request:
            return trials.try_one(read(request["try"]))
        return {"seconds": trials.in_turns([read(candidate) for candidate in request["turns"]])}
    except Exception as error:  # of the compiler, the device, or the kernels' own making: all make it no candidate
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        return {"refusal": said[:300], "spoilt": isinstance(error, jax.errors.JaxRuntimeError)}


def main() -> None:
    task = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    trials = Trials(tuple(task["shape"]), task["workspace"])
    for line in sys.stdin:
        print(json.dumps(answer(trials, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
