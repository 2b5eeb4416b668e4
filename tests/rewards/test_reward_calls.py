"""A reward function gets the arguments that it declares, by name. A missing argument is a one-line error."""

import re
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mllm.config import load as configs
from mllm.data.tasks.answers import STATED
from mllm.data.tasks.task import Example, Task
from mllm.errors import UserError
from mllm.rewards.calls import LOGS, Reward, Sample, answers, bind, fields_of
from mllm.rewards.functions import exact_match, flexible_match, last_number, math, overlong, think_answer_format

OWN_REWARDS = """
import asyncio, json, re

def named(prompt, completion, example, answer, completion_ids, length, truncated, level):
    return [prompt, completion, example.answer, answer, completion_ids, length, truncated, level]

def everything(completion, **rest):
    return sorted(rest)

def with_default(completion, unit="kg"):
    return unit

def batch_of_everything(completions, **rest):
    return [rest] * len(completions)

def needs_state(completions, trainer_state):
    return [0.0]

def divides(completion):
    count = len(completion) - 1
    return helper(count)

def helper(count):
    return json.loads("{") if count > 2 else 1 / count

number = 1

def format_reward(completions, **kwargs):
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(pattern, content) else 0.0 for content in contents]

async def only_math(prompts, completions, task, **kwargs):
    return [float(len(text)) if kind == "math" else None for text, kind in zip(completions, task)]

def logs(completions, answer, **kwargs):
    kwargs["log_extra"]("golden", answer)
    kwargs["log_extra"](column="length", values=[len(text) for text in completions])
    kwargs["log_metric"]("accuracy", 0.5)
    kwargs["log_metric"](name="accuracy", value=1)
    return [1.0] * len(completions)

def logs_one(completion, log_extra, log_metric):
    log_extra("said", completion * 2000)
    log_metric("accuracy", len(completion) if completion else "no number")
    return 1.0

def takes(completion, words, bag):
    bag.append(completion)
    return len(bag) + sum([words.pop() in completion for _ in [*words]])

def takes_all(completions, words, **kwargs):
    return [sum([each.pop() in text for _ in [*each]]) for text, each in zip(completions, words)]

def numbered(completions):
    return dict.fromkeys(range(len(completions)), 0.5)

def meet(completion, there=[]):
    there.append(completion)
    return asyncio.sleep(0.01) if len(there) == 4 else until(lambda: len(there) > 3)

async def until(reached):
    while not reached():
        await asyncio.sleep(0.001)

async def meets(completion):
    await meet(completion)
    return float(completion)

async def meets_all(completions):
    await asyncio.gather(*map(meet, completions))
    return [10 * float(one) for one in completions]

async def hangs_at_times(completion):
    if completion == "hang":
        await asyncio.sleep(60)
    if completion == "exit":
        raise SystemExit(3)
    await asyncio.sleep(0.2 * len(completion))
    return 1.0
"""


@pytest.fixture(autouse=True, scope="module")
def own_rewards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "mine.py").write_text(OWN_REWARDS)
    (folder / "broken_rewards.py").write_text("import nothing_of_that_name")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def sample(completion, *, conversational=False, answer="7", **fields) -> Sample:
    prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+4="}]
    example = Example(prompt, answer, fields=fields, conversational=conversational)
    return Sample(example, completion, array("i", [*completion.encode()]), len(completion) > 3)


def bound(name, *samples, **args) -> Reward:
    task = Task("sums", [sample.example for sample in samples], [])
    return bind(name, args, fields_of(task), 16)


def place_of(code):
    return f"mine.py:{OWN_REWARDS[: OWN_REWARDS.index(code)].count(chr(10)) + 1}"


def values(name, *samples, **args):
    return [result for _, result in answers([bound(name, *samples, **args)], samples)]


def test_a_function_gets_its_declared_arguments():
    given = sample("long", level=2)
    assert bound("mine:named", given)([given]) == ["3+4=", "long", "7", "7", [108, 111, 110, 103], 4, True, 2]
    assert [bound("mine:with_default", given, **args)([given]) for args in ({}, {"unit": "g"})] == ["kg", "g"]
    fixed = ["answer", "completion_ids", "example", "length", "max_completion_length", "prompt"]
    fixed += ["thinks", "truncated"]
    assert bound("mine:everything", given, more=1)([given]) == sorted([*fixed, *LOGS, "level", "more"])


def test_calls_share_no_arguments_and_a_dict_is_no_list():
    given = [sample("a b", words=["a", "b"])] * 2
    assert values("mine:takes", *given, bag=[]) == [3, 3]
    assert values("mine:takes_all", *given) == [2, 2]
    assert values("mine:numbered", sample("a")) == ["returned no list of numbers: a dict"]


def test_a_batched_function_gets_lists_with_none_for_gaps():
    given = [sample("a", level=2), sample("b", source="x")]
    rest = bound("mine:batch_of_everything", *given)(given)[0]
    assert rest.pop("examples") == [one.example for one in given]
    alike = {"prompts": ["3+4="] * 2, "answer": ["7"] * 2, "answers": ["7"] * 2, "length": [1] * 2}
    own = {"completion_ids": [[97], [98]], "level": [2, None], "source": [None, "x"]}
    own |= {"thinks": [False] * 2, "truncated": [False] * 2}
    assert rest == {**alike, **own, "max_completion_length": 16, **dict.fromkeys(LOGS)}


def test_functions_written_for_trl_work_unchanged():
    chat = sample("a", conversational=True)
    assert bound("mine:batch_of_everything", chat)([chat])[0]["prompts"] == [chat.example.prompt]
    thought = "<think>3 and 4</think><answer>7</answer>"
    assert values("mine:format_reward", *[sample(text, conversational=True) for text in (thought, "7")]) == [1, 0]
    tasks = [sample("abc", task="math"), sample("abc", task="code")]
    assert list(answers([bound("mine:only_math", *tasks)], tasks)) == [("value", 3.0), ("not_applicable", "")]


def test_a_raising_function_names_the_line_of_its_file():
    divided, parsed = values("mine:divides", sample("a"), sample("long"))
    assert divided == f"ZeroDivisionError: division by zero ({place_of('1 / count')})"
    assert re.fullmatch(rf"JSONDecodeError: .* \({place_of('json.loads')}\)", parsed)
    (failure,) = values("exact_match", sample("a", answer=None), sample("a"))[:1]
    assert failure == "ValueError: this problem has no answer"  # the line of a built-in function is not the user's


def test_values_logged_the_trl_way_come_with_the_answers():
    given = [sample("abc"), sample("")]
    golden, metrics = ("extra", "golden", "7"), [("metric", "accuracy", value) for value in (0.5, 1)]
    logged = [golden, ("extra", "length", 3), *metrics], [golden, ("extra", "length", 0)]
    assert list(answers([bound("mine:logs", *given)], given)) == [("value", 1, *each) for each in logged]
    one, other = answers([bound("mine:logs_one", *given)], given)
    assert one == ("value", 1, ("extra", "said", ("abc" * 334)[:1000]), ("metric", "accuracy", 3))
    message = f"ValueError: log_metric: accuracy is no number: returned 'no number' ({place_of('if completion else')})"
    assert other == ("raised", message, ("extra", "said", ""))


@pytest.mark.slow
def test_coroutines_of_functions_run_together_and_time_out():
    given = [sample("1"), sample("2")]
    together = [bound("mine:meets", *given), bound("mine:meets_all", *given)]
    assert [value for _, value in answers(together, given, 60.0)] == [1, 2, 10, 20]
    given = [sample(text) for text in ("hang", "a", "exit", "abc", "ab")]
    timed_out, exited = "took longer than 0.5 s", f"SystemExit: 3 ({place_of('raise SystemExit')})"
    results = list(answers([bound("mine:hangs_at_times", *given)], given, 0.5))
    assert results == [("timed_out", timed_out), ("value", 1), ("raised", exited), ("value", 1), ("value", 1)]


def test_documented_rewards_run_as_their_configuration_says(monkeypatch):
    folder = Path(__file__).parents[2] / "docs" / "examples"
    monkeypatch.syspath_prepend(str(folder))
    task = configs.load(str(folder / "rewards.yaml")).task
    assert task is not None
    given = [sample(text) for text in ("7", "6", "6", "x")]
    scores = {reward.name: values(reward.name, *given, **reward.args) for reward in task.rewards}
    assert scores == {
        "rewards:digits": [1, 1, 1, 0],
        "rewards:close": [1, 0.9, 0.9, 0],
        "rewards:varied": [1, 0, 0, 1],
        "overlong": [0, 0, 0, 0],
        "exact_match": [1, 0, 0, 0],
    }


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("exact", {}, "there is no reward exact: exact_match, .*or package.module:function"),
        ("broken_rewards:f", {}, "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("mine:number", {}, "is not a function"),
        ("mine:needs_state", {}, "missing a .* argument: 'trainer_state'; there are .*level, prompts, .*; args gives"),
        ("mine:with_default", {"units": 1}, "got an unexpected keyword argument 'units'"),
        ("mine:with_default", {"completion": 1}, "args.completion: the trainer gives this argument itself"),
        ("overlong", {"cache": 17}, r"overlong: cache is 17, expected 1 to rollout.max_completion_length \(16\)"),
    ],
)
def test_an_uncallable_function_is_a_one_line_error(name, args, message):
    with pytest.raises(UserError, match=f"^task.rewards: .*{message}"):
        bound(name, sample("a", level=1), **args)


def test_a_function_that_needs_missing_answers_is_refused():
    given = sample("a", answer=None)
    with pytest.raises(UserError, match=r"exact_match: missing .* .answer.; .* task.columns.answer names the answer"):
        bound("exact_match", given)
    assert values("format", given) == [0]


def example(answer, form="whole"):
    return Example([{"role": "user", "content": "?"}], answer, answer_form=form)


@pytest.mark.parametrize(
    ("completion", "answer", "form", "reward"),
    [
        (" 7\n", "7", "whole", 1),
        ("#### 5\nno:\n#### -1,234.", "-1234", "hashes", 1),
        ("<answer>1</answer> or <answer> a b\n</answer>", "a b", "tags", 1),
        ("between <answer> and so on: <answer>7</answer>", "7", "tags", 1),
        (r"\boxed{1}, no: $\boxed{\frac{1}{2} }$.", r"\frac{1}{2}", "boxed", 1),
        (r"\boxed{1}, no: \boxed{7", "7", "boxed", 0),
    ],
)
def test_exact_match_requires_the_form_of_the_task(completion, answer, form, reward):
    assert exact_match(completion, answer, example(answer, form)) == reward


@pytest.mark.parametrize(
    ("completion", "thinks", "reward"),
    [
        ("<think>First guess: 7. But wait", False, 0),
        ("First guess: 7. But wait", True, 0),
        ("<think>7</think>", False, 0),
        ("<think>6</think>7", False, 1),
        ("6</think>7", True, 1),
        ("6</think>7", False, 1),
        ("7<think>6</think>", False, 1),
        ("<think>a<think>6</think>6</think>7", False, 1),
    ],
)
@pytest.mark.parametrize("form", ["whole", "hashes", "tags", "boxed", "last number"])
def test_text_in_a_thought_is_no_answer(completion, thinks, reward, form):
    match, known = (flexible_match, "whole") if form == "last number" else (exact_match, form)
    stated = re.sub("[67]", lambda number: STATED[known].format(number.group()), completion)
    assert match(stated, "7", example("7", known), thinks) == reward


LAST_NUMBERS = {
    "-5": ("so x = -5", "x = −5 (unicode)", "-$5", "$-5"),
    "7": ("10-7", "7.0", "The answer is 7. Done."),
    "-7": ("(-7)",),
    "1234567.5": ("1,234,567.50",),
    "1234567890": ("1234567,890",),
    "2345": ("1,2345",),
    "5": ("1,234,5",),
    "0.5": (".5",),
    "4": ("3 apples and 4 pears",),
}


def test_flexible_match_reads_the_last_number_in_any_form():
    for number, completions in LAST_NUMBERS.items():
        for completion in completions:
            assert flexible_match(completion, number, example(number)) == 1, completion
            assert flexible_match(completion, number + "1", example(number + "1")) == 0, completion


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**35), max_value=10**35))
def test_the_last_number_is_exact_at_any_size(number):
    assert last_number(f"It costs {number:,}") == last_number(f"It costs ${number}.") == number


def test_an_answer_without_a_number_is_matched_exactly():
    """A completion without a number matches no number."""
    assert flexible_match("yes", "yes", example("yes")) == 1
    for completion, answer in (("I do not know", "7"), ("yes 1", "yes"), ("7 - 1", "2 - 1")):
        assert flexible_match(completion, answer, example(answer)) == 0


def test_format_is_one_thought_and_one_answer():
    thought, answer = "<think>a</think>", "<answer>7</answer>"
    for completion in ("<think>\na\nb</think>\n<answer>\n7\n</answer>\n", "<think></think><answer></answer>"):
        assert think_answer_format(completion) == 1
    beside = f"Well {thought}{answer}", f"{thought}b{answer}", f"{thought}{answer} done"
    for completion in (*beside, f"<think>{thought}{answer}", f"{thought}{answer}<answer>8</answer>", answer):
        assert think_answer_format(completion) == 0, completion
    assert think_answer_format(f"3+4 is 7.</think>{answer}", thinks=True) == 1
    assert think_answer_format(thought + answer, thinks=True) == 0


def test_overlong_is_dapo_s_equation_13():
    lengths = {1: 0, 12: 0, 13: -0.25, 15: -0.75, 16: -1, 700: -1}
    assert {length: overlong(length, max_completion_length=16, cache=4) for length in lengths} == lengths


@pytest.mark.slow
def test_math_is_equivalence_however_the_two_are_written():
    pytest.importorskip("math_verify")
    assert math("so it is $0.5$", r"\frac{1}{2}") == math("#### 1,234", "1234") == 1
    assert math(r"the sum is 7 <answer>\frac{8}{2}</answer>", "4") == 1
    assert math(r"<think>\boxed{4}", "4") == math("so 4", "4", thinks=True) == 0
    assert math(r"thus \boxed{3}", "3\\sqrt{2}") == math("1" + "*(9^9^9^9^9)" * 9, "4") == 0
    with pytest.raises(ValueError, match="this problem has no answer"):
        math("7", None)
