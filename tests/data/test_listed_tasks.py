"""Tasks that users bring: files, data sets of the hub and functions become problems; what is bad is one line."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_data import write

from mllm.config.task import TaskConfig
from mllm.data.tasks.load import load
from mllm.data.tasks.task import Example, Task
from mllm.errors import UserError

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "a": a} for a in range(10) for b in range(10)]
ASKED = {"role": "user", "content": "2+2="}
SAID = {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Add."}


def task(folder: Path, *records: Any, **settings: Any) -> Task:
    return load(TaskConfig(name="jsonl", train=write(folder, records, "train.jsonl"), **settings), seed=0)


def first(folder: Path, record: Any, **settings: Any) -> Example:
    """The example of a record that is listed beside another one."""
    both = task(folder, record, {"prompt": "other", "answer": "other"}, heldout=1, **settings)
    return next(e for e in [*both.train, *both.heldout] if e.place.endswith(":1"))


def texts(examples: Any) -> list[str]:
    return [example.prompt[-1]["content"] for example in examples]


def test_a_file_becomes_problems_whose_other_fields_reach_the_rewards(tmp_path: Path) -> None:
    example = first(tmp_path, {"prompt": "2+2=", "answer": 4, "level": "easy", "numbers": [2, 2]})
    assert example.prompt == [ASKED]
    assert example.answer == example.solution == "4"
    assert example.fields == {"level": "easy", "numbers": [2, 2]}
    assert not example.conversational


@pytest.mark.parametrize(
    ("record", "prompt", "solution"),
    [
        ({"messages": [SYSTEM, ASKED]}, [SYSTEM, ASKED], None),
        ({"messages": [ASKED, SAID]}, [ASKED], "4"),
        ({"prompt": [ASKED, SAID, ASKED]}, [ASKED, SAID, ASKED], None),
        ({"prompt": [ASKED], "messages": [ASKED, SAID]}, [ASKED], None),
    ],
)
def test_messages_are_a_prompt_and_the_last_of_the_assistants_is_the_solution(
    tmp_path: Path, record: Any, prompt: Any, solution: str | None
) -> None:
    example = first(tmp_path, record)
    assert (example.prompt, example.solution, example.answer) == (prompt, solution, None)
    assert ("messages" in example.fields) == ({*record} == {"prompt", "messages"})
    assert example.conversational


@pytest.mark.parametrize(
    ("form", "given", "answer", "solution"),
    [
        ("whole", " 4 ", "4", " 4 "),
        ("hashes", "2+2 is 4\n#### 1,004", "1004", "2+2 is 4\n#### 1,004"),
        ("hashes", "1,004", "1004", None),
        ("boxed", r"It is $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}", r"It is $\boxed{\frac{1}{2}}$."),
        ("boxed", r"\frac{1}{2}", r"\frac{1}{2}", None),
    ],
)
def test_an_answer_may_be_a_whole_solution(
    tmp_path: Path, form: str, given: str, answer: str, solution: str | None
) -> None:
    example = first(tmp_path, {"prompt": "a", "answer": given}, answer_form=form)
    assert (example.answer, example.solution, example.answer_form) == (answer, solution, form)


def test_held_out_problems_are_a_tenth_and_the_same_in_whatever_order_and_however_often_they_are_listed(
    tmp_path: Path,
) -> None:
    given, other = task(tmp_path, *SUMS), task(tmp_path, *reversed(SUMS), *SUMS[:50], heldout=10)
    assert (len(given.train), len(given.heldout)) == (90, 10)
    assert texts(given.heldout) == texts(other.heldout)
    for each in (given, other):
        assert {*texts(each.train)} | {*texts(each.heldout)} == {record["prompt"] for record in SUMS}
        assert {*texts(each.train)}.isdisjoint(texts(each.heldout))


def test_other_content_is_another_hash_wherever_it_stands(tmp_path: Path) -> None:
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
        ("{", {}, "not JSON"),
        ({"answer": "4"}, {}, "neither prompt nor messages are there"),
        ({"messages": [SAID]}, {}, "the last message of a prompt must be the user's"),
        ({"prompt": [ASKED, SAID]}, {}, "the last message of a prompt must be the user's"),
        ({"prompt": "a", "answer": ["4"]}, {}, "answer must be a string, got list"),
        ({"answer": "a"}, {"columns": {"prompt": "question"}}, "question is missing, which task.columns.prompt names"),
        ({"messages": [SYSTEM, ASKED]}, {"system_prompt": "Subtract."}, "has a system message, and so has task.system"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, settings: Any, fault: str) -> None:
    with pytest.raises(UserError, match=rf"^{tmp_path}/train.jsonl:2: {fault}"):
        task(tmp_path, {"prompt": "1+1=", "question": "1+1="}, line, **settings)


@pytest.mark.parametrize("record", [{"prompt": "2+2="}, {"messages": [ASKED]}])
def test_a_system_prompt_comes_first(tmp_path: Path, record: Any) -> None:
    assert first(tmp_path, record, system_prompt="Add.").prompt == [SYSTEM, ASKED]


def test_files_that_are_empty_or_too_small_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task.test: there is no problem in it"):
        task(tmp_path, *SUMS, test=write(tmp_path, [], "test.jsonl"))
    with pytest.raises(UserError, match=r"task.heldout: 1 of task jsonl's 1 problems leave none to train on"):
        task(tmp_path, SUMS[0])


def test_a_data_set_of_the_hub_becomes_problems_whose_fields_keep_its_names_for_rewards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load_dataset(source: str, subset: str | None, split: str) -> list[dict[str, Any]]:
        if (source, subset) != ("us/sums", "small"):
            raise FileNotFoundError(f"Dataset '{source}' doesn't exist on the Hub\nmore lines")
        rows = {"train": SUMS, "dev": SUMS[:5]}[split]
        return [{"question": row["prompt"], "solution": row["answer"], "level": None} for row in rows]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    columns = {"prompt": "question", "answer": "solution"}
    given = load(TaskConfig(name="hub", id="us/sums", subset="small", test="dev", columns=columns), seed=0)
    assert given.test is not None
    assert (len(given.train), len(given.heldout), len(given.test)) == (85, 10, 5)
    example = given.train[0]
    assert example.place.startswith("us/sums[train]:")
    assert texts([example]) == [example.fields["question"]]
    assert example.answer == example.fields["solution"]
    with pytest.raises(UserError, match=r"task.id: us/other can't be had from the hub \(Dataset 'us/other'"):
        load(TaskConfig(name="hub", id="us/other"), seed=0)


def user_module(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Task:
    (folder / "our_problems.py").write_text(f"def make():\n {code}")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "our_problems", raising=False)
    return load(TaskConfig(name="our_problems:make", heldout=1), seed=0)


MADE = "{'prompt': str(i), 'extra': range(i)} for i in range"


@pytest.mark.parametrize(
    "code", [f"yield from ({MADE}(3))", f"return {{'train': [{MADE}(4)], 'test': [{{'prompt': '3'}}]}}"]
)
def test_a_function_returns_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    given = user_module(tmp_path, monkeypatch, code)
    assert sorted(texts([*given.train, *given.heldout])) == ["0", "1", "2"]
    assert given.train[0].fields["extra"] == range(int(texts(given.train)[0]))
    assert (given.test is None) == ("'test'" not in code)
    assert given.content == user_module(tmp_path, monkeypatch, code).content


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("import nothing_like_it", "nothing_like_it.*; modules are looked for beside the configuration, too"),
        ("raise SystemExit(3)", "can't be used: SystemExit: 3"),
        ("yield {}\n raise ValueError('a\\nb')", "can't be used: ValueError: a$"),
        ("return 3", "can't be used: TypeError: 'int' object is not iterable"),
        ("return {'dev': []}", "returned 'dev': expected train, and test"),
        ("return 'abc'", r"our_problems:make\[0\]: expected a mapping, got str"),
        (
            "return [{'prompt': 'a', 'f': lambda: 0}]",
            r"make\[0\]: can't be sent to the rewards' process: .*Can't pickle",
        ),
    ],
)
def test_a_function_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, fault: str
) -> None:
    with pytest.raises(UserError, match=fault):
        user_module(tmp_path, monkeypatch, code)
