"""Times a run's update, and its rollout's programs, by part: python tools/bench step [--config NAME] [--model HUB_ID]

The programs are those of training, with random parameters and tokens. No checkpoint and no data are read. Where
`micro_batch_size` or `model.remat` is open, the memory plan chooses. A part is a program, or a difference of two:

    forward     the embedding and all layers, with their dithered copies
    head        the head with its gradients, times the micro-batches
    backward    gradients - forward - head
    optimizer   update - gradients
    log-prob    the log-prob pass over a batch, where the run has one
    prefill     the widest batch of prompts, where the run samples
    decode      one decode step, with half of the longest sequences' tokens in each slot; on GPUs also its kernels

MFU counts 6 N operations a token, N without the embedding that is looked up but with the head; the products of causal
attention stand beside it. Operations of recomputation don't count. Noise can make a small difference negative. Leaves
out several processes, data and rewards.
"""

import re
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mllm import errors
from mllm.config import load as configs
from mllm.config.run import RunConfig
from mllm.data.batch import Batch
from mllm.model.layout import count
from mllm.plan.fit import fitted
from mllm.plan.memory import size
from mllm.plan.programs import Programs, RolloutPrograms
from mllm.plan.targets import Devices, as_jitted, find_devices, memory
from mllm.sampler.decoding import Pages
from mllm.sampler.slots import CHUNK
from mllm.stopwatch import peak_memory
from mllm.training.step import accumulate, init_state, loop
from tools.bench.frame import Seconds, in_turns, positive, table

PEAKS = {"H100": 989, "H200": 989, "TPU v5 lite": 197, "TPU v5": 459, "TPU v6 lite": 918, "TPU7x": 1154}
"""Dense bfloat16 teraflops a second by JAX's name of the device, from the vendors' data sheets."""
DOCUMENTS = 8
"""Documents in a packed row."""
KERNELS = "fusion|custom-call|copy|dot|scatter|sort|reduce|convert|transpose"
Calls = dict[str, Callable[[], Any]]


@errors.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = errors.ArgumentParser(__doc__, prog="python tools/bench step")
    default = "tiny_sft.yaml" if jax.default_backend() == "cpu" else "qwen35_0p8b_sft.yaml"
    add = parser.add_argument
    add("--config", default=default, metavar="NAME", help=f"a path, or a file in configs/ (default here {default})")
    add("--model", metavar="HUB_ID", help="the sizes of this model in place of the configuration's")
    add("--rows", type=positive(int), help="sequences in an update (batch_size)")
    add("--length", type=positive(int), help="tokens in a row (data.max_length)")
    add("--full", action="store_true", help=f"one document a row (data.packing=false); default: {DOCUMENTS}, packed")
    add("--repeats", type=positive(int), default=5, help="rounds timed, after one that is not (default 5)")
    add("overrides", nargs="*", metavar="key.sub=value", help="settings that replace the file's")
    options = parser.parse_intermixed_args(arguments)
    chosen: dict[str, Any] = {"batch_size": options.rows, "data.max_length": options.length}
    chosen |= {"data.packing": "false" if options.full else None}
    chosen |= {"model.source": options.model, "model.architecture": "null" if options.model else None}
    settings = [f"{key}={value}" for key, value in chosen.items() if value is not None]
    config = configs.load(options.config, ["model.init=random", *settings, *options.overrides])
    config, devices = find_devices(config, None)
    config, _ = fitted(config, devices)
    print(report(config, devices, options.repeats, 1 if options.full else DOCUMENTS))
    return 0


def report(config: RunConfig, devices: Devices, rounds: int, documents: int) -> str:
    """The lines about the model and its speed, and the table of the parts."""
    shapes = Programs(config, devices.mesh)
    rows, sizes, kind = shapes.shape, shapes.policy.architecture, jax.devices()[0].device_kind
    calls, account = update_calls(shapes, documents)
    kernels = 0
    if config.rollout and shapes.demands.completions:
        decoding, kernels = decode_calls(RolloutPrograms(shapes, config.rollout))
        calls |= decoding
    timed = in_turns(calls, rounds, queue=1 if jax.default_backend() == "cpu" else 2)
    times = parts(timed, rows.total // rows.micro)
    tokens, update = rows.total * rows.length, times["update"]
    parameters = count(shapes.policy.params)
    looked_up = 0 if sizes.tie_word_embeddings else sizes.vocab_size * sizes.hidden_size
    scores = len(sizes.layers_of("layers")) * sizes.num_attention_heads * sizes.head_dim * rows.length // documents
    peak = next((tera for name, tera in PEAKS.items() if name in kind), 0) * devices.mesh.size
    speeds = [6 * work * tokens / update / 1e12 for work in (parameters - looked_up, scores)]
    shares = [f"{speed:.3g} TFLOP/s{f', {speed / peak:.1%} of the peak' if peak else ''}" for speed in speeds]
    model = f"{config.model.source or 'a new model'}, {parameters:,} parameters, {config.model.dtype}"
    lines = [
        f"{config.algorithm} of {model}, remat {config.model.remat}; {kind}, jax {jax.__version__}",
        f"{rows.total} rows of {rows.length} tokens, {documents} documents each, {rows.micro} rows at a time",
        f"{tokens / update:,.0f} tokens/s; MFU by 6 N: {shares[0]}; attention beside it: {shares[1]}",
        f"memory: update {size(account)} by the compiler, peak of all parts {size(peak_memory())}\n",
    ]
    shown = [[part, f"{1e3 * time:.2f}", f"{time / update:.2f}"] for part, time in times.items()]
    shown[-1].append(str(kernels or ""))  # decode is the last
    return "\n".join(lines) + table(("part", "ms", "/update", "kernels"), shown)


def parts(seconds: Seconds, micro_batches: int) -> dict[str, float]:
    """The seconds of each part: medians over the rounds, also of differences."""
    rounds = {name: [time / CHUNK if name == "decode" else time for time in seconds[name]] for name in seconds}
    gradients = rounds.pop("gradients")
    rounds["head"] = [micro_batches * time for time in rounds["head"]]
    before = zip(gradients, rounds["forward"], rounds["head"], strict=True)
    rounds["backward"] = [whole - forward - head for whole, forward, head in before]
    rounds["optimizer"] = [update - whole for update, whole in zip(rounds["update"], gradients, strict=True)]
    order = ("update", "forward", "head", "backward", "optimizer")
    return {name: statistics.median(rounds[name]) for name in (*order, *(x for x in rounds if x not in order))}


def filled(tree: Any, value: float = 1) -> Any:
    """Arrays of these shapes, dtypes and shardings."""
    return jax.tree.map(lambda x: jnp.full(x.shape, value, x.dtype, device=x.sharding), tree)


def update_calls(shapes: Programs, documents: int) -> tuple[Calls, int]:
    """The calls of the update, its parts and the log-prob pass; and the bytes of the update."""
    policy, forward, micro_rows = shapes.policy, shapes.forward, shapes.shape.micro
    function, (_, like, _, *teacher) = shapes.update()
    params = policy.initial_params()
    trained, frozen = policy.split(params)
    length, batch = like.tokens.shape[1], filled(like)
    place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), like.tokens.shape)
    tokens = jax.random.randint(jax.random.key(0), place.shape, 0, policy.architecture.vocab_size, jnp.int32)
    each = -(-length // documents)
    arrays = tokens, place % each, place // each + 1, jnp.roll(tokens, -1, 1), batch.weights / tokens.size
    placed = [jax.device_put(x, y.sharding) for x, y in zip(arrays, like[:5], strict=True)]
    batch = Batch._make([*placed, batch.inputs])
    scored = [shapes.teacher.initial_params()] if shapes.teacher and teacher else []
    state = init_state(jax.tree.map(jnp.copy, trained), shapes.optimizer)
    update = as_jitted(function).lower(state, batch, frozen, *scored).compile()

    def run_update() -> Any:
        nonlocal state
        state, metrics = update(state, batch, frozen, *scored)
        return metrics

    @jax.jit
    def run_forward(params: Any, batch: Batch) -> Any:
        sums = lambda _, micro: (None, forward.states(params, micro).hidden.astype(jnp.float32).sum(-1))  # noqa: E731
        return loop(sums, None, jnp.zeros(batch.tokens.shape), batch, micro_rows)[1]

    @jax.jit
    def gradients(trained: Any, batch: Batch, frozen: Any, *teacher: Any) -> Any:
        loss = lambda trained, micro: forward.loss(policy.join(trained, frozen), micro, *teacher)  # noqa: E731
        return accumulate(loss, trained, batch, micro_rows)

    head, (hidden, weight, copy, micro, *of_teacher) = shapes.head_of_update()
    micro = jax.tree.map(lambda x, y: jax.device_put(x[:micro_rows], y.sharding), batch, micro)
    arguments = *filled((hidden, weight, copy), 0.02), micro, *filled(of_teacher, 0.02)
    calls: Calls = {"update": run_update, "gradients": partial(gradients, trained, batch, frozen, *scored)}
    calls |= {"forward": partial(run_forward, params, batch), "head": partial(jax.jit(head), *arguments)}
    if shapes.demands.passes:
        calls["log-prob"] = partial(shapes.logprob()[0], params, batch._replace(inputs=None))
    return calls, memory(update).peak


def decode_calls(rollouts: RolloutPrograms) -> tuple[Calls, int]:
    """The calls of the prefill and of a chunk of decode steps; and a step's kernels, 0 except on GPUs."""
    longest, size = rollouts.rollout.total_length, rollouts.cache()[0].keys.shape[2]
    prefill, (_, *prompts) = rollouts.prefill()
    function, (weights, tail, states, cache, pages, slots, stream, stop_after) = rollouts.decode()
    program = as_jitted(function).lower(weights, tail, states, cache, pages, slots, stream, stop_after).compile()

    def half_full(like: Pages) -> Pages:
        """Each row's pages for half of the longest sequence's tokens."""
        rows = rollouts.slots // rollouts.shards
        turn, row = jnp.divmod(jnp.arange(like.rows.size // rollouts.shards), rows)
        of_row = jnp.arange(rows)[:, None] + rows * jnp.arange(like.of_row.shape[1])
        of_row = jnp.where((of_row < row.size) & (of_row // rows * size < longest // 2), of_row, row.size)
        arrays = jnp.where(turn * size < longest // 2, row, -1), turn * size, of_row
        stacked = (jnp.concatenate([x] * rollouts.shards).astype(jnp.int32) for x in arrays)
        return Pages(*(jax.device_put(x, y.sharding) for x, y in zip(stacked, like, strict=True)))

    occupied = filled(slots)._replace(lengths=filled(slots.lengths, longest // 2), limits=filled(slots.limits, longest))
    flow = filled(stream, 0)._replace(stop_ids=filled(stream.stop_ids, -1))
    given = filled(cache), tuple(map(half_full, pages)), occupied, flow, filled(stop_after, 2**30)
    used, kept = filled(weights), filled((tail, states))

    def run_decode() -> Any:
        nonlocal kept
        *drawn, tail, states = program(used, *kept, *given)
        kept = tail, states
        return drawn

    kernels = kernels_of_loop(program.as_text() or "") if jax.default_backend() == "gpu" else 0
    calls: Calls = {"prefill": partial(prefill, rollouts.policy.initial_params(), *filled(prompts))}
    return calls | {"decode": run_decode}, kernels


def kernels_of_loop(text: str) -> int:
    """The kernels in the body of the loop of a GPU's program, with all branches of its conditionals."""
    bodies = dict(re.findall(r"^(?:ENTRY )?%?(\S+) \([^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))

    def launched(name: str) -> int:
        inner = re.findall(r"(?:body|true_computation|false_computation)=%([\w.-]+)", bodies[name])
        return len(re.findall(rf" (?:{KERNELS})\(", bodies[name])) + sum(map(launched, inner))

    first = re.search(r"^ENTRY .*? while\([^\n]*body=%([\w.-]+)", text, re.MULTILINE | re.DOTALL)
    return launched(first[1]) if first else 0
