"""The algorithms, by their names: the one place, besides its own files, that knows of each."""

from functools import cache
from typing import Any, Literal

from pydantic import Field, create_model

from mllm.algorithms.distill.settings import DistillRules
from mllm.algorithms.dpo.settings import DpoRules
from mllm.algorithms.grpo.settings import GrpoRules
from mllm.algorithms.sft.settings import SftRules
from mllm.config.schema import Config, Rules

ALGORITHMS: dict[str, Rules] = {"sft": SftRules(), "grpo": GrpoRules(), "dpo": DpoRules(), "distill": DistillRules()}


def schema() -> type[Config]:
    """The configuration with the sections of all algorithms in the table."""
    return schema_of(tuple(ALGORITHMS.items()))


@cache
def schema_of(algorithms: tuple[tuple[str, Rules], ...]) -> type[Config]:
    """The configuration with the sections of these algorithms, in alphabetical order."""
    description = Config.model_fields["algorithm"].description
    fields: dict[str, Any] = {"algorithm": (Literal[*(name for name, _ in algorithms)], Field(description=description))}
    sections = {key: section for _, rules in algorithms for key, section in rules.sections.items()}
    for key in sorted(sections):
        users = " and ".join(name for name, rules in algorithms if key in rules.sections)
        summary = (sections[key].__doc__ or "").strip().partition("\n\n")[0]
        fields[key] = (sections[key] | None, Field(default=None, description=f"{summary} For {users}."))
    config = create_model("Config", __base__=Config, __doc__="The settings of a run; its sections follow.", **fields)
    config.rules_by_name = dict(algorithms)
    return config
