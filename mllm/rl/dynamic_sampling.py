"""Dynamic sampling: prompts whose completions all have equal rewards teach nothing and are replaced by others.

DAPO: Yu et al. 2025, section 3.2. Theirs draws whole batches; here a later round draws about as many as are missing.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from mllm.data.iteration import DataIterator
from mllm.data.prompts import PromptBatch
from mllm.rl.schedule import bucket, slot_buckets


class PromptQueue:
    """The prompts of an iterator of batches, taken in any numbers."""

    def __init__(self, batches: DataIterator[PromptBatch]) -> None:
        self.batches = batches
        self.before: Mapping[str, Any] = {}
        """The iterator's position before `batch`."""
        self.batch = PromptBatch([], [])
        self.taken = 0
        """How many prompts of `batch` are taken."""

    def take(self, count: int) -> PromptBatch:
        """The next prompts."""
        found = PromptBatch([], [])
        while missing := count - len(found.examples):
            if self.taken == len(self.batch.examples):
                self.load()
            part = slice(self.taken, self.taken + missing)
            found.examples.extend(self.batch.examples[part])
            found.tokens.extend(self.batch.tokens[part])
            self.taken = min(part.stop, len(self.batch.examples))
        return found

    def load(self) -> None:
        self.before = self.batches.get_state()
        self.batch, self.taken = next(self.batches), 0

    def position(self) -> dict[str, Any]:
        """The position from which `seek` continues: JSON."""
        if self.taken == len(self.batch.examples):
            return {"prompts": self.batches.get_state()}
        return {"prompts": dict(self.before), "prompts_taken": self.taken}

    def seek(self, position: Mapping[str, Any]) -> None:
        self.batches.set_state(position["prompts"])
        self.batch, self.taken = PromptBatch([], []), 0
        if taken := position.get("prompts_taken", 0):
            self.load()
            self.taken = taken


def round_size(missing: int, whole: int, shards: int) -> int:
    """How many prompts are drawn, by all processes, where `missing` of a rollout's `whole` are missing.

    It is one of few numbers, so that few programs are compiled, and one that the devices' `shards` of rows can share.
    """
    return bucket(missing, [size for size in slot_buckets(whole) if size % shards == 0 or size == whole])


def choose_groups(has_signal: Bool[np.ndarray, "G"], count: int) -> Int[np.ndarray, " count"]:
    """The first `count` groups with a signal, filled up with the first without, in the order in which they came."""
    return np.sort(np.argsort(~has_signal, kind="stable")[:count])
