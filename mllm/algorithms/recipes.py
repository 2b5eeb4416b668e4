"""The recipe of each algorithm, by the class of its settings. `table.py` lists the classes, which need no JAX."""

from collections.abc import Callable
from typing import Any

from mllm.algorithms.distill import algorithm as distill
from mllm.algorithms.distill.settings import DistillRun, OwnDistillRun
from mllm.algorithms.dpo import algorithm as dpo
from mllm.algorithms.dpo.settings import DpoRun
from mllm.algorithms.grpo import algorithm as grpo
from mllm.algorithms.grpo.settings import GrpoRun
from mllm.algorithms.sft import algorithm as sft
from mllm.algorithms.sft.settings import SftRun
from mllm.config.run import RunConfig
from mllm.training.recipe import Recipe

MAKERS: dict[type[RunConfig], Callable[[Any], Recipe[Any]]] = {
    SftRun: sft.make,
    GrpoRun: grpo.make,
    DpoRun: dpo.make,
    OwnDistillRun: distill.make_own,
    DistillRun: distill.make,
}


def recipe_of(config: RunConfig) -> Recipe[Any]:
    """The recipe of a run: loss, metrics and source."""
    return MAKERS[type(config)](config)
