"""Makes one measurement of `python tools/bench train`: what runs out of memory spoils the process that it is in.

The argument says in JSON what is measured, and with which settings; the figures are a line of JSON on stdout. The data
are random tokens, in rows that are full: for SFT one document that counts as a whole, for GRPO the longest prompt and
the longest completion. Rewards, which the host computes, are left out.

Model flops are counted as in PaLM's appendix B (arXiv:2204.02311): 6 for each parameter of a matrix product and token,
2 forward and 4 backward, and the same of attention's two products; nothing for what remat computes again. The count
is lower than PaLM's in two places: attention's products count only where the mask lets a query see a key (PaLM: T for
each token), and the head's only for tokens that the loss counts. Embedding lookups, norms, biases, softmaxes and the
optimizer are not counted.

A decode step reads each parameter once, except that it reads only rows of an embedding that is not the head; and keys
and values of the tokens so far. Left out: what it writes, activations, and slots of the cache that are still empty.
"""

import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from mllm import child_process
from mllm.config.schema import Config, MeshConfig
from mllm.data.batch import Batch
from mllm.errors import UserError
from mllm.model.architecture import Qwen2Config
from mllm.parallel.mesh import make_mesh, shard_batch
from mllm.plan.memory import memory_at_hand
from mllm.plan.programs import Programs
from mllm.rl.rollout import DecodeInputs, decoding_weights, generate
from mllm.train.step import init_state

Result = dict[str, Any]

PEAKS = (
    ("H100 PCIe", 756.5e12),
    ("H100 NVL", 835.5e12),
    ("H100", 989.4e12),
    ("H200 NVL", 835.5e12),
    ("H200", 989.4e12),
    ("A100", 312e12),
)
"""Parts of a device's kind, and bfloat16 flop/s without sparsity by NVIDIA's data sheets; the first match counts."""
NO_STOP = -1
"""A token that is never sampled, so that every completion is as long as it may be."""
QUEUED = 10
"""Calls of a short program that are waited for together, so that the host is not measured."""
ROUNDS = 5
TURNS = 8
"""Parts of a completion; the first is not timed."""


def main(settings: dict[str, Any]) -> None:
    child_process.end_with_parent()
    try:
        child_process.answer(measure(settings))
    except UserError as error:
        sys.exit(str(error))


def measure(settings: dict[str, Any]) -> Result:
    """The figures of one measurement."""
    options = dict(settings)
    functions: dict[str, Callable[..., Result]] = {"device": device, "update": update, "decode": decode}
    return functions[options.pop("what")](**options)


# --- work by arithmetic


def data_sheet_peak(kind: str) -> float | None:
    """Flop/s by the data sheet; None for a device that isn't listed."""
    return next((rate for name, rate in PEAKS if name in kind), None)


def layer_products(config: Qwen2Config) -> int:
    """Parameters of the matrices of all layers."""
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    attention = config.hidden_size * (2 * queries + 2 * keys)
    return config.num_hidden_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def update_flops(config: Qwen2Config, rows: int, length: int, counted: int) -> int:
    """Flops of the forward and backward passes over rows of one document each, with `counted` tokens in the loss."""
    head = config.vocab_size * config.hidden_size
    products = 6 * (layer_products(config) * rows * length + head * counted)
    # Two products of head_dim multiplications and additions for each query, key that it sees, and attention head.
    pairs = rows * length * (length + 1) // 2
    return products + 3 * 2 * 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs


def weight_bytes(config: Qwen2Config, itemsize: int) -> int:
    """Bytes of the parameters that a decode step reads."""
    hidden, heads = config.hidden_size, config.num_attention_heads + 2 * config.num_key_value_heads
    vectors = config.num_hidden_layers * (2 * hidden + heads * config.head_dim) + hidden
    return itemsize * (layer_products(config) + vectors + config.vocab_size * hidden)


def cache_bytes(config: Qwen2Config, tokens: int, itemsize: int) -> int:
    """Bytes of the keys and values of this number of tokens."""
    return itemsize * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens


# --- the measurements


def device(*, matmul: int, copy_mib: int) -> Result:
    """What the device is, and the rates that everything else is compared with: of a matrix product, and of a copy."""
    mesh = make_mesh(MeshConfig())
    here = mesh.devices.flat[0]
    left, right = jax.random.normal(jax.random.key(0), (2, matmul, matmul), jnp.bfloat16)
    multiplied = seconds_a_call(jax.jit(jnp.matmul), left, right)
    # A bare copy might be left out, or made by something that no program's kernels use.
    copied = seconds_a_call(jax.jit(lambda x: x + 1), jnp.zeros(copy_mib * 2**18, jnp.float32))
    return {
        "kind": here.device_kind,
        "platform": here.platform,
        "jax": jax.__version__,
        "memory": memory_at_hand(mesh),
        "peak_flops": data_sheet_peak(here.device_kind),
        "matmul": matmul,
        "matmul_flops": 2 * matmul**3 / multiplied,
        "copy_bytes": 2 * copy_mib * 2**20 / copied,
    }


def seconds_a_call(program: Callable[..., jax.Array], *arguments: jax.Array) -> float:
    jax.block_until_ready(program(*arguments))
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(QUEUED):
            result = program(*arguments)
        jax.block_until_ready(result)
        rounds.append((time.perf_counter() - start) / QUEUED)
    return statistics.median(rounds)


def update(*, config: dict[str, Any], steps: int) -> Result:
    """Seconds of a step's phases, medians over `steps` of them after one that is not counted."""
    run = Config.model_validate(config)
    mesh = make_mesh(run.mesh)
    shapes = Programs(run, mesh)
    update_program = compiled(*shapes.update())
    logprob_program = compiled(*shapes.logprob()) if run.grpo else None
    state = init_state(shapes.policy.initial_params(), shapes.optimizer)
    batch = random_batch(shapes)
    counted = int(np.count_nonzero(batch.weights))
    batch = shard_batch(mesh, batch)

    taken: dict[str, list[float]] = defaultdict(list)
    for step in range(steps + 1):
        if logprob_program is not None:
            with timed(taken["rollout"]):
                roll_out(shapes, state.params, step)
            with timed(taken["logprob"]):
                ours = batch._replace(old_logprobs=None, reference_logprobs=None)
                jax.block_until_ready(logprob_program(state.params, ours))
        with timed(taken["update"]):
            state, metrics = update_program(state, batch)
            jax.block_until_ready((state, metrics))
        if metrics["skipped"]:
            raise UserError("the update was skipped: the loss or a gradient is not finite")
    rows, length = run.batch_size, shapes.length
    sizes = shapes.policy.architecture
    attention = shapes.model.attention
    return {
        "rows": rows,
        "length": length,
        "micro": shapes.micro_rows,
        "attention": "xla" if attention is None else attention.kernel,
        "seconds": {phase: statistics.median(seconds[1:]) for phase, seconds in taken.items()},
        "logprob_passes": (run.grpo.num_iterations > 1) + (run.grpo.beta > 0) if run.grpo else 0,
        "counted": counted,
        "flops": update_flops(sizes, rows, length, counted),
        "peak_bytes": peak_bytes(mesh),
    }


def compiled(function: Any, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
    return function.trace(*arguments).lower().compile()


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - start)


def roll_out(shapes: Programs, params: Any, step: int) -> None:
    """Sample as training does: in slices of `rollout.batch_size`, with the parameters gathered and cast anew."""
    options = shapes.config.rollout
    assert options is not None
    generate(
        shapes.policy.graphdef,
        params,
        random_tokens(shapes, (shapes.config.batch_size, options.max_prompt_length)).tolist(),
        options=options,
        stop_ids=(NO_STOP,),
        pad_id=0,
        seed=0,
        step=step,
    )


def random_tokens(shapes: Programs, shape: tuple[int, int]) -> Int[np.ndarray, "B T"]:
    return np.random.default_rng(0).integers(1, shapes.policy.architecture.vocab_size, shape, dtype=np.int32)


def random_batch(shapes: Programs) -> Batch:
    """A batch of the largest shape, in numpy; each token predicts the next one."""
    config, length = shapes.config, shapes.length
    shape = (config.batch_size, length)
    tokens, place = random_tokens(shapes, shape), np.arange(length)
    first = config.rollout.max_prompt_length - 1 if config.rollout is not None and config.grpo is not None else 0
    counts = (place >= first) & (place < length - 1)

    def each_row(values: Any, dtype: Any = np.int32) -> np.ndarray:
        return np.ascontiguousarray(np.broadcast_to(values, shape), dtype)

    labels = np.ascontiguousarray(np.roll(tokens, -1, axis=1) * counts, np.int32)
    weights = each_row(counts / (config.batch_size * counts.sum()), np.float32)
    batch = Batch(tokens, each_row(place), each_row(1), labels, weights)
    # Log-probabilities under other policies: about those of a model that knows nothing.
    guess = np.full(shape, -np.log(shapes.policy.architecture.vocab_size), np.float32)
    known = {"advantages": np.ones(shape, np.float32)}
    needed = shapes.batch(config.batch_size)._asdict()
    return batch._replace(**{name: known.get(name, guess) for name in Batch._fields[5:] if needed[name] is not None})


def peak_bytes(mesh: Mesh) -> int | None:
    """The most that the device has held; None where it doesn't count."""
    stats = mesh.devices.flat[0].memory_stats()
    return None if stats is None else stats["peak_bytes_in_use"]


def decode(*, config: dict[str, Any]) -> Result:
    """Seconds of the parts of a rollout's decode loop, all rows at a time, and the bytes that they must read."""
    run = Config.model_validate(config)
    assert run.rollout is not None
    if run.rollout.max_completion_length < 3:
        raise UserError(
            "rollout.max_completion_length: decoding is timed from its second part on, which takes 3 tokens"
        )
    mesh = make_mesh(run.mesh)
    shapes = Programs(run, mesh)
    prefill, decode_until = compiled(*shapes.prefill()), compiled(*shapes.decode())
    weights = decoding_weights(shapes.policy.graphdef, shapes.policy.initial_params())
    rows, prompt, limit = shapes.decoded_rows, run.rollout.max_prompt_length, run.rollout.max_completion_length
    per_row = (random_tokens(shapes, (rows, prompt)), np.full(rows, prompt, np.int32), np.arange(rows, dtype=np.int32))
    prompts, lengths, sequences = shard_batch(mesh, per_row)
    stop = np.full(len(shapes.policy.stop_ids), NO_STOP, np.int32)
    inputs = DecodeInputs(lengths, sequences, stop, np.int32(0), np.int32(0), np.int32(0))

    prefills: list[float] = []
    for _ in range(2):
        state: Any = None  # else its cache would be there twice
        with timed(prefills):
            state = jax.block_until_ready(prefill(weights, prompts, inputs))
    sizes, itemsize = shapes.policy.architecture, shapes.model.dtype.itemsize
    turns: list[dict[str, float]] = []
    ends = np.unique(np.linspace(1, limit, TURNS + 1).astype(int)).tolist()
    for made, until in pairwise(ends):
        seconds: list[float] = []
        with timed(seconds):
            state = jax.block_until_ready(decode_until(weights, state, inputs, np.int32(until)))
        # With m tokens made, the last of them is the query of step m; it sees the prompt and all m.
        cached = rows * sum(prompt + m for m in range(made, until))
        read = (until - made) * weight_bytes(sizes, itemsize) + cache_bytes(sizes, cached, itemsize)
        turns.append({"seconds": seconds[0], "steps": until - made, "bytes": read})
    return {
        "rows": rows,
        "prompt": prompt,
        "completion": limit,
        "prefill_seconds": prefills[-1],
        "turns": turns[1:],
        "peak_bytes": peak_bytes(mesh),
    }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
