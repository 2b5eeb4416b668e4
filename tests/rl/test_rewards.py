"""The runner scores every completion with every function, in one process without JAX. See test_reward_worker, too."""

import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mllm.config.task import RewardConfig, TaskConfig
from mllm.data.tasks.task import Example, Task
from mllm.rl.rewards import Failure, RewardRunner, Scores

OWN_REWARDS = """
import os, signal, sys

def length(prompt, completion, example):
    print("printed", flush=True)
    if completion == "raise": raise ValueError("no " + prompt)
    return len(completion)

def jax_is_imported(prompt, completion, example):
    return "jax" in sys.modules

def process_id(prompt, completion, example):
    return os.getpid()

def alarm(prompt, completion, example):
    signal.signal(signal.SIGALRM, lambda *_: None)
    return 1
"""
NAMES = ("exact_match", *(f"own_rewards:{name}" for name in ("length", "jax_is_imported", "process_id", "alarm")))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardRunner]:
    """A runner that finds the functions above, as a user's, in the working directory."""
    folder: Path = tmp_path_factory.mktemp("rewards")
    (folder / "own_rewards.py").write_text(OWN_REWARDS)
    task = TaskConfig(name="arithmetic", rewards=tuple(RewardConfig(name=name) for name in NAMES), reward_timeout=60.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with RewardRunner(task, Task("", [], [])) as runner:
            yield runner


def score(runner: RewardRunner, *completions: str) -> Scores:
    example = Example([{"role": "user", "content": "?"}], "7")
    return runner.score(["p"] * len(completions), completions, [example] * len(completions))


def test_functions_run_in_the_main_thread_of_one_lasting_process_without_jax(runner: RewardRunner) -> None:
    """Only a main thread may set an alarm, as math-verify does."""
    first, second = score(runner, "7").values[2:, 0], score(runner, "7").values[2:, 0]
    np.testing.assert_array_equal(first, second)
    jax_is_imported, process_id, alarm = first
    assert (jax_is_imported, alarm) == (0, 1)
    assert process_id != os.getpid()


def test_a_failure_is_kept_and_only_the_first_of_its_kind_is_logged(
    runner: RewardRunner, caplog: pytest.LogCaptureFixture
) -> None:
    failure = Failure("own_rewards:length", "raised", "ValueError: no p")
    with caplog.at_level(logging.WARNING):
        scores = score(runner, "raise", "7", "raise")
        score(runner, "raise")
    assert scores.failures == [failure, failure]
    np.testing.assert_array_equal(scores.values[:2], [[0, 1, 0], [math.nan, 1, math.nan]])
    assert [record.getMessage() for record in caplog.records] == [
        "reward own_rewards:length raised: ValueError: no p (further ones are only counted)"
    ]
