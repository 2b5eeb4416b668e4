"""How many sequences can be decoded at a time in what training leaves of the devices' memory, by arithmetic on shapes.

`--plan` has the compiler check the same number of slots.
"""

import jax.numpy as jnp
from flax import nnx

from mllm.config.schema import Config
from mllm.model.decoding import abstract_cache, abstract_decoding_weights
from mllm.model.load import Policy
from mllm.parallel.mesh import bytes_on_device, device_memory
from mllm.parallel.processes import gather_objects
from mllm.rl.schedule import PREFILL_TOKENS, PREFILLED_BATCHES, most_places
from mllm.train.optimizer import make_optimizer
from mllm.train.step import abstract_state

SHARE = 0.92
"""The share of a device's memory that is given away: the rest is for fragments and what the compiler holds besides."""
LOGITS = 3
"""Arrays of a decode step's logits, in float32, that are held at a time: logits, noise, and what top-p sorts."""


def slots_that_fit(policy: Policy, config: Config, memory: int | None = None) -> int:
    """The most slots, over all devices, that the memory in bytes a device (None: that of the devices at hand) holds.

    It is at least one for each of the devices that rows are spread over. Training keeps parameters, the optimizer's
    moments, and a reference where the objective compares with one.
    """
    assert config.rollout is not None
    model = nnx.merge(policy.graphdef, policy.params)
    layout = model.layout
    if memory is None:
        memory = min(gather_objects(device_memory(layout.mesh)))  # all processes must choose the same number
    weights, shared = map(bytes_on_device, abstract_decoding_weights(model, policy.params))
    place = bytes_on_device(abstract_cache(model, layout.row_shards, 1))
    waiting = PREFILLED_BATCHES * max(PREFILL_TOKENS, config.rollout.max_prompt_length) * place
    logits = layout.abstract((layout.row_shards, model.config.vocab_size), jnp.float32, ("batch", "vocab"))
    slot = most_places(config.rollout) * place + LOGITS * bytes_on_device(logits)
    trained, frozen = policy.split(policy.params)
    state = abstract_state(trained, make_optimizer(config.optimizer, steps=1))
    kept = bytes_on_device((state.params, state.opt_state, frozen))
    kept += bytes_on_device(trained) if config.grpo and config.grpo.beta > 0 else 0
    free = SHARE * memory - kept - (weights - shared) - waiting
    return max(1, int(free // slot)) * layout.row_shards
