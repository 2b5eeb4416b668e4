"""Dynamic sampling: prompts whose completions all have equal rewards teach nothing and are replaced by others.

DAPO: Yu et al. 2025, section 3.2. Theirs draws whole batches; here a later round draws about as many as are missing.
"""

import numpy as np
from jaxtyping import Bool, Int

from mllm.rl.schedule import bucket, slot_buckets


def round_size(missing: int, whole: int, shards: int) -> int:
    """How many prompts are drawn, by all processes, where `missing` of a rollout's `whole` are missing.

    It is one of few numbers, so that few programs are compiled, and one that the devices' `shards` of rows can share.
    """
    return bucket(missing, [size for size in slot_buckets(whole) if size % shards == 0 or size == whole])


def choose_groups(has_signal: Bool[np.ndarray, "G"], count: int) -> Int[np.ndarray, " count"]:
    """The first `count` groups with a signal, filled up with the first without, in the order in which they came."""
    return np.sort(np.argsort(~has_signal, kind="stable")[:count])
