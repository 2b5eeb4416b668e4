"""Scores completions with a task's reward functions, in processes of their own (see worker.py).

A call that raises, times out or returns no finite number is counted as a failure; its completion gets no reward.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from mllm.config.task import ENVIRONMENT, TaskConfig
from mllm.data.tasks.task import Example, Task
from mllm.errors import UserError
from mllm.rewards.calls import OF_CONVERSATIONS, Sample, bind_all, fields_of
from mllm.rewards.environments import Move, players
from mllm.rewards.scores import FAILURES, NOT_APPLICABLE, NOTHING, Answer
from mllm.rewards.worker import TICK, Call, Workers

log = logging.getLogger(__name__)


class RewardRunner:
    """Calls a task's reward functions. UserError if a function isn't found, or requires an unknown argument.

    `poll` is called at least every 0.25 s while completions are scored. If the task has an environment or tools, their
    reward comes last. They run in processes of their own, so that a hanging reward function does not end them.
    """

    environments: Sequence[Workers] = ()
    """One process each for `Conversations`: every turn of a conversation must reach the same process."""
    tools: Sequence[dict[str, Any]] = ()
    """The JSON schemas of the tools."""

    def __init__(
        self, config: TaskConfig, task: Task, max_completion_length: int, poll: Callable[[], None] = lambda: None
    ) -> None:
        converses = [ENVIRONMENT] * config.converses
        self.names = [*short_names([reward.name for reward in config.rewards]), *converses]
        self.weights = np.array([*(reward.weight for reward in config.rewards), *(1.0 for _ in converses)])
        self.timeout = config.reward_timeout
        self.poll = poll
        rewards = [(reward.name, reward.args) for reward in config.rewards]
        fields = (*fields_of(task), *(OF_CONVERSATIONS if converses else ()))
        self.workers = Workers(partial(bind_all, rewards, fields, max_completion_length), config.reward_workers)
        self.kinds: list[str] = []
        self.warned: set[tuple[str, str]] = set()
        try:
            if rewards:
                self.workers.start()
                self.kinds = self.workers.kinds
            if converses:
                make = partial(players, config.environment, config.tools or (), self.timeout)
                key = "task.environment" if config.environment else "task.tools"
                self.environments = [Workers(make, key=key) for _ in range(config.reward_workers)]
                first = self.environments[0]
                first.start()
                self.tools = first.tools
                self.try_out(config.environment, task.train[:1])
        except BaseException:
            self.__exit__()
            raise

    def try_out(self, environment: str | None, problems: Sequence[Example]) -> None:
        """Start a conversation on the first problem; UserError if the environment raises.

        A timeout is no error: a server that is still starting may answer later.
        """
        if environment and problems:
            ((kind, message, *_),) = self.environments[0].ask(
                [Move(0, problems[0], trial=True)], self.timeout, self.poll
            )
            if kind == "raised":
                raise UserError(f"task.environment: {environment} fails with the first problem: {message}")

    def score(self, samples: Sequence[Sample]) -> list[list[Answer]]:
        """Every function's answer for every sample; independent of the number of processes.

        The run's first failure of each function and kind is logged. If `poll` raises, the exception passes through, and
        the runner stays usable.
        """
        with self.scoring(len(samples)) as scoring:
            return scoring.finish(samples)

    @contextmanager
    def scoring(self, count: int) -> Iterator["Scoring"]:
        """Score `count` samples that arrive one after another; leaving the context stops calls that still run."""
        scoring = Scoring(self, count)
        try:
            yield scoring
        finally:
            if not all(call.future.done() for _, _, call in scoring.calls):
                self.workers.close()

    def warn(self, answers: Sequence[Sequence[Answer]]) -> None:
        """Log the run's first failure of each function and kind."""
        for function, name in enumerate(self.names):
            column = [row[function] for row in answers]
            if name != ENVIRONMENT and {kind for kind, *_ in column} == {NOT_APPLICABLE}:
                column = [("returned None", f"for all of {len(column)} completions; is a return missing?")]
            for kind, message, *_ in column:
                if kind in (*FAILURES, "returned None") and (name, kind) not in self.warned:
                    self.warned.add((name, kind))
                    log.warning("reward %s %s: %s (further ones are only counted)", name, kind, message)

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *exception: object) -> None:
        for workers in (self.workers, *self.environments):
            workers.close()


class Scoring:
    """Scores a rollout's samples. Functions of one completion are called as soon as the completion has ended.

    Batched and coroutine functions wait for the last sample. They get failed conversations as well, since they may rely
    on the order of the groups; their result for a failed conversation is not used.
    """

    def __init__(self, runner: RewardRunner, count: int) -> None:
        self.runner = runner
        self.answers: list[list[Answer]] = [[NOTHING] * len(runner.names) for _ in range(count)]
        self.samples: dict[int, Sample] = {}
        self.calls: list[tuple[Sequence[int], Sequence[int], Call]] = []
        """The calls, each with the indices of its functions and samples."""

    def add(self, samples: Mapping[int, Sample]) -> None:
        """Begin to score samples, by index; a failed conversation is not passed to functions of one completion."""
        self.samples |= samples
        new = [i for i, sample in samples.items() if not sample.failed]
        for function, kind in enumerate(self.runner.kinds):
            for numbers in [[i] for i in new] if kind == "single" else [[*new]] if kind == "quick" else []:
                self.call([function], numbers)

    def call(self, functions: Sequence[int], numbers: Sequence[int]) -> None:
        if functions and numbers:
            samples = [self.samples[i] for i in numbers]
            call = self.runner.workers.schedule(functions, samples, self.runner.timeout)
            self.calls.append((functions, numbers, call))

    def finish(self, samples: Sequence[Sample]) -> list[list[Answer]]:
        """The answers for all samples; samples that were not added yet are added."""
        self.add({number: sample for number, sample in enumerate(samples) if number not in self.samples})
        numbers, kinds = sorted(self.samples), self.runner.kinds
        self.call([function for function, kind in enumerate(kinds) if kind == "async"], numbers)
        for function in (function for function, kind in enumerate(kinds) if kind == "batched"):
            self.call([function], numbers)
        while wait([call.future for _, _, call in self.calls], TICK).not_done:
            self.runner.poll()
        for functions, members, call in self.calls:
            for (function, member), answer in zip(product(functions, members), call.result(), strict=True):
                if not samples[member].failed:
                    self.answers[member][function] = answer
        for row, sample in zip(self.answers, samples, strict=True):
            if sample.result:
                row[-1] = sample.result.reward
        self.runner.warn(self.answers)
        return self.answers


def short_names(names: Sequence[str]) -> list[str]:
    """The reward functions' names in metrics: the bare function name, or `module:function` where two are equal."""
    ends = [name.rpartition(":")[2] for name in names]
    return [end if ends.count(end) == 1 and end != ENVIRONMENT else name for end, name in zip(ends, names, strict=True)]
