"""Prompts in, completions and their text out: the rollout bound to one model, tokenizer and mesh."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from mllm.config.grpo import RolloutConfig
from mllm.config.model import OptimizerConfig
from mllm.model.layout import Params
from mllm.model.load import Policy
from mllm.model.tokenizer import Tokenizer
from mllm.rl.capacity import slots_that_fit
from mllm.rl.rollout import Completions, RolloutWork, generate


@dataclass(frozen=True)
class Sampler:
    """Completes prompts with parameters that each call passes."""

    graphdef: Any
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    options: RolloutConfig
    seed: int
    max_slots: Callable[[], int | None] = lambda: None
    """Returns the most sequences that are decoded at a time; None: all."""
    poll: Callable[[], None] = lambda: None
    """Called during rollouts by all processes alike: see `generate`."""
    work: RolloutWork = field(default_factory=RolloutWork)
    """What all rollouts so far did."""

    def complete(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        *,
        step: int,
        first_sequence: int = 0,
        greedy: bool = False,
    ) -> tuple[Completions, list[str]]:
        """Complete each prompt (token ids) once; prompt i draws from the stream (seed, step, first_sequence + i).

        Returns the completions, and each one's text without the token that ended it.
        """
        pad_id = self.tokenizer.pad_token_id
        completions = generate(
            self.graphdef,
            params,
            prompts,
            options=self.options,
            stop_ids=self.stop_ids,
            pad_id=self.stop_ids[0] if pad_id is None else pad_id,
            seed=self.seed,
            step=step,
            first_sequence=first_sequence,
            greedy=greedy,
            max_slots=self.max_slots(),
            poll=self.poll,
            work=self.work,
        )
        lengths = completions.lengths - completions.finished
        tokens = [row[:length].tolist() for row, length in zip(completions.tokens, lengths, strict=True)]
        return completions, self.tokenizer.batch_decode(tokens)


def make_sampler(
    policy: Policy,
    rollout: RolloutConfig,
    optimizer: OptimizerConfig,
    *,
    needs_reference: bool,
    seed: int,
    poll: Callable[[], None],
) -> Sampler:
    """The sampler of a run, whose slots take what training leaves of the memory."""

    @cache
    def slots() -> int:  # not before it is needed, because other mistakes in the configuration come first
        return rollout.max_slots or slots_that_fit(policy, rollout, optimizer, needs_reference=needs_reference)

    return Sampler(policy.graphdef, policy.tokenizer, policy.stop_ids, rollout, seed, slots, poll)
