"""A tool gets the text that was written, and a call that can't be read costs itself alone."""

import json
from typing import Any

import pytest

from mllm.data.turns import tool_calls, tool_schemas
from mllm.model.tokenizer import bytes_tokenizer, decode


def add(x: str, n: int, flag: bool = False, any_of: int | str = 0, rest: dict | None = None) -> int:
    """
    Add.

    Args:
        x: A text.
        n: A number.
        flag: A flag.
        any_of: Either.
        rest: The rest.
    """
    return 0


TOOLS = tool_schemas([add])


def tagged(value: Any) -> str:
    return f"<tool_call>\n{value if isinstance(value, str) else json.dumps(value)}\n</tool_call>"


def function(**values: str) -> str:
    return (
        "<function=add>" + "".join(f"<parameter={n}>\n{v}\n</parameter>\n" for n, v in values.items()) + "</function>"
    )


def read(text: str) -> list[Any]:
    """The arguments of each call, or that it can't be read."""
    return ["error" if isinstance(call, ValueError) else call[1] for call in tool_calls(text, TOOLS)]


CALL = {"name": "add", "arguments": {"x": "a"}}


@pytest.mark.parametrize(
    "text", ["10001", "1.10", "null", "true", '{"a": 1}', "x\ny", "</parameter>", "a </think> b", "<tool_call>"]
)
def test_a_text_is_what_was_written(text: str) -> None:
    for written in (
        tagged(function(x=text, n="1")),
        function(x=text),
        tagged({"name": "add", "arguments": {"x": text}}),
    ):
        (arguments,) = read(f"I add.\n{written}")
        assert arguments["x"] == text


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("n", "7", 7),
        ("n", "seven", "seven"),
        ("flag", "true", True),
        ("flag", "True", True),
        ("any_of", "7", "7"),
        ("rest", '{"a": [1, null]}', {"a": [1, None]}),
        ("rest", "null", None),
        ("unknown", "7", 7),
    ],
)
def test_the_schema_decides_what_a_value_is(name: str, text: str, value: Any) -> None:
    assert read(tagged(function(**{name: text}))) == [{name: value}]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<think>maybe {tagged(CALL)}", []),
        (f"<think>a</think><think>maybe {tagged(CALL)}", []),
        (f"maybe {tagged(CALL)}</think>\n\nNo.", []),  # the prompt has opened the thought
        (f"maybe</think>\n\n{tagged(CALL)}", [{"x": "a"}]),
        (f"<think>a</think>{tagged(CALL)} b </think> c", [{"x": "a"}]),
        (tagged(CALL) + tagged('{"name": '), [{"x": "a"}, "error"]),
        (tagged('{"name": ') + tagged(CALL), ["error", {"x": "a"}]),
        (tagged(f"{json.dumps(CALL)} please") + tagged(CALL), [{"x": "a"}, "error", {"x": "a"}]),
        (tagged(f"{json.dumps(CALL)};\n{json.dumps(CALL)}"), [{"x": "a"}] * 2),
        (tagged(function(n="1") + "\n" + function(n="2")), [{"n": 1}, {"n": 2}]),
        (f"So: {function(n='1')} and {function(n='2')}.", [{"n": 1}, {"n": 2}]),
        (f"<tool_call>{json.dumps(CALL)}", ["error"]),
        (f"<tool_call>{json.dumps(CALL)}{tagged(CALL)}", ["error", {"x": "a"}]),
        (tagged({"name": "add", "arguments": {"x": "</tool_call>"}}), [{"x": "</tool_call>"}]),
        ('{"name": "Ada", "age": 36}', []),
        ('{"name": "Ada"}', []),
        ('{"name": "add", "parameters": {"x": "a"}}', [{"x": "a"}]),
        ('{"name": "add", "parameters": {"x": "a </think> <tool_call>"}}', [{"x": "a </think> <tool_call>"}]),
        (
            '<think>a</think>\n{"name": "add", "parameters": {"x": "a"}}; {"name": "add", "arguments": {}}',
            [{"x": "a"}, {}],
        ),
        ('{"name": "add", "parameters": {"x": ', ["error"]),
        ('{"name": "Ada", ', []),
        ("<|python_tag|>print(1)", ["error"]),
        ('<|python_tag|>{"type": "function", "name": "add", "parameters": {}}', [{}]),
        ("<function=>", ["error"]),
        ("A function call like f(x) = <tool> is none.", []),
    ],
)
def test_thoughts_answers_and_broken_calls_stand_apart(text: str, expected: list[Any]) -> None:
    assert read(text) == expected


def test_tags_that_are_control_tokens_stay_in_a_completion_s_text() -> None:
    tokenizer = bytes_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    text = decode(tokenizer, tokenizer.encode(f"<|im_start|>{tagged(CALL)}<|im_end|>", add_special_tokens=False))
    assert read(text) == [{"x": "a"}]
    assert text == tagged(CALL)
