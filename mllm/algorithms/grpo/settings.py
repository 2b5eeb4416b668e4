"""The settings of GRPO and its kin, and of every algorithm that trains on its own sampled completions."""

import math
from abc import ABC
from typing import Literal, NamedTuple, Self, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt, StrictBool, model_validator

from mllm.config.rollout import RolloutConfig
from mllm.config.run import BatchShape, RunConfig
from mllm.config.section import Section, impossible
from mllm.config.task import TaskConfig

LossType: TypeAlias = Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo"]
RewardScale: TypeAlias = Literal["group", "mean", "batch", "none"]
ImportanceSampling: TypeAlias = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class Limits(NamedTuple):
    """A loss type's defaults, and which settings it reads."""

    below: float | None = 0.2
    """Default of `epsilon`; None: the loss reads neither `epsilon` nor `dual_clip`."""
    above: float | None = 0.2
    """Default of `epsilon_high`, or the ratio's cap if `below` is None; None: the loss doesn't read `epsilon_high`."""
    scale_rewards: RewardScale = "group"
    by_sequence: bool = False
    """Whether the probability ratio is computed per completion, not per token."""


LIMITS: dict[LossType, Limits] = {
    "grpo": Limits(),
    "dapo": Limits(),
    "dr_grpo": Limits(scale_rewards="none"),
    "gspo": Limits(3e-4, 4e-4, by_sequence=True),  # its paper's section 5.1
    "cispo": Limits(None, 5.0),  # ScaleRL's cap (Khatri et al. 2025, arXiv:2510.13786)
    "sapo": Limits(None, None),
}


class GrpoConfig(Section):
    """Group relative policy optimization; docs/training.md has the papers."""

    num_generations: PositiveInt = 8
    """Completions of each prompt, a group. Rewards are compared within the group, so GRPO needs 2 or more. Divides
    `batch_size`."""
    loss_type: LossType = "dapo"
    """`dapo`: mean over all tokens of the update. `grpo`: mean over each completion's tokens, then over completions.
    `dr_grpo`: token sum divided by a constant. `gspo`: `grpo` with the probability ratio of whole completions. `cispo`:
    `dapo` with the capped ratio as a constant weight of the log-probability. `sapo`: `grpo` with a sigmoid in place of
    the clip. With one update per rollout every ratio is 1: `gspo` and `sapo` equal `grpo`, and `cispo` equals
    `dapo`."""
    updates_per_generation: PositiveInt = 1
    """Updates per rollout. A rollout has this many times `batch_size` completions; each update takes an equal part."""
    num_iterations: PositiveInt = 1
    """The number of passes over each rollout."""
    epsilon: float | None = Field(default=None, gt=0, lt=1)
    """Lower clip range: how far the probability ratio may fall below 1. Default: 0.2; 3e-4 for GSPO. The ratio is 1 in
    a rollout's first update. SAPO uses no clip range, CISPO only `epsilon_high`."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """Upper clip range. Default: `epsilon`; 4e-4 for GSPO; 5 for CISPO, where it caps the ratio."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Upper limit of the ratio for tokens with a negative advantage; None: no limit."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference policy. Above 0 it needs `reference`; at 0 no reference policy is
    held."""
    reference: Literal["initial"] | None = None
    """The reference policy: the run's initial parameters. Only with `beta` above 0."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    scale_rewards: RewardScale | None = None
    """The divisor of the advantages. `group`: standard deviation of the group's rewards. `mean`: mean of the group's
    rewards, which must be 0 or more (MaxRL). `batch`: standard deviation of the rollout's rewards. `none`: 1. Default:
    `group`; `none` with `dr_grpo`."""
    baseline: Literal["group", "token"] = "group"
    """The baseline of a completion's reward. `group`: the group's mean reward. `token`: at each token a mean weighted
    by the uncertainty of the tokens so far (the optimal token baseline)."""
    importance_sampling: ImportanceSampling = "token_truncate"
    """The importance weight p_trainer / p_sampler, per token (`token_`) or per completion (`sequence_`). A weight above
    `importance_cap` becomes the cap (`_truncate`) or 0 (`_mask`)."""
    importance_cap: PositiveFloat | None = 2.0
    """The cap of the importance weight; None: no importance weight."""
    dynamic_sampling: PositiveInt = 1
    """The most sampling rounds per rollout. Each further round replaces prompts with equal rewards by new prompts."""
    mask_truncated_completions: StrictBool = False
    """Leave truncated completions out of the update."""
    row_length: PositiveInt | None = None
    """Tokens in a packed row of the update; the gradient does not depend on it. At least `rollout.max_prompt_length` +
    `rollout.max_completion_length`, or with several turns `rollout.max_total_length`; None: this minimum."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.beta > 0 and self.reference is None:
            raise impossible("beta", "a KL penalty needs a reference: set grpo.reference=initial, or beta to 0")
        if self.clip_range[1] < 1:
            raise impossible("epsilon_high", f"{self.epsilon_high} is the cap of cispo's ratio itself: give 1 or more")
        return self

    @property
    def updates_per_rollout(self) -> int:
        return self.updates_per_generation * self.num_iterations

    def groups_per_rollout(self, batch_size: int) -> int:
        """The number of prompts in a rollout, if an update has `batch_size` completions."""
        return self.updates_per_generation * batch_size // self.num_generations

    @property
    def limits(self) -> "Limits":
        """The loss type's defaults."""
        return LIMITS[self.loss_type]

    @property
    def clip_range(self) -> tuple[float, float]:
        """The lowest and highest probability ratio that are not clipped."""
        below, above = self.limits.below, self.limits.above
        if below is None or above is None:
            return 0.0, self.epsilon_high or above or math.inf
        return 1 - (self.epsilon or below), 1 + (self.epsilon_high or self.epsilon or above)

    @property
    def reward_scale(self) -> "RewardScale":
        """`scale_rewards`, or the loss type's default."""
        return self.scale_rewards or self.limits.scale_rewards

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the old policy's log-probabilities are computed before the first update, for later updates."""
        return self.updates_per_rollout > 1

    @property
    def first_is_current(self) -> bool:
        """Whether the first update needs no old log-probabilities: it trains the old policy itself, and no later update
        uses its batch."""
        return self.num_iterations == 1 and not self.weighs_sequences

    @property
    def passes(self) -> int:
        """The number of log-probability passes per rollout, each over one update's batch."""
        old = (self.updates_per_generation - self.first_is_current) * self.needs_old_logprobs
        return old + self.updates_per_generation * (self.beta > 0)

    @property
    def weighs_sequences(self) -> bool:
        """Whether the importance weight is computed per completion, not per token."""
        return self.importance_cap is not None and self.importance_sampling.startswith("sequence")

    @property
    def takes_sequences(self) -> bool:
        """Whether a token's loss depends on the current log-probabilities of its whole completion."""
        return self.limits.by_sequence or (self.weighs_sequences and not self.needs_old_logprobs)


class RolloutRun(RunConfig, ABC):
    """The settings of a run that trains on its own sampled completions."""

    task: TaskConfig
    """Problems with rewards."""
    rollout: RolloutConfig
    """How completions are sampled."""
    grpo: GrpoConfig = GrpoConfig()
    """The objective over completions."""

    @property
    def batch_shape(self) -> BatchShape:
        length = self.grpo.row_length or self.rollout.total_length
        # First-fit opens a row only if no open row has room, so every row but the last holds at least
        # length // total_length sequences.
        most_rows = math.ceil(self.batch_size / (length // self.rollout.total_length))
        micro = self.micro_batch_size or math.ceil(most_rows / (16 * self.shards)) * self.shards
        return BatchShape(length, micro, math.ceil(most_rows / micro) * micro, self.shards)

    @model_validator(mode="after")
    def check_rollout(self) -> Self:
        grpo, rollout = self.grpo, self.rollout
        longest, group, updates = rollout.total_length, grpo.num_generations, grpo.updates_per_rollout
        if grpo.row_length is not None and grpo.row_length < longest:
            bound = "max_prompt_length + max_completion_length" if rollout.turns == 1 else "max_total_length"
            raise impossible("grpo.row_length", f"{grpo.row_length} is less than rollout.{bound} ({longest})")
        if self.batch_size % group:
            raise impossible("batch_size", f"{self.batch_size} is not divisible by grpo.num_generations ({group})")
        # A signal in an evaluation ends the run, and only between two rollouts can it be saved.
        intervals = {"steps": self.steps, "checkpoint.every": self.checkpoint.every}
        for key, steps in (intervals | {"eval.every": self.eval and self.eval.every}).items():
            if steps and steps % updates:
                product = f"grpo.updates_per_generation * num_iterations ({updates})"
                raise impossible(key, f"{steps} is not divisible by {product}, the updates of a rollout")
        return self


class GrpoRun(RolloutRun):
    """Group relative policy optimization and its kin, on the problems of `task`."""

    algorithm: Literal["grpo"]

    @model_validator(mode="after")
    def check_group(self) -> Self:
        if self.grpo.num_generations < 2:
            raise impossible("grpo.num_generations", "1 leaves nothing to compare a reward with: 2 or more")
        return self
