"""Rewards: plain functions (prompt, completion, example) -> float, and the process that calls them.

They run in a process of their own, because a user's function may hang, crash or print, and a regular
expression or C code that hangs can only be killed. The process has a main thread of its own (math-verify's
time limit needs one), never imports JAX, and what it prints goes to stderr. A reward that raises, runs over
its time or is no number is counted and left NaN, never guessed. Left out: rewards that compare completions
with each other; calling several at a time.
"""

import importlib
import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite
from queue import SimpleQueue
from typing import IO, Any

import numpy as np
from jaxtyping import Float

from mllm.config import TaskConfig
from mllm.errors import UserError
from mllm.tasks import Example, Scorer, Task, final_answer

Reward = Callable[[str, str, Example], float]
KINDS = ("raised", "timed_out", "not_a_number")
START_TIMEOUT = 120.0
"""Seconds that the process may take to import the functions."""

NUMBER = re.compile(
    r"(?:(?<![\w.)%])[-−])?[$€£¥]?(?:(?<=[$€£¥])[-−])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
"""A minus counts as a sign only where nothing precedes it that it could be subtracted from."""
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
    return -magnitude if re.search("[-−]", found[-1]) else magnitude


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
        self.worker = Worker(self.names, self.scorer)
        self.warned: set[tuple[str, str]] = set()

    def score(self, prompts: Sequence[str], completions: Sequence[str], examples: Sequence[Example]) -> Scores:
        """Every function on every completion."""
        samples = list(zip(prompts, completions, examples, strict=True))
        scores = Scores(
            values=np.full((len(self.names), len(samples)), np.nan),
            failures={name: dict.fromkeys(KINDS, 0) for name in self.names},
            messages={name: {} for name in self.names},
        )
        done, total = 0, scores.values.size
        if self.worker.process.poll() is not None:  # it died between batches, by no function's fault
            self.worker = Worker(self.names, self.scorer)
        self.worker.submit(samples, done)
        while done < total:
            function, sample = divmod(done, len(samples))
            kind, result = self.worker.result(self.timeout)
            if kind == "value":
                scores.values[function, sample] = result
            else:
                self.record(scores, self.names[function], kind, result)
            done += 1
            if not self.worker.alive:
                self.worker = Worker(self.names, self.scorer)
                self.worker.submit(samples, done)
        return scores

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


class Worker:
    """The process, seen from outside. It's a fresh interpreter: forking one that runs JAX's threads may deadlock."""

    def __init__(self, names: Sequence[str], scorer: Scorer | None) -> None:
        self.socket, theirs = socket.socketpair()
        self.incoming = self.socket.makefile("rb")
        path = [entry or os.getcwd() for entry in sys.path]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from mllm.rewards import work; work({theirs.fileno()})"],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[theirs.fileno()],
            # the functions may import JAX themselves; the accelerator is the trainer's
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*path, os.getcwd()]), "JAX_PLATFORMS": "cpu"},
            start_new_session=True,  # Ctrl-C is the trainer's to handle
        )
        theirs.close()
        self.alive = True
        self.socket.sendall(pickle.dumps((names, scorer)))
        kind, message = self.result(START_TIMEOUT)
        if kind != "ready":
            self.kill()
            raise UserError(message if kind == "failed" else f"task.rewards: importing them {message}")

    def submit(self, samples: Sequence[tuple[str, str, Example]], done: int) -> None:
        """Ask for the results of all functions on all samples, function by function, but for the first `done`."""
        self.socket.settimeout(None)
        with suppress(ConnectionError):  # a process that has died is `result`'s to find
            self.socket.sendall(pickle.dumps((samples, done)))

    def result(self, timeout: float) -> tuple[str, Any]:
        """The next one: ("value", float), or how it failed and what that says. The process may be dead thereafter."""
        self.socket.settimeout(timeout)
        try:
            return pickle.load(self.incoming)
        except TimeoutError:
            self.kill()
            return "timed_out", f"took longer than {timeout:g} s"
        except (EOFError, ConnectionError, pickle.UnpicklingError):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1)  # it is leaving: its own exit code is worth waiting for
            self.kill()
            return "raised", f"ended its process with exit code {self.process.returncode}"

    def kill(self) -> None:
        self.alive = False
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # with whatever it started
        self.process.wait()
        self.incoming.close()
        self.socket.close()


def work(handle: int) -> None:
    """The process, seen from inside. It ends with the connection, even where a function hangs."""
    with socket.socket(fileno=handle) as connection:
        incoming = connection.makefile("rb")
        names, scorer = pickle.load(incoming)
        try:
            functions = [find(name, scorer) for name in names]
        except UserError as error:
            connection.sendall(pickle.dumps(("failed", str(error))))
            return
        connection.sendall(pickle.dumps(("ready", "")))
        requests: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=listen, args=(incoming, requests), daemon=True).start()
        while True:
            samples, done = requests.get()
            for index in range(done, len(functions) * len(samples)):
                function, sample = divmod(index, len(samples))
                connection.sendall(pickle.dumps(call(functions[function], samples[sample])))


def listen(incoming: IO[bytes], requests: SimpleQueue[Any]) -> None:
    """Take requests, so that the end of the connection is seen even while a function runs."""
    try:
        while True:
            requests.put(pickle.load(incoming))
    except (EOFError, OSError):
        os._exit(0)


def call(function: Reward, sample: tuple[str, str, Example]) -> tuple[str, Any]:
    """("value", float), or ("raised" or "not_a_number", what it said)."""
    try:
        value = function(*sample)
        number = float(value) if hasattr(value, "__float__") else float("nan")
    except BaseException as error:  # SystemExit too: one sample's trouble is not the others'
        return "raised", f"{type(error).__name__}: {error!s:.300}"
    return ("value", number) if isfinite(number) else ("not_a_number", f"returned {value!r:.100}")
