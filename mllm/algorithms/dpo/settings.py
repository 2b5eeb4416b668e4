"""The section `dpo`: what is learned from preferences; and the rules of DPO and its kin."""

from collections.abc import Iterator
from typing import ClassVar, Literal, Self, TypeAlias

from pydantic import Field, PositiveFloat, model_validator

from mllm.algorithms.sft.settings import example_faults, example_rows
from mllm.config.data import PreferenceForm
from mllm.config.schema import Config, Rows, Rules
from mllm.config.section import Fault, Section

LossType: TypeAlias = Literal["sigmoid", "ipo", "hinge", "simpo", "orpo", "kto"]


class DpoConfig(Section):
    """What is learned from preferences. docs/training.md has the formulas and papers of these settings."""

    loss_type: LossType = "sigmoid"
    """The loss of a pair: DPO's (`sigmoid`), of log-probabilities a token and squared (`ipo`), SLiC's (`hinge`); or
    without a reference policy `simpo` and `orpo`. `kto` learns from single completions with a label."""
    beta: PositiveFloat = 0.1
    """How much a difference of log-probabilities counts: the weight of the divergence to the reference policy, with
    `orpo` the weight of the odds ratio (its paper's lambda)."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """The share of pairs that are taken to be the wrong way round (cDPO). Only with `sigmoid`."""
    gamma: float = Field(default=0.5, ge=0)
    """The margin between rewards that is aimed at. Only with `simpo`."""
    desirable_weight: PositiveFloat = 1.0
    """The factor of the loss of completions that are labelled true. Only with `kto`."""
    undesirable_weight: PositiveFloat = 1.0
    """The factor of the loss of completions that are labelled false. Only with `kto`."""

    @model_validator(mode="after")
    def check(self) -> Self:
        users = {"label_smoothing": "sigmoid", "gamma": "simpo", "desirable_weight": "kto", "undesirable_weight": "kto"}
        unread = [name for name, loss_type in users.items() if loss_type != self.loss_type]
        self.reject_unused(f"with loss_type: {self.loss_type}", *unread)
        return self

    @property
    def form(self) -> PreferenceForm:
        return "labelled" if self.loss_type == "kto" else "pairs"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with a reference."""
        return self.loss_type not in ("simpo", "orpo")

    @property
    def per_token(self) -> bool:
        """Whether the loss takes the mean log-probability of a completion's tokens, not their sum."""
        return self.loss_type in ("ipo", "simpo", "orpo")


class DpoRules(Rules):
    implementation = "mllm.algorithms.dpo.algorithm:Dpo"
    sections: ClassVar = {"dpo": DpoConfig}
    needs = ("data", "dpo")
    unused = ("teacher",)

    def faults(self, config: Config) -> Iterator[Fault]:
        if config.head.workspace_mib is not None:
            yield "head.workspace_mib", f"is not used by algorithm: {config.algorithm}: remove it"
        if config.data and config.data.source == "task" and config.section(DpoConfig).form == "labelled":
            yield "data.source", "a task has no labels, which dpo.loss_type: kto needs: give a file"
        yield from example_faults(config)

    def rows(self, config: Config) -> Rows:
        return example_rows(config)
