"""What a plan says by arithmetic on shapes, without a compiler: its subject, seconds, other heads, better settings.

The seconds are for devices of known rates, and nothing has measured them. Assumed are prompts and completions of a
quarter of their limits on average, the longest of a rollout at its limit; decode steps at `BANDWIDTH` of the memory's
rate, which read the cache up to half of the limit; and all other phases at `FLOPS` of the rate of matrix products, of
packed rows, with half a micro-batch of padding. What the host does, rewards, evaluations and the exchange between
devices are left out.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from mllm.config.schema import Config
from mllm.model.decoding import abstract_cache
from mllm.parallel.mesh import bytes_on_device
from mllm.plan.programs import Programs

BANDWIDTH, FLOPS = 0.85, 0.4
MEAN_LENGTH = 0.25
"""The mean length over the limit."""
GAIN, NEAR = 0.1, 1.05
"""What another micro-batch must save of a step's seconds to be named; the largest is, of those so near to the best."""


def size(count: int) -> str:
    """A number of bytes, for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def subject(config: Config, shapes: Programs) -> str:
    """The line that says what is planned: algorithm, model, batch, lengths, micro-batch and steps."""
    whole, trained = (sum(x.size for x in jax.tree.leaves(x)) for x in (shapes.policy.params, shapes.state.params))
    adapters = f" ({trained:,} in adapters, which are trained)" if config.model.lora else ""
    parts = [f"{config.algorithm} of {config.model.source or 'a new model'}, {whole:,} parameters{adapters}"]
    if config.grpo and config.rollout:
        prompts = config.grpo.groups_per_rollout(config.batch_size)
        lengths = f"{config.rollout.max_prompt_length} + {config.rollout.max_completion_length} tokens at most"
        parts.append(f"rollouts of {prompts} prompts x {config.grpo.num_generations} completions, {lengths}")
    rows = shapes.rows
    parts.append(f"updates of at most {rows.total} rows of {rows.length} tokens, micro_batch_size {rows.micro}")
    parts.append(f"{config.steps} steps" if config.steps else "steps by data.epochs")
    return "; ".join(parts)


def checkpoints(config: Config, shapes: Programs) -> str:
    """The line that says what a checkpoint and all that a run keeps take on disk."""
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes.state))
    kept = config.checkpoint.keep + config.checkpoint.keep_best if config.checkpoint.every else 0
    # An older one is removed only when the new one is complete.
    return f"checkpoint: {size(nbytes)}; run_dir has up to {kept + 1} at a time, {size(nbytes * (kept + 1))}"


def other_heads(shapes: Programs, fused: int) -> str:
    """The line that compares the compiler's bytes for the head's temporaries with what other heads need."""
    rows, layout = shapes.rows, shapes.layout
    tokens = rows.micro // rows.shards * rows.length
    # The head `xla` keeps the logits of so many.
    chunk = min(tokens, 256 if layout.mesh.devices.flat[0].platform == "cpu" else 1024)
    _, weight, copy = shapes.head_operands()
    vocabulary = weight.shape[0] // layout.mesh.shape["tp"]
    gathered = 0
    if layout.mesh.shape["fsdp"] > 1:
        # The matrix in the compute dtype and, where it is trained, its gradient in float32: whole on each device.
        gathered = vocabulary * weight.shape[1] * (copy.dtype.itemsize + 4 * shapes.trains_head)
    full, chunked = (size(gathered + 4 * vocabulary * count) for count in (tokens, chunk))
    own = f"{shapes.config.head.impl or 'fused'} {size(fused)} by the compiler"
    others = f"full logits {full}, a scan over {chunk} tokens {chunked} and one product more"
    return f"head of {tokens} tokens a device: {own}; by arithmetic about: {others}"


class Seconds(NamedTuple):
    """The seconds of a rollout with its log-prob passes and all of its updates, and the number of its decode steps."""

    rollout: float
    logprob: float
    update: float
    steps: int

    @property
    def total(self) -> float:
        return self.rollout + self.logprob + self.update


class Estimate:
    """The seconds of a run on devices with these rates in flop/s and byte/s."""

    def __init__(self, shapes: Programs, flops: float, bandwidth: float) -> None:
        self.shapes, self.bandwidth = shapes, BANDWIDTH * bandwidth
        # A token is multiplied with all parameters but an embedding that is not the head, too.
        multiplied = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes.policy.params))
        multiplied -= 0 if shapes.model.head is None else math.prod(shapes.model.embed.get_value().shape)
        self.forward = 2 * multiplied / (FLOPS * flops * shapes.layout.mesh.size)
        self.weights = bytes_on_device(shapes.decoding_weights())

    def step(self, mean_length: float = MEAN_LENGTH, micro: int | None = None) -> Seconds:
        """The seconds of a step whose lengths are on average this share of their limits; SFT's rows are full."""
        config = self.shapes.config
        # Forward, the gradient of activations and that of weights, which frozen ones lack; and forward once more.
        products = 3 - (config.model.lora is not None) + (config.model.remat == "full")
        grpo, rollout = config.grpo, config.rollout
        if grpo is None or rollout is None:
            return Seconds(0.0, 0.0, products * self.passes(math.inf, micro), 0)
        limit, shards = rollout.max_completion_length, self.shapes.layout.row_shards
        sequences = grpo.steps_per_generation * config.batch_size
        prompt, completion = (mean_length * length for length in (rollout.max_prompt_length, limit))
        cache = bytes_on_device(abstract_cache(self.shapes.model, shards, 1))
        # The devices' slots, full until the last sequences wait for the longest.
        steps = max(limit, math.ceil(sequences * completion / self.shapes.slots))
        decoded = steps * self.weights + sequences / shards * completion * (prompt + limit / 2) * cache
        prefilled = self.forward * prompt * sequences / grpo.num_generations
        passes = self.passes(config.batch_size * (prompt + completion) / self.shapes.rows.length, micro)
        return Seconds(
            rollout=decoded / self.bandwidth + prefilled,
            logprob=self.shapes.logprob_passes * grpo.steps_per_generation * passes,
            update=products * grpo.updates_per_rollout * passes,
            steps=steps,
        )

    def passes(self, used: float, micro: int | None) -> float:
        """The seconds of a forward pass over so many rows, in micro-batches that read all weights and may be padded."""
        rows = self.shapes.rows
        micro = micro or rows.micro
        computed = min(rows.total, used + micro / 2)
        return computed / micro * max(self.forward * micro * rows.length, self.weights / self.bandwidth)

    def lines(self, micro_batches: Sequence[int]) -> Iterator[str]:
        """The seconds of a step, the run's hours, and a micro-batch of these that saves much, if there is one."""
        step, config = self.step(), self.shapes.config
        parts, assumed, steps = f"update {step.update:.1f} s", "40 % of the flops", config.steps or 1000
        hours = f"{steps * step.total / 3600:.2f} h"
        if config.grpo is not None:
            # A rollout and its updates.
            rollouts = steps / config.grpo.updates_per_rollout / 3600
            mean, most = (rollouts * self.step(length).total for length in (MEAN_LENGTH, 1.0))
            hours = f"{mean:.2f} h, {most:.2f} h if all lengths were at their limits"
            parts = f"rollout {step.rollout:.1f} s ({step.steps} decode steps), log-prob {step.logprob:.1f} s, {parts}"
            assumed = f"prompts and completions of a quarter of their limits, 85 % of the bandwidth, {assumed}"
        yield f"estimate of a step, never measured: {parts} ({assumed})"
        yield f"estimate of {steps} steps: {hours}; without evaluations, rewards, compiling and what devices exchange"
        updates = {micro: self.step(micro=micro).update for micro in micro_batches}
        near = [micro for micro, seconds in updates.items() if seconds <= NEAR * min(updates.values())]
        if near and step.update - updates[near[-1]] > GAIN * step.total:
            seconds = f"an update of {updates[near[-1]]:.1f} s, not {step.update:.1f}"
            yield f"micro_batch_size={near[-1]} is better by the estimate: {seconds}"


def better_meshes(config: Config, available: int, peak: int, held: int, memory: int) -> Iterator[str]:
    """Lines on meshes that use more devices, or exchange less; `held` are the bytes that fsdp divides."""
    mesh = config.mesh
    shards, used = mesh.dp * mesh.fsdp, mesh.dp * mesh.fsdp * mesh.tp
    rows: Any = [count for count in (config.batch_size, config.micro_batch_size) if count]
    factor = max(n for n in range(1, available // used + 1) if not any(count % (n * shards) for count in rows))
    if factor > 1:
        yield f"mesh.fsdp={mesh.fsdp * factor} uses {used * factor} of the {available} devices, in place of {used}"
    whole = peak + (mesh.fsdp - 1) * held
    if mesh.fsdp > 1 and whole <= memory:
        yield f"mesh.dp={shards} mesh.fsdp=1 fits, too (about {size(whole)} at most), and gathers no parameters"
