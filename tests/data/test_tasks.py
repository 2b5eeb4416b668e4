"""Tasks, built-in and listed by users: held-out problems stay held out, answers are right, bad input is one line."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_data import write

from mllm.config.task import ArithmeticConfig, TaskConfig
from mllm.data.tasks import arithmetic as arithmetic_task
from mllm.data.tasks.answers import final_answer
from mllm.data.tasks.load import GSM8K_INSTRUCTION, load
from mllm.data.tasks.task import Example, Task, prompt_hash
from mllm.data.turns import tool_calls, tool_schemas
from mllm.errors import UserError
from mllm.examples import calculator, guess

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "a": a} for a in range(10) for b in range(10)]
ASKED = {"role": "user", "content": "2+2="}
SAID = {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Add."}


def arithmetic(heldout: int = 32, **shape: Any) -> Task:
    return load(TaskConfig(name="arithmetic", heldout=heldout, arithmetic=ArithmeticConfig(**shape)))


def texts(examples: Any) -> list[str]:
    return [example.prompt[-1]["content"] for example in examples]


def test_one_digit_sums_split_alike_under_every_seed() -> None:
    task = arithmetic(heldout=32)
    train, heldout = {*texts(task.train)}, {*texts(task.heldout)}
    assert (len(task.train), len(task.heldout)) == (68, 32)
    assert train.isdisjoint(heldout)
    assert train | heldout == {f"{a}+{b}=" for a in range(10) for b in range(10)}
    again = load(TaskConfig(name="arithmetic", heldout=32))
    assert (list(again.heldout), again.content) == (list(task.heldout), task.content)
    assert arithmetic(operators="-").content != task.content


def test_answers_match_python_also_for_a_part_of_all_problems(monkeypatch) -> None:
    monkeypatch.setattr(arithmetic_task, "MOST", 300)
    for task in (arithmetic(digits=3, operators="-"), arithmetic(256, operands=6, digits=6, operators="+-*")):
        assert len({*texts(task.train)}) == 300
        assert {*texts(task.train)}.isdisjoint(texts(task.heldout))
        for example in [*task.train, *task.heldout]:
            assert example.answer == example.solution == str(eval(example.question.removesuffix("=")))


def test_gsm8k_reads_two_files_and_never_trains_on_its_test(tmp_path: Path, caplog: Any) -> None:
    for name, numbers in (("train", (1234, 3, 2)), ("test", (3, 4))):
        rows = [{"question": f"How much is {n}?", "answer": f"It is <<{n}={n}>>.\n#### {n:,}"} for n in numbers]
        write(tmp_path, rows, f"{name}.jsonl")
    task = load(TaskConfig(name="gsm8k", path=str(tmp_path), heldout=1))
    assert {e.answer for e in [*task.train, *task.heldout]} == {"1234", "2"}
    assert (len(task.train), len(task.heldout)) == (1, 1)
    assert "1 training problems are in its test set and are left out" in caplog.text
    assert task.test is not None
    assert [(e.answer, e.answer_form) for e in task.test] == [("3", "hashes"), ("4", "hashes")]
    assert task.test[0].solution == "It is <<3=3>>.\n#### 3"
    assert task.test[0].question == f"How much is 3? {GSM8K_INSTRUCTION}"
    write(tmp_path, [{"question": "How much is 5?", "answer": "5"}], "test.jsonl")
    with pytest.raises(UserError, match=r"answer has no line '#### N' with the result \(.*test.jsonl:1\)"):
        load(TaskConfig(name="gsm8k", path=str(tmp_path), heldout=1))


def task(folder: Path, *records: Any, **settings: Any) -> Task:
    return load(TaskConfig(name="jsonl", train=write(folder, records, "train.jsonl"), **settings))


def first(folder: Path, record: Any, **settings: Any) -> Example:
    """The example of a record that is listed beside another record."""
    both = task(folder, record, {"prompt": "other", "answer": "1"}, heldout=1, **settings)
    return next(e for e in [*both.train, *both.heldout] if e.place.endswith(":1"))


BOXED = {"answer_form": "boxed"}
SUM = {"prompt": "2+2=", "level": ["easy", 2]}


@pytest.mark.parametrize(
    ("record", "settings", "prompt", "answer", "solution"),
    [
        (SUM | {"answer": 4}, {}, [ASKED], "4", "4"),
        (SUM | {"answer": "It is\n#### 1,004"}, {"answer_form": "hashes"}, [ASKED], "1004", "It is\n#### 1,004"),
        (SUM | {"answer": r"$\boxed{\frac{1}{2}}$."}, BOXED, [ASKED], r"\frac{1}{2}", r"$\boxed{\frac{1}{2}}$."),
        (SUM | {"answer": r"\frac{1}{2}"}, BOXED, [ASKED], r"\frac{1}{2}", None),
        (SUM, {"system_prompt": "Add."}, [SYSTEM, ASKED], None, None),
        ({"messages": [ASKED]}, {"system_prompt": "Add."}, [SYSTEM, ASKED], None, None),
        ({"messages": [SYSTEM, ASKED]}, {}, [SYSTEM, ASKED], None, None),
        ({"messages": [ASKED, SAID]}, {}, [ASKED], None, "4"),
        ({"messages": [ASKED, {**SAID, "train": False}]}, {}, [ASKED], None, None),
        ({"prompt": [ASKED, SAID, ASKED]}, {}, [ASKED, SAID, ASKED], None, None),
        ({"prompt": [ASKED], "messages": [ASKED, SAID]}, {}, [ASKED], None, None),
    ],
)
def test_rewards_get_the_other_fields_of_a_record(tmp_path, record, settings, prompt, answer, solution):
    example = first(tmp_path, record, **settings)
    assert (example.prompt, example.answer, example.solution) == (prompt, answer, solution)
    assert example.answer_form == settings.get("answer_form", "whole")
    key = "prompt" if "prompt" in record else "messages"
    assert example.fields == {name: value for name, value in record.items() if name not in (key, "answer")}
    assert example.conversational == isinstance(record[key], list)


def test_a_renamed_messages_column_counts_beside_a_prompt(tmp_path: Path) -> None:
    record = {"prompt": "the first sentence", "chat": [ASKED, SAID]}
    assert task(tmp_path, record, heldout=0, columns={"messages": "chat"}).train[0].prompt == [ASKED]


HASHES = {"answer_form": "hashes"}
ANSWERS = [("It is\n#### 1,004.", HASHES, "1004"), ("-3.5", HASHES, "-3.5"), ("7.0", {}, "7.0"), (7.0, {}, "7")]
ANSWERS += [(7.5, {}, "7.5"), (1e20, {}, "1" + "0" * 20), (-0.0, {}, "0"), (1e-5, {}, "0.00001")]
ANSWERS += [("1,234,567", HASHES, "1234567")]


@pytest.mark.parametrize(("answer", "settings", "expected"), ANSWERS)
def test_answers_are_parsed_like_completions(tmp_path, answer, settings, expected):
    assert first(tmp_path, {"prompt": "q", "answer": answer}, **settings).answer == expected


def test_the_beginning_of_an_expression_is_no_answer():
    for completion in ("#### 3/4", "#### 34 / 5", "#### 3^2", "#### 3e5", "#### 3 000", "#### 3-1", "#### 3 + 4 = 7"):
        assert final_answer(completion, "hashes") is None
    for completion in ("#### 3 km.", "**#### 3**", "#### 3\n\n**Well**", "#### 3\n1 more", "#### 3 - so"):
        assert final_answer(completion, "hashes") == "3"


def test_games_that_differ_in_one_field_are_two_problems(tmp_path: Path) -> None:
    games = [{"prompt": "Guess my number.", "largest": largest} for largest in range(10, 30)]
    given = task(tmp_path, *games, environment="my_env:Guess", heldout=4)
    assert sorted(each.fields["largest"] for each in (*given.train, *given.heldout)) == [*range(10, 30)]
    assert len(given.heldout) == 4


def test_problems_are_told_apart_by_numbers_of_numpy_too():
    def hashed(value: Any) -> str:
        return prompt_hash(Example([ASKED], None, fields={"largest": value}), fields=True)

    assert len({hashed(np.int64(3)), hashed(np.int64(4)), hashed(np.array([3, 4])), hashed(np.array([3, 5]))}) == 4


def test_held_out_problems_are_a_tenth_in_any_order(tmp_path: Path) -> None:
    given, other = task(tmp_path, *SUMS), task(tmp_path, *reversed(SUMS), *SUMS[:50], heldout=10)
    assert (len(given.train), len(given.heldout)) == (90, 10)
    assert texts(given.heldout) == texts(other.heldout)
    for each in (given, other):
        assert {*texts(each.train)} | {*texts(each.heldout)} == {record["prompt"] for record in SUMS}
        assert {*texts(each.train)}.isdisjoint(texts(each.heldout))


def test_changed_content_anywhere_changes_the_hash(tmp_path: Path) -> None:
    def content(*records: Any, **settings: Any) -> str | None:
        return task(tmp_path, *records, heldout=1, **settings).content

    others = [{**SUMS[0], "answer": "1"}, {**SUMS[0], "a": 7}, {**SUMS[0], "prompt": "0 + 0="}]
    changed = [content(other, *SUMS[1:]) for other in others]
    assert content(*SUMS) == content(*SUMS)
    hashes = {content(*SUMS), content(*reversed(SUMS)), content(*SUMS, system_prompt="Add."), *changed}
    assert len(hashes) == 6


@pytest.mark.parametrize(
    ("line", "settings", "fault"),
    [
        ({"answer": "4"}, {}, "neither prompt nor messages are there"),
        ({"messages": json.dumps([ASKED])}, {}, "messages must be a list of objects with role and content"),
        ({"prompt": [ASKED, SAID]}, {}, "the last message of a prompt must be the user's"),
        ({"prompt": "a", "answer": ["4"]}, {}, "answer must be a string, got list"),
        ({"answer": "a"}, {"columns": {"prompt": "question"}}, "question is missing, which task.columns.prompt names"),
        ({"messages": [SYSTEM, ASKED]}, {"system_prompt": "Subtract."}, "has a system message, and so has task.system"),
        ({"prompt": "q", "answer": "So\n#### 3/4"}, HASHES, "answer 3/4 is more than the number that #### states"),
        ({"prompt": "q", "answer": "$5"}, HASHES, "answer .5 is more"),
        ({"prompt": "q", "answer": "+3"}, HASHES, "answer .3 is more"),
        ({"prompt": "q", "answer": "#### ,"}, HASHES, "answer , is more"),
        ({"prompt": "q", "answer": r"\boxed{}"}, BOXED, "answer .* can't be stated as"),
        ({"prompt": "q", "answer": r"\boxed{1} or \boxed{2"}, BOXED, "answer .* can't be stated as"),
        ({"prompt": "q", "answer": "<answer>5"}, {"answer_form": "tags"}, "answer .* can't be stated as <answer>"),
        ({"prompt": "q", "answer": float("nan")}, {}, "answer is nan, which is no number"),
        ({"prompt": "q", "answer": float("-inf")}, HASHES, "answer is -inf, which is no number"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, settings: Any, fault: str) -> None:
    with pytest.raises(UserError, match=rf"^task.train: {fault}.* \({tmp_path}/train.jsonl:2\)"):
        task(tmp_path, {"prompt": "1+1=", "question": "1+1="}, line, **settings)


def test_files_that_are_empty_or_too_small_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task.test: there is no problem in its part test"):
        task(tmp_path, *SUMS, test=write(tmp_path, [], "test.jsonl"))
    with pytest.raises(UserError, match=r"task.heldout: 1 of task jsonl's 1 problems leave none to train on"):
        task(tmp_path, SUMS[0])


def test_a_hub_data_set_becomes_problems_with_its_field_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(source: str, subset: str | None, split: str) -> list[dict[str, Any]]:
        if (source, subset) != ("us/sums", "small"):
            raise FileNotFoundError(f"Dataset '{source}' doesn't exist on the Hub\nmore lines")
        rows = {"train": SUMS, "dev": SUMS[:5]}[split]
        return [{"question": row["prompt"], "solution": row["answer"], "level": None} for row in rows]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    columns = {"prompt": "question", "answer": "solution"}
    given = load(TaskConfig(name="hub", id="us/sums", subset="small", test="dev", columns=columns))
    assert given.test is not None
    assert (len(given.train), len(given.heldout), len(given.test)) == (85, 10, 5)
    example = given.train[0]
    assert example.place.startswith("us/sums[train]:")
    assert texts([example]) == [example.fields["question"]]
    assert example.answer == example.fields["solution"]
    with pytest.raises(UserError, match=r"task.id: us/other; it can't be had from the hub \(Dataset 'us/other'"):
        load(TaskConfig(name="hub", id="us/other"))


def user_module(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Task:
    (folder / "our_problems.py").write_text(f"def make():\n {code}")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "our_problems", raising=False)
    return load(TaskConfig(name="our_problems:make", heldout=1))


@pytest.mark.parametrize("code", ["yield from rows[:3]", "return {'train': iter(rows), 'test': [{'prompt': '3'}]}"])
def test_a_function_returns_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    code = "rows = [{'prompt': str(i), 'extra': range(i)} for i in range(4)]; " + code
    given = user_module(tmp_path, monkeypatch, code)
    assert sorted(texts([*given.train, *given.heldout])) == ["0", "1", "2"]
    assert given.train[0].fields["extra"] == range(int(texts(given.train)[0]))
    assert (given.test is None) == ("'test'" not in code)
    assert given.content == user_module(tmp_path, monkeypatch, code).content


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("import nothing_like_it", "nothing_like_it.*; modules are also looked for beside the configuration"),
        ("yield {}\n raise ValueError('a\\nb')", "can't be used: ValueError: a$"),
        ("return {'dev': []}", "returned 'dev': expected train, and test"),
        ("return 'abc'", r"task.name: expected a mapping, got str \(our_problems:make\[0\], our_"),
        ("return [{'prompt': 'a', 'f': lambda: 0}]", r"the rewards' process: Can't .*make\[0\]"),
    ],
)
def test_a_failing_task_function_is_a_one_line_error(tmp_path: Path, monkeypatch: Any, code: str, fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        user_module(tmp_path, monkeypatch, code)


def test_the_number_game_hints_until_right_or_out_of_turns() -> None:
    assert len(load(TaskConfig(name="mllm.examples.guess:problems", heldout=250)).train) == guess.GAMES - 250
    game = guess.Guess()
    game.reset(seed=7, prompt="game 7")
    answers = [game.step(str(number)) for number in (0, 99)] + [game.step(text) for text in ("x", f" {game.number}\n")]
    assert answers == [("higher", 0, False), ("lower", 0, False), ("a number", 0, False), ("right", 1, True)]
    game.reset(seed=7)
    assert [game.step("0")[1:] for _ in range(guess.TURNS)] == [(0, False)] * (guess.TURNS - 1) + [(0, True)]


def test_calculator_chats_are_runs_of_other_problems() -> None:
    chats = [calculator.chat(number) for number in range(50)]
    for prompt, *turns, answer in chats:
        assert str(eval(prompt["content"].removesuffix("="))) == answer["content"]
        for call, output in zip(turns[::2], turns[1::2], strict=True):
            [(name, arguments)] = tool_calls(call["content"])
            assert getattr(calculator, name)(**arguments) == int(output["content"]) == int(answer["content"])
            assert tool_schemas([calculator.add])[0]["function"]["name"] == name
    assert [len(chat) for chat in chats] == [2, 4] * 25
    learned, problems = {calculator.chat(number)[0]["content"] for number in range(20_000)}, calculator.problems()
    assert sum(problem["prompt"] in learned for problem in problems) < len(problems) / 10


@pytest.mark.parametrize(("module", "made"), [("guess", guess.played(3)[0]), ("calculator", calculator.chat(3))])
def test_the_examples_write_chats_to_learn_from(module: str, made: object, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "runs" / "chats.jsonl"
    monkeypatch.setattr(sys, "argv", [module, str(path)])
    monkeypatch.delitem(sys.modules, f"mllm.examples.{module}")
    runpy.run_module(f"mllm.examples.{module}", run_name="__main__")
    assert json.loads(path.read_text().splitlines()[3]) == {"messages": made}
