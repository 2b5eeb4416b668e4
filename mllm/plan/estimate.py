"""What a plan says by arithmetic on shapes, without a compiler: its subject, seconds, other heads, better settings.

The seconds are for devices of known rates, and nothing has measured them. Assumed are prompts and completions of a
quarter of their limits on average, the longest of a rollout at its limit; decode steps at `BANDWIDTH` of the memory's
rate, which read the cache up to half of the limit; and all other phases at `FLOPS` of the rate of matrix products, of
packed rows, with half a micro-batch of padding. What the host does, rewards, evaluations and the exchange between
devices are left out.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
from flax import nnx

from kernels.lm_head import chunked_logits
from mllm.model.layout import count
from mllm.model.load import Policy
from mllm.parallel.mesh import bytes_on_device
from mllm.plan.programs import Programs
from mllm.sampler.decoding import abstract_cache
from mllm.sampler.schedule import MEAN_LENGTH

BANDWIDTH, FLOPS = 0.85, 0.4


def size(count: int) -> str:
    """A number of bytes, for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def subject(shapes: Programs) -> Iterator[str]:
    """The lines that say what is planned and what its checkpoints take on disk."""
    config, rows, state = shapes.config, shapes.rows, shapes.state
    whole, trained = count(shapes.policy.params), count(state.params)
    adapters = f" ({trained:,} in adapters, which are trained)" if config.model.lora else ""
    yield f"{config.algorithm} of {config.model.source or 'a new model'}, {whole:,} parameters{adapters}"
    if config.teacher and shapes.teacher:
        yield f"teacher: {config.teacher.source}, {count(shapes.teacher.params):,} parameters in {config.teacher.dtype}"
    rollout, batch = config.rollout, f"batch_size {config.batch_size}"
    if config.grpo and rollout:
        limits = f"{rollout.max_prompt_length} + {rollout.total_length - rollout.max_prompt_length}"
        batch += f", {config.grpo.num_generations} completions a prompt, {limits} tokens at most"
    steps = f"{config.steps} steps" if config.steps else "steps by data.epochs"
    yield f"{batch}; micro_batch_size {rows.micro}, rows of {rows.length} tokens; {steps}"
    nbytes, settings = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)), config.checkpoint
    # An older one is removed only when the new one is complete.
    most = 1 + (settings.keep + settings.keep_best if settings.every else 0)
    yield f"checkpoint: {size(nbytes)}; run_dir has up to {most} at a time, {size(nbytes * most)}"


def other_heads(shapes: Programs, fused: int) -> str:
    """The line that compares the compiler's bytes for the head's temporaries with what other heads need."""
    rows, mesh, lora = shapes.rows, shapes.mesh.shape, shapes.policy.lora
    tokens = rows.micro // rows.shards * rows.length
    _, weight, copy = shapes.head_states()
    vocabulary, gathered = weight.shape[0] // mesh["tp"], 0
    if mesh["fsdp"] > 1:
        # Each device has the whole matrix in the compute dtype and, if it is trained, its gradient in float32.
        trained = lora is None or "head" in lora.targets
        gathered = vocabulary * weight.shape[1] * (copy.dtype.itemsize + 4 * trained)
    if shapes.config.teacher_in_update:  # both models' logits are compared
        _, theirs, narrow = shapes.head_states(shapes.teacher)
        gathered += theirs.size // mesh["tp"] * narrow.dtype.itemsize * (mesh["fsdp"] > 1)
        vocabulary += theirs.shape[0] // mesh["tp"]
    chunk = chunked_logits.most_rows(shapes.mesh.devices.flat[0].platform)
    full, chunked = (size(gathered + 4 * vocabulary * count) for count in (tokens, min(tokens, chunk)))
    own = f"{shapes.config.head.impl or 'fused'} {size(fused)} by the compiler"
    return f"head for {tokens} tokens a device: {own}; chunks of {chunk} about {chunked}, full logits about {full}"


class Seconds(NamedTuple):
    """The seconds of a rollout with its log-prob passes and all of its updates, and the number of its decode steps."""

    rollout: float
    logprob: float
    update: float
    steps: int


def estimate(shapes: Programs, flops: float, bandwidth: float, micro: int | None = None) -> Seconds:
    """The estimate for devices with these rates in flop/s and byte/s and this micro-batch; SFT's rows are full."""
    config, layout, rows = shapes.config, shapes.layout, shapes.rows
    grpo, rollout, micro = config.grpo, config.rollout, micro or rows.micro
    forward, scoring = (
        2 * (multiplied(policy) if policy else 0) / (FLOPS * flops * layout.mesh.size)
        for policy in (shapes.policy, shapes.teacher)
    )
    weights, bandwidth = bytes_on_device(shapes.decoding_weights()[0]), BANDWIDTH * bandwidth
    # Each micro-batch reads all weights.
    row = max(forward * rows.length, weights / bandwidth / micro)
    # Forward, the gradient of activations and that of weights, which frozen ones lack; and forward once more.
    update: float = 3 - (config.model.lora is not None) + (config.model.remat == "full")
    scoring = scoring / forward  # of a teacher, in forward passes of the policy
    if config.teacher_in_update:
        update, scoring = update + scoring, 0.0
    if grpo is None or rollout is None:
        # Under KTO the mismatched completions go through the log-prob pass, in as many rows.
        passes = 1 if config.dpo and config.dpo.form == "labelled" else 0
        return Seconds(0.0, passes * rows.total * row, update * rows.total * row, 0)
    limit, sequences = rollout.total_length - rollout.max_prompt_length, grpo.updates_per_generation * config.batch_size
    prompt, completion = (MEAN_LENGTH * length for length in (rollout.max_prompt_length, limit))
    seen, shards = int(prompt + limit / 2), layout.row_shards
    counts = [shards * min(seen, kind.window or seen) for kind in shapes.model.config.kinds]
    cache = bytes_on_device(abstract_cache(shapes.model, counts, 1))
    # The devices' slots, full until the last sequences wait for the longest.
    steps = max(limit, math.ceil(sequences * completion / shapes.slots))
    decoded = steps * weights + sequences / shards * completion * cache
    prefilled = forward * prompt * sequences / grpo.num_generations
    computed = min(rows.total, config.batch_size * (prompt + completion) / rows.length + micro / 2) * row
    passes = (0 if config.teacher_in_update else grpo.passes) + grpo.updates_per_generation * scoring
    updates = update * grpo.updates_per_rollout * computed
    return Seconds(decoded / bandwidth + prefilled, passes * computed, updates, steps)


def multiplied(policy: Policy) -> int:
    """The parameters that a token is multiplied with: all but an embedding that is not the head, too."""
    model = nnx.merge(policy.graphdef, policy.params)
    return count(policy.params) - (0 if model.head is None else math.prod(model.embed.get_value().shape))


def estimates(shapes: Programs, rates: tuple[float, float], micro_batches: Sequence[int]) -> Iterator[str]:
    """Lines on a step's seconds, the run's hours, and the largest of the best micro-batches, if it saves a tenth."""
    step, config = estimate(shapes, *rates), shapes.config
    total, steps = step.rollout + step.logprob + step.update, config.steps or 1000
    parts, assumed = f"update {step.update:.1f} s", f"{FLOPS:.0%} of the flops"
    if config.grpo is not None:
        parts = f"rollout {step.rollout:.1f} s ({step.steps} decode steps), log-prob {step.logprob:.1f} s, {parts}"
        assumed = f"prompts and completions of a quarter of their limits, {BANDWIDTH:.0%} of the bandwidth, {assumed}"
    elif step.logprob:
        parts = f"log-prob {step.logprob:.1f} s, {parts}"
    yield f"estimate of a step, never measured: {parts} ({assumed})"
    hours = steps / (config.grpo.updates_per_rollout if config.grpo else 1) * total / 3600
    yield f"estimate of {steps} steps: {hours:.2f} h, without evaluations, rewards, compiling and exchange"
    updates = {micro: estimate(shapes, *rates, micro).update for micro in micro_batches}
    best = max(micro for micro, update in updates.items() if update <= 1.05 * min(updates.values()))
    if step.update - updates[best] > total / 10:
        yield f"micro_batch_size={best} is better by the estimate: update {updates[best]:.1f} s, not {step.update:.1f}"


def better_meshes(shapes: Programs, available: int, peak: int, held: int, memory: int) -> Iterator[str]:
    """Lines on meshes that use more devices, or exchange less; `held` are the bytes that fsdp divides."""
    config, mesh, hidden = shapes.config, shapes.config.mesh, shapes.policy.architecture.hidden_size
    shards, used, micro = mesh.dp * mesh.fsdp, shapes.mesh.size, config.micro_batch_size or config.batch_size
    divided = math.gcd(config.batch_size // shards, micro // shards, hidden // mesh.fsdp)
    factor = max(n for n in range(1, available // used + 1) if divided % n == 0)
    if factor > 1:
        yield f"mesh.fsdp={mesh.fsdp * factor} uses {used * factor} of the {available} devices, in place of {used}"
    whole = peak + (mesh.fsdp - 1) * held
    if mesh.fsdp > 1 and whole <= memory:
        yield f"mesh.dp={shards} mesh.fsdp=1 fits, too (about {size(whole)} at most), and gathers no parameters"
