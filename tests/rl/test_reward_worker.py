"""Whatever a reward function does, it is counted or a number, and neither the trainer nor another function notices."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import hostile_rewards
import numpy as np
import pytest
from hostile_rewards import NO_NUMBERS, NUMBERS
from hypothesis import given, settings
from hypothesis import strategies as st

from mllm.config.schema import RewardConfig, TaskConfig
from mllm.data.tasks import Example, Task
from mllm.rl.reward_worker import FAILURES, HANDSHAKE, LARGEST, call, read
from mllm.rl.rewards import RewardRunner

HOSTILE, BUSY = "hostile_rewards:hostile", "hostile_rewards:busy"
SEVEN = Example([], "7", None)
WROTE = "wrote to its process's connection with the trainer"
CLOSED = "closed its process's connection|ended its process with exit code"
FAILING = {
    "raise_error": ("raised", r"^ValueError: two lines \[31m$"),
    "raise_interrupt": ("raised", "^KeyboardInterrupt"),
    "leave": ("raised", "^SystemExit: 3$"),
    "recurse": ("raised", "^RecursionError"),
    "eat_memory": ("raised", "^MemoryError"),
    "raise_unspeakable": ("raised", "^an exception that can't be printed$"),
    "leave_at_once": ("raised", "^ended its process with exit code 3$"),
    "kill_itself": ("raised", r"^had its process killed by signal 9 \(Killed\)$"),
    "kill_its_group": ("raised", r"^had its process killed by signal 9 \(Killed\)$"),
    "crash": ("raised", "^had its process killed by signal 11 "),
    "fork_and_leave": ("raised", "^ended its process with exit code 3$"),
    "write_pickle": ("raised", WROTE),
    "write_half_a_line": ("raised", WROTE),
    "write_depths": ("raised", WROTE),
    "write_no_end": ("raised", WROTE),
    "answer_for_another": ("raised", WROTE),
    "answer_what_is_none": ("raised", WROTE),
    "close_everything": ("raised", CLOSED),
    "close_everything_and_stay": ("raised", CLOSED),
    "sleep": ("timed_out", "^took longer than 0.8 s$"),
    **dict.fromkeys(
        [
            "match_for_ever",
            "block_signals_and_sleep",
            "ignore_signals_and_sleep",
            "catch_everything",
            "stop_itself",
            "wait_for_a_child",
            "number_for_ever",
            "say_for_ever",
        ],
        ("timed_out", "took longer"),
    ),
    **dict.fromkeys(NO_NUMBERS, ("not_a_number", "^returned ")),
    "a_refusal": ("not_a_number", "^returned a Refusal: ValueError: not today$"),
    "a_silence": ("not_a_number", "^returned a Silent: RuntimeError: no comment$"),
    "none": ("not_a_number", "^returned None$"),
}
HARMLESS = [
    *NUMBERS,
    "print_much",
    "fork_and_return",
    "fork_and_raise",
    "leave_a_child",
    "leave_a_thread",
    "move_away",
    "run_a_loop",
]


class Stop(Exception):
    pass


def runner(*names: str, timeout: float) -> RewardRunner:
    rewards = tuple(RewardConfig(name=name) for name in names)
    return RewardRunner(TaskConfig(name="arithmetic", rewards=rewards, reward_timeout=timeout), Task("", [], []))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder to work in, since functions leave files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("work"))
        yield Path.cwd()


@pytest.fixture(scope="module")
def judge(place):
    """One for all, since each must leave it as it was."""
    with runner(HOSTILE, "exact_match", timeout=60) as judge:
        yield judge


def score(judge, *completions, **options):
    return judge.score(["?"] * len(completions), completions, [SEVEN] * len(completions), **options)


def gone(process: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True


def assert_gone(processes, seconds=10.0):
    deadline = time.monotonic() + seconds
    while left := [process for process in processes if not gone(process)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


# One function's trouble


@pytest.mark.parametrize("does", FAILING)
def test_a_failure_is_counted_by_its_kind_and_nothing_else_is_lost(judge, place, does):
    kind, said = FAILING[does]
    judge.timeout = 0.8 if kind == "timed_out" else 60.0
    scores = score(judge, "7", does, "7")
    np.testing.assert_array_equal(scores.values, [[1, math.nan, 1], [1, 0, 1]])
    none = dict.fromkeys(FAILURES, 0)
    assert scores.failures == {HOSTILE: {**none, kind: 1}, "exact_match": none}
    (message,) = scores.messages[HOSTILE].values()
    assert message.isprintable()
    assert len(message) < 400
    assert re.search(said, message)
    assert not (place / "executed").exists()


@pytest.mark.parametrize("does", HARMLESS)
def test_what_gives_a_number_in_the_end_gives_it_once_whatever_else_it_does(judge, place, does):
    judge.timeout = 60.0
    environment, path = dict(os.environ), list(sys.path)
    scores = score(judge, "7", does, "7")
    np.testing.assert_array_equal(scores.values, [[1, 1, 1], [1, 0, 1]])
    assert (Path.cwd(), dict(os.environ), sys.path) == (place, environment, path)


def test_every_way_to_be_no_number_is_in_the_table():
    functions = {name for name, f in vars(hostile_rewards).items() if callable(f)}
    assert functions >= {*FAILING, *HARMLESS}


def test_a_function_that_waits_for_all_of_its_children_waits_for_none_of_ours(place):
    with runner(HOSTILE, timeout=60) as judge:
        assert score(judge, "wait_for_all_children").values == 1


def test_an_alarm_that_a_function_leaves_behind_does_not_go_off_in_another(place):
    with runner(HOSTILE, BUSY, timeout=60) as judge:
        np.testing.assert_array_equal(score(judge, "leave_an_alarm").values, [[1], [1]])


def test_what_functions_print_never_gets_to_the_trainer_s_output(place):
    script = """
        from test_reward_worker import HOSTILE, runner, score
        with runner(HOSTILE, timeout=60) as judge:
            print(score(judge, "print_much").values)
    """
    run = trainer(script)
    output, errors = run.communicate()
    assert output == "[[1.]]\n"
    for letter in "oew":
        assert errors.count(letter) >= 200 * 10_000


def trainer(script):
    """A process of its own that scores."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


# Processes that it starts


@pytest.fixture
def left(place):
    """The processes that functions noted."""
    path = place / "left"
    path.unlink(missing_ok=True)
    return lambda: [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_what_a_function_started_ends_with_a_worker_that_is_killed(judge, left):
    def poll():
        if left():
            raise Stop

    judge.timeout = 60.0
    with pytest.raises(Stop):
        score(judge, "start_a_session_and_sleep", poll=poll)
    assert_gone(left(), seconds=2)


def test_what_a_function_started_ends_with_a_worker_that_it_ended(judge, left):
    assert score(judge, "fork_and_end").failures[HOSTILE]["raised"] == 1
    (process,) = left()
    assert_gone([process], seconds=2)


def test_what_a_function_started_ends_with_the_runner(left):
    with runner(HOSTILE, timeout=60) as judge:
        score(judge, "start_a_session")
        (process,) = left()
        assert not gone(process)
    assert_gone([process], seconds=2)


def test_nothing_is_left_of_workers_that_were_replaced(place):
    def held():
        children = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
        return len(children.split()), len(os.listdir("/proc/self/fd"))

    before = held()
    with runner(HOSTILE, timeout=60) as judge:
        score(judge, *["leave_at_once", "kill_itself"] * 2)
    assert held() == before


@pytest.mark.parametrize("does", ["sleep", "match_for_ever"])
def test_a_trainer_that_is_killed_takes_a_hanging_function_with_it(place, does):
    script = f"""
        from test_reward_worker import HOSTILE, runner, score
        judge = runner(HOSTILE, timeout=60)
        print(judge.worker.process.pid, flush=True)
        score(judge, {does!r})
    """
    run = trainer(script)
    process = int(run.stdout.readline())
    time.sleep(0.3)
    assert not gone(process)
    run.kill()
    run.communicate()
    assert_gone([process])


def test_signals_to_every_process_of_a_job_leave_a_function_alone(place):
    with runner(BUSY, timeout=60) as judge:
        sent = []

        def poll():
            if len(sent) < 6:
                number = (signal.SIGTERM, signal.SIGINT)[len(sent) % 2]
                os.kill(judge.worker.process.pid, number)
                sent.append(number)

        assert score(judge, "7", poll=poll).values == 1
        assert len(sent) == 6


# The trainer waits


@pytest.mark.parametrize("does", ["sleep", "stop_itself", "match_for_ever"])
def test_the_trainer_is_asked_while_it_waits_and_what_it_raises_passes_through(place, does):
    calls = []

    def poll():
        calls.append(time.monotonic())
        if calls[-1] - calls[0] > 0.8:
            raise Stop

    with runner(HOSTILE, "exact_match", timeout=60) as judge:
        process = judge.worker.process.pid
        with pytest.raises(Stop):
            score(judge, "7", does, poll=poll)
        assert np.median(np.diff(calls)) < 0.25
        assert calls[-1] - calls[0] < 2
        assert gone(process)
        np.testing.assert_array_equal(score(judge, "7").values, [[1], [1]])


def test_the_trainer_is_asked_while_a_worker_starts_again(place):
    def poll():
        raise Stop

    with runner(HOSTILE, timeout=60) as judge:
        os.kill(judge.worker.process.pid, signal.SIGKILL)
        with pytest.raises(Stop):
            score(judge, "7", poll=poll)
        assert score(judge, "7").values == 1


# What comes back


@settings(deadline=None)
@given(st.binary())
def test_no_line_of_bytes_is_an_answer_by_chance_or_harms_the_reader(line):
    assert read(line, 0) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["value", "raised", "ready"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=2),
)


@settings(deadline=None)
@given(JSON | st.tuples(st.sampled_from([HANDSHAKE, 0]), st.sampled_from(["value", *FAILURES, "ready"]), JSON))
def test_an_answer_is_a_number_within_bounds_or_a_failure_in_words(message):
    answer = read(json.dumps(message).encode(), 0)
    if answer is not None:
        kind, result = answer
        assert message[0] == 0
        if kind == "value":
            assert abs(result) <= LARGEST
        else:
            assert kind in FAILURES
            assert result == "" or result.isprintable()


@settings(deadline=None)
@given(st.floats(-LARGEST, LARGEST))
def test_a_number_comes_back_as_it_was_to_the_bit(number):
    answer = call(lambda: number, [])
    assert answer == ("value", number)
    assert read(json.dumps([3, *answer]).encode(), 3) == answer
