"""Dynamic sampling: prompts whose completions all have equal rewards teach nothing and are replaced by others.

DAPO: Yu et al. 2025, section 3.2. Theirs draws whole batches; here a later round draws about as many as are missing.
"""

import numpy as np
from jaxtyping import Bool, Int

from mllm.rl.schedule import bucket


def round_size(missing: int, whole: int, shards: int) -> int:
    """How many prompts are drawn, by all processes, where `missing` of a rollout's `whole` are missing.

    It is the whole, a half or a quarter, so that few programs are compiled, and divisible by the devices' `shards` of
    rows, or the whole.
    """
    sizes = (-(-whole // parts) for parts in (4, 2))
    return bucket(missing, [*(size for size in sizes if size % shards == 0), whole])


def choose_groups(has_signal: Bool[np.ndarray, "G"], count: int) -> Int[np.ndarray, " count"]:
    """The first `count` groups with a signal, filled up with the first without, in the order in which they came."""
    return np.sort(np.argsort(~has_signal, kind="stable")[:count])
