"""An estimate, which nothing has measured, of the seconds that a GRPO step takes on devices of known rates.

Assumed are prompts and completions of a quarter of their limits on average, the lengths of completions geometric;
decode steps at `BANDWIDTH` of the memory's rate; and all other phases at `FLOPS` of the rate of matrix products. What
the host does, rewards and the exchange between devices are left out.
"""

import math
from typing import NamedTuple

import jax

from mllm.config.grpo import RolloutConfig
from mllm.model.decoding import abstract_cache
from mllm.parallel.mesh import bytes_on_device
from mllm.plan.programs import Programs
from mllm.rl.schedule import bucket, places_for, slot_buckets
from mllm.rl.slots import CHUNK

BANDWIDTH, FLOPS = 0.85, 0.4
MEAN_LENGTH = 0.25
"""The mean length over the limit."""

ASSUMED = "prompts and completions of a quarter of their limits, 85 % of the bandwidth, 40 % of the flops"


class Seconds(NamedTuple):
    """The seconds of a rollout with its log-prob passes and all of its updates, and the number of its decode steps."""

    rollout: float
    logprob: float
    update: float
    steps: int


def estimate(shapes: Programs, flops: float, bandwidth: float) -> Seconds:
    """The estimate for a GRPO run on devices with these rates in flop/s and byte/s."""
    config, layout = shapes.config, shapes.layout
    assert config.grpo is not None
    assert config.rollout is not None
    rows, devices = config.grpo.steps_per_generation * config.batch_size, layout.mesh.size
    prompt = MEAN_LENGTH * config.rollout.max_prompt_length
    lengths = geometric_lengths(-(-rows // layout.row_shards), config.rollout.max_completion_length)
    tokens = rows * (prompt + sum(lengths) / len(lengths))
    forward = 2 * multiplied_parameters(shapes) / (FLOPS * flops * devices)
    weights = bytes_on_device(shapes.decoding_weights())
    cache = bytes_on_device(abstract_cache(shapes.model, layout.row_shards, 1))
    steps = decode_steps(lengths, shapes.slots // layout.row_shards, int(prompt), config.rollout)
    decoded = sum(count * (weights + slots * places * cache) for count, slots, places in steps)
    prefilled = forward * prompt * rows / config.grpo.num_generations
    # Forward, the gradient of activations and that of weights, which frozen ones lack; and forward once more.
    update = 3 - (config.model.lora is not None) + (config.model.remat == "full")
    passes = config.grpo.needs_old_logprobs + (config.grpo.beta > 0)
    return Seconds(
        rollout=decoded / (BANDWIDTH * bandwidth) + prefilled,
        logprob=passes * forward * tokens,
        update=config.grpo.num_iterations * update * forward * tokens,
        steps=sum(count for count, _, _ in steps),
    )


def multiplied_parameters(shapes: Programs) -> int:
    """How many parameters a token is multiplied with: all but an embedding that is not the head, too."""
    model = shapes.model
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes.policy.params))
    return count - (0 if model.head is None else math.prod(model.embed.get_value().shape))


def geometric_lengths(rows: int, limit: int) -> list[int]:
    """The lengths of so many completions: evenly spaced quantiles of a geometric distribution, cut at the limit."""
    mean = MEAN_LENGTH * limit
    return [min(limit, math.ceil(-mean * math.log(1 - (row + 0.5) / rows))) for row in range(rows)]


def decode_steps(lengths: list[int], slots: int, prompt: int, options: RolloutConfig) -> list[tuple[int, int, int]]:
    """The decode steps of a device as the engine makes them: how many, in how many slots and places."""
    # A stride without a common divisor mixes long and short ones.
    stride = next(n for n in range(len(lengths) * 5 // 8 + 1, 2 * len(lengths) + 2) if math.gcd(n, len(lengths)) == 1)
    waiting = [lengths[row * stride % len(lengths)] for row in range(len(lengths))]
    live: list[tuple[int, int]] = []
    found = []
    buckets = slot_buckets(min(slots, len(lengths)))
    while waiting or live:
        while waiting and len(live) < buckets[-1]:
            live.append((0, waiting.pop()))
        longest = prompt + max(done for done, _ in live)
        found.append((CHUNK, bucket(len(live), buckets), places_for(longest, options)))
        live = [(done + CHUNK, length) for done, length in live if done + CHUNK < length]
    return found
