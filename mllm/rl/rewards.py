"""Scores completions with a task's reward functions, in a process of their own (see reward_worker).

The functions run in that process's main thread (math-verify's time limit needs one) and without JAX, because a user's
function may do anything. A reward that raises, runs over its time or is not a number is counted and left NaN, never
guessed. Left out: rewards that compare completions with each other; calling several functions at a time.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from mllm.config.schema import TaskConfig
from mllm.data.tasks import Example, Task
from mllm.rl.reward_worker import FAILURES, Worker


@dataclass(frozen=True)
class Scores:
    values: Float[np.ndarray, "functions completions"]
    """float64; NaN where a function gave no number."""
    failures: dict[str, dict[str, int]]
    """Reward's name -> how it failed (`raised`, `timed_out`, `not_a_number`) -> how often."""
    messages: dict[str, dict[str, str]]
    """Reward's name -> how it failed -> what the first such failure said."""

    @classmethod
    def joined(cls, parts: Sequence["Scores"]) -> "Scores":
        """Of several parts of the completions: of all of them, in their order."""
        failures: dict[str, dict[str, int]] = {}
        messages: dict[str, dict[str, str]] = {}
        for part in parts:
            for name, kinds in part.failures.items():
                counts = failures.setdefault(name, dict.fromkeys(kinds, 0))
                for kind, count in kinds.items():
                    counts[kind] += count
            for name, said in part.messages.items():
                messages[name] = {**said, **messages.get(name, {})}
        return cls(np.concatenate([part.values for part in parts], axis=1), failures, messages)


class RewardRunner:
    """Calls a task's reward functions in a process of their own; replaces the process when one hangs or dies.

    Raises:
        UserError: a function is unknown or can't be imported.
    """

    def __init__(self, config: TaskConfig, task: Task) -> None:
        self.names = [reward.name for reward in config.rewards]
        self.timeout = config.reward_timeout
        self.scorer = task.scorer
        self.worker = Worker(self.names, self.scorer, lambda: None)
        self.warned: set[tuple[str, str]] = set()

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        examples: Sequence[Example],
        poll: Callable[[], None] = lambda: None,
    ) -> Scores:
        """Every function on every completion.

        `poll` is called at least every 0.25 s; what it raises passes through, and the runner can be used again.
        """
        samples = list(zip(prompts, completions, examples, strict=True))
        scores = Scores(
            values=np.full((len(self.names), len(samples)), np.nan),
            failures={name: dict.fromkeys(FAILURES, 0) for name in self.names},
            messages={name: {} for name in self.names},
        )
        asked = False
        try:
            for number in range(scores.values.size):
                if not asked or not self.worker.alive:
                    self.ask(samples, number, poll)
                    asked = True
                function, sample = divmod(number, len(samples))
                kind, result = self.worker.answer(number, self.timeout, poll)
                if kind == "value":
                    scores.values[function, sample] = result
                else:
                    self.record(scores, self.names[function], kind, result)
        except BaseException:
            self.worker.kill()  # it may be in the middle of a function
            raise
        return scores

    def ask(self, samples: Sequence[tuple[str, str, Example]], done: int, poll: Callable[[], None]) -> None:
        """For the results of all functions on all samples, function by function, but for the first `done`."""
        if not self.worker.alive or self.worker.process.poll() is not None:
            self.worker.kill()
            self.worker = Worker(self.names, self.scorer, poll)
        self.worker.send((samples, done), self.timeout, poll)

    def record(self, scores: Scores, name: str, kind: str, message: str) -> None:
        scores.failures[name][kind] += 1
        scores.messages[name].setdefault(kind, message)
        if (name, kind) not in self.warned:
            self.warned.add((name, kind))
            logging.getLogger(__name__).warning("reward %s %s: %s (further ones are only counted)", name, kind, message)

    def close(self) -> None:
        self.worker.kill()

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
