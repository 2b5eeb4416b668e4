"""Rewards: plain functions (prompt, completion, example) -> float.

They run in a process of their own (see reward_worker), in its main thread (math-verify's time limit needs one) and
without JAX, because a user's function may do anything. A reward that raises, runs over its time or is no number is
counted and left NaN, never guessed. Left out: rewards that compare completions with each other; calling several at a
time.
"""

import importlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
from jaxtyping import Float

from mllm.config.schema import TaskConfig
from mllm.data.tasks import Example, Scorer, Task, final_answer
from mllm.errors import UserError
from mllm.rl.reward_worker import FAILURES, Worker

Reward = Callable[[str, str, Example], float]

NUMBER = re.compile(
    r"(?:(?<![\w.)%])[-−])?[$€£¥]?(?:(?<=[$€£¥])[-−])?(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|\.[0-9]+)"
)
"""A minus counts as a sign only where nothing precedes it that it could be subtracted from, and a comma as thousands'
where just three digits follow, even if the digits before it lack one."""
THINK_ANSWER = re.compile(
    r"\s*<think>(?:(?!</?(?:think|answer)>).)*</think>\s*<answer>(?:(?!</?(?:think|answer)>).)*</answer>\s*", re.DOTALL
)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def exact_match(prompt: str, completion: str, example: Example) -> float:
    """1 where the completion states the answer, letter by letter, in the very form that the task asks for.

    For GSM8K that is `#### N` (the official extraction: Cobbe et al. 2021, grade_school_math/dataset.py).
    """
    return float(final_answer(completion, example) == example.answer)


def flexible_match(prompt: str, completion: str, example: Example) -> float:
    """1 where the last number of the completion equals the answer's, however the two are written.

    The flexible filter of lm-evaluation-harness (tasks/gsm8k), but 1,234 is one number, and 7.0 equals 7. An
    answer that is no number is matched exactly.
    """
    if not NUMBER.fullmatch(example.answer):
        return exact_match(prompt, completion, example)
    return float(last_number(completion) == last_number(example.answer))


def last_number(text: str) -> Decimal | None:
    """Signs, thousands' commas, decimals and currencies are read; percent signs and a final full stop don't matter."""
    found = NUMBER.findall(text)
    if not found:
        return None
    magnitude = Decimal(re.sub(r"[^0-9.]", "", found[-1]))
    # Not -magnitude, which rounds to 28 digits.
    return magnitude.copy_negate() if re.search("[-−]", found[-1]) else magnitude


def think_answer_format(prompt: str, completion: str, example: Example) -> float:
    """1 where all of the completion is <think>...</think><answer>...</answer>, each tag once, space aside.

    DeepSeek-R1's format reward (arXiv:2501.12948, section 2.2.2).
    """
    return float(THINK_ANSWER.fullmatch(completion) is not None)


def tag_count(prompt: str, completion: str, example: Example) -> float:
    """The share of the four tags that stand exactly once (Open-R1's `tag_count_reward`, line breaks aside)."""
    return sum(completion.count(tag) == 1 for tag in TAGS) / len(TAGS)


BUILT_IN: dict[str, Reward] = {
    "exact_match": exact_match,
    "flexible_match": flexible_match,
    "format": think_answer_format,
    "tag_count": tag_count,
}


def find(name: str, scorer: Scorer | None) -> Reward:
    """The reward function called `name`; `package.module:function` is imported.

    Raises:
        UserError: there is none of that name, or it can't be imported.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name == "task":
        if scorer is None:
            raise UserError("task.rewards: this task has no scorer of its own: use exact_match or flexible_match")
        return scorer
    module, colon, function = name.partition(":")
    if not colon:
        raise UserError(
            f"task.rewards: there is no reward {name}: {', '.join(BUILT_IN)}, task, or package.module:function"
        )
    try:
        found = getattr(importlib.import_module(module), function)
    except BaseException as error:  # a module may do anything when it's imported, exit too
        raise UserError(f"task.rewards: {name} can't be imported: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise UserError(f"task.rewards: {name} is no function")
    return found


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
