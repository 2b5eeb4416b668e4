"""Distillation's source where some updates learn from the student's completions, and the others from given ones."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import grain

from mllm.algorithms.grpo.source import GrpoSource
from mllm.algorithms.sft.source import SftSource
from mllm.data.source import Step
from mllm.model.layout import Params
from mllm.stopwatch import Stopwatch


class MixedSource:
    """A `mllm.data.source.Source` of two, which Grain mixes: a rollout's updates are all of the same source.

    Which one that is depends on the rollout's number alone, so it is known without the steps before.
    """

    def __init__(self, sampled: GrpoSource, given: SftSource, share: float) -> None:
        """`share` of the rollouts are of the `given` source, evenly spread."""
        self.sampled, self.given = sampled, given
        self.order = mixed_order(share)
        self.steps = sampled.steps
        self.needs_reference, self.validation = sampled.needs_reference, given.validation

    def next(self, params: Params, step: int, watch: Stopwatch, reference: Params | None = None) -> Step:
        given = self.order[step // self.sampled.config.updates_per_rollout]
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


def mixed_order(share: float) -> grain.MapDataset[bool]:
    """Whether given completions take the place of each rollout, by its number."""
    sampled, given = (grain.MapDataset.source([which]).repeat() for which in (False, True))
    return grain.MapDataset.mix([sampled, given], weights=[1 - share, share])
