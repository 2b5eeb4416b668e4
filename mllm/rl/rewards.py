"""Scores completions with a task's reward functions, in processes of their own (see reward_worker).

A reward that raises, runs over its time or is not a number is counted and left NaN, never guessed.
"""

import logging
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Event

import numpy as np
from jaxtyping import Float, Shaped

from mllm.config.task import TaskConfig
from mllm.data.tasks.task import Example, Task
from mllm.errors import UserError
from mllm.rl.reward_process import FAILURES, NOT_APPLICABLE, Sample, fields_of
from mllm.rl.reward_worker import TICK, Worker
from mllm.rl.rollout import Completions

CHUNKS = 4
"""A function's samples are dealt to the workers in so many chunks for each, so that all end at about the same time."""


@dataclass(frozen=True)
class Failure:
    """A call of a reward function that gave no number."""

    name: str
    kind: str
    message: str


@dataclass(frozen=True)
class Scores:
    """What the reward functions gave for some completions."""

    values: Float[np.ndarray, "B R"]
    """float64; NaN where a function failed or does not apply."""
    kinds: Shaped[np.ndarray, "B R"]
    """`value`, one of FAILURES, or NOT_APPLICABLE."""
    failures: Sequence[Failure]


class Stopped(Exception):
    """Another thread has given up."""


class RewardRunner:
    """Calls a task's reward functions; replaces a process that hangs or dies. UserError as for `Worker`.

    `poll` is called at least every 0.25 s while completions are scored.
    """

    def __init__(
        self, config: TaskConfig, task: Task, max_completion_length: int, poll: Callable[[], None] = lambda: None
    ) -> None:
        self.names = [reward.name for reward in config.rewards]
        self.weights = np.array([reward.weight for reward in config.rewards])
        self.timeout = config.reward_timeout
        self.poll = poll
        rewards = [(reward.name, reward.args) for reward in config.rewards]
        self.stopped = Event()
        given = rewards, task.scorer, fields_of(task), max_completion_length, self.stop_thread
        self.workers = [Worker(*given) for _ in range(config.reward_workers)]
        first = self.workers[0]
        first.start()  # the others start when they are needed
        self.batched = first.batched
        self.codes = {name: code for name, code in zip(self.names, first.codes, strict=True) if code}
        self.warned: set[tuple[str, str]] = set()
        if all(self.batched) and len(self.workers) > len(self.names):
            first.kill()
            raise UserError(
                f"task.reward_workers: {len(self.workers)} processes for {len(self.names)} batched functions, each of "
                "which is called once with all completions, are more than can work"
            )

    def score(self, examples: Sequence[Example], completions: Completions) -> Scores:
        """The scores of every function for every completion; they don't depend on the number of processes.

        What `poll` raises passes through, and the runner can be used again.
        """
        rows = zip(
            examples, completions.texts, completions.tokens, completions.lengths, completions.finished, strict=True
        )
        samples = [
            Sample(example, text, array("i", tokens[:length].astype(np.int32).tobytes()), not finished)
            for example, text, tokens, length, finished in rows
        ]
        kinds = np.full((len(samples), len(self.names)), "", object)
        results = np.full(kinds.shape, None, object)
        calls = iter(self.calls(len(samples)))
        self.stopped.clear()

        def serve(worker: Worker) -> None:
            try:
                for function, part in calls:  # each call goes to one thread: they share a list's iterator
                    answers = worker.ask(function, [samples[i] for i in part], self.timeout)
                    for sample, answer in zip(part, answers, strict=True):
                        kinds[sample, function], results[sample, function] = answer
            except BaseException:
                worker.kill()  # it may be in the middle of a function
                raise

        with ThreadPoolExecutor(len(self.workers)) as pool:
            try:
                serving = {pool.submit(serve, worker) for worker in self.workers}
                while serving:
                    self.poll()
                    done, serving = wait(serving, TICK)
                    for future in done:
                        future.result()
            except BaseException:
                self.stopped.set()
                raise
        values = np.where(kinds == "value", results, np.nan).astype(np.float64)
        failed = np.argwhere(np.isin(kinds, FAILURES).T)  # function by function
        failures = [Failure(self.names[f], kinds[sample, f], results[sample, f]) for f, sample in failed]
        for failure in failures:
            self.warn(failure)
        return Scores(values, kinds, failures)

    def stop_thread(self) -> None:
        """What the workers' threads poll while they wait."""
        if self.stopped.is_set():
            raise Stopped

    def calls(self, count: int) -> list[tuple[int, range]]:
        """Each call's function and samples, of so many; those of batched functions, which take longest, come first."""
        size = -(-count // (CHUNKS * len(self.workers))) or 1
        chunks = [range(first, min(first + size, count)) for first in range(0, count, size)]
        whole = [(function, range(count)) for function, batched in enumerate(self.batched) if batched]
        return whole + [(f, chunk) for f, batched in enumerate(self.batched) if not batched for chunk in chunks]

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
        for worker in self.workers:
            worker.kill()


def weighted_sum(
    values: Float[np.ndarray, "B R"], kinds: Shaped[np.ndarray, "B R"], weights: Float[np.ndarray, "R"]
) -> Float[np.ndarray, "B"]:
    """Each completion's reward; NaN where a function failed whose weight is not 0. What does not apply adds nothing."""
    return np.where((weights == 0) | (kinds == NOT_APPLICABLE), 0.0, weights * values).sum(axis=1)


def reward_metrics(
    names: Sequence[str], values: Float[np.ndarray, "B R"], kinds: Shaped[np.ndarray, "B R"]
) -> dict[str, float]:
    """For each reward function the mean and deviation of its values, and how often it failed."""
    metrics: dict[str, float] = {}
    for name, column, kind in zip(names, values.T, kinds.T, strict=True):
        numbers = column[kind == "value"]
        metrics[f"rewards/{name}/mean"] = float(numbers.mean()) if numbers.size else float("nan")
        metrics[f"rewards/{name}/std"] = float(numbers.std()) if numbers.size else float("nan")
        metrics |= {f"rewards/{name}/{failure}": int((kind == failure).sum()) for failure in FAILURES}
    return metrics
