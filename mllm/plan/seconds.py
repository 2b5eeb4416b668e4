"""An estimate, which nothing has measured, of the seconds that a GRPO step takes on devices of known rates.

Assumed are prompts and completions of a quarter of their limits on average, the longest of a rollout at its limit;
decode steps at `BANDWIDTH` of the memory's rate, which read the cache up to half of the limit; and all other phases at
`FLOPS` of the rate of matrix products. What the host does, rewards and the exchange between devices are left out.
"""

import math
from typing import NamedTuple

import jax

from mllm.model.decoding import abstract_cache
from mllm.parallel.mesh import bytes_on_device
from mllm.plan.programs import Programs

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
    limit, devices = config.rollout.max_completion_length, layout.mesh.size
    rows = config.grpo.steps_per_generation * config.batch_size
    prompt, completion = (MEAN_LENGTH * length for length in (config.rollout.max_prompt_length, limit))
    # A token is multiplied with all parameters but an embedding that is not the head, too.
    multiplied = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes.policy.params))
    multiplied -= 0 if shapes.model.head is None else math.prod(shapes.model.embed.get_value().shape)
    forward = 2 * multiplied / (FLOPS * flops * devices)
    weights = bytes_on_device(shapes.decoding_weights())
    cache = bytes_on_device(abstract_cache(shapes.model, layout.row_shards, 1))
    # The devices' slots, full until the last sequences wait for the longest.
    steps = max(limit, math.ceil(rows * completion / shapes.slots))
    decoded = steps * weights + rows / layout.row_shards * completion * (prompt + limit / 2) * cache
    prefilled = forward * prompt * rows / config.grpo.num_generations
    # Forward, the gradient of activations and that of weights, which frozen ones lack; and forward once more.
    update = 3 - (config.model.lora is not None) + (config.model.remat == "full")
    passes = config.grpo.needs_old_logprobs + (config.grpo.beta > 0)
    return Seconds(
        rollout=decoded / (BANDWIDTH * bandwidth) + prefilled,
        logprob=passes * forward * rows * (prompt + completion),
        update=config.grpo.num_iterations * update * forward * rows * (prompt + completion),
        steps=steps,
    )
