"""Environments and tools as users write them answer the assistant's turns; in this process, without the trainer."""

import json
import re
from pathlib import Path

import own_environments
import pytest

from mllm.data.tasks.task import Example
from mllm.errors import UserError
from mllm.rewards.calls import answers
from mllm.rewards.environments import Move, players

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", (DOCS / "environments.md").read_text(), re.DOTALL))
"""The files that docs/environments.md shows."""


def example(prompt="Go.", answer=None, **fields) -> Example:
    return Example([{"role": "user", "content": prompt}], answer, fields=fields)


def mover(environment=None, *tools, seconds=5.0):
    """A function that makes moves, all of them together, and returns the answers."""
    name = environment and (environment if ":" in environment else f"own_environments:{environment}")
    (player,) = players(name, [f"own_environments:{tool}" for tool in tools], seconds)
    return lambda *moves: list(answers([player], moves, seconds))


def beginning(number=0, seed=5, **fields) -> Move:
    return Move(number, example(**fields), seed)


def fields_of(answer):
    """The texts of an answer's messages, and its other fields."""
    kind, given, (_, messages, done, calls, errors, values) = answer
    return [message["content"] for message in messages], kind, given, done, [*calls], errors, values


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_class_with_step_gets_its_named_fields():
    """The last step returns the rewards and values."""
    move = mover("Guess")
    (first,) = move(beginning(prompt="Guess.", largest=30, other=1))
    number = own_environments.random.Random(5).randint(1, 30)
    assert fields_of(first) == (["Guess. Up to 30."], "not_applicable", "", False, [], 0, {})
    (wrong,) = move(Move(0, completion="0"))
    assert fields_of(wrong) == (["higher"], "value", 0, False, [], 0, {})
    (right,) = move(Move(0, completion=str(number)))
    assert fields_of(right) == (["lower"], "value", 0.5, True, [], 0, {"tried": ["0", str(number)], "number": number})
    assert [number] == own_environments.CLOSED
    assert move(Move(0, completion="0"))[0][:2] == ("raised", "LookupError: its environment was lost with its process")
    (_, cut) = move(beginning(), Move(0, completion="0", last=True))
    assert fields_of(cut)[2:4] == (-0.25, True)
    (_, ended) = move(beginning(), Move(0))
    assert fields_of(ended)[:4] == ([], "value", 0, True)
    assert len(own_environments.CLOSED) == 3


def test_environments_close_at_a_restart_or_a_bad_reward(capsys):
    move = mover("Hostile")
    move(beginning(), beginning())  # as after a rollout that was interrupted
    assert capsys.readouterr().err == "closed\n"
    move(Move(0, completion="result = 'on', float('nan'), False"))
    assert capsys.readouterr().err == "closed\n"
    _, text = move(beginning(), Move(0, completion="result = 'on', 1, 'false'"))
    assert text[:2] == ("raised", "TypeError: expected observation, reward and done, got ('on', 1, 'false')")


def test_a_trl_class_has_tools_and_its_errors_are_answers():
    """Tools of the class are added to the functions."""
    move = mover("Echo", "double")
    (player,) = players("own_environments:Echo", ["own_environments:double"], 5.0)
    assert [schema["function"]["name"] for schema in player.tools] == ["double", "step"]
    move(beginning(answer="7", level=1))
    tagged = "<function=double><parameter=number>4</parameter></function>"
    text = f"Well. {call('step', number=2)}{call('step', number=0)}<tool_call>{{</tool_call>{tagged}{call('triple')}"
    (turn,) = move(Move(0, completion=text))
    texts, kind, _, done, calls, errors, _ = fields_of(turn)
    assert (texts[0], texts[3], kind, done, errors) == ("2", "8", "not_applicable", False, 3)
    assert "number must be positive" in texts[1]
    assert texts[2].startswith("Error: ValueError: a tool call is not JSON")
    assert "there is no tool triple; there are double, step" in texts[4]
    assert calls[1:3] == [{"name": "step", "arguments": {"number": 0}}, {"name": "double", "arguments": {"number": 4}}]
    (unread,) = move(Move(0, completion="<tool_call>{"))
    assert fields_of(unread)[3:6] == (False, [], 1)
    (over,) = move(Move(0, completion="Done."))
    assert fields_of(over) == ([], "not_applicable", "", True, [], 0, {"row": ["answer", "level", "prompt"]})


def test_conversations_share_nothing_and_log_calls_verbatim():
    move, problem = mover("Deck"), example(cards=[1, 2, 3])
    assert [fields_of(turn)[0] for turn in move(*(Move(number, problem) for number in range(3)))] == [["Go. 3"]] * 3
    (turn,) = move(Move(0, completion=call("sort", numbers=[2, 1]) + call("sort", numbers=[])))
    texts, _, _, _, calls, errors, _ = fields_of(turn)
    assert texts == ["[1, 2]", "Error: SystemExit: unsorted"]
    assert (calls[0]["arguments"], errors) == ({"numbers": [2, 1]}, 1)


def test_plain_functions_are_tools_until_a_turn_without_calls():
    turns = mover(None, "double")(beginning(), Move(0, completion=call("double", number=3)), Move(0, completion="6"))
    assert [fields_of(turn)[::3] for turn in turns] == [(["Go."], False, {}), (["6"], False, {}), ([], True, {})]


def test_coroutines_run_together_and_hanging_calls_time_out():
    own_environments.MET.clear()
    move = mover("Meeting", seconds=0.5)
    move(*(beginning(number) for number in range(4)))
    results = move(*(Move(number, completion=text) for number, text in enumerate(["a", "never", "bc", "d"])))
    late = "timed_out", "took longer than 0.5 s"
    assert [answer[:2] for answer in results] == [("value", 1), late, ("value", 2), ("value", 1)]


@pytest.mark.parametrize(
    ("environment", "tools", "message"),
    [
        ("Nothing", [], "task.environment: own_environments:Nothing can't be imported: AttributeError"),
        ("double", [], "task.environment: own_environments:double is not a class"),
        ("Undescribed", [], "task.environment: the tool tool can't be described"),
        (None, ["USED"], "task.tools: own_environments:USED is not a function"),
    ],
)
def test_a_bad_environment_or_tool_is_a_one_line_error(environment, tools, message):
    with pytest.raises(UserError, match=f"^{message}"):
        mover(environment, *tools)


def test_the_examples_of_the_docs_run_unchanged(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, content in BLOCKS.items():
        (tmp_path / f"{name}.py").write_text(content)
    number = own_environments.random.Random(5).randint(1, 20)
    turns = mover("my_env:Guess")(beginning(prompt="Guess."), Move(0, completion="x"), Move(0, completion=f" {number}"))
    assert [fields_of(turn)[:4] for turn in turns] == [
        (["Guess. It is between 1 and 20."], "not_applicable", "", False),
        (["higher"], "value", 0, False),
        (["right"], "value", 1, True),
    ]
    counted = Move(0, completion=call("add", amount=3)), Move(0, completion="3")
    _, turn, over = mover("my_counter:Counter")(beginning(), *counted)
    assert (fields_of(turn)[0], fields_of(over)[-1]) == (["3.0"], {"reward": 3.0})
