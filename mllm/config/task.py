"""The sections `task` and `eval`: problems, their rewards, and how often they are measured."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from mllm.config.section import Section, impossible

AnswerForm = Literal["whole", "hashes", "tags", "boxed"]
"""How a completion states its answer, see mllm/data/tasks/answers.py."""


class RewardConfig(Section):
    name: str
    """`exact_match`, `flexible_match`, `math`, `format`, `tag_count`, `overlong`, `repetition`, `task` (its own
    scorer), `package.module:function`, or `url:http(s)://...`."""
    weight: float = 1.0
    args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the function, by name."""


class ArithmeticConfig(Section):
    operands: int = Field(default=2, ge=2, le=6)
    digits: int = Field(default=1, ge=1, le=6)
    """The most digits of an operand."""
    operators: str = Field(default="+", pattern=r"^[-+*]+$")


class TaskConfig(Section):
    name: str = Field(pattern=r"^(arithmetic|gsm8k|reasoning_gym:[a-z0-9_]+)$")
    arithmetic: ArithmeticConfig | None = None
    path: str | None = None
    """gsm8k: a folder with train.jsonl and test.jsonl; None: from the hub."""
    train_examples: PositiveInt = 10_000
    """reasoning_gym: how many problems to make for training."""
    heldout: PositiveInt = 256
    """How many problems evaluation may use; training never sees them."""
    system_prompt: str | None = None
    rewards: tuple[RewardConfig, ...] = (RewardConfig(name="exact_match"),)
    reward_timeout: PositiveFloat = 2.0
    """Seconds that a reward function may take for a completion; a batched one has the sum for all of its call."""
    reward_workers: PositiveInt = 1
    """Processes that compute rewards, so that slow ones overlap. What they give does not depend on it."""
    max_failed_groups: float = Field(default=0.5, ge=0, le=1)
    """The share of a step's groups that may be left out; a larger one stops the run. A group is left out if a reward
    with a weight failed for one of its completions."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.name != "arithmetic":
            self.reject_unused(f"by task {self.name}", "arithmetic")
        if self.name != "gsm8k":
            self.reject_unused(f"by task {self.name}", "path")
        if not self.name.startswith("reasoning_gym:"):
            self.reject_unused(f"by task {self.name}", "train_examples")
        if not self.rewards:
            raise impossible("rewards", "give at least one")
        names = [reward.name for reward in self.rewards]
        if len(set(names)) < len(names):
            raise impossible("rewards", "each name may stand once")
        return self


class EvalConfig(Section):
    """Evaluation at step 0, every n steps and at the end, on problems that training never sees."""

    every: PositiveInt | None = None
    """Steps between evaluations; None: only at step 0 and at the end."""
    prompts: PositiveInt | None = None
    """How many held-out problems are used; None: all."""
    sampled: bool = False
    """Measure one completion at the rollout's temperature besides the greedy one."""
