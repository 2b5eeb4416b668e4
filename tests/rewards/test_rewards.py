"""Every completion is scored by every function, in processes without JAX.

A function that fails, hangs or ends its process is counted, and only its own completion is lost.
"""

import math
import os
import re
import signal
import subprocess
import sys
import time
from array import array
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hostile_rewards import ENDING, FOREVER, HANGING, LASTING, PRINTS, STARTS
from hypothesis import given
from hypothesis import strategies as st

from mllm.config.task import RewardConfig, TaskConfig
from mllm.data.tasks.task import Example, Task
from mllm.errors import UserError
from mllm.rewards.calls import Sample
from mllm.rewards.functions import BUILT_IN
from mllm.rewards.runner import RewardRunner
from mllm.rewards.scores import LARGEST, judge, reward_metrics, totals
from mllm.rewards.worker import decode, encode

OWN_REWARDS = """
import time

def late(completion):
    if completion == "hang": time.sleep(60)
    if completion == "raise": raise ValueError("no")
    return len(completion)

def batch(completions):
    return [len(text) if text else None for text in completions]

def no_list(completions):
    return 1.0

def half_hanging_batch(completions):
    class Slow:
        def __float__(self): time.sleep(60)
    return [1.0, Slow(), 1.0]
"""
NOTHING = ("not_applicable", "")
EXITED = ("raised", "ended its process with exit code 3")
HOSTILE = "hostile_rewards:hostile"
SEVEN = Example([{"role": "user", "content": "p"}], "7")


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """The working directory, where the functions above are found as a user's, and others leave files."""
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "own_rewards.py").write_text(OWN_REWARDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield Path.cwd()


def opened(*names: str, workers: int = 1, seconds: float = 60.0) -> RewardRunner:
    paths = (name if name in BUILT_IN or ":" in name else f"own_rewards:{name}" for name in names)
    rewards = tuple(RewardConfig(name=name) for name in paths)
    task = TaskConfig(name="arithmetic", rewards=rewards, reward_timeout=seconds, reward_workers=workers)
    return RewardRunner(task, Task("", [SEVEN], []), 4)


def score(runner, *completions, poll=lambda: None):
    """The scores for SEVEN's completions, each of one token."""
    runner.poll = poll
    return runner.score([Sample(SEVEN, completion, array("i", [1]), False) for completion in completions])


@pytest.fixture(scope="module")
def hostile(place):
    """One process for the tests that leave it alive, or that report its end."""
    with opened(HOSTILE, seconds=3600) as runner:
        yield runner


def test_functions_run_in_one_main_thread_without_jax(hostile):
    """Only a main thread may set an alarm, as math-verify does."""
    does = "result = os.getpid()", "signal.signal(signal.SIGALRM, print)", "result = 'jax' in sys.modules"
    ((_, pid),), *others = score(hostile, *does)
    assert others == [[("value", 1)], [("value", 0)]]
    assert score(hostile, does[0]) == [[("value", pid)]]


@pytest.mark.slow
def test_several_processes_give_the_values_of_one_process():
    mixed = ["7", "raise", "", "hang", "12345", "7", "four", "raise", "1", "2", "3"]
    with opened("late", "batch", "exact_match", seconds=0.7) as one:
        alone = score(one, *mixed)
    with opened("late", "batch", "exact_match", seconds=0.7, workers=3) as three:
        assert score(three, *mixed) == alone
        assert three.workers.count == 3
    failed = [late for late, *_ in alone if late[0] != "value"]
    assert failed[:2] == [("raised", "ValueError: no (own_rewards.py:6)"), ("timed_out", "took longer than 0.7 s")]


@pytest.mark.slow
def test_a_batched_failure_fails_all_and_is_logged_once(caplog):
    """Each kind of failure is logged once."""
    with opened("no_list", "half_hanging_batch", "batch", "late", seconds=0.5) as runner:
        scores = score(runner, "four", "", "raise")
        score(runner, "raise")
        score(runner, "", "")
    no_list, half, batch, late = zip(*scores, strict=True)
    assert no_list == (("not_a_number", "returned no list of numbers: TypeError: 'float' object is not iterable"),) * 3
    assert half == (("timed_out", "took longer than 1.5 s"),) * 3
    assert batch == (("value", 4.0), NOTHING, ("value", 5.0))
    assert late == (("value", 4.0), ("value", 0.0), ("raised", "ValueError: no (own_rewards.py:6)"))
    assert caplog.text.count("reward late raised: ValueError: no (own_rewards.py:6)") == 1
    assert "reward batch returned None: for all of 2 completions; is a return missing?" in caplog.text
    last = [row[-2:] for row in scores]  # a batched function's None is neither a failure nor part of the mean
    np.testing.assert_array_equal(totals(last, np.array([1.0, 0.5]))[0], [6, 0, math.nan])
    metrics = {name: value for name, value in reward_metrics(["batch", "late"], last).items() if value}
    expected = {"batch/mean": 4.5, "batch/std": 0.5, "late/mean": 2, "late/std": 2, "late/raised": 1}
    assert metrics == {f"rewards/{name}": value for name, value in expected.items()}


def test_silent_functions_give_no_reward_and_no_failure():
    """A silent function returns None. A function of weight 0 gives no reward either."""
    one, failure = ("value", -1.0), ("raised", "no")
    rows = [[one, NOTHING], [NOTHING, one], [NOTHING, NOTHING], [NOTHING, failure], [failure, NOTHING], [one, one]]
    for weights, reward, failed in (
        ([2.0, 0.0], [-2, math.nan, math.nan, math.nan, math.nan, -2], [0, 0, 0, 0, 1, 0]),
        ([2.0, 1.0], [-2, -1, math.nan, math.nan, math.nan, -3], [0, 0, 0, 1, 1, 0]),
        ([0.0, 0.0], [0] * 6, [0] * 6),
    ):
        rewards, failures = totals(rows, np.array(weights))
        np.testing.assert_array_equal(rewards, reward)
        assert failures.tolist() == [*map(bool, failed)]


def test_sums_equal_but_for_rounding_become_equal():
    weights = np.array([0.1, 0.2, 0.3])
    scores = [(1, 1, 0), (0, 0, 1), (1, 0, 0), (0, 1, 0), (1, 1, -1), (0, 0, 0), (1 + 1e-12, 0, 0)]
    sums = totals([[("value", float(value)) for value in row] for row in scores], weights)[0]
    assert sums[0] == sums[1]
    assert sums[4] == sums[5]
    exact = np.array(scores) @ weights
    np.testing.assert_array_equal(sums[[2, 3]], exact[[2, 3]])
    assert sums[6] > sums[2]
    np.testing.assert_allclose(sums, exact, atol=1e-15)
    rows = [[("value", float(value)) for value in row] for row in [(1, 1, 1), (0, 0, 0)]]
    assert totals(rows, np.array([0.3, -0.1, -0.2]))[0].tolist() == [0, 0]


def test_a_failed_evaluation_is_no_better_than_a_loss():
    won, lost, failure = ("value", 1.0), ("value", -1.0), ("raised", "no")
    for column, mean in (([won, won, failure, failure], 0.5), ([won, lost, failure], -1 / 3), ([failure], math.nan)):
        metrics = reward_metrics(["game"], [[answer] for answer in column], evaluates=True)
        np.testing.assert_equal(metrics["rewards/game/mean"], mean)


def assert_answered(expected, answers):
    for (does, pattern), (kind, result) in zip(expected.items(), answers, strict=True):
        assert re.fullmatch(pattern, kind if kind == "value" else f"{kind} {result}"), does
        assert str(result).isprintable()
        assert len(str(result)) < 400


def test_any_act_of_a_function_is_a_number_or_a_failure(hostile):
    """Each stands before a good completion."""
    pid = "result = os.getpid()"
    before = score(hostile, pid)
    scores = [answer for (answer,) in score(hostile, *[does for name in LASTING for does in (name, "7")])]
    assert {*scores[1::2]} == {("value", 1.0)}
    assert_answered(LASTING, scores[::2])
    assert score(hostile, pid) == before


@pytest.mark.slow
def test_a_function_that_exits_or_hangs_fails_only_its_sample():
    for expected, seconds in ((ENDING, 60.0), (HANGING, 0.4)):
        with opened(HOSTILE, workers=2, seconds=seconds) as runner:
            scores = [answer for (answer,) in score(runner, *[does for name in expected for does in (name, "7")])]
            assert {*scores[1::2]} == {("value", 1.0)}
            assert_answered(expected, scores[::2])


def is_gone(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True


def wait_until_gone(*pids):
    """Until pytest's time is up, if one of the processes stays."""
    while not all(map(is_gone, pids)):
        time.sleep(0.02)


def trainer(does, folder):
    """A process with a main module that scores one completion as the trainer does.

    It would start processes without end, if they imported it.
    """
    (folder / "main.py").write_text(f"""
from array import array
from functools import partial
from mllm.data.tasks.task import Example
from mllm.rewards.calls import Sample, bind_all
from mllm.rewards.worker import Workers
workers = Workers(partial(bind_all, [({HOSTILE!r}, {{}})], ["answer"], 4))
workers.start()
print(workers.schedule([0], [Sample(Example([], "7"), {does!r}, array("i", [1]), False)], 60).result())
workers.close()
""")
    command, pipe = [sys.executable, str(folder / "main.py")], subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


@pytest.mark.slow
def test_prints_of_functions_never_reach_trainer_stdout(tmp_path):
    """The trainer's main module is not imported by the process of the functions."""
    output, errors = trainer(PRINTS, tmp_path).communicate()
    assert output.splitlines() == ["[('value', 1.0)]"]
    for letter in "oew":
        assert errors.count(letter) >= 200 * 10_000


@pytest.fixture
def noted(place):
    path = place / "left"
    path.unlink(missing_ok=True)
    return lambda: [int(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_processes_of_a_function_end_with_its_worker(hostile, noted):
    def poll():
        if len(noted()) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(hostile, f"{STARTS}\nsleep()", poll=poll)
    wait_until_gone(*noted())
    assert score(hostile, "7") == [[("value", 1)]]
    while_noting = "while LEFT.read_text().count('\\n') < {}: time.sleep(0.01)"
    assert score(hostile, f"{STARTS}\n{while_noting.format(4)}\nos._exit(3)") == [[EXITED]]
    wait_until_gone(*noted())
    with opened(HOSTILE, seconds=0.5) as runner:
        assert score(runner, f"{STARTS}\nsleep()") == [[("timed_out", "took longer than 0.5 s")]]
        wait_until_gone(*noted())
    assert len(noted()) == 6


def test_a_killed_trainer_takes_a_hanging_function_along(noted, tmp_path):
    """A pattern hangs in C and holds Python's lock, so that no thread of its process could end it."""
    killed = trainer(f"note(os.getpid())\n{STARTS}\n{FOREVER}", tmp_path)
    while len(noted()) < 3:
        time.sleep(0.01)
    left = noted()
    try:
        assert not any(map(is_gone, left))
        killed.kill()
        wait_until_gone(*left)
    finally:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.communicate()


def test_signals_to_the_job_are_the_trainer_s_to_handle(hostile):
    does = "for kind in (signal.SIGTERM, signal.SIGINT): os.kill(os.getpid(), kind)\ntime.sleep(0.1)"
    assert score(hostile, does) == [[("value", 1)]]


def test_a_process_that_ends_while_nothing_is_scored_is_replaced(hostile):
    ((_, pid),) = score(hostile, "result = os.getpid()")[0]
    os.kill(int(pid), signal.SIGKILL)
    wait_until_gone(int(pid))
    time.sleep(0.3)
    assert score(hostile, "7") == [[("value", 1)]]


def test_ended_completions_are_scored_before_the_rest_end():
    """Batched functions wait for all completions."""
    samples = [Sample(SEVEN, completion, array("i", [1]), False) for completion in ("four", "7", "")]
    with opened("late", "batch") as runner:
        expected = runner.score(samples)
        with runner.scoring(3) as scoring:
            scoring.add({1: samples[1]})
            ((functions, numbers, call),) = scoring.calls
            assert ([*functions], [*numbers], call.result()) == ([0], [1], [expected[1][0]])
            assert scoring.finish(samples) == expected


def test_a_module_that_exits_on_import_is_a_one_line_error(place):
    (place / "ends.py").write_text("import os\nos._exit(3)")
    with pytest.raises(UserError, match=r"^task.rewards: importing it ended its process$"):
        opened("ends:f")


def test_an_answer_that_strict_json_can_not_hold_is_a_failure():
    kind, message = decode(encode("value", 0.5, ("turn", "x" * 10**6)))
    assert kind == "raised"
    assert re.fullmatch("what it gave can't be sent: it takes .* bytes .*", message)


@given(st.floats(-LARGEST, LARGEST))
def test_a_number_is_transferred_to_the_bit(number):
    answer = judge(number)
    assert answer == ("value", number)
    assert decode(encode(*answer)) == answer
