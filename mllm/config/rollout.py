"""The section `rollout`: how completions are sampled, for training and for evaluation."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from mllm.config.section import Section, impossible


class RolloutConfig(Section):
    """How completions are sampled, for GRPO and for evaluation."""

    max_prompt_length: PositiveInt
    """Tokens of the longest prompt; longer prompts are left out and counted."""
    max_completion_length: PositiveInt
    """Tokens after which a completion is cut off; with an environment or tools, the limit of each turn."""
    max_turns: PositiveInt | None = None
    """The most assistant turns in a conversation with `task.environment` or `task.tools`; None: 1."""
    max_total_length: PositiveInt | None = None
    """Tokens of the longest conversation, the prompt included; it ends before a turn without room. None: room for the
    longest prompt and turns, and for replies of `max_completion_length` between turns."""
    temperature: PositiveFloat = 1.0
    """Divisor of the logits, in sampling and in the update."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of likeliest tokens with this total probability; 1: from every token."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many likeliest tokens; 0: from every token."""
    min_p: float | None = Field(default=None, gt=0, le=1)
    """Sample only tokens with at least this share of the likeliest token's probability; None: from every token."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a completion, besides the model's stop tokens; the completion's text ends before them."""
    weights: Literal["int8"] | None = None
    """The dtype of matrices in decode steps, with a scale per row. `int8` halves the bytes read per step; the sampler
    then differs more from the trainer. None: `model.dtype`."""
    max_slots: PositiveInt | None = None
    """The most sequences that decode at the same time, over all devices; None: as many as fit in memory."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.total_length < (least := self.max_prompt_length + self.max_completion_length):
            fault = f"{self.total_length} is less than max_prompt_length + max_completion_length ({least})"
            raise impossible("max_total_length", fault)
        return self

    @property
    def turns(self) -> int:
        """The most turns of a completion."""
        return self.max_turns or 1

    @property
    def total_length(self) -> int:
        """Tokens of the longest prompt and completion, replies to its turns included."""
        longest = self.max_prompt_length + (2 * self.turns - 1) * self.max_completion_length
        return self.max_total_length or longest

    @property
    def sampled_length(self) -> int:
        """The most sampled tokens of a completion, over all its turns."""
        return min(self.turns * self.max_completion_length, self.total_length)

    @property
    def truncates(self) -> bool:
        """Whether tokens may be excluded by top-k, top-p or min-p."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p is not None
