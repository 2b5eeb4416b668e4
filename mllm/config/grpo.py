"""The sections `rollout` and `grpo`: how completions are sampled, and what is learned from them."""

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from mllm.config.section import Section, impossible


class RolloutConfig(Section):
    """How completions are sampled, for GRPO and for evaluation."""

    max_prompt_length: PositiveInt
    max_completion_length: PositiveInt
    temperature: PositiveFloat = 1.0
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """How many of the likeliest tokens are sampled from; 0: all."""
    stop: tuple[str, ...] = ()
    """Tokens that end a completion, besides the model's own."""
    max_slots: PositiveInt | None = None
    """The most sequences that are decoded at a time, over all devices; None: as many as the devices' memory holds."""


class GrpoConfig(Section):
    num_generations: int = Field(default=8, ge=2)
    """Completions of each prompt: the group whose rewards are compared."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "gspo"] = "grpo"
    num_iterations: PositiveInt = 1
    """Updates from each rollout."""
    epsilon: float = Field(default=0.2, gt=0, lt=1)
    epsilon_high: float | None = Field(default=None, gt=0)
    """None: the same as `epsilon`."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference policy; 0: no reference policy is held."""
    reference: Literal["initial"] | None = None
    """The reference policy: the parameters that the run began with."""
    entropy_coef: float = 0.0
    scale_rewards: Literal["group", "batch", "none"] = "group"
    importance_cap: PositiveFloat | None = 2.0
    """Upper limit of the importance weight, trainer's over sampler's probability; None: no such weight."""
    mask_truncated_completions: bool = False
    row_length: PositiveInt | None = None
    """Tokens in a row of the update, into which sequences are packed; None: as many as the longest sequence may have.
    The gradient does not depend on it."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.beta > 0 and self.reference is None:
            raise impossible("beta", "a KL penalty needs a reference: set grpo.reference=initial, or beta to 0")
        if self.beta == 0:
            self.reject_unused("with beta: 0", "reference")
        return self
