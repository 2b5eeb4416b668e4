"""Whatever a reward function does gives a number or is counted; it harms neither the trainer nor other functions."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from hostile_rewards import ENDING, HANGING, LASTING
from hypothesis import given, settings
from hypothesis import strategies as st

from mllm.config.task import RewardConfig, TaskConfig
from mllm.data.tasks.task import Example, Task
from mllm.rl.reward_worker import FAILURES, HANDSHAKE, LARGEST, judge, parse
from mllm.rl.rewards import RewardRunner
from mllm.rl.rollout import Completions

HOSTILE, BUSY = "hostile_rewards:hostile", "hostile_rewards:busy"
SEVEN = Example([{"role": "user", "content": "?"}], "7")


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


def runner(*names: str, workers: int = 1, seconds: float = 60.0) -> RewardRunner:
    rewards = tuple(RewardConfig(name=name) for name in names)
    task = TaskConfig(name="arithmetic", rewards=rewards, reward_timeout=seconds, reward_workers=workers)
    return RewardRunner(task, Task("", [SEVEN], []), 4)


def score(runner, *completions, poll=lambda: None):
    """The scores for SEVEN's completions, each of one token."""
    runner.poll, ones = poll, np.ones(len(completions), np.int32)
    return runner.score([SEVEN] * ones.size, completions, Completions(ones[:, None], None, ones, ones > 0))


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


def answers(cases, **options):
    """Each case's kind and message, by one runner whose functions must all come to an end."""
    with runner(HOSTILE, **options) as opened:
        scores = score(opened, *cases)
    messages = iter(failure.message for failure in scores.failures)
    return {
        case: (kind, "" if kind == "value" else next(messages))
        for case, kind in zip(cases, scores.kinds[:, 0], strict=True)
    }


@pytest.fixture(scope="module")
def found(place):
    """What is answered to all cases: one process gets those that must leave it alive, each before a good completion."""
    alive = {}
    with runner(HOSTILE) as one:
        score(one, "7")
        process = one.workers[0].process
        scores = score(one, *[completion for name in LASTING for completion in (name, "7")])
        assert one.workers[0].process is process
    assert (scores.values[1::2] == 1).all()
    messages = iter(failure.message for failure in scores.failures)
    for name, kind, value in zip(LASTING, scores.kinds[::2, 0], scores.values[::2, 0], strict=True):
        assert (value == 1) == (kind == "value")
        alive[name] = kind, "" if kind == "value" else next(messages)
    return alive | answers(ENDING, workers=4) | answers(HANGING, workers=8, seconds=0.4)


@pytest.mark.parametrize("does", LASTING | ENDING | HANGING)
def test_whatever_a_function_does_is_answered_by_a_number_or_a_failure(found, place, does):
    _, kind, message = (LASTING | ENDING | HANGING)[does]
    assert found[does][0] == kind
    assert re.fullmatch(message, found[does][1])
    assert found[does][1] == "" or found[does][1].isprintable()
    assert len(found[does][1]) < 400
    assert not (place / "executed").exists()


def trainer(does):
    """Start a process that scores one completion as the trainer does, and first prints its worker's process id."""
    script = f"""
        from array import array
        from mllm.data.tasks.task import Example
        from mllm.rl.reward_calls import Available, Sample
        from mllm.rl.reward_worker import Worker
        worker = Worker([({HOSTILE!r}, {{}})], None, Available((), True, 4))
        worker.start(lambda: None)
        print(worker.process.pid, flush=True)
        print(worker.ask(0, [Sample(Example([], "7"), {does!r}, array("i", [1]), False)], 60, lambda: None))
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
    assert output.splitlines()[1:] == ["[('value', 1.0)]"]
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


def test_closing_the_runner_leaves_no_process_and_no_file_open(noted):
    def held():  # not /proc/self/task/*/children: a child whose thread ends moves to another, perhaps unseen
        status = ["ps", "-o", "pid=", "--ppid", str(os.getpid())]
        with subprocess.Popen(status, stdout=subprocess.PIPE, text=True) as ps:
            children = {int(pid) for pid in ps.communicate()[0].split()} - {ps.pid}
        return children, len(os.listdir("/proc/self/fd"))

    before = held()
    with runner(HOSTILE, workers=2) as opened:
        score(opened, "exit at once", "start_a_session")
        (started,) = noted()
        assert not is_gone(started)
    assert_gone(started, seconds=2)
    assert held() == before


def test_a_trainer_that_is_killed_takes_a_hanging_function_with_it():
    killed = trainer("match forever")
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


@pytest.mark.parametrize("does", ["stop itself", "match forever"])
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
        both_run.extend([time.monotonic()] * all(worker.alive for worker in two.workers))
        if both_run and time.monotonic() - both_run[0] > 0.5:
            raise Stop

    with runner(HOSTILE, workers=2) as two:
        with pytest.raises(Stop):
            score(two, "sleep", "match forever", poll=poll)
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

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["value", "raised", "ready"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=8,
)
NUMBERED = st.tuples(st.sampled_from([HANDSHAKE, 0]), st.sampled_from(["value", *FAILURES, "ready"]), JSON)


@settings(max_examples=40)
@given(st.binary() | (JSON | NUMBERED).map(lambda message: json.dumps(message).encode()))
def test_an_answer_is_a_number_within_bounds_or_a_failure_with_a_message(line):
    answer = parse(line, 0)
    if answer is not None:
        kind, result = answer
        assert json.loads(line)[0] == 0
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
