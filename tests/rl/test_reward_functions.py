"""What each built-in reward function gives, and how a function is found by its name."""

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mllm.config.task import AnswerForm
from mllm.data.tasks.task import Example
from mllm.errors import UserError
from mllm.rl.reward_functions import exact_match, find, flexible_match, last_number, tag_count, think_answer_format


def example(answer: str, form: AnswerForm = "whole") -> Example:
    return Example([{"role": "user", "content": "?"}], answer, answer_form=form)


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
def test_exact_match_requires_the_form_of_the_task(
    completion: str, answer: str, form: AnswerForm, reward: float
) -> None:
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
def test_the_last_number_is_exact_whatever_its_size(number: Decimal) -> None:
    assert last_number(f"It costs {number:,}") == number
    assert last_number(f"It costs ${number}.") == number


def test_text_without_a_number_matches_none_and_an_answer_without_one_is_matched_exactly() -> None:
    assert flexible_match("", "I do not know", example("7")) == 0
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
def test_format_requires_both_elements_once_in_order_and_nothing_else(completion: str, reward: float) -> None:
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
def test_tag_count_is_the_share_of_tags_that_occur_once(completion: str, share: float) -> None:
    assert tag_count("", completion, example("7")) == share


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact", "there is no reward exact: exact_match, .*package.module:function"),
        ("task", "no scorer of its own"),
        ("broken_rewards:f", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("exiting_rewards:f", "SystemExit"),
        ("math:missing", "AttributeError"),
        ("math:pi", "is not a function"),
    ],
)
def test_a_function_that_is_not_found_is_an_error_of_one_line(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_rewards.py").write_text("import nothing_of_that_name")
    (tmp_path / "exiting_rewards.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=f"task.rewards: .*{message}") as error:
        find(name, None)
    assert "\n" not in str(error.value)
