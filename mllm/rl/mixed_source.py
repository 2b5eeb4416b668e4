"""Distillation's source where some updates learn from the student's completions, and the others from given ones."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mllm.data.sft_source import SftSource
from mllm.data.source import Step
from mllm.model.layout import Params
from mllm.rl.grpo_source import GrpoSource
from mllm.stopwatch import Stopwatch


class MixedSource:
    """A `mllm.data.source.Source` of two: which one a rollout's updates come from is a hash of the seed and its number.

    So a step's source is known without the steps before, and a rollout's updates are all of the same source.
    """

    def __init__(self, sampled: GrpoSource, given: SftSource, share: float, seed: int) -> None:
        """`share` of the rollouts are in fact of the `given` source."""
        self.sampled, self.given = sampled, given
        self.share, self.seed = share, seed
        self.steps = sampled.steps
        self.needs_reference, self.validation = sampled.needs_reference, given.validation

    def next(self, params: Params, step: int, watch: Stopwatch, reference: Params | None = None) -> Step:
        given = is_given(self.seed, step // self.sampled.config.updates_per_rollout, self.share)
        found = (self.given if given else self.sampled).next(params, step, watch, reference)
        tokens = self.given.num_tokens + self.sampled.num_tokens
        return replace(found, metrics=found.metrics | {"num_tokens": tokens, "given": float(given)})

    def position(self) -> dict[str, Any]:
        return {"sampled": self.sampled.position(), "given": self.given.position()}

    def seek(self, position: Mapping[str, Any]) -> None:
        self.sampled.seek(position["sampled"])
        self.given.seek(position["given"])

    def resumable(self, step: int) -> bool:
        return self.sampled.resumable(step)


def is_given(seed: int, rollout: int, share: float) -> bool:
    """Whether given completions take the place of this rollout."""
    digest = hashlib.sha256(f"{seed} {rollout}".encode()).digest()
    return int.from_bytes(digest[:8]) < share * 2**64
