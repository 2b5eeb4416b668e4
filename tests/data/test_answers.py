"""The answer in the data is all that a completion has to state, or a bad line."""

import json

import pytest

from mllm.config.task import TaskConfig
from mllm.data.tasks.answers import final_answer
from mllm.data.tasks.load import load
from mllm.errors import UserError
from mllm.rewards.functions import overlong


def answer_of(folder, answer, form):
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{n}", "answer": answer}) + "\n" for n in range(3)))
    return load(TaskConfig(name="jsonl", train=str(path), answer_form=form), 0).train[0].answer


@pytest.mark.parametrize(
    ("answer", "form", "expected"),
    [
        ("It is\n#### 1,004.", "hashes", "1004"),
        ("-3.5", "hashes", "-3.5"),
        (7.0, "whole", "7"),
        (7.5, "whole", "7.5"),
        (1e20, "whole", "1" + "0" * 20),
        (-0.0, "whole", "0"),
        (7, "tags", "7"),
        ("7.0", "whole", "7.0"),
    ],
)
def test_an_answer_is_what_completions_state(tmp_path, answer, form, expected):
    assert answer_of(tmp_path, answer, form) == expected


@pytest.mark.parametrize(
    ("answer", "form", "said"),
    [
        ("So\n#### 3/4", "hashes", "answer 3/4 is more than the number that #### states"),
        ("3/4", "hashes", "answer 3/4 is more than the number"),
        ("#### 18 dollars", "hashes", "answer 18 dollars is more"),
        (float("nan"), "whole", "answer is nan, which is no number"),
        (float("-inf"), "hashes", "answer is -inf, which is no number"),
    ],
)
def test_what_a_completion_can_not_state_is_a_bad_line(tmp_path, answer, form, said):
    with pytest.raises(UserError, match=said):
        answer_of(tmp_path, answer, form)


@pytest.mark.parametrize(
    ("completion", "stated"), [("#### 3/4", None), ("#### 34 / 5", None), ("#### 3^2", None), ("#### 3 km.", "3")]
)
def test_the_beginning_of_an_expression_is_no_answer(completion, stated):
    assert final_answer(completion, "hashes") == stated


def test_overlong_never_falls_below_minus_one():
    assert [overlong(length, 100, 20) for length in (0, 80, 90, 100, 700)] == [0, 0, -0.5, -1, -1]
