"""Scores completions with a task's reward functions, in processes of their own (see reward_worker).

A reward that raises, runs over its time or is not a number is counted and left NaN, never guessed.
"""

import itertools
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from queue import PriorityQueue
from threading import Event
from typing import Any

import numpy as np
from jaxtyping import Float

from mllm.config.task import ENVIRONMENT, TaskConfig
from mllm.data.tasks.task import Task
from mllm.errors import UserError, printable
from mllm.rewards.calls import FAILURES, NOT_APPLICABLE, PLAYED, Answer, Sample, bind_all, fields_of
from mllm.rewards.environments import Move, players
from mllm.rewards.worker import TICK, Worker

log = logging.getLogger(__name__)

CHUNKS = 4
"""A function's samples are dealt to the workers in so many chunks for each, so that all end at about the same time."""

Call = tuple[list[int], Sequence[int]]
"""The functions and samples of a call, by their numbers."""


class Stopped(Exception):
    """Another thread has given up."""


class RewardRunner:
    """Calls a task's reward functions; replaces a process that hangs or dies. UserError as for `Worker`.

    `poll` is called at least every 0.25 s while completions are scored. The last reward is the environment's, if there
    is one, or tools: its processes are apart, so that no function that hangs ends them.
    """

    environments: Sequence[Worker] = ()
    """The processes that `Conversations` are held in."""
    tools: Sequence[dict[str, Any]] = ()
    """The JSON schemas of what the assistant may call."""

    def __init__(
        self, config: TaskConfig, task: Task, max_completion_length: int, poll: Callable[[], None] = lambda: None
    ) -> None:
        converses = [ENVIRONMENT] * config.converses
        self.names = [*short_names([reward.name for reward in config.rewards]), *converses]
        self.weights = np.array([*(reward.weight for reward in config.rewards), *(1.0 for _ in converses)])
        self.timeout = config.reward_timeout
        self.poll = poll
        rewards = [(reward.name, reward.args) for reward in config.rewards]
        self.stopped = Event()
        fields = (*fields_of(task), *(PLAYED if converses else ()))
        make = partial(bind_all, rewards, task.scorer, fields, max_completion_length)
        self.workers = [Worker(make, self.stop_thread) for _ in range(config.reward_workers)]
        self.kinds: list[str] = []
        self.warned: set[tuple[str, str]] = set()
        codes: list[str] = []
        try:  # the first processes; the others start when they are needed
            if rewards:
                self.workers[0].start()
                self.kinds, codes = self.workers[0].kinds, self.workers[0].codes
            if converses:
                held = partial(players, config.environment, config.tools or (), self.timeout)
                key = "task.environment" if config.environment else "task.tools"
                self.environments = [Worker(held, self.stop_thread, key) for _ in self.workers]
                _, message, *logged = self.environments[0].ask([0], [Move()], self.timeout)[0]
                if not logged:
                    raise UserError(f"{key}: {message}")
                self.tools, codes = json.loads(logged[0][2]), codes + self.environments[0].codes
            elif "single" not in self.kinds and len(self.workers) > (calls := len(self.whole_calls([0]))):
                many = f"{len(self.workers)} processes for {calls} calls with all completions"
                needed = "one for each batched function and one for all async functions"
                raise UserError(f"task.reward_workers: {many}, {needed}, are more than can work")
        except BaseException:
            self.__exit__()
            raise
        self.codes = {name: code for name, code in zip(self.names, codes, strict=True) if code}

    def score(self, samples: Sequence[Sample]) -> list[list[Answer]]:
        """Every function's answer for every sample; they don't depend on the number of processes.

        The first failure of each function and kind in the run is logged. What `poll` raises passes through, and the
        runner can be used again.
        """
        with self.scoring(len(samples)) as scoring:
            return scoring.finish(samples)

    @contextmanager
    def scoring(self, count: int) -> Iterator["Scoring"]:
        """Score so many samples, which come one after another; calls that still run when this is left are stopped."""
        self.stopped.clear()
        with ThreadPoolExecutor(len(self.workers)) as pool:
            scoring = Scoring(self, count, pool)
            try:
                yield scoring
            finally:
                self.stopped.set()
                scoring.close()

    def warn(self, answers: Sequence[Sequence[Answer]]) -> None:
        """Log the first failure of each function and kind in the run."""
        for function, name in enumerate(self.names):
            column = [row[function] for row in answers]
            if name != ENVIRONMENT and {kind for kind, *_ in column} == {NOT_APPLICABLE}:
                column = [("returned None", f"for all of {len(column)} completions; is a return missing?")]
            for kind, message, *_ in column:
                if kind in (*FAILURES, "returned None") and (name, kind) not in self.warned:
                    self.warned.add((name, kind))
                    log.warning("reward %s %s: %s (further ones are only counted)", name, kind, message)

    def stop_thread(self) -> None:
        """Raise Stopped in a worker's thread, which calls this while it waits, once scoring is over."""
        if self.stopped.is_set():
            raise Stopped

    def whole_calls(self, samples: Sequence[int]) -> list[Call]:
        """The calls with all of these samples."""
        together = [function for function, kind in enumerate(self.kinds) if kind == "async"]
        groups = [together, *([function] for function, kind in enumerate(self.kinds) if kind == "batched")]
        return [(functions, samples) for functions in groups if functions]

    def single_calls(self, samples: Sequence[int]) -> list[Call]:
        """The calls of functions that are called for each sample alone, with a chunk of these samples each."""
        size = -(-len(samples) // (CHUNKS * len(self.workers))) or 1
        chunks = [samples[first : first + size] for first in range(0, len(samples), size)]
        single = [[function] for function, kind in enumerate(self.kinds) if kind == "single"]
        return [(functions, chunk) for functions in single for chunk in chunks]

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in (*self.workers, *self.environments):
            worker.kill()


class Scoring:
    """The scores of a rollout's samples: functions of one completion are called as soon as that has ended.

    Functions with all samples wait for the last of them.
    """

    def __init__(self, runner: RewardRunner, count: int, pool: ThreadPoolExecutor) -> None:
        self.runner = runner
        self.samples: dict[int, Sample] = {}
        self.found: list[list[Answer]] = [[(NOT_APPLICABLE, "")] * len(runner.names) for _ in range(count)]
        self.calls: PriorityQueue[tuple[int, int, Call | None]] = PriorityQueue()
        self.numbers = itertools.count()
        self.serving = {pool.submit(self.serve, worker) for worker in runner.workers}

    def serve(self, worker: Worker) -> None:
        """Have a worker answer calls; each goes to one thread."""
        try:
            while (call := self.calls.get()[2]) is not None and not self.runner.stopped.is_set():
                functions, part = call
                answers = worker.ask(functions, [self.samples[i] for i in part], self.runner.timeout)
                for (function, sample), answer in zip(itertools.product(functions, part), answers, strict=True):
                    self.found[sample][function] = answer
        except BaseException:
            worker.kill()  # it may be in the middle of a function
            raise

    def add(self, samples: Mapping[int, Sample]) -> None:
        """Begin to score samples, by their numbers.

        No function is called for a conversation that failed: it has no environment any more.
        """
        ok = {i: sample for i, sample in samples.items() if not (sample.played and sample.played.reward[0] in FAILURES)}
        self.samples |= ok
        self.put(1, self.runner.single_calls([*ok]))

    def put(self, priority: int, calls: Sequence[Call | None]) -> None:
        for call in calls:
            self.calls.put((priority, next(self.numbers), call))

    def close(self) -> None:
        """Let each thread end when no call is left."""
        self.put(2, [None] * len(self.runner.workers))

    def finish(self, samples: Sequence[Sample]) -> list[list[Answer]]:
        """The answers for all samples; any that were not added yet are added."""
        self.add({number: sample for number, sample in enumerate(samples) if number not in self.samples})
        self.put(0, self.runner.whole_calls(sorted(self.samples)))  # which take longest
        self.close()
        while self.serving:
            self.runner.poll()
            done, self.serving = wait(self.serving, TICK, FIRST_EXCEPTION)
            for future in done:
                future.result()
        for row, sample in zip(self.found, samples, strict=True):
            if sample.played:
                row[-1] = sample.played.reward
        self.runner.warn(self.found)
        return self.found


def short_names(names: Sequence[str]) -> list[str]:
    """The names of reward functions in metrics: the function's own name, unless two would have the same."""
    ends = [name.rpartition(":")[2] for name in names]
    return [end if ends.count(end) == 1 and end != ENVIRONMENT else name for end, name in zip(ends, names, strict=True)]


def number(answer: Answer) -> float:
    """The number in a function's answer; NaN where it failed or does not apply."""
    kind, value, *_ = answer
    return float(value) if kind == "value" else float("nan")


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
        for kind, metric, value in itertools.chain.from_iterable(entries for _, _, *entries in column):
            if kind == "metric":
                logged[printable(metric)].append(float(value))
        metrics |= {f"rewards/{name}/{metric}": float(np.mean(values)) for metric, values in logged.items()}
        numbers = np.array([number(answer) for answer in column if answer[0] == "value"])
        metrics[f"rewards/{name}/mean"] = float(numbers.mean()) if numbers.size else float("nan")
        metrics[f"rewards/{name}/std"] = float(numbers.std()) if numbers.size else float("nan")
        kinds = [kind for kind, *_ in column]
        metrics |= {f"rewards/{name}/{failure}": kinds.count(failure) for failure in FAILURES}
    return metrics
