"""The section `grpo`: what is learned from completions."""

from typing import Literal, Self, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from mllm.config.section import Section, impossible

LossType: TypeAlias = Literal["grpo", "dapo", "prompt_mean", "dr_grpo", "gspo", "cispo", "sapo"]
ImportanceSampling: TypeAlias = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class GrpoConfig(Section):
    """What is learned from completions. docs/training.md has the papers of these settings."""

    num_generations: PositiveInt = 8
    """Completions of each prompt: the group whose rewards are compared, so 2 or more where they are learned from. It
    divides `batch_size`."""
    loss_type: LossType = "grpo"
    """How tokens are averaged: first over each completion (`grpo`), over all tokens of the update (`dapo`), first over
    the tokens of each prompt's completions (`prompt_mean`), or as a sum over a constant (`dr_grpo`); `gspo` is `grpo`
    with the probability ratio of whole completions, `cispo` `dapo` with the capped ratio as a constant weight of the
    log-probability, `sapo` `grpo` with a soft gate in place of the clip; these three need more than one update per
    rollout."""
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
    scale_rewards: Literal["group", "batch", "none"] | None = None
    """Which rewards' standard deviation divides the advantages: the group's, or the rollout's (`batch`); None: the
    group's, with `dr_grpo` none."""
    importance_sampling: ImportanceSampling = "token_truncate"
    """How the trainer's probability over the sampler's becomes a weight: each token's or the whole completion's, which
    above `importance_cap` is that cap (`truncate`) or 0 (`mask`)."""
    importance_cap: PositiveFloat | None = 2.0
    """The limit of the importance weight; None: no such weight."""
    teacher_coef: float = Field(default=0.0, ge=0)
    """How much of log teacher - log sampler of each token is added to its advantage; needs `teacher`. Not with
    `distill`."""
    dynamic_sampling: PositiveInt = 1
    """The most rollouts of a step: prompts whose completions have equal rewards are replaced by others that often."""
    filter_by: str | None = None
    """The name of the reward whose equal values count as equal rewards, also where other rewards differ; None: the
    weighted sum. Only with `dynamic_sampling` above 1."""
    mask_truncated_completions: bool = False
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
        if self.dynamic_sampling == 1:
            self.reject_unused("with dynamic_sampling: 1", "filter_by")
        if self.updates_per_rollout == 1:
            one = "with one update per rollout, whose ratios are all 1 (updates_per_generation * num_iterations)"
            self.reject_unused(one, "epsilon", "epsilon_high", "dual_clip")
            if (same := {"gspo": "grpo", "sapo": "grpo", "cispo": "dapo"}.get(self.loss_type)) is not None:
                what = f"{self.loss_type} is {same} {one}"
                raise impossible("loss_type", f"{what}: set updates_per_generation to 2 or more")
        if self.loss_type in ("cispo", "sapo"):
            unused = ("epsilon", "dual_clip", "epsilon_high")[: 2 + (self.loss_type == "sapo")]
            self.reject_unused(f"with loss_type: {self.loss_type}", *unused)
        if self.loss_type == "cispo" and self.clip_range[1] < 1:
            raise impossible("epsilon_high", f"{self.epsilon_high} is the cap of cispo's ratio itself: give 1 or more")
        return self

    @property
    def updates_per_rollout(self) -> int:
        return self.updates_per_generation * self.num_iterations

    def groups_per_rollout(self, batch_size: int) -> int:
        """The prompts whose completions are learned from in a rollout, where an update has `batch_size` completions."""
        return self.updates_per_generation * batch_size // self.num_generations

    @property
    def clip_range(self) -> tuple[float, float]:
        """The lowest and highest probability ratio that are not clipped."""
        if self.loss_type == "cispo":
            return 0.0, self.epsilon_high or 5.0  # ScaleRL's (Khatri et al. 2025, arXiv:2510.13786)
        low, high = (3e-4, 4e-4) if self.loss_type == "gspo" else (0.2, 0.2)  # GSPO: its paper's section 5.1
        return 1 - (self.epsilon or low), 1 + (self.epsilon_high or self.epsilon or high)

    @property
    def reward_scale(self) -> Literal["group", "batch", "none"]:
        """`scale_rewards`, or what the loss type implies."""
        return self.scale_rewards or ("none" if self.loss_type == "dr_grpo" else "group")

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the trainer's log-probabilities are computed before the first update, for those after it."""
        return self.updates_per_rollout > 1

    @property
    def first_is_current(self) -> bool:
        """Whether the first update needs none of them: its parameters are those, and no later one takes its batch."""
        return self.num_iterations == 1 and not self.weighs_sequences

    @property
    def passes(self) -> int:
        """The log-prob passes of a rollout, each over one update's batch."""
        old = (self.updates_per_generation - self.first_is_current) * self.needs_old_logprobs
        return old + self.updates_per_generation * (self.beta > 0)

    @property
    def weighs_sequences(self) -> bool:
        """Whether the importance weight is that of whole completions."""
        return self.importance_cap is not None and self.importance_sampling.startswith("sequence")

    @property
    def takes_sequences(self) -> bool:
        """Whether a token's loss takes the current log-probabilities of all of its completion."""
        return self.loss_type == "gspo" or (self.weighs_sequences and not self.needs_old_logprobs)
