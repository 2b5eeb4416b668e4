"""Sizes of a rollout: how prompts are assigned to devices, the few batches and caches for which programs are compiled,
and, by arithmetic on shapes, how many sequences fit beside training; `--plan` has the compiler check that number.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mllm.config.grpo import GrpoConfig, RolloutConfig
from mllm.config.model import OptimizerConfig
from mllm.data.batch import SIZES, bucket
from mllm.model.decoder import Decoder
from mllm.model.decoding import abstract_cache, abstract_decoding_weights
from mllm.model.load import Policy
from mllm.parallel.mesh import bytes_on_device, device_memory
from mllm.parallel.processes import gather_objects
from mllm.rl.pages import page_size
from mllm.rl.slots import CHUNK
from mllm.train.optimizer import make_optimizer
from mllm.train.step import abstract_state

PREFILL_TOKENS = 4096
"""The most tokens, padding included, that a device prefills at a time."""
PREFILLED_BATCHES = 2
"""The most batches of prompts whose keys and values wait for slots."""
MEAN_LENGTH = 0.25
"""The mean length of sequences over their limit, as it is assumed until the pages are full."""
PIECE = 32
"""The most tokens of an answer that are prefilled at a time: their scores with the whole pool are in memory."""
WIDTHS = [8, *SIZES]
"""Widths of batches of prompts."""
SHARE = 0.92
"""The share of a device's memory that is given away: the rest is for fragments and what the compiler holds besides."""
LOGITS = 3
"""Arrays of a decode step's logits, in float32, that are held at a time: logits, noise, and what top-p sorts."""


class Room(NamedTuple):
    """How much is decoded at a time over all devices, which share it evenly."""

    slots: int
    """Sequences, at least one on each device."""
    tokens: int | None = None
    """Their tokens, those in the pages that they have begun to fill included; None: as many as they may have."""


def assign_prompts(prompts: Sequence[Sequence[int]], shards: int) -> list[deque[list[int]]]:
    """Each shard's distinct prompts, in order of their lengths, as the sequences (places in `prompts`) that have one.

    A shard has at most ceil(B / shards) sequences; a prompt whose sequences don't fit into one is assigned to several.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for sequence, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt), []).append(sequence)
    most, queues = -(-len(prompts) // shards), [deque[list[int]]() for _ in range(shards)]
    loads = [0] * shards
    for _, sequences in sorted(groups.items(), key=lambda group: len(group[0])):
        while sequences:
            shard = loads.index(min(loads))
            room = most - loads[shard]
            assigned, sequences = sequences[:room], sequences[room:]
            queues[shard].append(assigned)
            loads[shard] += len(assigned)
    return queues


def window_pages(window: int, size: int) -> int:
    """The most pages of a window's tokens: they, and those of three chunks, begin and end within pages."""
    return -(-(window + 3 * CHUNK) // size) + 1


def pool_pages(model: Decoder, options: RolloutConfig, slots: int, tokens: int | None = None) -> list[int]:
    """The pages of each kind of layers for so many slots, which have so many tokens together; None: the most."""
    longest, size = options.total_length, page_size(options.total_length)
    whole = slots * -(-longest // size) if tokens is None else min(slots * -(-longest // size), tokens // size)
    windows = (kind.window for kind in model.config.kinds)
    return [whole if window is None else min(whole, slots * window_pages(window, size)) for window in windows]


def slot_buckets(most: int, vocabulary: int, weights: int) -> list[int]:
    """The numbers of slots that a shard may have: the most; its half and its quarter, too, where rows cost time.

    They do on CPUs. Elsewhere a step takes as long as its bytes: empty rows cost less than more programs where the
    logits of all have less than an eighth of the weights' bytes, which are `weights`.
    """
    free = jax.default_backend() != "cpu" and 8 * LOGITS * 4 * vocabulary * most < weights
    return sorted({-(-most // 2**power) for power in range(1 if free else 3)})


def prompts_a_batch(needed: int, width: int) -> int:
    """How many prompts of this width a device prefills at a time: a power of two, so that little is compiled."""
    return max(1, min(1 << max(needed - 1, 0).bit_length(), PREFILL_TOKENS // width))


def round_size(missing: int, whole: int, shards: int) -> int:
    """How many prompts a round of dynamic sampling draws, where `missing` of a rollout's `whole` are missing.

    It is the whole, a half or a quarter; the latter two only where the devices' `shards` of rows divide them.
    """
    sizes = (-(-whole // parts) for parts in (4, 2))
    return bucket(missing, [*(size for size in sizes if size % shards == 0), whole])


def room_that_fits(
    policy: Policy,
    rollout: RolloutConfig,
    optimizer: OptimizerConfig,
    grpo: GrpoConfig | None,
    memory: int | None = None,
    teacher: Policy | None = None,
) -> Room:
    """What the memory in bytes a device (None: that of the devices at hand) holds beside training.

    There are as many slots as have `MEAN_LENGTH` of the longest sequence's tokens each. Training keeps parameters, the
    optimizer's moments, a teacher, and a reference where the objective compares with one.
    """
    model = nnx.merge(policy.graphdef, policy.params)
    layout = model.layout
    if memory is None:
        memory = min(gather_objects(device_memory(layout.mesh)))  # all processes must choose the same number
    weights, shared = map(bytes_on_device, abstract_decoding_weights(model, policy.params, rollout.weights == "int8"))
    shards, longest, size = layout.row_shards, rollout.total_length, page_size(rollout.total_length)
    most = pool_pages(model, rollout, shards)
    whole = bytes_on_device(abstract_cache(model, [shards] * len(most), 1))
    waiting = PREFILLED_BATCHES * max(PREFILL_TOKENS, longest) * whole
    logits = layout.abstract((shards, model.config.vocab_size), jnp.float32, ("batch", "vocab"))
    windows = [0 if kind.window is None else count for kind, count in zip(model.config.kinds, most, strict=True)]
    fixed = LOGITS * bytes_on_device(logits) + CHUNK * whole + bytes_on_device(abstract_cache(model, windows, size))
    token = bytes_on_device(abstract_cache(model, [shards * (kind.window is None) for kind in model.config.kinds], 1))
    if rollout.turns > 1:  # an answer's scores and their exponentials, and its own keys and values
        scores = (shards, 2 * PIECE * model.config.num_attention_heads)
        token += bytes_on_device(layout.abstract(scores, jnp.float32, ("batch", "heads")))
        fixed += PIECE * whole
    trained, frozen = policy.split(policy.params)
    state = abstract_state(trained, make_optimizer(optimizer, steps=1))
    kept = bytes_on_device((state.params, state.opt_state, frozen))
    kept += bytes_on_device(trained) if grpo and grpo.beta > 0 else 0
    kept += bytes_on_device(teacher.params) if teacher else 0
    free = SHARE * memory - kept - (weights - shared) - waiting
    slots = max(1, int(free // (fixed + MEAN_LENGTH * longest * token)))
    return Room(slots * shards, max(longest + size, int((free - slots * fixed) // max(token, 1))) * shards)
