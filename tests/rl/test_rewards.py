"""The runner scores every completion with every function, in processes without JAX. See test_reward_worker, too."""

import json
import logging
import math
import os
import re
import time
import zlib
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from mllm.config.task import RewardConfig, TaskConfig
from mllm.data.tasks.task import Example, Task
from mllm.errors import UserError
from mllm.rl import reward_functions
from mllm.rl.reward_functions import BUILT_IN
from mllm.rl.rewards import Failure, RewardRunner, reward_metrics, weighted_sum
from mllm.rl.rollout import Completions

OWN_REWARDS = """
import os, signal, sys, time

def length(prompt, completion):
    print("printed", flush=True)
    if completion == "raise": raise ValueError("no " + prompt)
    return len(completion)

def jax_is_imported():
    return "jax" in sys.modules

def process_id():
    return os.getpid()

def alarm():
    signal.signal(signal.SIGALRM, lambda *_: None)
    return 1

def late(completion):
    time.sleep(0.1 if completion != "hang" else 60)
    if completion == "raise": raise ValueError("no")
    return len(completion)

def batch(completions):
    return [len(text) if text else None for text in completions]

def short_list(completions):
    return [1.0]

def no_list(completions):
    return 1.0

def raising_batch(completions):
    raise ValueError("no")

def half_hanging_batch(completions):
    class Slow:
        def __float__(self): time.sleep(60)
    return [1.0, Slow(), 1.0]

def none_at_all(completion):
    return None
"""
NAMES = ("exact_match", "length", "jax_is_imported", "process_id", "alarm")
SEVEN = Example([{"role": "user", "content": "p"}], "7")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """The working directory, where the functions above are found as a user's."""
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "own_rewards.py").write_text(OWN_REWARDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


@pytest.fixture(scope="module")
def runner():
    with opened(*NAMES) as runner:
        yield runner


def opened(*names, **settings) -> RewardRunner:
    rewards = tuple(
        RewardConfig(name=name if name in BUILT_IN or name.startswith("url:") else f"own_rewards:{name}")
        for name in names
    )
    task = TaskConfig(name="arithmetic", rewards=rewards, **{"reward_timeout": 60.0, **settings})
    return RewardRunner(task, Task("", [SEVEN], []), 4)


def score(runner, *completions):
    ones = np.ones(len(completions), np.int32)
    tokens = Completions(ones[:, None], np.zeros((ones.size, 1), np.float32), ones, ones > 0)
    return runner.score([SEVEN] * ones.size, completions, tokens)


def test_functions_run_in_the_main_thread_of_one_lasting_process_without_jax_and_are_known_by_their_file(runner):
    """Only a main thread may set an alarm, as math-verify does."""
    first, second = score(runner, "7").values[0, 2:], score(runner, "7").values[0, 2:]
    np.testing.assert_array_equal(first, second)
    jax_is_imported, process_id, alarm = first
    assert (jax_is_imported, alarm) == (0, 1)
    assert process_id != os.getpid()
    code = f"{zlib.crc32(Path('own_rewards.py').read_bytes()):08x}"
    assert runner.codes == dict.fromkeys([f"own_rewards:{name}" for name in NAMES[1:]], code)


def test_a_failure_is_kept_and_only_the_first_of_its_kind_is_logged(runner, caplog):
    failure = Failure("own_rewards:length", "raised", "ValueError: no p")
    with caplog.at_level(logging.WARNING):
        scores = score(runner, "raise", "7", "raise")
        score(runner, "raise")
    assert scores.failures == [failure, failure]
    np.testing.assert_array_equal(scores.values.T[:2], [[0, 1, 0], [math.nan, 1, math.nan]])
    assert [record.getMessage() for record in caplog.records] == [
        "reward own_rewards:length raised: ValueError: no p (further ones are only counted)"
    ]


def test_several_processes_overlap_and_give_what_one_gives():
    mixed = ["7", "raise", "", "hang", "12345", "7", "four", "raise", "1", "2", "3"]
    with opened("late", "batch", "exact_match", reward_timeout=1.0) as one:
        alone = score(one, *mixed)
    with opened("late", "batch", "exact_match", reward_timeout=1.0, reward_workers=4) as four:
        score(four, *"abcd")  # the processes start
        begin = time.monotonic()
        scores = score(four, *["a"] * 24)
        assert time.monotonic() - begin < 0.5 * 24 * 0.1
        np.testing.assert_array_equal(scores.values.T, [[1] * 24, [1] * 24, [0] * 24])
        scores = score(four, *mixed)
    np.testing.assert_array_equal(scores.values, alone.values)
    np.testing.assert_array_equal(scores.kinds, alone.kinds)
    assert scores.failures == alone.failures
    assert [failure.kind for failure in scores.failures] == ["raised", "timed_out", "raised"]


def test_a_batched_function_that_fails_fails_for_all_and_one_bad_item_for_itself():
    names = ("short_list", "no_list", "raising_batch", "half_hanging_batch", "none_at_all", "batch", "length")
    with opened(*names, reward_timeout=0.3) as runner:
        scores = score(runner, "four", "", "raise")
    assert scores.kinds.T.tolist() == [
        *[["not_a_number"] * 3] * 2,
        ["raised"] * 3,
        ["value", "timed_out", "timed_out"],
        ["not_a_number"] * 3,
        ["value", "not_applicable", "value"],
        ["value", "value", "raised"],
    ]
    assert {failure.message for failure in scores.failures} == {
        "returned no list of numbers: ValueError: 1 values for 3 completions",
        "returned no list of numbers: TypeError: 'float' object is not iterable",
        "ValueError: no",
        "ValueError: no p",
        "took longer than 0.9 s",
        "returned None",
    }
    # A batched function's None is neither a failure nor part of the mean.
    values, kinds = scores.values[:, -2:], scores.kinds[:, -2:]
    np.testing.assert_array_equal(weighted_sum(values, kinds, np.array([1.0, 0.5])), [6, 0, math.nan])
    assert {name: value for name, value in reward_metrics(["batch", "length"], values, kinds).items() if value} == {
        "rewards/batch/mean": 4.5,
        "rewards/batch/std": 0.5,
        "rewards/length/mean": 2,
        "rewards/length/std": 2,
        "rewards/length/raised": 1,
    }


def test_more_processes_than_calls_are_refused():
    with pytest.raises(UserError, match=r"task.reward_workers: 2 processes for 1 batched function.* than can work"):
        opened("batch", reward_workers=2)


# Over HTTP


@contextmanager
def server(*replies):
    """The address of a server, and the requests that it got; it gives each reply, a status and a body, once.

    A number means that it says nothing for so many seconds.
    """
    requests, left = [], iter(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            reply = next(left)
            if isinstance(reply, float):
                time.sleep(reply)
                return
            self.send_response(reply[0])
            self.end_headers()
            self.wfile.write(reply[1])

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield f"url:http://127.0.0.1:{listening.server_address[1]}/score", requests
        listening.shutdown()
        thread.join()


BODY = {
    "prompts": ["p", "p"],
    "completions": ["a", "b"],
    "answers": ["7", "7"],
    "completion_ids": [[1], [1]],
    "length": [1, 1],
    "truncated": [False, False],
    "max_completion_length": 4,
}


def test_a_url_gets_the_batch_as_json_and_gives_a_number_for_each_and_any_other_answer_is_a_failure():
    """The last reply comes after the time limit of a second."""
    failures = (
        ((200, b"[1]"), "not_a_number", r"returned no list of numbers: ValueError: 1 values for 2 completions"),
        ((200, b'["1", NaN]'), "not_a_number", r"returned '1'"),
        ((200, b"<html>"), "raised", r"ValueError: expected a JSON list, .* the answer was '<html>'"),
        ((400, b"no field level"), "raised", r"ValueError: HTTP 400 Bad Request: no field level"),
        (1.5, "timed_out", "took longer than 1 s"),
    )
    good = ((503, b""), (200, b'{"rewards": [0.5, null]}'))
    with server(*good, *(reply for reply, _, _ in failures)) as (url, requests), opened(url, reward_timeout=0.5) as one:
        scores = score(one, "a", "b")
        np.testing.assert_array_equal(scores.values.T, [[0.5, math.nan]])
        assert scores.kinds.T.tolist() == [["value", "not_applicable"]]
        for _, kind, message in failures:
            found = score(one, "a", "b").failures
            assert [failure.kind for failure in found] == [kind, kind]
            assert re.fullmatch(message, found[0].message)
    assert requests == [BODY] * (len(good) + len(failures))


def test_a_server_that_is_overrun_or_not_there_is_tried_again_for_some_seconds(monkeypatch):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    with server((429, b""), (200, b"[1]")) as (url, _):
        assert reward_functions.post(url.removeprefix("url:"), completions=["a"]) == [1]
    assert waited == [0.25]
    with pytest.raises(ConnectionError, match=r"6 tries: URLError: .*refused"):
        reward_functions.post("http://127.0.0.1:9/", completions=["a"])
    assert waited[1:] == [0.25, 0.5, 1, 2, 4]
