"""The settings of DPO and its kin."""

from typing import Literal, TypeAlias

from pydantic import Field, PositiveFloat

from mllm.config.run import ExampleRun
from mllm.config.section import Section

LossType: TypeAlias = Literal["sigmoid", "ipo", "simpo", "orpo"]


class DpoConfig(Section):
    """Preference optimization; docs/training.md has formulas and papers."""

    loss_type: LossType = "sigmoid"
    """The loss of a pair: DPO's (`sigmoid`), of log-probabilities a token and squared (`ipo`), or without a reference
    policy `simpo` and `orpo`."""
    beta: PositiveFloat = 0.1
    """Weight of the divergence from the reference policy; with `orpo` the weight of the odds ratio (lambda in the
    paper)."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """The share of pairs that are taken to be the wrong way round (cDPO). Only with `sigmoid`."""
    gamma: float = Field(default=0.5, ge=0)
    """The target margin between rewards. Only with `simpo`."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with a reference."""
        return self.loss_type in ("sigmoid", "ipo")

    @property
    def per_token(self) -> bool:
        """Whether the loss takes the mean log-probability of a completion's tokens, not their sum."""
        return self.loss_type != "sigmoid"


class DpoRun(ExampleRun):
    """Direct preference optimization and its kin, on the pairs of `data`."""

    algorithm: Literal["dpo"]
    dpo: DpoConfig = DpoConfig()
    """The objective over preferences."""
