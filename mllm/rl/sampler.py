"""Prompts in, completions and their text out: the rollout bound to one model, tokenizer and mesh."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from mllm.config.schema import RolloutConfig
from mllm.rl.rollout import Completions, generate

EVALUATION = 2**30
"""Evaluation numbers its sequences from here, so that it never draws training's random numbers."""


@dataclass(frozen=True)
class Sampler:
    graphdef: Any
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    options: RolloutConfig
    seed: int
    poll: Callable[[], None] = lambda: None
    """See `generate`."""

    def complete(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        *,
        step: int,
        first: int = 0,
        greedy: bool = False,
    ) -> tuple[Completions, list[str]]:
        """Complete each prompt (token ids) once; sequence i draws from the stream (seed, step, first + i).

        Returns:
            The tokens with their log-probabilities, and each completion's text without the token that ended it.
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
            first_sequence=first,
            greedy=greedy,
            poll=self.poll,
        )
        said = completions.lengths - completions.finished
        tokens = [row[:count].tolist() for row, count in zip(completions.tokens, said, strict=True)]
        return completions, self.tokenizer.batch_decode(tokens)
