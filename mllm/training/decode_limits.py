"""The limits of decoding beside training, by arithmetic on shapes; `--plan` checks them with the compiler."""

import jax.numpy as jnp
from flax import nnx

from mllm.config.model import OptimizerConfig
from mllm.config.rollout import RolloutConfig
from mllm.model.load import Policy
from mllm.parallel.mesh import bytes_on_device, device_memory
from mllm.parallel.processes import gather_objects
from mllm.sampler.decoding import abstract_cache, abstract_decoding_weights
from mllm.sampler.pages import page_size
from mllm.sampler.schedule import (
    LOGITS,
    MEAN_LENGTH,
    PIECE,
    PREFILL_TOKENS,
    PREFILLED_BATCHES,
    PREFILLED_STATES,
    DecodeLimits,
    pool_pages,
)
from mllm.sampler.slots import CHUNK
from mllm.sampler.states import abstract_states
from mllm.training.optimizer import make_optimizer
from mllm.training.step import abstract_state

SHARE = 0.92
"""The share of a device's memory that programs may use; fragments and the compiler need the rest."""


def fitting_limits(
    policy: Policy,
    rollout: RolloutConfig,
    optimizer: OptimizerConfig,
    holds_reference: bool,
    memory: int | None = None,
    teacher: Policy | None = None,
) -> DecodeLimits:
    """The limits of decoding beside training in `memory` bytes a device; None: the memory of the devices at hand.

    The number of slots assumes `MEAN_LENGTH` of the longest sequence's tokens per slot. Training keeps parameters, the
    optimizer's moments, and, if the objective needs them, a teacher and a reference.
    """
    model = nnx.merge(policy.graphdef, policy.params)
    layout = model.layout
    if memory is None:
        memory = min(gather_objects(device_memory(layout.mesh)))  # all processes must choose the same number
    weights, shared = map(bytes_on_device, abstract_decoding_weights(model, policy.params, rollout.weights == "int8"))
    shards, longest, size = layout.row_shards, rollout.total_length, page_size(rollout.total_length)
    most = pool_pages(model, rollout, shards)
    entry = bytes_on_device(abstract_cache(model, [shards] * len(most), 1))
    state = bytes_on_device(abstract_states(model, shards))
    waiting = PREFILLED_BATCHES * (max(PREFILL_TOKENS, longest) * entry + PREFILLED_STATES * state)
    logits = layout.abstract((shards, model.config.vocab_size), jnp.float32, ("batch", "vocab"))
    windows = [0 if kind.window is None else count for kind, count in zip(model.config.kinds, most, strict=True)]
    fixed = LOGITS * bytes_on_device(logits) + CHUNK * entry + bytes_on_device(abstract_cache(model, windows, size))
    fixed += state
    token = bytes_on_device(abstract_cache(model, [shards * (kind.window is None) for kind in model.config.kinds], 1))
    if rollout.turns > 1:  # an answer's scores and their exponentials, and its own keys and values
        scores = (shards, 2 * PIECE * model.config.num_attention_heads)
        token += bytes_on_device(layout.abstract(scores, jnp.float32, ("batch", "heads")))
        fixed += PIECE * entry + state
    trained, frozen = policy.split(policy.params)
    training = abstract_state(trained, make_optimizer(optimizer, steps=1))
    kept = bytes_on_device((training.params, training.opt_state, frozen))
    kept += bytes_on_device(trained) if holds_reference else 0
    kept += bytes_on_device(teacher.params) if teacher else 0
    free = SHARE * memory - kept - (weights - shared) - waiting
    slots = max(1, int(free // (fixed + MEAN_LENGTH * longest * token)))
    return DecodeLimits(slots * shards, max(longest + size, int((free - slots * fixed) // max(token, 1))) * shards)
