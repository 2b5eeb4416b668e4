"""Tools answer each call of a turn, are told apart by name and known by their files; a game is its problem's."""

from itertools import chain

import pytest
from test_environments import BLOCKS, begun, call, held, said

from mllm.config.rollout import RolloutConfig
from mllm.config.task import TaskConfig
from mllm.data.prompts import Prompt
from mllm.data.tasks.load import load
from mllm.data.tasks.task import Example
from mllm.errors import UserError
from mllm.model.tokenizer import Renderer, bytes_tokenizer
from mllm.rewards.environments import Move, Player
from mllm.rewards.runner import RewardRunner
from mllm.sampler.conversations import Conversations


def test_a_call_that_can_not_be_read_is_answered_beside_one_that_is_run():
    readable = "<function=double><parameter=number>4</parameter></function>"
    text = f"{call('double', number=3)}<tool_call>{{</tool_call>{readable}"
    _, turn = held(None, "double")(begun(), Move(0, completion=text))
    texts, _, _, done, calls, errors, _ = said(turn)
    assert (texts[0], texts[2], done, errors) == ("6", "8", False, 1)
    assert texts[1].startswith("Error: ValueError: a tool call is not JSON")
    assert [one["arguments"] for one in calls] == [{"number": 3}, {"number": 4}]


def test_two_tools_of_a_name_are_an_error():
    with pytest.raises(UserError, match=r"task\.tools: two tools are named double"):
        Player(None, ["own_environments:double", "own_environments:double"], 1.0)


def test_a_changed_file_of_a_tool_is_another_code(tmp_path, monkeypatch):
    file, codes = tmp_path / "a_tool.py", []
    monkeypatch.syspath_prepend(str(tmp_path))
    for returned in (1, 2):
        file.write_text(
            f'def tool(x: int) -> int:\n    """Do.\n\n    Args:\n        x: It.\n    """\n    return {returned}\n'
        )
        codes.append(Player("own_environments:Guess", ["a_tool:tool"], 1.0).code)
    assert "" not in codes
    assert codes[0] != codes[1]


def test_the_documented_game_starts_with_problems_that_differ_in_a_field_alone(tmp_path, monkeypatch):
    (tmp_path / "my_env.py").write_text(BLOCKS["my_env"])
    lines = [f'{{"prompt": "Guess my number.", "largest": {largest}}}\n' for largest in range(10, 30)]
    (tmp_path / "games.jsonl").write_text("".join(lines))
    config = TaskConfig(name="jsonl", train=str(tmp_path / "games.jsonl"), environment="my_env:Guess", heldout=4)
    task = load(config, seed=0)
    largest = [[example.fields["largest"] for example in part] for part in (task.train, task.heldout)]
    assert sorted(chain(*largest)) == [*range(10, 30)]
    assert len(task.heldout) == 4


def test_a_held_out_game_is_the_same_at_each_step():
    seeds = []

    class Told(Conversations):
        def move(self, move):
            seeds[-1].append(move.seed)

        def collect(self, numbers):
            return {}

    runner, renderer = object.__new__(RewardRunner), Renderer(bytes_tokenizer())
    runner.tools, runner.environments = [], []
    options = RolloutConfig(max_prompt_length=64, max_completion_length=8, max_turns=5)
    examples = [Example([{"role": "user", "content": "Go."}], None, fields={"largest": n}) for n in (5, 6)]
    prompts = [Prompt(example, [1]) for example in examples for _ in range(2)]
    for step, fixed in ((0, True), (20, True), (0, False), (20, False)):
        seeds.append([])
        Told(runner, renderer, options, 0, group=2, step=step, fixed=fixed).start(prompts)
    assert seeds[0] == seeds[1] != seeds[2] != seeds[3]
    assert all(a == b != c == d for a, b, c, d in seeds)
