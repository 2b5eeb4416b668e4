"""What each reward gives, and that no reward function can harm the run."""

import logging
import math
import os
import signal
import textwrap
import time
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mllm.config.schema import RewardConfig, TaskConfig
from mllm.data.tasks import Example, Task
from mllm.errors import UserError
from mllm.rl.reward_functions import exact_match, flexible_match, last_number, tag_count, think_answer_format
from mllm.rl.rewards import RewardRunner, Scores


def example(answer: str, form: str = "whole") -> Example:
    return Example([{"role": "user", "content": "?"}], answer, None, {"form": form})


@pytest.mark.parametrize(
    ("completion", "answer", "form", "reward"),
    [
        ("7", "7", "whole", 1),
        (" 7\n", "7", "whole", 1),
        ("7.0", "7", "whole", 0),
        ("It is 7", "7", "whole", 0),
        ("", "7", "whole", 0),
        ("So\n#### 1,234", "1234", "hashes", 1),
        ("#### 1234.", "1234", "hashes", 1),
        ("It is 1234", "1234", "hashes", 0),
        ("#### 5\n#### 7", "7", "hashes", 1),
        ("<answer> a b </answer>", "a b", "tags", 1),
        ("a b, or not", "a b", "tags", 0),
    ],
)
def test_exact_match_wants_the_very_form_of_the_task(completion: str, answer: str, form: str, reward: float) -> None:
    assert exact_match("", completion, example(answer, form)) == reward


@pytest.mark.parametrize(
    ("completion", "number"),
    [
        ("so x = -5", "-5"),
        ("x = −5 (unicode)", "-5"),
        ("10-7", "7"),
        ("(10)-7", "7"),
        ("(-7)", "-7"),
        ("1,234", "1234"),
        ("1,234,567.50", "1234567.5"),
        ("1234567,890", "1234567890"),
        ("1,2,3", "3"),
        ("1,2345", "2345"),
        ("1,234,5", "5"),
        ("7.0", "7"),
        ("7.", "7"),
        ("The answer is 7. Done.", "7"),
        (".5", "0.5"),
        ("$1,234.50", "1234.5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("12%", "12"),
        ("3 apples and 4 pears", "4"),
    ],
)
def test_flexible_match_reads_the_last_number_however_it_is_written(completion: str, number: str) -> None:
    assert flexible_match("", completion, example(number)) == 1
    assert flexible_match("", completion, example(number + "1")) == 0


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**35), max_value=10**35))
def test_a_number_is_read_as_it_was_written(number: Decimal) -> None:
    assert last_number(f"It costs {number:,}") == number
    assert last_number(f"It costs ${number}.") == number


def test_flexible_match_finds_no_number_where_there_is_none() -> None:
    assert flexible_match("", "I do not know", example("7")) == 0


def test_an_answer_that_is_no_number_is_matched_exactly() -> None:
    assert flexible_match("", "yes", example("yes")) == 1
    assert flexible_match("", "yes 1", example("yes")) == 0
    assert flexible_match("", "7 - 1", example("2 - 1")) == 0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a\nb</think><answer>7</answer>", 1),
        ("<think>\na\n</think>\n<answer>\n7\n</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        ("<answer>7</answer>", 0),
        ("<think>a</think>7", 0),
        ("<think>a</think><answer>7</answer> done", 0),
        ("Well <think>a</think><answer>7</answer>", 0),
        ("<think>a</think>b<answer>7</answer>", 0),
        ("<think><think>a</think><answer>7</answer>", 0),
        ("<think>a</think><answer>7</answer><answer>8</answer>", 0),
        ("<answer>7</answer><think>a</think>", 0),
    ],
)
def test_format_wants_both_elements_once_in_order_and_nothing_else(completion: str, reward: float) -> None:
    assert think_answer_format("", completion, example("7")) == reward


@pytest.mark.parametrize(
    ("completion", "share"),
    [
        ("", 0),
        ("<think>a</think>", 0.5),
        ("<think>a</think><answer>7", 0.75),
        ("<think><think>a</think><answer>7</answer>", 0.75),
        ("<think>a</think><answer>7</answer>", 1),
    ],
)
def test_tag_count_is_the_share_of_tags_that_stand_once(completion: str, share: float) -> None:
    assert tag_count("", completion, example("7")) == share


USER_MODULE = """
import os, sys, time

def length(prompt, completion, example):
    print("printed", flush=True)
    os.write(1, b"written")
    return len(completion)

def troubled(prompt, completion, example):
    if completion == "raise": raise ValueError("no " + prompt)
    if completion == "exit": sys.exit(3)
    if completion == "die": os._exit(3)
    if completion == "hang": time.sleep(60)
    if completion == "none": return None
    if completion == "text": return "1"
    if completion == "nan": return float("nan")
    if completion == "inf": return float("inf")
    return example.answer == completion

def knows_jax(prompt, completion, example):
    return "jax" in sys.modules

def process(prompt, completion, example):
    return os.getpid()

def alarm(prompt, completion, example):
    import signal
    signal.signal(signal.SIGALRM, lambda *_: None)
    return 1

not_callable = 3
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(textwrap.dedent(USER_MODULE))
    (tmp_path / "broken_rewards.py").write_text("import nothing_of_that_name")
    (tmp_path / "leaving_rewards.py").write_text("raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)


def runner(*names: str, timeout: float = 20.0) -> RewardRunner:
    config = TaskConfig(
        name="arithmetic", rewards=tuple(RewardConfig(name=name) for name in names), reward_timeout=timeout
    )
    return RewardRunner(config, Task("arithmetic", [], []))


def score(judge: RewardRunner, *completions: str) -> Scores:
    return judge.score(["p"] * len(completions), completions, [example("7")] * len(completions))


def test_every_function_is_asked_about_every_completion() -> None:
    with runner("exact_match", "own_rewards:length") as judge:
        scores = score(judge, "7", "seven", "")
    np.testing.assert_array_equal(scores.values, [[1, 0, 0], [1, 5, 0]])
    assert scores.values.dtype == np.float64
    assert not any(count for kinds in scores.failures.values() for count in kinds.values())


def test_a_failing_reward_is_counted_by_kind_and_harms_no_other() -> None:
    completions = ["7", "raise", "exit", "none", "text", "nan", "inf", "8", "7"]
    with runner("own_rewards:troubled", "exact_match") as judge:
        scores = score(judge, *completions)
    nan = math.nan
    np.testing.assert_array_equal(scores.values[0], [1, nan, nan, nan, nan, nan, nan, 0, 1])
    np.testing.assert_array_equal(scores.values[1], [1, 0, 0, 0, 0, 0, 0, 0, 1])
    assert scores.failures["own_rewards:troubled"] == {"raised": 2, "timed_out": 0, "not_a_number": 4}
    assert scores.messages["own_rewards:troubled"] == {"raised": "ValueError: no p", "not_a_number": "returned None"}
    assert scores.failures["exact_match"] == {"raised": 0, "timed_out": 0, "not_a_number": 0}


def test_a_reward_that_hangs_is_stopped_and_only_it_is_lost() -> None:
    with runner("own_rewards:troubled", "exact_match", timeout=0.5) as judge:
        start = time.monotonic()
        scores = score(judge, "7", "hang", "7")
        assert time.monotonic() - start < 20
        np.testing.assert_array_equal(scores.values, [[1, math.nan, 1], [1, 0, 1]])
        assert scores.failures["own_rewards:troubled"]["timed_out"] == 1
        assert scores.messages["own_rewards:troubled"]["timed_out"] == "took longer than 0.5 s"
        np.testing.assert_array_equal(score(judge, "7").values, [[1], [1]])


def test_a_reward_that_kills_its_process_is_counted_and_the_rest_is_scored() -> None:
    with runner("own_rewards:troubled", "exact_match") as judge:
        scores = score(judge, "die", "7")
    np.testing.assert_array_equal(scores.values, [[math.nan, 1], [0, 1]])
    assert scores.failures["own_rewards:troubled"]["raised"] == 1
    assert "exit code 3" in scores.messages["own_rewards:troubled"]["raised"]


def test_the_first_failure_of_a_kind_is_logged_and_no_second_one(caplog: pytest.LogCaptureFixture) -> None:
    with runner("own_rewards:troubled") as judge, caplog.at_level(logging.WARNING):
        score(judge, "raise", "raise")
        score(judge, "raise")
    assert [record.getMessage() for record in caplog.records] == [
        "reward own_rewards:troubled raised: ValueError: no p (further ones are only counted)"
    ]


def test_the_process_knows_nothing_of_jax_and_lives_on_between_batches() -> None:
    with runner("own_rewards:knows_jax", "own_rewards:process") as judge:
        first, second = score(judge, "7"), score(judge, "7")
    assert first.values[0] == 0
    assert first.values[1] == second.values[1] != os.getpid()


def test_rewards_run_in_a_main_thread_so_that_alarms_work() -> None:
    with runner("own_rewards:alarm") as judge:
        assert score(judge, "7").values == 1


def test_a_process_that_dies_between_batches_is_replaced() -> None:
    with runner("own_rewards:process") as judge:
        process = int(score(judge, "7").values[0, 0])
        os.kill(process, signal.SIGKILL)
        judge.worker.process.wait()
        assert np.isfinite(score(judge, "7").values).all()


def test_the_process_ends_with_the_runner() -> None:
    with runner("own_rewards:process") as judge:
        process = int(score(judge, "7").values[0, 0])
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact", "there is no reward exact: exact_match, .*package.module:function"),
        ("task", "no scorer of its own"),
        ("broken_rewards:f", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("leaving_rewards:f", "SystemExit"),
        ("own_rewards:missing", "AttributeError"),
        ("own_rewards:not_callable", "is no function"),
    ],
)
def test_a_reward_that_can_not_be_had_is_an_error_before_training(name: str, message: str) -> None:
    with pytest.raises(UserError, match=f"task.rewards: .*{message}") as error:
        runner(name)
    assert "\n" not in str(error.value)


def test_a_batch_of_256_completions_costs_milliseconds() -> None:
    with runner("exact_match", "flexible_match") as judge:
        score(judge, "7")
        times = []
        for _ in range(5):
            start = time.perf_counter()
            score(judge, *["The answer is 7."] * 256)
            times.append(time.perf_counter() - start)
    assert min(times) < 0.2  # 4 to 12 ms, beside other work


def test_scores_of_parts_join_to_those_of_the_whole() -> None:
    first = Scores(np.array([[1.0, np.nan]]), {"r": {"raised": 1, "timed_out": 0}}, {"r": {"raised": "first"}})
    second = Scores(
        np.array([[np.nan, np.nan]]),
        {"r": {"raised": 1, "timed_out": 1}},
        {"r": {"raised": "second", "timed_out": "x"}},
    )
    whole = Scores.joined([first, second])
    np.testing.assert_array_equal(whole.values, [[1.0, np.nan, np.nan, np.nan]])
    assert whole.failures == {"r": {"raised": 2, "timed_out": 1}}
    assert whole.messages == {"r": {"raised": "first", "timed_out": "x"}}
