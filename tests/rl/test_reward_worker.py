"""Whatever a reward function does gives a number or is counted; it harms neither the trainer nor other functions."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from array import array
from pathlib import Path

import numpy as np
import pytest
from hostile_rewards import END, HANG, RAISE, RETURN_NO_NUMBER, RETURN_ONE
from hypothesis import given, settings
from hypothesis import strategies as st

from mllm.config.task import RewardConfig, TaskConfig
from mllm.data.tasks.task import Example, Task
from mllm.rl.reward_calls import Available, Sample
from mllm.rl.reward_worker import FAILURES, HANDSHAKE, LARGEST, Worker, judge, parse
from mllm.rl.rewards import RewardRunner
from mllm.rl.rollout import Completions

HOSTILE, BUSY = "hostile_rewards:hostile", "hostile_rewards:busy"
SEVEN = Example([{"role": "user", "content": "?"}], "7")
AVAILABLE = Available((), True, 4)

# By the function's name in hostile_rewards: what the worker answers

FAILURE = {
    "raise_error": ("raised", r"^ValueError: two lines \[31m$"),
    "raise_interrupt": ("raised", "^KeyboardInterrupt"),
    "exit_by_exception": ("raised", "^SystemExit: 3$"),
    "recurse": ("raised", "^RecursionError"),
    "eat_memory": ("raised", "^MemoryError"),
    "raise_unprintable": ("raised", "^an exception that can't be printed$"),
    **dict.fromkeys(RETURN_NO_NUMBER, ("not_a_number", "^returned ")),
    "a_raising_float": ("not_a_number", "^returned a RaisingFloat: ValueError: not today$"),
    "a_raising_repr": ("not_a_number", "^returned a RaisingRepr: RuntimeError: no comment$"),
    "none": ("not_a_number", "^returned None$"),
}
LOSS = dict.fromkeys(END, "^wrote to its process's connection with the trainer$") | {
    "exit_at_once": "^ended its process with exit code 3$",
    "kill_itself": r"^had its process killed by signal 9 \(Killed\)$",
    "kill_its_group": r"^had its process killed by signal 9 \(Killed\)$",
    "crash": "^had its process killed by signal 11 ",
    "close_everything": "^closed its process's connection|^ended its process with exit code",
    "close_everything_and_stay": "^closed its process's connection",
}
"""The process is lost, and the sample counts as raised."""


class Stop(Exception):
    """The trainer is asked to stop."""


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """The working directory, since functions leave files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("work"))
        yield Path.cwd()


@pytest.fixture(scope="module")
def hostile(place):
    """One runner for all tests that must leave it able to score."""
    with runner(HOSTILE, "exact_match") as hostile:
        yield hostile


def runner(*names: str, workers: int = 1) -> RewardRunner:
    rewards = tuple(RewardConfig(name=name) for name in names)
    task = TaskConfig(name="arithmetic", rewards=rewards, reward_timeout=60.0, reward_workers=workers)
    return RewardRunner(task, Task("", [SEVEN], []), AVAILABLE.max_completion_length)


def score(runner, *completions, poll=lambda: None):
    """The scores for SEVEN's completions, each of one token."""
    runner.poll, ones = poll, np.ones(len(completions), np.int32)
    return runner.score([SEVEN] * ones.size, completions, Completions(ones[:, None], None, ones, ones > 0))


def answers(completions, timeout=60.0):
    """A new worker's answers to the completions, and whether it lives on."""
    worker = Worker([(HOSTILE, {})], None, AVAILABLE, lambda: None)
    try:
        samples = [Sample(SEVEN, completion, array("i", [1]), False) for completion in completions]
        worker.send((0, 0, samples), timeout, lambda: None)
        found = [worker.answer(number, timeout, lambda: None) for number in range(len(completions))]
        return found, worker.alive
    finally:
        worker.kill()


def is_gone(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True


def assert_gone(pid, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not is_gone(pid):
        assert time.monotonic() < deadline, f"{pid} is still there"
        time.sleep(0.02)


# One function


@pytest.fixture(scope="module")
def shared_answers(place):
    """One process's answers to all that must leave it alive: after each a good completion, which must not notice."""
    names = [*RAISE, *RETURN_NO_NUMBER, *RETURN_ONE]
    found, alive = answers([completion for name in names for completion in (name, "7")])
    assert alive
    assert found[1::2] == [("value", 1.0)] * len(names)
    return dict(zip(names, found[::2], strict=True))


@pytest.mark.parametrize("does", RAISE | RETURN_NO_NUMBER)
def test_a_failing_function_is_answered_by_its_kind_and_a_message(shared_answers, does):
    kind, pattern = FAILURE[does]
    found, message = shared_answers[does]
    assert found == kind
    assert re.search(pattern, message)
    assert message.isprintable()
    assert len(message) < 400


@pytest.mark.parametrize("does", RETURN_ONE)
def test_a_number_is_answered_once_whatever_else_the_function_does(shared_answers, does):
    assert shared_answers[does] == ("value", 1.0)


@pytest.mark.parametrize("does", END)
def test_a_function_that_ends_its_process_is_a_failure(place, does):
    [(kind, message)], alive = answers([does])
    assert (kind, alive) == ("raised", False)
    assert re.search(LOSS[does], message)
    assert not (place / "executed").exists()


@pytest.mark.parametrize("does", HANG)
def test_a_function_that_hangs_is_killed_at_its_time_limit(does):
    assert answers([does], timeout=0.4) == ([("timed_out", "took longer than 0.4 s")], False)


def test_failures_are_counted_by_function_and_kind_and_nothing_else_is_lost(hostile):
    scores = score(hostile, "7", "exit_at_once", "none", "raise_error", "kill_itself", "wait_for_all_children", "7")
    nan = math.nan
    np.testing.assert_array_equal(scores.values.T, [[1, nan, nan, nan, nan, 1, 1], [1, 0, 0, 0, 0, 0, 1]])
    assert {failure.name for failure in scores.failures} == {HOSTILE}
    assert [failure.kind for failure in scores.failures] == ["raised", "not_a_number", "raised", "raised"]
    assert [failure.message for failure in scores.failures[:2]] == [
        "ended its process with exit code 3",
        "returned None",
    ]


def trainer(does):
    """Start a process that scores one completion as the trainer does, and first prints its worker's process id."""
    script = f"""
        from array import array
        from mllm.data.tasks.task import Example
        from mllm.rl.reward_calls import Available, Sample
        from mllm.rl.reward_worker import Worker
        worker = Worker([({HOSTILE!r}, {{}})], None, Available((), True, 4), lambda: None)
        print(worker.process.pid, flush=True)
        worker.send((0, 0, [Sample(Example([], "7"), {does!r}, array("i", [1]), False)]), 60, lambda: None)
        print(worker.answer(0, 60, lambda: None))
        worker.kill()
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_what_a_function_prints_never_reaches_the_trainers_stdout():
    output, errors = trainer("print_much").communicate()
    assert output.splitlines()[1:] == ["('value', 1.0)"]
    for letter in "oew":
        assert errors.count(letter) >= 200 * 10_000


# Processes that it starts


@pytest.fixture
def noted(place):
    """Reads the process ids that functions have noted."""
    path = place / "left"
    path.unlink(missing_ok=True)
    return lambda: [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_what_a_function_started_ends_with_a_worker_that_is_killed_and_one_that_it_ended(hostile, noted):
    def poll():
        if noted():
            raise Stop

    with pytest.raises(Stop):
        score(hostile, "start_a_session_and_sleep", poll=poll)
    assert_gone(noted()[0], seconds=2)
    assert [failure.kind for failure in score(hostile, "fork_and_exit").failures] == ["raised"]
    assert_gone(noted()[1], seconds=2)


@pytest.mark.parametrize("workers", [1, 2])
def test_closing_the_runner_leaves_no_process_and_no_file_open(noted, workers):
    def held():  # not /proc/self/task/*/children: a child whose thread ends moves to another, perhaps unseen
        status = ["ps", "-o", "pid=", "--ppid", str(os.getpid())]
        with subprocess.Popen(status, stdout=subprocess.PIPE, text=True) as ps:
            children = {int(pid) for pid in ps.communicate()[0].split()} - {ps.pid}
        return children, len(os.listdir("/proc/self/fd"))

    before = held()
    with runner(HOSTILE, workers=workers) as opened:
        score(opened, "exit_at_once", "start_a_session")
        (started,) = noted()
        assert not is_gone(started)
    assert_gone(started, seconds=2)
    assert held() == before


@pytest.mark.parametrize("does", ["sleep", "match_forever"])
def test_a_trainer_that_is_killed_takes_a_hanging_function_with_it(does):
    killed = trainer(does)
    process = int(killed.stdout.readline())
    time.sleep(0.3)
    assert not is_gone(process)
    killed.kill()
    killed.communicate()
    assert_gone(process)


def test_neither_signals_to_the_job_nor_an_alarm_left_by_another_disturb_a_function():
    with runner(HOSTILE, BUSY) as both:
        sent = []

        def poll():
            if len(sent) < 4:
                sent.append((signal.SIGTERM, signal.SIGINT)[len(sent) % 2])
                os.kill(both.workers[0].process.pid, sent[-1])

        np.testing.assert_array_equal(score(both, "leave_an_alarm", poll=poll).values, [[1, 1]])
        assert len(sent) == 4


# The trainer waits


@pytest.mark.parametrize("does", ["sleep", "stop_itself", "match_forever"])
def test_the_trainer_polls_while_it_waits_and_what_poll_raises_passes_through(hostile, does):
    score(hostile, "7")  # its process runs
    process, calls = hostile.workers[0].process.pid, []

    def poll():
        calls.append(time.monotonic())
        if calls[-1] - calls[0] > 0.8:
            raise Stop

    with pytest.raises(Stop):
        score(hostile, "7", does, poll=poll)
    assert np.median(np.diff(calls)) < 0.25
    assert calls[-1] - calls[0] < 2
    assert is_gone(process)


def test_when_the_trainer_stops_waiting_all_functions_end_and_the_next_step_is_scored():
    both_run = []

    def poll():
        both_run.extend([time.monotonic()] * all(two.workers))
        if both_run and time.monotonic() - both_run[0] > 0.5:
            raise Stop

    with runner(HOSTILE, workers=2) as two:
        with pytest.raises(Stop):
            score(two, "sleep", "match_forever", poll=poll)
        assert not any(worker.alive for worker in two.workers)
        np.testing.assert_array_equal(score(two, "7", "7").values, [[1], [1]])


def test_the_trainer_polls_while_a_worker_starts_again(hostile):
    def poll():
        raise Stop

    score(hostile, "7")
    os.kill(hostile.workers[0].process.pid, signal.SIGKILL)
    with pytest.raises(Stop):
        score(hostile, "7", poll=poll)
    np.testing.assert_array_equal(score(hostile, "7").values, [[1, 1]])


# What comes back


@given(st.binary())
def test_no_line_of_bytes_is_an_answer_by_chance(line):
    assert parse(line, 0) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["value", "raised", "ready"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=8,
)


@settings(max_examples=60)
@given(JSON | st.tuples(st.sampled_from([HANDSHAKE, 0]), st.sampled_from(["value", *FAILURES, "ready"]), JSON))
def test_an_answer_is_a_number_within_bounds_or_a_failure_with_a_message(message):
    answer = parse(json.dumps(message).encode(), 0)
    if answer is not None:
        kind, result = answer
        assert message[0] == 0
        if kind == "value":
            assert abs(result) <= LARGEST
        else:
            assert kind in FAILURES
            assert result == "" or result.isprintable()


@given(st.floats(-LARGEST, LARGEST))
def test_a_number_is_transferred_to_the_bit(number):
    answer = judge(number)
    assert answer == ("value", number)
    assert parse(json.dumps([3, *answer]).encode(), 3) == answer
