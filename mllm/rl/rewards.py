"""Scores completions with a task's reward functions, in a process of their own (see reward_worker).

A reward that raises, runs over its time or is not a number is counted and left NaN, never guessed.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from mllm.config.task import TaskConfig
from mllm.data.tasks.task import Example, Task
from mllm.rl.reward_worker import Worker


@dataclass(frozen=True)
class Failure:
    """A call of a reward function that gave no number."""

    name: str
    kind: str
    message: str


@dataclass(frozen=True)
class Scores:
    """What the reward functions gave for some completions, float64; NaN where a function failed."""

    values: Float[np.ndarray, "functions completions"]
    failures: list[Failure]


class RewardRunner:
    """Calls a task's reward functions; replaces their process when one hangs or dies. UserError as for `Worker`."""

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
        """The scores of every function for every completion.

        `poll` is called at least every 0.25 s; what it raises passes through, and the runner can be used again.
        """
        samples = list(zip(prompts, completions, examples, strict=True))
        scores = Scores(np.full((len(self.names), len(samples)), np.nan), [])
        try:
            for number in range(scores.values.size):
                if number == 0 or not self.worker.alive:
                    if not self.worker.alive or self.worker.process.poll() is not None:
                        self.worker.kill()
                        self.worker = Worker(self.names, self.scorer, poll)
                    self.worker.send((samples, number), self.timeout, poll)
                function, sample = divmod(number, len(samples))
                kind, result = self.worker.answer(number, self.timeout, poll)
                if kind == "value":
                    scores.values[function, sample] = result
                else:
                    scores.failures.append(Failure(self.names[function], kind, result))
                    self.warn(scores.failures[-1])
        except BaseException:
            self.worker.kill()  # it may be in the middle of a function
            raise
        return scores

    def warn(self, failure: Failure) -> None:
        """Log a failure, if it is the first one of this function and kind in the run."""
        name, kind = failure.name, failure.kind
        if (name, kind) not in self.warned:
            self.warned.add((name, kind))
            message = "reward %s %s: %s (further ones are only counted)"
            logging.getLogger(__name__).warning(message, name, kind, failure.message)

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *exception: object) -> None:
        self.worker.kill()
