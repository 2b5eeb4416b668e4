"""Whatever a model or an environment does costs its own conversation, and at worst those of its process."""

import json
import re

import pytest
from test_conversations import opened, play, prompt

TOO_MUCH = r"raised ValueError: what it said and its values can't be sent: it takes [0-9,]+ bytes as JSON, and .*"


# Environments

LASTING = {
    "if os.fork() == 0: raise ValueError": None,
    "result = 'on', 'jax' not in sys.modules, False": None,
    "raise ValueError('two\\nlines')": r"raised ValueError: two lines \(own_environments.py:\d+\)",
    "result = 5, 0.0, False": "raised TypeError: expected a text or messages, got 5.*",
    "result = None, 0.0, False": "raised TypeError: it is not done, and there is no observation.*",
    "result = 'on', 0.0": "raised TypeError: expected observation, reward and done.*",
    "result = 'x' * 10**7, 0.0, False": TOO_MUCH,
    "self.board = 'x' * 10**7; result = '', 0, True": TOO_MUCH,
    "result = 'on', float('nan'), False": "not_a_number returned nan",
    "result = ' \\ud800<|im_end|>', 1.0, False": None,
    "self.board = float('inf')": None,
    "self.board = functools.reduce(lambda board, _: [board], range(10**5), 0)": None,
}
"""What an environment does in its first turn, and how it is counted; None: it is not, and each of its turns gives 1."""
HANGING = "time.sleep(600)", "re.match(r'(a+)+$', 'a' * 64 + 'b')"
DEADLY = {
    "os._exit(3)": "raised ended its process with exit code 3",
    "while True:\n try: time.sleep(600)\n except BaseException: pass": "timed_out took longer than 1.5 s",
}
"""What ends the process, and the other environments in it."""
GOOD = ["pass"]


def counted(found):
    return [" ".join(one.failure) if one.failure else None for one in found]


@pytest.mark.slow
def test_a_hostile_environment_is_counted():
    with opened("Hostile", reward_timeout=60) as made:
        prompts = [prompt(begins="raise ValueError('at once')")] + [prompt()] * len(LASTING)
        found = play(made(), prompts, [GOOD, *([does, *GOOD] for does in LASTING)])
    expected = [r"raised ValueError: at once \(own_environments.py:\d+\)", *LASTING.values()]
    for said, pattern in zip(counted(found), expected, strict=True):
        assert said is pattern is None or re.fullmatch(pattern, said)
    assert {one.played.reward for one in found if one.failure is None} == {("value", 3)}


@pytest.mark.slow
def test_one_that_hangs_is_interrupted_alone_and_one_that_ends_its_process_loses_only_those_in_it():
    """Even conversations are in one process, odd ones in another."""
    with opened("Hostile", reward_timeout=0.5, reward_workers=2) as made:
        late = "timed_out took longer than 0.5 s"
        assert (
            counted(play(made(), [prompt()] * 4, [*([does] for does in HANGING), GOOD, GOOD]))
            == [late] * 2 + [None] * 2
        )
        for does, said in DEADLY.items():
            lost = "raised LookupError: its environment was lost with its process"
            assert counted(play(made(), [prompt()] * 4, [[does], GOOD, GOOD, GOOD])) == [said, None, lost, None]
        assert counted(play(made(), [prompt()] * 4, [GOOD] * 4)) == [None] * 4


# Tool calls


def call(arguments):
    return f'<tool_call>{{"name": "double", "arguments": {arguments}}}</tool_call>'


def tagged(value):
    return f"<tool_call><function=double><parameter=number>{value}</parameter></function></tool_call>"


NO_JSON = "Error: ValueError: a tool call is not JSON: "
CALLS = {
    "1e999": (call('{"number": [-1e999]}'), NO_JSON + "-inf"),
    "half a character": (call(r'{"number": "\ud800"}'), NO_JSON + ".*surrogates"),
    "lists": (call(f'{{"number": {10**4 * "[" + 10**4 * "]"}}}'), NO_JSON),
    "tagged 1e999": (tagged("1e999"), "1e9991e999"),
    "tagged lists": (tagged(978 * "[" + 978 * "]"), r"\[\["),
    "two megabytes": (call(f'{{"number": "{2**20 * "x"}"}}'), None),
    "20,000 calls": (20_000 * call('{"other": 1}'), None),
}
"""What a model writes, and what it is answered; None: the conversation fails, since that is too much.

tests/data/test_tool_calls.py has more of what can't be read.
"""


@pytest.mark.slow
def test_a_hostile_tool_call_is_answered_or_costs_its_own_conversation_and_the_process_lasts():
    good = call('{"number": 4}')
    says = [says for text, _ in CALLS.values() for says in ([text, "pass"], [good, "pass"])]
    with opened("Hostile", tools=["own_environments:double"], reward_timeout=60) as made:
        talk = made(max_turns=2, max_total_length=10**7)
        (process,) = [worker.process.pid for worker in talk.runner.environments]
        found = play(talk, [prompt()] * len(says), says)
        assert [worker.process.pid for worker in talk.runner.environments] == [process]
    hostile, others = found[::2], found[1::2]
    for (_, pattern), one in zip(CALLS.values(), hostile, strict=True):
        if pattern is None:
            assert re.fullmatch(TOO_MUCH, counted([one])[0])
        else:
            assert one.failure is None
            assert re.match(pattern, one.messages[1]["content"])
    assert counted(others) == [None] * len(CALLS)
    assert {one.messages[1]["content"] for one in others} == {"8"}
    json.dumps([one.messages for one in found], allow_nan=False, ensure_ascii=False).encode()
