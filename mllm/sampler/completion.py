"""A rollout's completions, the work that they took, and the settings that determine them besides the parameters."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from mllm.config.rollout import RolloutConfig
from mllm.model.tokenizer import Renderer, decode
from mllm.sampler.schedule import DecodeLimits, TypicalBatch
from mllm.sampler.slots import CHUNK


@dataclass
class Completion:
    """The tokens that follow a prompt: the sampled ones and, where there are several turns, the answers to them."""

    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    """The sampled tokens, with the token that stops a turn."""
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    """Log-probabilities of the sampled tokens, under the whole vocabulary's distribution with the temperature."""
    kept: "array[float] | None" = None
    """The probability that top-k, top-p and min-p kept at each sampled token; None with none of them."""
    norms: "array[float]" = field(default_factory=lambda: array("f"))
    """The squared norm of each sampled token's log-probability's gradient by the logits."""
    finished: bool = False
    """Whether a stop token or text ended its last turn; False if it was cut off."""
    text: str = ""
    """The last turn's text, without the token or text that ended it, and without control tokens."""
    given: list[tuple[int, int]] = field(default_factory=list)
    """Where the answers begin and end."""

    @property
    def turn(self) -> "array[int]":
        """The tokens of the last turn."""
        return self.tokens[self.given[-1][1] :] if self.given else self.tokens


@runtime_checkable
class Turns(Protocol):
    """The partner who answers the turns of sequences, which it knows by their numbers."""

    def send(self, ended: Mapping[int, Completion]) -> None:
        """Begin to answer the ended turns; each completion has the tokens of its turn alone."""

    def receive(self, sequences: Sequence[int]) -> Mapping[int, list[int] | None]:
        """The tokens after each sequence, at least one; None at its end. The same in all processes."""


@dataclass
class RolloutWork:
    """The counts of a rollout's work; equal whenever the same tokens are sampled."""

    completions: int = 0
    """Completions that have ended."""
    tokens: int = 0
    """Tokens of completions."""
    prefilled: int = 0
    """Tokens that were prefilled, padding included."""
    steps: int = 0
    """Decode steps."""
    slot_steps: int = 0
    """Decode steps times slots: the tokens that were computed."""
    read: int = 0
    """Decode steps times the tokens that the pool has room for, of the layers without a window."""
    held: int = 0
    """Decode steps times the tokens that the sequences had then."""
    programs: set[tuple[int, ...]] = field(default_factory=set)
    """The decode programs: slots, and pages of each kind of layers."""

    def bytes_over_least(self, weights: int, token: int) -> float:
        """The bytes of the decode steps over the minimum: `weights` per step, and `token` per token of a sequence."""
        return (self.steps * weights + self.read * token) / (self.steps * weights + self.held * token)


@dataclass(frozen=True)
class SamplerSettings:
    """The settings of a sampler: with prompts and parameters they determine completions and their texts."""

    graphdef: Any
    renderer: Renderer
    stop_ids: Sequence[int]
    options: RolloutConfig
    seed: int
    room: Callable[[], DecodeLimits | None] = lambda: None
    """Returns the limits of a decode batch, None for no limits; called if `options.max_slots` is None."""
    typical: TypicalBatch | None = None
    """The size of a training step's rollout; rollouts of up to twice its size reuse its programs."""
    poll: Callable[[], object] = lambda: None
    """Called by all processes after each decode call; its exceptions end the rollout."""
    work: RolloutWork = field(default_factory=RolloutWork)
    """The work of the rollouts so far."""
    stop_texts: Sequence[str] = ()
    """Texts that end a completion; a text of one token is in `stop_ids` as well."""

    def text_of(self, completion: Completion) -> str:
        """The text of a completion's last turn, up to the first of the stop texts."""
        turn = completion.turn
        content = turn[: len(turn) - (turn[-1] in self.stop_ids)]
        text = decode(self.renderer.tokenizer, content.tolist())
        return min((text.partition(stop)[0] for stop in self.stop_texts), key=len, default=text)

    def stopped_length(self, tokens: "array[int]") -> int | None:
        """The number of tokens up to the end of the first stop text; None if the last chunk completes no stop text."""
        # A token has a byte at least; one token more, since tokenizers may drop a space before the first.
        first = max(0, len(tokens) - CHUNK - 1 - max(len(stop.encode()) for stop in self.stop_texts))

        def stops(end: int) -> bool:
            text = self.renderer.tokenizer.decode(tokens[first:end].tolist(), skip_special_tokens=True)
            return any(stop in text for stop in self.stop_texts)

        return next(filter(stops, range(first + 1, len(tokens))), len(tokens)) if stops(len(tokens)) else None
