"""The settings of each algorithm by name; `recipes.py` has the algorithms themselves, which need JAX."""

from functools import reduce
from operator import or_
from typing import Annotated, Any

from pydantic import Discriminator, Tag, TypeAdapter

from mllm.algorithms.distill.settings import DistillRun, OwnDistillRun
from mllm.algorithms.dpo.settings import DpoRun
from mllm.algorithms.grpo.settings import GrpoRun
from mllm.algorithms.sft.settings import SftRun
from mllm.config.run import RunConfig

RUNS: dict[str, type[RunConfig]] = {
    "sft": SftRun,
    "grpo": GrpoRun,
    "dpo": DpoRun,
    "distill": OwnDistillRun,
    "distill with data": DistillRun,
}
"""The class of a run's settings by its algorithm, and ` with data` where an algorithm may also learn from examples."""


def kind_of(settings: Any) -> str | None:
    """The key of `RUNS` for these settings; None where the algorithm is missing or no text."""
    given = settings if isinstance(settings, dict) else dict(settings)
    algorithm = given.get("algorithm")
    if not isinstance(algorithm, str):
        return None
    return key if given.get("data") is not None and (key := f"{algorithm} with data") in RUNS else algorithm


def schema() -> TypeAdapter[RunConfig]:
    """The settings of any run: a union that the algorithm, and whether it learns from `data`, discriminates."""
    tagged = [Annotated[run, Tag(key)] for key, run in RUNS.items()]
    union: Any = Annotated[reduce(or_, tagged), Discriminator(kind_of)]
    return TypeAdapter(union)
