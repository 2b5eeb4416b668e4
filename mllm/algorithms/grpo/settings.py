"""The section `grpo`: what is learned from completions; and the rules of GRPO and its kin."""

import math
from collections.abc import Iterator
from typing import ClassVar, Literal, NamedTuple, Self, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt, StrictBool, model_validator

from mllm.config.schema import Config, Rows, Rules
from mllm.config.section import Fault, Section, impossible

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
    with_one_update: LossType | None = None
    """The loss type that it equals where all ratios are 1; it is refused there."""
    by_sequence: bool = False
    """Whether the probability ratio is a whole completion's."""


LIMITS: dict[LossType, Limits] = {
    "grpo": Limits(),
    "dapo": Limits(),
    "dr_grpo": Limits(scale_rewards="none"),
    "gspo": Limits(3e-4, 4e-4, with_one_update="grpo", by_sequence=True),  # its paper's section 5.1
    "cispo": Limits(None, 5.0, with_one_update="dapo"),  # ScaleRL's cap (Khatri et al. 2025, arXiv:2510.13786)
    "sapo": Limits(None, None, with_one_update="grpo"),
}


class GrpoConfig(Section):
    """What is learned from completions. docs/training.md has the papers of these settings."""

    num_generations: PositiveInt = 8
    """Completions of each prompt: the group whose rewards are compared, so 2 or more where they are learned from. It
    divides `batch_size`."""
    loss_type: LossType = "grpo"
    """How tokens are averaged: first over each completion (`grpo`), over all tokens of the update (`dapo`), or as a sum
    over a constant (`dr_grpo`); `gspo` is `grpo` with the probability ratio of whole completions, `cispo` `dapo` with
    the capped ratio as a constant weight of the log-probability, `sapo` `grpo` with a soft gate in place of the clip;
    these three need more than one update per rollout."""
    updates_per_generation: PositiveInt = 1
    """Updates that share a rollout: it has so many times `batch_size` completions, and each update takes its part."""
    num_iterations: PositiveInt = 1
    """How often each rollout is gone through."""
    epsilon: float | None = Field(default=None, gt=0, lt=1)
    """How far the probability ratio may fall below 1; None: 0.2, with `gspo` 3e-4. This, `epsilon_high` and `dual_clip`
    need more than one update per rollout (`updates_per_generation`, `num_iterations`), since the first one's ratio is
    1, and `sapo` has none of them, `cispo` only `epsilon_high`."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """How far it may rise above 1; None: as `epsilon`, or with `gspo`, where that is None, too, 4e-4. With `cispo` the
    cap of the ratio itself; None: 5."""
    dual_clip: float | None = Field(default=None, gt=1)
    """The largest ratio that counts where the advantage is negative; None: no limit."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference policy; 0: no reference policy is held; else `reference` is
    needed."""
    reference: Literal["initial"] | None = None
    """The reference policy: the parameters that the run began with. Only with `beta` above 0."""
    entropy_coef: float = 0.0
    """Weight of the entropy, which a positive one rewards."""
    scale_rewards: RewardScale | None = None
    """What divides the advantages: the standard deviation of the `group`'s rewards, their `mean` (MaxRL; for rewards of
    0 or more), or the standard deviation of the rollout's (`batch`); None: the group's, with `dr_grpo` nothing."""
    baseline: Literal["group", "token"] = "group"
    """What a completion's reward is compared with: the mean of its group, or at each token a mean in which completions
    weigh by how uncertain their tokens were so far (the optimal token baseline)."""
    importance_sampling: ImportanceSampling = "token_truncate"
    """How the trainer's probability over the sampler's becomes a weight: each token's or the whole completion's, which
    above `importance_cap` is that cap (`truncate`) or 0 (`mask`)."""
    importance_cap: PositiveFloat | None = 2.0
    """The limit of the importance weight; None: no such weight."""
    dynamic_sampling: PositiveInt = 1
    """The most rollouts of a step: prompts whose completions have equal rewards are replaced by others that often."""
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
        if self.beta == 0:
            self.reject_unused("with beta: 0", "reference")
        if self.importance_cap is None:
            self.reject_unused("with importance_cap: null", "importance_sampling")
        if self.updates_per_rollout == 1:
            condition = "with one update per rollout, whose ratios are all 1 (updates_per_generation * num_iterations)"
            self.reject_unused(condition, "epsilon", "epsilon_high", "dual_clip")
            if (equivalent := self.limits.with_one_update) is not None:
                fault = f"{self.loss_type} is {equivalent} {condition}"
                raise impossible("loss_type", f"{fault}: set updates_per_generation to 2 or more")
        unread = ["epsilon", "dual_clip"] * (self.limits.below is None) + ["epsilon_high"] * (self.limits.above is None)
        self.reject_unused(f"with loss_type: {self.loss_type}", *unread)
        if self.clip_range[1] < 1:
            raise impossible("epsilon_high", f"{self.epsilon_high} is the cap of cispo's ratio itself: give 1 or more")
        return self

    @property
    def updates_per_rollout(self) -> int:
        return self.updates_per_generation * self.num_iterations

    def groups_per_rollout(self, batch_size: int) -> int:
        """The prompts whose completions are learned from in a rollout, where an update has `batch_size` completions."""
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


class GrpoRules(Rules):
    implementation = "mllm.algorithms.grpo.algorithm:Grpo"
    sections: ClassVar = {"grpo": GrpoConfig}
    needs = ("task", "rollout", "grpo")
    unused = ("data", "teacher")

    def faults(self, config: Config) -> Iterator[Fault]:
        if config.section(GrpoConfig).num_generations < 2:
            yield "grpo.num_generations", "1 leaves nothing to compare a reward with: 2 or more"
        yield from rollout_faults(config)

    def rows(self, config: Config) -> Rows:
        return packed_rows(config)


def packed_rows(config: Config) -> Rows:
    """The rows of an update into which completions are packed."""
    grpo, rollout = config.section(GrpoConfig), config.rollout
    assert rollout is not None
    length = grpo.row_length or rollout.total_length
    # First-fit opens a row only when the others are too full: all rows but the last hold at least this many sequences.
    most_rows = math.ceil(config.batch_size / (length // rollout.total_length))
    micro = config.micro_batch_size or math.ceil(most_rows / (16 * config.shards)) * config.shards
    return Rows(length, micro, math.ceil(most_rows / micro) * micro, config.shards)


def rollout_faults(config: Config) -> Iterator[Fault]:
    """Settings that can't work, or have no effect, where sampled completions are learned from."""
    grpo, rollout = config.section(GrpoConfig), config.rollout
    assert rollout is not None
    longest, group, updates = rollout.total_length, grpo.num_generations, grpo.updates_per_rollout
    if grpo.row_length is not None and grpo.row_length < longest:
        bound = "max_prompt_length + max_completion_length" if rollout.turns == 1 else "max_total_length"
        yield "grpo.row_length", f"{grpo.row_length} is less than rollout.{bound} ({longest})"
    if grpo.takes_sequences and config.head.workspace_mib is not None:
        users = "grpo.loss_type: gspo, nor where one update takes the importance weights of whole completions"
        yield "head.workspace_mib", f"is not used with {users}: remove it"
    if config.batch_size % group:
        yield "batch_size", f"{config.batch_size} is not divisible by grpo.num_generations ({group})"
    # A signal in an evaluation ends the run, and only between two rollouts can it be saved.
    intervals = {"steps": config.steps, "checkpoint.every": config.checkpoint.every}
    for key, steps in (intervals | {"eval.every": config.eval and config.eval.every}).items():
        if steps and steps % updates:
            product = f"grpo.updates_per_generation * num_iterations ({updates})"
            yield key, f"{steps} is not divisible by {product}, the updates of a rollout"
