"""Sizes of a rollout: how prompts are assigned to devices, the few batches and caches for which programs are compiled,
and, by arithmetic on shapes, how many sequences fit beside training; `--plan` has the compiler check that number.
"""

from collections import deque
from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx

from mllm.config.grpo import GrpoConfig, RolloutConfig
from mllm.config.model import OptimizerConfig
from mllm.data.batch import SIZES, bucket
from mllm.model.decoding import abstract_cache, abstract_decoding_weights
from mllm.model.load import Policy
from mllm.parallel.mesh import bytes_on_device, device_memory
from mllm.parallel.processes import gather_objects
from mllm.rl.slots import CHUNK
from mllm.train.optimizer import make_optimizer
from mllm.train.step import abstract_state

PREFILL_TOKENS = 4096
"""The most tokens, padding included, that a device prefills at a time."""
PREFILLED_BATCHES = 2
"""The most batches of prompts whose keys and values wait for slots."""
SPARE_PLACES = 4 * CHUNK
"""Places that repacking leaves behind the longest row, so that it is not repacked again soon."""
WIDTHS = [8, *SIZES]
"""Widths of batches of prompts."""
SHARE = 0.92
"""The share of a device's memory that is given away: the rest is for fragments and what the compiler holds besides."""
LOGITS = 3
"""Arrays of a decode step's logits, in float32, that are held at a time: logits, noise, and what top-p sorts."""


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


def most_places(options: RolloutConfig) -> int:
    """The places of the largest cache: a chunk begins before the limit and may go beyond it."""
    return options.max_prompt_length + options.max_completion_length + CHUNK


def slot_buckets(most: int) -> list[int]:
    """The numbers of slots that a shard may have: the most, and its half, down to a sixteenth."""
    return sorted({-(-most // 2**power) for power in range(5)})


def prompts_a_batch(needed: int, width: int) -> int:
    """How many prompts of this width a device prefills at a time: a power of two, so that little is compiled."""
    return max(1, min(1 << max(needed - 1, 0).bit_length(), PREFILL_TOKENS // width))


def round_size(missing: int, whole: int, shards: int) -> int:
    """How many prompts a round of dynamic sampling draws, where `missing` of a rollout's `whole` are missing.

    It is the whole, a half or a quarter; the latter two only where the devices' `shards` of rows divide them.
    """
    sizes = (-(-whole // parts) for parts in (4, 2))
    return bucket(missing, [*(size for size in sizes if size % shards == 0), whole])


def places_for(end: int, options: RolloutConfig) -> int:
    """The number of places of a cache whose rows end at `end`."""
    return min(bucket(end + SPARE_PLACES), most_places(options))


def slots_that_fit(
    policy: Policy,
    rollout: RolloutConfig,
    optimizer: OptimizerConfig,
    grpo: GrpoConfig | None,
    memory: int | None = None,
    teacher: Policy | None = None,
) -> int:
    """The most slots, over all devices, that the memory in bytes a device (None: that of the devices at hand) holds.

    It is at least one for each of the devices that rows are spread over. Training keeps parameters, the optimizer's
    moments, a teacher, and a reference where the objective compares with one.
    """
    model = nnx.merge(policy.graphdef, policy.params)
    layout = model.layout
    if memory is None:
        memory = min(gather_objects(device_memory(layout.mesh)))  # all processes must choose the same number
    weights, shared = map(bytes_on_device, abstract_decoding_weights(model, policy.params, rollout.weights == "int8"))
    place = bytes_on_device(abstract_cache(model, layout.row_shards, 1))
    waiting = PREFILLED_BATCHES * max(PREFILL_TOKENS, rollout.max_prompt_length) * place
    logits = layout.abstract((layout.row_shards, model.config.vocab_size), jnp.float32, ("batch", "vocab"))
    longest = bytes_on_device(abstract_cache(model, layout.row_shards, most_places(rollout)))
    slot = longest + LOGITS * bytes_on_device(logits)
    trained, frozen = policy.split(policy.params)
    state = abstract_state(trained, make_optimizer(optimizer, steps=1))
    kept = bytes_on_device((state.params, state.opt_state, frozen))
    kept += bytes_on_device(trained) if grpo and grpo.beta > 0 else 0
    kept += bytes_on_device(teacher.params) if teacher else 0
    free = SHARE * memory - kept - (weights - shared) - waiting
    return max(1, int(free // slot)) * layout.row_shards
