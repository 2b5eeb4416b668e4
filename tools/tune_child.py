"""Plans and makes the trials of tools/tune.py, in a process that it starts: python -m tools.tune_child TASK

    {"task": "plan", ...}   answers with the device, its table, and the entries to try
    {"task": "time", ...}   answers for each entry with seconds, the xla engine's seconds and errors, or with a refusal

Data is random: logits of unit variance, and every other label beyond the vocabulary, where it hits nothing. In rows
with a label that counts, and in that label's row of the weight, the label's part of a gradient hides all others; so
rows with and without one are compared apart. After a failure on the device nothing that this process finds can be
relied upon, so it ends.
"""

import dataclasses
import functools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels.lm_head import token_loss
from kernels.lm_head.contract import Inputs, Options
from kernels.lm_head.gpu import tiles as gpu_tiles
from kernels.lm_head.gpu.plan import make_plan
from kernels.lm_head.gpu.tiles import SHARED_MEMORY, Tiles, shared_memory
from kernels.lm_head.tpu import tiles as tpu_tiles
from mllm import child_process
from tools.bench import measure
from tools.tune import KINDS, ON_GPU, Entry

WORKSPACE = 640 << 20
TOLERANCE = {"loss": 1e-4, "statistics": 1e-4, "dh": 0.02, "dW": 0.02}
"""Gradients are bfloat16; leaving out a tile of 256 columns would move an lse of 12 nats by 2e-3."""
CHUNKS = (8448, 6144, 4224, 4096, 3072, 2304, 2048, 1792, 1536, 1024)
"""Columns, in the order of trials; some of them divide evenly among 132 multiprocessors."""
ROUNDS, LEAST = 7, 0.05
"""Rounds that are timed, and seconds of a turn in each of them."""

Arrays = tuple[Float[Array, "N D"], Float[Array, "V D"], Int[Array, "N"]]
Results = tuple[Float[Array, ""], Any, tuple[Array, ...]]
"""The loss, the tokens' statistics, and dh and dW (nothing for the value alone)."""


# --- what to try


def plan(shape: list[int], dtype: str, kinds: list[str], most: int | None, tiles: Any = None) -> None:
    """Answer with the device, its table, and the entries to try; with `tiles`, those that add a chunk to them."""
    platform = jax.default_backend()
    if platform not in ("tpu", "gpu"):
        sys.exit("there is no TPU or Hopper GPU here, and tile sizes are found by timing them on one")
    engine = f"mosaic_{platform}"
    try:
        jax.eval_shape(program("value", engine), *jax.eval_shape(functools.partial(random_arrays, shape, dtype)))
    except ValueError as error:
        sys.exit(f"--shape: {error}")
    if platform == "tpu":
        entries = {kind: tpu_entries(kind, shape, dtype, most or 8) for kind in kinds}
    else:
        entries = {"gpu": gpu_entries(shape, most) if tiles is None else gpu_chunks(shape, tiles)}
    table = str(Path(str(table_of(engine).__file__)).with_suffix(".json"))
    found = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "table": table, "entries": entries}
    child_process.answer(found)


def tpu_entries(kind: str, shape: Sequence[int], dtype: str, most: int) -> list[Entry]:
    """Tilings that fit the chip's VMEM: the one taken without a table, then those that move least."""
    kernel, mean, keep, _ = KINDS[kind]
    tokens, features, vocabulary = shape
    product = jnp.dtype(dtype)
    gradient = jnp.dtype(jnp.float32) if kernel == "forward" else product
    sizes: Any = (kernel, tokens, vocabulary, features, product, product, product, gradient, mean, keep)
    case = tpu_tiles.Case(*sizes)
    default, fitting = tpu_tiles.best(case, tpu_tiles.vmem()), tpu_tiles.candidates(case, tpu_tiles.vmem())
    fitting.sort(key=lambda tile: (tile != default, tpu_tiles.traffic(case, tile), -tile.step))
    about = {"device": tpu_tiles.chip(), "kernel": kernel, "mean": mean, "keep": keep, "dtype": dtype}
    return [{**about, "features": features, "tiles": dataclasses.asdict(tile)} for tile in fitting[:most]]


def gpu_entries(shape: Sequence[int], most: int | None) -> list[Entry]:
    """Tilings that fit a block's shared memory: the default, it without clusters, then by their slots and columns."""
    found = [
        Tiles(columns=columns, slots=slots, cluster=cluster)
        for columns in (256, 128)
        for cluster in (2, 1)
        if columns % (Tiles.rows * cluster) == 0
        for slots in (6, 5, 4, 3)
    ]
    found = [tiles for tiles in found if shared_memory(tiles) <= SHARED_MEMORY]
    first = [Tiles(), Tiles(cluster=1)]
    found.sort(key=lambda tiles: (tiles not in first, -tiles.slots * tiles.columns, -tiles.cluster))
    return [gpu_entry(shape, dataclasses.asdict(tiles)) for tiles in found[:most]]


def gpu_chunks(shape: Sequence[int], tiles: dict[str, int]) -> list[Entry]:
    """Entries with these tiles and a largest chunk of the vocabulary below that of the kernels' rule, largest first."""
    hidden, weight, labels = jax.eval_shape(functools.partial(random_arrays, shape, "bfloat16"))
    inputs = Inputs(hidden, weight, labels, jnp.ones(len(labels), bool), jnp.ones(()))
    with noted("mosaic_gpu", gpu_entry(shape, tiles)):
        own = make_plan(inputs, Options(None, weight.dtype, workspace=0))
    most = max(own.sizes.chunk, own.idle.chunk)
    chunks = [chunk for chunk in CHUNKS if chunk < most and chunk % tiles["columns"] == 0]
    return [{**gpu_entry(shape, tiles), "chunk": chunk} for chunk in chunks]


def gpu_entry(shape: Sequence[int], tiles: dict[str, int]) -> Entry:
    about = {"engine": "mosaic_gpu", "device": jax.devices()[0].device_kind, "features": shape[1]}
    return {**about, "shape": list(shape), "tiles": tiles}


def table_of(engine: str) -> Any:
    return gpu_tiles if engine == "mosaic_gpu" else tpu_tiles


@contextmanager
def noted(engine: str, entry: Entry) -> Iterator[None]:
    """In it, kernels are traced as if `entry` stood in the engine's table, which on a GPU has no other."""
    module = table_of(engine)
    others = [] if engine == "mosaic_gpu" else tpu_tiles.table()
    jax.clear_caches()  # nothing that was traced with another entry
    with mock.patch.object(module, "_TABLE", [entry, *others]):
        yield


# --- the trials


def time_entries(
    shape: list[int], dtype: str, kind: str, entries: list[Entry], engine: str | None = None, rounds: int = ROUNDS
) -> None:
    """Answer for each entry, in order. `engine`: by default that of the kind's platform."""
    engine = engine or ("mosaic_gpu" if kind == "gpu" else "mosaic_tpu")
    names = ON_GPU if kind == "gpu" else (KINDS[kind][3],)
    arrays = jax.block_until_ready(jax.jit(functools.partial(random_arrays, shape, dtype))())
    others = {name: compiled(name, "xla", None, arrays) for name in names}
    expected = {name: jax.block_until_ready(call()) for name, call in others.items()}
    xla_seconds = medians(others, rounds)
    for entry in entries:
        try:
            calls = {name: compiled(name, engine, entry, arrays) for name in names}
            errors = [compared(call(), expected[name], arrays) for name, call in calls.items()]
            largest = {key: max(float(found[key]) for found in errors if key in found) for key in errors[0]}
            wrong = [f"{key} {x:.1e}" for key, x in largest.items() if not x <= TOLERANCE[key]]
            if wrong or not all(same(call(), call()) for call in calls.values()):
                child_process.answer({"refusal": f"WRONG: {', '.join(wrong) or 'results move from call to call'}"})
                continue
            seconds = medians(calls, rounds)
        except Exception as error:  # the compiler's, the device's or the kernel's own: all make it no candidate
            child_process.answer({"refusal": f"{type(error).__name__}: {error}".splitlines()[0][:300]})
            if isinstance(error, jax.errors.JaxRuntimeError):
                return
            continue
        child_process.answer({"seconds": seconds, "xla_seconds": xla_seconds, "errors": largest})


def random_arrays(shape: Sequence[int], dtype: str) -> Arrays:
    tokens, features, vocabulary = shape
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (tokens, features), dtype)
    weight = (jax.random.normal(keys[1], (vocabulary, features), dtype) * features**-0.5).astype(dtype)
    labels = jax.random.randint(keys[2], (tokens,), 0, vocabulary)
    return hidden, weight, jnp.where(jnp.arange(tokens) % 2 == 0, labels, vocabulary)


def program(name: str, engine: str) -> Callable[[Array, Array, Array], Results]:
    workspace = {"no workspace": 0, "workspace": WORKSPACE}.get(name)
    bonus = 0.01 if name == "entropy" else 0.0

    def loss(hidden: Array, weight: Array, labels: Array) -> tuple[Array, Any]:
        def objective(logprob: Array, entropy: Array) -> Array:
            return -logprob - bonus * entropy if bonus else -logprob

        options: Any = {"workspace": workspace, "impl": engine}
        return token_loss(hidden, weight, labels, objective, **options)

    def call(hidden: Array, weight: Array, labels: Array) -> Results:
        if name == "value":
            return (*loss(hidden, weight, labels), ())
        (value, tokens), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, weight, labels)
        return value, tokens, gradients

    return call


def compiled(name: str, engine: str, entry: Entry | None, arrays: Arrays) -> Callable[[], Results]:
    with nullcontext() if entry is None else noted(engine, entry):
        return functools.partial(jax.jit(program(name, engine)).lower(*arrays).compile(), *arrays)


def medians(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    found = measure.in_turns(calls, jax.block_until_ready, rounds=rounds, least=LEAST, queue=2)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def compared(found: Results, expected: Results, arrays: Arrays) -> dict[str, float]:
    """The errors by name; for the value alone, without those of gradients."""
    labels, vocabulary = arrays[2], len(arrays[1])
    every = jnp.ones(labels.shape, bool)
    statistics = [relative(a[:, None], b[:, None], every) for a, b in zip(found[1], expected[1], strict=True)]
    result = {"loss": relative(found[0][None, None], expected[0][None, None], every[:1]), "statistics": max(statistics)}
    labelled = {"dh": labels < vocabulary, "dW": jnp.zeros(vocabulary, bool).at[labels].set(True, mode="drop")}
    for (name, rows), a, b in zip(labelled.items(), found[2], expected[2], strict=False):
        result[name] = max(relative(a, b, rows), relative(a, b, ~rows))
    return result


@jax.jit
def relative(found: Float[Array, "R C"], expected: Float[Array, "R C"], rows: Bool[Array, "R"]) -> Any:
    """The largest difference over the largest magnitude among these rows, or the root mean squares', if that is more;
    infinite where something is NaN."""
    found, expected = (jnp.where(rows[:, None], x.astype(jnp.float32), 0) for x in (found, expected))
    norms = [jnp.stack([jnp.abs(x).max(), jnp.sqrt((x**2).sum())]) for x in (found - expected, expected)]
    ratios = jnp.where(norms[0] == 0, 0, norms[0] / norms[1])
    return jnp.where(jnp.isnan(ratios), math.inf, ratios).max()


def same(found: Any, again: Any) -> bool:
    """Whether two results have the same bits."""
    return all(bool(jnp.array_equal(a, b)) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True))


def main(task: dict[str, Any]) -> None:
    function: Callable[..., None] = {"plan": plan, "time": time_entries}[task.pop("task")]  # type: ignore[assignment]
    function(**task)


if __name__ == "__main__":
    child_process.end_with_parent()
    main(json.loads(sys.argv[1]))
