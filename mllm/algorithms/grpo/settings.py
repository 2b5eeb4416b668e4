"""The settings of GRPO and its kin, and of every algorithm that learns from completions that it samples."""

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
    """A loss type's values for settings that are None, and which settings it reads."""

    below: float | None = 0.2
    """How far the probability ratio may fall below 1; None: `epsilon` and `dual_clip` aren't read."""
    above: float | None = 0.2
    """How far it may rise above 1, or where `below` is None its cap; None: `epsilon_high` isn't read."""
    scale_rewards: RewardScale = "group"
    by_sequence: bool = False
    """Whether the probability ratio is a whole completion's."""


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
    """Completions of each prompt. Rewards are compared within this group, so learning needs 2 or more. Divides
    `batch_size`."""
    loss_type: LossType = "dapo"
    """How tokens are averaged: over all tokens of the update (`dapo`), first over each completion (`grpo`), or as a sum
    over a constant (`dr_grpo`); `gspo` is `grpo` with the probability ratio of whole completions, `cispo` `dapo` with
    the capped ratio as a constant weight of the log-probability, `sapo` `grpo` with a soft gate in place of the clip.
    With one update a rollout every ratio is 1: `gspo` and `sapo` equal `grpo`, and `cispo` equals `dapo`."""
    updates_per_generation: PositiveInt = 1
    """The number of updates that share a rollout of that many times `batch_size` completions; each takes its part."""
    num_iterations: PositiveInt = 1
    """The number of passes over each rollout."""
    epsilon: float | None = Field(default=None, gt=0, lt=1)
    """Lower clip range: how far the probability ratio may fall below 1. Default: 0.2; 3e-4 for GSPO. The ratio of a
    rollout's first update is 1 and never clipped. SAPO uses no clip range, CISPO only `epsilon_high`."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """Upper clip range. Default: `epsilon`; 4e-4 for GSPO; 5 for CISPO, where it caps the ratio."""
    dual_clip: float | None = Field(default=None, gt=1)
    """The largest ratio that counts where the advantage is negative; None: no limit."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference policy; 0: no reference policy is held; else `reference` is
    needed."""
    reference: Literal["initial"] | None = None
    """The reference policy: the parameters that the run began with. Only with `beta` above 0."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    scale_rewards: RewardScale | None = None
    """The divisor of the advantages: the standard deviation of the `group`'s rewards, their `mean` (MaxRL; for rewards
    of 0 or more), or the standard deviation of the rollout's (`batch`); None: the group's, with `dr_grpo` nothing."""
    baseline: Literal["group", "token"] = "group"
    """The baseline of a completion's reward: its group's mean, or at each token a mean weighted by the uncertainty of
    the tokens so far (the optimal token baseline)."""
    importance_sampling: ImportanceSampling = "token_truncate"
    """How the trainer's probability over the sampler's becomes a weight: each token's or the whole completion's, which
    above `importance_cap` is that cap (`truncate`) or 0 (`mask`)."""
    importance_cap: PositiveFloat | None = 2.0
    """The limit of the importance weight; None: no such weight."""
    dynamic_sampling: PositiveInt = 1
    """The most rounds of sampling in a step. Each further round replaces prompts with equal rewards."""
    mask_truncated_completions: StrictBool = False
    """Leave completions that were cut off out of the update."""
    row_length: PositiveInt | None = None
    """Tokens in a row of the update, into which sequences are packed; None: as many as the longest sequence may have.
    At least `rollout.max_prompt_length` + `rollout.max_completion_length`, or with several turns
    `rollout.max_total_length`. The gradient does not depend on it."""

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
        """The loss type's values for settings that are None."""
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
        """`scale_rewards`, or what the loss type implies."""
        return self.scale_rewards or self.limits.scale_rewards

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the trainer's log-probabilities are computed before the first update, for the later updates."""
        return self.updates_per_rollout > 1

    @property
    def first_is_current(self) -> bool:
        """Whether the first update needs no old log-probabilities: its parameters are the old ones, and no later update
        takes its batch."""
        return self.num_iterations == 1 and not self.weighs_sequences

    @property
    def passes(self) -> int:
        """The log-prob passes of a rollout, each over one update's batch."""
        old = (self.updates_per_generation - self.first_is_current) * self.needs_old_logprobs
        return old + self.updates_per_generation * (self.beta > 0)

    @property
    def weighs_sequences(self) -> bool:
        """Whether the importance weight is a whole completion's."""
        return self.importance_cap is not None and self.importance_sampling.startswith("sequence")

    @property
    def takes_sequences(self) -> bool:
        """Whether a token's loss takes the current log-probabilities of its whole completion."""
        return self.limits.by_sequence or (self.weighs_sequences and not self.needs_old_logprobs)


class RolloutRun(RunConfig, ABC):
    """The settings of a run that learns from completions that it samples."""

    task: TaskConfig
    """Problems with rewards."""
    rollout: RolloutConfig
    """How completions are sampled."""
    grpo: GrpoConfig
    """The objective over completions."""

    @property
    def batch_shape(self) -> BatchShape:
        length = self.grpo.row_length or self.rollout.total_length
        # First-fit opens a row only when the open rows are too full: every row but the last holds this many sequences.
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
