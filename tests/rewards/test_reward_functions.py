"""What each built-in reward function gives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mllm.data.tasks.task import Example
from mllm.rewards.functions import (
    exact_match,
    flexible_match,
    last_number,
    math,
    overlong,
    think_answer_format,
)


def example(answer, form="whole"):
    return Example([{"role": "user", "content": "?"}], answer, answer_form=form)


@pytest.mark.parametrize(
    ("completion", "answer", "form", "reward"),
    [
        (" 7\n", "7", "whole", 1),
        ("It is 7", "7", "whole", 0),
        ("#### 5\nno:\n#### -1,234.", "-1234", "hashes", 1),
        ("<answer>1</answer> or <answer> a b\n</answer>", "a b", "tags", 1),
        ("a b, or not", "a b", "tags", 0),
        (r"\boxed{1}, no: $\boxed{\frac{1}{2} }$.", r"\frac{1}{2}", "boxed", 1),
        (r"\boxed{1}, no: \boxed{7", "7", "boxed", 0),
        ("7", "7", "boxed", 0),
    ],
)
def test_exact_match_requires_the_form_of_the_task(completion, answer, form, reward):
    assert exact_match(completion, answer, example(answer, form)) == reward


@pytest.mark.parametrize(
    ("completion", "number"),
    [
        ("so x = -5", "-5"),
        ("x = −5 (unicode)", "-5"),
        ("10-7", "7"),
        ("(-7)", "-7"),
        ("1,234,567.50", "1234567.5"),
        ("1234567,890", "1234567890"),
        ("1,2345", "2345"),
        ("1,234,5", "5"),
        ("7.0", "7"),
        ("The answer is 7. Done.", "7"),
        (".5", "0.5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("3 apples and 4 pears", "4"),
    ],
)
def test_flexible_match_reads_the_last_number_however_it_is_written(completion, number):
    assert flexible_match(completion, number, example(number)) == 1
    assert flexible_match(completion, number + "1", example(number + "1")) == 0


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**35), max_value=10**35))
def test_the_last_number_is_exact_whatever_its_size(number):
    assert last_number(f"It costs {number:,}") == number
    assert last_number(f"It costs ${number}.") == number


def test_text_without_a_number_matches_none_and_an_answer_without_one_is_matched_exactly():
    assert flexible_match("I do not know", "7", example("7")) == 0
    assert flexible_match("yes", "yes", example("yes")) == 1
    assert flexible_match("yes 1", "yes", example("yes")) == 0
    assert flexible_match("7 - 1", "2 - 1", example("2 - 1")) == 0


THOUGHT, ANSWER = "<think>a</think>", "<answer>7</answer>"


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a\nb</think><answer>7</answer>", 1),
        ("<think>\na\n</think>\n<answer>\n7\n</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        (ANSWER, 0),
        (f"{THOUGHT}{ANSWER} done", 0),
        (f"Well {THOUGHT}{ANSWER}", 0),
        (f"{THOUGHT}b{ANSWER}", 0),
        (f"<think>{THOUGHT}{ANSWER}", 0),
        (f"{THOUGHT}{ANSWER}<answer>8</answer>", 0),
    ],
)
def test_format_is_one_thought_and_one_answer(completion, reward):
    assert think_answer_format(completion) == reward


def test_overlong_is_dapo_s_equation_13():
    lengths = {1: 0, 12: 0, 13: -0.25, 15: -0.75, 16: -1, 700: -1}
    assert {length: overlong(length, max_completion_length=16, cache=4) for length in lengths} == lengths


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("so it is $0.5$", r"\frac{1}{2}", 1),
        ("#### 1,234", "1234", 1),
        (r"thus \boxed{3}", "3\\sqrt{2}", 0),
        (r"the sum is 7 <answer>\frac{8}{2}</answer>", "4", 1),
        ("I do not know", "4", 0),
        ("1" + "*(9^9^9^9^9)" * 9, "4", 0),
    ],
)
def test_math_is_equivalence_however_the_two_are_written(completion, answer, reward):
    pytest.importorskip("math_verify")
    assert math(completion, answer) == reward


@pytest.mark.parametrize("function", [exact_match, flexible_match, math])
def test_a_problem_without_an_answer_is_a_failure_not_a_number(function):
    arguments = {"example": example("")} if function is not math else {}
    with pytest.raises(ValueError, match="this problem has no answer"):
        function(completion="7", answer=None, **arguments)
