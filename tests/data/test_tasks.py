"""Tasks: held-out problems stay held out, and every answer is right."""

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_data import write

from mllm.config.task import ArithmeticConfig, TaskConfig
from mllm.data.permutation import permute_index
from mllm.data.tasks import gym as gym_module
from mllm.data.tasks.gym import gym as gym_problems
from mllm.data.tasks.load import GSM8K_INSTRUCTION, load
from mllm.data.tasks.task import Example, Task
from mllm.errors import UserError


def arithmetic(heldout: int = 32, **shape: Any) -> Task:
    return load(TaskConfig(name="arithmetic", heldout=heldout, arithmetic=ArithmeticConfig(**shape)), seed=0)


def question(example: Example) -> str:
    return example.prompt[-1]["content"]


def test_one_digit_sums_are_a_hundred_problems_each_in_one_half_whatever_the_seed() -> None:
    task = arithmetic(heldout=32)
    train, heldout = {question(e) for e in task.train}, {question(e) for e in task.heldout}
    assert (len(task.train), len(task.heldout)) == (68, 32)
    assert train.isdisjoint(heldout)
    assert train | heldout == {f"{a}+{b}=" for a in range(10) for b in range(10)}
    assert list(load(TaskConfig(name="arithmetic", heldout=32), seed=2).heldout) == list(task.heldout)


@pytest.mark.parametrize("shape", [{"operators": "+-*", "operands": 4}, {"digits": 3, "operators": "-"}])
def test_answers_are_what_python_says(shape: dict[str, Any]) -> None:
    task = arithmetic(**shape)
    for example in [*task.train[:300], *task.heldout]:
        assert example.answer == example.solution == str(eval(question(example).removesuffix("=")))


def test_more_problems_than_could_be_listed_are_still_split() -> None:
    task = arithmetic(heldout=256, operands=6, digits=6, operators="+-*")
    assert len(task.train) > 2**60
    some = {question(task.train[i * 10**12]) for i in range(100)}
    assert len(some) == 100
    assert some.isdisjoint(question(e) for e in task.heldout)


@pytest.mark.parametrize("size", [1, 2, 3, 64, 65, 300])
def test_a_permutation_reaches_every_index_once(size: int) -> None:
    orders = [[permute_index(i, size, key) for i in range(size)] for key in ("", "0 1")]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(size))
    assert size < 60 or orders[0] != orders[1]


def test_gsm8k_reads_its_two_files_and_never_trains_on_a_question_of_the_test_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, numbers in (("train", (1234, 3, 2)), ("test", (3, 4))):
        rows = [{"question": f"How much is {n}?", "answer": f"It is <<{n}={n}>>.\n#### {n:,}"} for n in numbers]
        write(tmp_path, rows, f"{name}.jsonl")
    task = load(TaskConfig(name="gsm8k", path=str(tmp_path), heldout=1), seed=0)
    assert {e.answer for e in [*task.train, *task.heldout]} == {"1234", "2"}
    assert (len(task.train), len(task.heldout)) == (1, 1)
    assert "1 training problems are in its test set and are left out" in caplog.text
    assert task.test is not None
    assert [(e.answer, e.answer_form) for e in task.test] == [("3", "hashes"), ("4", "hashes")]
    assert task.test[0].solution == "It is <<3=3>>.\n#### 3"
    assert question(task.test[0]) == f"How much is 3? {GSM8K_INSTRUCTION}"
    write(tmp_path, [{"question": "How much is 5?", "answer": "It is 5."}], "test.jsonl")
    with pytest.raises(UserError, match=r"test.jsonl:1: answer has no line '#### N' with the result"):
        load(TaskConfig(name="gsm8k", path=str(tmp_path), heldout=1), seed=0)


class FakeGym:
    """reasoning_gym's contract: problem i of a generator is made from seed + i alone, and indices are plain ints."""

    def __init__(self, name: str, seed: int, size: int) -> None:
        if name == "missing":
            raise ValueError(f"Dataset '{name}' not registered")
        self.name, self.seed, self.size = name, seed, size

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert type(index) is int
        if self.name == "broken":
            raise ZeroDivisionError("no such sum")
        number = (self.seed + index) % (10 if self.name == "small" else 10**9)
        return {"question": f"Which is {number}?", "answer": str(number), "metadata": {}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return 1.0 if answer == entry["answer"] else 0.01


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> None:
    gym_problems.cache_clear()
    monkeypatch.setattr(gym_module, "TRAIN_EXAMPLES", 20)
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=FakeGym))


@pytest.mark.usefixtures("gym")
def test_reasoning_gym_holds_the_same_problems_out_of_every_seed() -> None:
    config = TaskConfig(name="reasoning_gym:sums", heldout=5)
    first, second = load(config, seed=0), load(config, seed=1)
    assert first.heldout == second.heldout
    questions = [{question(e) for e in examples} for examples in (first.heldout, first.train, second.train)]
    assert [len(q) for q in questions] == [5, 20, 20]
    assert len(set.union(*questions)) == 45


@pytest.mark.usefixtures("gym")
def test_a_small_generator_that_repeats_itself_still_trains_on_other_questions() -> None:
    task = load(TaskConfig(name="reasoning_gym:small", heldout=5), seed=0)
    assert {question(e) for e in task.train}.isdisjoint(question(e) for e in task.heldout)


@pytest.mark.usefixtures("gym")
def test_reasoning_gyms_scorer_judges_the_tagged_answer_and_travels() -> None:
    task = load(TaskConfig(name="reasoning_gym:sums", heldout=1), seed=0)
    scorer, example = pickle.loads(pickle.dumps(task.scorer)), task.train[0]
    said = f"It is <answer>{example.answer}</answer>", "nonsense"
    assert [scorer("", completion, example) for completion in said] == [1.0, 0.01]


@pytest.mark.usefixtures("gym")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", r"broken\[0\]: can't be made: ZeroDivisionError: no such sum"),
        ("missing", "missing: Dataset 'missing'"),
    ],
)
def test_a_generator_that_fails_or_is_unknown_is_one_line(name: str, said: str) -> None:
    with pytest.raises(UserError, match=f"reasoning_gym:{said}"):
        load(TaskConfig(name=f"reasoning_gym:{name}", heldout=1), seed=0)
