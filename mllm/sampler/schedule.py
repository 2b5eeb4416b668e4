"""Sizes of a rollout: the assignment of prompts to devices, and the few batches and caches with compiled programs.

The number of sequences that fit beside training is computed from shapes. `--plan` has the compiler check that number.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import jax

from mllm.config.rollout import RolloutConfig
from mllm.data.batch import SIZES, bucket
from mllm.model.decoder import Decoder
from mllm.sampler.pages import page_size
from mllm.sampler.slots import CHUNK

PREFILL_TOKENS = 4096
"""The most tokens, padding included, that a device prefills at a time."""
PREFILLED_STATES = 8
"""The most prompts with states of delta nets that a device prefills at a time: a state is up to 50 MB."""
PREFILLED_BATCHES = 2
"""The most batches of prompts with keys and values that wait for slots; more batches of no more tokens are allowed."""
MEAN_LENGTH = 0.25
"""The mean length of sequences over their limit, as it is assumed until the pages are full."""
PIECE = 32
"""The most tokens of an answer that are prefilled at a time: their scores with the whole pool are in memory."""
WIDTHS = [8, *SIZES]
"""Widths of batches of prompts."""
LOGITS = 3
"""Arrays of a decode step's logits in float32 at a time: logits, noise, and top-p's copy."""


class DecodeLimits(NamedTuple):
    """The limits of a decode batch over all devices, which share it evenly."""

    slots: int
    """Sequences, at least one on each device."""
    tokens: int | None = None
    """The sequences' tokens; a page with one token counts as full. None: as many as the sequences may have."""


class TypicalBatch(NamedTuple):
    """The typical numbers of distinct prompts and sequences, over all devices or on one device."""

    prompts: int
    sequences: int

    def serve(self, share: "TypicalBatch", shards: int) -> "TypicalBatch":
        """The numbers for a device's programs, for its share of a rollout: the typical numbers if they cost little."""
        typical = TypicalBatch(-(-self.prompts // shards), -(-self.sequences // shards))
        return typical if share.sequences <= 2 * typical.sequences else share


def assign_prompts(prompts: Sequence[Sequence[int]], shards: int) -> list[deque[list[int]]]:
    """Each shard's distinct prompts in order of their lengths; a prompt is its sequences (places in `prompts`).

    A shard has at most ceil(B / shards) sequences; a prompt with too many sequences for a shard is assigned to several.
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
    """The most pages that the tokens of a window and of three chunks are in, which begin and end within pages."""
    return -(-(window + 3 * CHUNK) // size) + 1


def pool_pages(model: Decoder, options: RolloutConfig, slots: int, tokens: int | None = None) -> list[int]:
    """The pages of each kind of layers for so many slots, which have so many tokens together; None: the most."""
    longest, size = options.total_length, page_size(options.total_length)
    most = slots * -(-longest // size) if tokens is None else min(slots * -(-longest // size), tokens // size)
    windows = (kind.window for kind in model.config.kinds)
    return [most if window is None else min(most, slots * window_pages(window, size)) for window in windows]


def slot_buckets(most: int, vocabulary: int, weights: int, answered: bool = False) -> list[int]:
    """The numbers of slots that a shard may have: the most, and where rows cost time its half and its quarter.

    Rows cost time on CPUs. Elsewhere a step takes as long as its bytes. There empty rows cost less than more programs
    if logits have less than an eighth of the weights' bytes, `weights`. Sequences that are `answered` have two programs
    for each number, and so no quarter.
    """
    free = jax.default_backend() != "cpu" and 8 * LOGITS * 4 * vocabulary * most < weights
    return [most] if free else sorted({-(-most // 2**power) for power in range(2 if answered else 3)})


def prompts_a_batch(model: Decoder, needed: int, width: int) -> int:
    """The number of prompts of this width in a device's prefill: a power of two, so that few programs are compiled."""
    most = min(PREFILLED_STATES, PREFILL_TOKENS // width) if model.config.traits.delta else PREFILL_TOKENS // width
    return max(1, min(1 << max(needed - 1, 0).bit_length(), most))


def round_size(missing: int, whole: int, shards: int) -> int:
    """The number of prompts in a round of dynamic sampling, with `missing` of a rollout's `whole` prompts missing.

    The size is the whole, a half or a quarter. A half or a quarter must be divisible by the devices' `shards` of rows.
    """
    sizes = (-(-whole // parts) for parts in (4, 2))
    return bucket(missing, [*(size for size in sizes if size % shards == 0), whole])
