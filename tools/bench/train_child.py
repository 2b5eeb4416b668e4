"""One measurement of bench_train.py, in a process of its own: what runs out of memory spoils the process that it is in.

The argument says in JSON what is measured, how, and with which settings. Lines of JSON on stdout: `progress` as it
goes, and at the end what came out, or that it ran out of memory, or one line that says what else went wrong.

The data are random tokens, in rows that are full: under SFT of documents of equal length that count as a whole, under
GRPO of the longest prompt and the longest completion. Rewards, which the host computes, are left out.
"""

import json
import os
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Int

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # a script sees only its own folder
from mllm.config.schema import Config, MeshConfig
from mllm.data.batch import Batch
from mllm.errors import UserError
from mllm.parallel.mesh import make_mesh, shard_batch
from mllm.plan.memory import memory_at_hand
from mllm.plan.programs import Programs
from mllm.rl.rollout import DecodeInputs, decoding_weights, generate
from mllm.train.step import init_state
from tools import memory
from tools.bench import train_work as work

Tell = Callable[[str], None]
Result = dict[str, Any]

NO_STOP = -1
"""A token that is never drawn: every completion is as long as it may be."""
DOCUMENTS = 4
"""In a packed row."""
QUEUED = 10
"""Calls of a short program that are waited for together, so that the host is not measured."""
ROUNDS = 5
TURNS = 8
"""Parts of a completion, of which the first is not timed."""


def main(arguments: list[str]) -> int:
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed is no event
    result = measure(json.loads(arguments[0]), lambda text: print(json.dumps({"progress": text}), file=events))
    print(json.dumps(result), file=events)
    return 0


def measure(settings: dict[str, Any], tell: Tell) -> Result:
    """What came of one measurement: its result, or `out_of_memory` or `error` with a line that says why."""
    how = dict(settings)
    what: dict[str, Callable[..., Result]] = {"device": device, "update": update, "decode": decode, "fits": fits}
    function = what[how.pop("what")]
    try:
        return function(tell=tell, **how)
    except UserError as error:
        return {"error": str(error)}
    except jax.errors.JaxRuntimeError as error:
        line = str(error).splitlines()[0]
        return {"out_of_memory" if is_out_of_memory(str(error)) else "error": line}


def is_out_of_memory(message: str) -> bool:
    """Of the device. A kernel that asks for more shared memory than there is exhausts a resource, too."""
    said = message.lower()
    return bool(re.search("resource_exhausted|out.of.memory", said)) and "shared memory" not in said


def device(*, matmul: int, copy_mib: int, tell: Tell) -> Result:
    """What the device is, and the rates that all else is held against: of a matrix product, and of a copy."""
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
        "peak_flops": work.peak(here.device_kind),
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


def update(*, config: dict[str, Any], steps: int, tell: Tell) -> Result:
    """Seconds of a step's phases, medians over `steps` of them after one that is not counted."""
    run = Config.model_validate(config)
    mesh = make_mesh(run.mesh)
    shapes = Programs(run, mesh)
    tell("compiling")
    update_program = compiled(*shapes.update())
    logprob_program = compiled(*shapes.logprob()) if run.grpo else None
    state = init_state(shapes.policy.initial_params(), shapes.optimizer)
    batch, documents = random_batch(shapes)
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
        tell(f"step {step} of {steps}" if step else "warmed up")
    rows, length = run.batch_size, shapes.length
    sizes = shapes.policy.architecture
    return {
        "rows": rows,
        "length": length,
        "micro": shapes.micro_rows,
        "masters": run.model.param_dtype,
        "attention": attention_of(shapes),
        "seconds": {phase: statistics.median(seconds[1:]) for phase, seconds in taken.items()},
        "logprob_passes": (run.grpo.num_iterations > 1) + (run.grpo.beta > 0) if run.grpo else 0,
        "counted": counted,
        "flops": work.update_flops(sizes, rows * length, counted, rows * work.visible_pairs(documents)),
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
    """As training samples: in slices of `rollout.batch_size`, with the parameters gathered and cast anew."""
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


def random_batch(shapes: Programs) -> tuple[Batch, list[int]]:
    """A batch of the largest shape, in numpy, and the lengths of a row's documents."""
    config, length = shapes.config, shapes.length
    shape = (config.batch_size, length)
    documents, counts = row_of(config, length)
    drawn = random_tokens(shapes, shape)
    place = np.concatenate([np.arange(size) for size in documents])
    segment = np.repeat(np.arange(1, len(documents) + 1), documents)
    fields = (drawn, place, segment, np.roll(drawn, -1, axis=1) * counts)
    tokens, positions, segments, labels = (np.ascontiguousarray(np.broadcast_to(x, shape), np.int32) for x in fields)
    weights = np.ascontiguousarray(np.broadcast_to(counts / (config.batch_size * counts.sum()), shape), np.float32)
    batch = Batch(tokens, positions, segments, labels, weights)
    # What the objective compares with: about what a model that knows nothing gives.
    guess = np.full(shape, -np.log(shapes.policy.architecture.vocab_size), np.float32)
    given = {"advantages": np.ones(shape, np.float32)}
    asked = shapes.batch(config.batch_size)._asdict()
    policies = {name: given.get(name, guess) for name in Batch._fields[5:] if asked[name] is not None}
    return batch._replace(**policies), documents


def row_of(config: Config, length: int) -> tuple[list[int], Bool[np.ndarray, "T"]]:
    """The lengths of a row's documents, and which tokens count: each predicts the next one of its document."""
    place = np.arange(length)
    if config.rollout is not None and config.algorithm == "grpo":
        return [length], (place >= config.rollout.max_prompt_length - 1) & (place < length - 1)
    packed = config.data is not None and config.data.packing
    ends = np.linspace(0, length, min(DOCUMENTS, length) + 1 if packed else 2).astype(int)
    return np.diff(ends).tolist(), ~np.isin(place, ends - 1)


def attention_of(shapes: Programs) -> str:
    return "xla" if shapes.model.attention is None else shapes.model.attention.kernel


def peak_bytes(mesh: Mesh) -> int | None:
    """The most that the device has held; None where it doesn't count."""
    stats = mesh.devices.flat[0].memory_stats()
    return None if stats is None else stats["peak_bytes_in_use"]


def decode(*, config: dict[str, Any], tell: Tell) -> Result:
    """Seconds of the turns of a rollout's decode loop, all rows at a time, and the bytes that they must read."""
    run = Config.model_validate(config)
    assert run.rollout is not None
    if run.rollout.max_completion_length < 3:
        raise UserError(
            "rollout.max_completion_length: decoding is timed from its second part on, which takes 3 tokens"
        )
    mesh = make_mesh(run.mesh)
    shapes = Programs(run, mesh)
    tell("compiling")
    begin, advance = compiled(*shapes.prefill()), compiled(*shapes.decode())
    weights = decoding_weights(shapes.policy.graphdef, shapes.policy.initial_params())
    rows, prompt, limit = shapes.decoded_rows, run.rollout.max_prompt_length, run.rollout.max_completion_length
    of_rows = (random_tokens(shapes, (rows, prompt)), np.full(rows, prompt, np.int32), np.arange(rows, dtype=np.int32))
    prompts, lengths, sequences = shard_batch(mesh, of_rows)
    stop = np.full(len(shapes.policy.stop_ids), NO_STOP, np.int32)
    inputs = DecodeInputs(lengths, sequences, stop, np.int32(0), np.int32(0), np.int32(0))

    prefills: list[float] = []
    for _ in range(2):
        progress: Any = None  # else its cache would be there twice
        with timed(prefills):
            progress = jax.block_until_ready(begin(weights, prompts, inputs))
    sizes, itemsize = shapes.policy.architecture, shapes.model.dtype.itemsize
    turns: list[dict[str, float]] = []
    ends = np.unique(np.linspace(1, limit, TURNS + 1).astype(int)).tolist()
    for made, until in pairwise(ends):
        seconds: list[float] = []
        with timed(seconds):
            progress = jax.block_until_ready(advance(weights, progress, inputs, np.int32(until)))
        # With m tokens made, the last of them is the query of step m; it sees the prompt and all m.
        cached = rows * sum(prompt + m for m in range(made, until))
        read = (until - made) * work.weight_bytes(sizes, itemsize) + work.cache_bytes(sizes, cached, itemsize)
        turns.append({"seconds": seconds[0], "steps": until - made, "bytes": read})
        tell(f"{until} of {limit} tokens")
    return {
        "rows": rows,
        "prompt": prompt,
        "completion": limit,
        "prefill_seconds": prefills[-1],
        "turns": turns[1:],
        "peak_bytes": peak_bytes(mesh),
    }


def fits(*, config: dict[str, Any], head: str, tell: Tell) -> Result:
    """The most that an update held, run on zeros."""
    tell("compiling")
    return {"peak_bytes": memory.at_hand(config, head, "update", measured=True).peak}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
