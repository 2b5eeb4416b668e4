"""Scores completions with a task's reward functions, in processes of their own (see reward_worker).

A reward that raises, runs over its time or is not a number is counted and left NaN, never guessed.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import chain, product
from threading import Event

import numpy as np
from jaxtyping import Float

from mllm.config.task import TaskConfig
from mllm.data.tasks.task import Task
from mllm.errors import UserError, printable
from mllm.rl.reward_process import FAILURES, NOT_APPLICABLE, Answer, Sample, fields_of
from mllm.rl.reward_worker import TICK, Worker

log = logging.getLogger(__name__)

CHUNKS = 4
"""A function's samples are dealt to the workers in so many chunks for each, so that all end at about the same time."""


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
        self.kinds = first.kinds
        self.codes = {name: code for name, code in zip(self.names, first.codes, strict=True) if code}
        self.warned: set[tuple[str, str]] = set()
        if "single" not in self.kinds and len(self.workers) > (calls := len(self.calls(1))):
            first.kill()
            many = f"{len(self.workers)} processes for {calls} calls with all completions"
            each = "one for each batched function and one for all async functions"
            raise UserError(f"task.reward_workers: {many}, {each}, are more than can work")

    def score(self, samples: Sequence[Sample]) -> list[list[Answer]]:
        """Every function's answer for every sample; they don't depend on the number of processes.

        The first failure of each function and kind in the run is logged. What `poll` raises passes through, and the
        runner can be used again.
        """
        found: list[list[Answer]] = [[(NOT_APPLICABLE, "")] * len(self.names) for _ in samples]
        calls = iter(self.calls(len(samples)))
        self.stopped.clear()

        def serve(worker: Worker) -> None:
            try:
                for functions, part in calls:  # each call goes to one thread: they share a list's iterator
                    answers = worker.ask(functions, [samples[i] for i in part], self.timeout)
                    for (function, sample), answer in zip(product(functions, part), answers, strict=True):
                        found[sample][function] = answer
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
        for function, name in enumerate(self.names):
            column = [row[function] for row in found]
            if {kind for kind, *_ in column} == {NOT_APPLICABLE}:
                column = [("returned None", f"for all of {len(column)} completions; is a return missing?")]
            for kind, message, *_ in column:
                if kind in (*FAILURES, "returned None") and (name, kind) not in self.warned:
                    self.warned.add((name, kind))
                    log.warning("reward %s %s: %s (further ones are only counted)", name, kind, message)
        return found

    def stop_thread(self) -> None:
        """What the workers' threads poll while they wait."""
        if self.stopped.is_set():
            raise Stopped

    def calls(self, count: int) -> list[tuple[list[int], range]]:
        """Each call's functions and samples, of so many; those with all samples, which take longest, come first."""
        size = -(-count // (CHUNKS * len(self.workers))) or 1
        chunks = [range(first, min(first + size, count)) for first in range(0, count, size)]
        together = [function for function, kind in enumerate(self.kinds) if kind == "async"]
        whole = [together, *([function] for function, kind in enumerate(self.kinds) if kind == "batched")]
        single = [[function] for function, kind in enumerate(self.kinds) if kind == "single"]
        return [(call, range(count)) for call in whole if call] + [(call, chunk) for call in single for chunk in chunks]

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self.workers:
            worker.kill()


def number(answer: Answer) -> float:
    """What a function gave; NaN where it failed or does not apply."""
    kind, given, *_ = answer
    return float(given) if kind == "value" else float("nan")


def weighted_sum(answers: Sequence[Sequence[Answer]], weights: Float[np.ndarray, "R"]) -> Float[np.ndarray, "B"]:
    """Each completion's reward; NaN where a function failed whose weight is not 0. What does not apply adds nothing."""
    values = np.array([[number(answer) for answer in row] for row in answers])
    nothing = np.array([[kind == NOT_APPLICABLE for kind, *_ in row] for row in answers])
    return np.where((weights == 0) | nothing, 0.0, weights * values).sum(axis=1)


def reward_metrics(names: Sequence[str], answers: Sequence[Sequence[Answer]]) -> dict[str, float]:
    """For each reward function what it logs, the mean and deviation of its values, and how often it failed."""
    metrics: dict[str, float] = {}
    for name, column in zip(names, zip(*answers, strict=True), strict=True):
        logged = defaultdict[str, list[float]](list)
        for kind, metric, value in chain.from_iterable(rest for _, _, *rest in column):
            if kind == "metric":
                logged[printable(metric)].append(float(value))
        metrics |= {f"rewards/{name}/{metric}": float(np.mean(values)) for metric, values in logged.items()}
        numbers = np.array([number(answer) for answer in column if answer[0] == "value"])
        metrics[f"rewards/{name}/mean"] = float(numbers.mean()) if numbers.size else float("nan")
        metrics[f"rewards/{name}/std"] = float(numbers.std()) if numbers.size else float("nan")
        kinds = [kind for kind, *_ in column]
        metrics |= {f"rewards/{name}/{failure}": kinds.count(failure) for failure in FAILURES}
    return metrics
