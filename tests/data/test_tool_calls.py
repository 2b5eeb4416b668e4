"""A tool gets the text that was written, and a call that can't be read costs itself alone."""

import json
import re
from typing import Any

import pytest

from mllm.data.turns import failed_call, tool_calls, tool_schemas
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
        ('{"name": "add", "parameters": {"x": "a </think> <tool_call>"}}', [{"x": "a </think> <tool_call>"}]),
        (
            '<think>a</think>\n{"name": "add", "parameters": {"x": "a"}}; {"name": "add", "arguments": {}}',
            [{"x": "a"}, {}],
        ),
        ('{"name": "add", "parameters": {"x": ', ["error"]),
        ('{"name": "Ada", ', []),
        ('<|python_tag|>{"type": "function", "name": "add", "parameters": {}}', [{}]),
        (tagged({"name": "add", "arguments": '{"x": "a"}'}), [{"x": "a"}]),
        (tagged({"name": "add"}), [{}]),
        ("<function=>", ["error"]),
        ("A function call like f(x) = <tool> is none.", []),
        ("", []),
    ],
)
def test_thoughts_answers_and_broken_calls_stand_apart(text: str, expected: list[Any]) -> None:
    assert read(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('<tool_call>{"name": "add"}', "no </tool_call>"),
        ("<tool_call></tool_call>", "not JSON"),
        (tagged({"name": "add", "arguments": [1]}), "an object"),
        (tagged([1]), "an object"),
        (tagged({"arguments": {}}), "a text"),
        (tagged(10**5 * "["), "not JSON: .*recursion"),
        ("<tool_call><function=add><parameter=a>1</function></tool_call>", "the parameter a has no </parameter>"),
        ("<|python_tag|>print(1)", "not JSON"),
        (r'<tool_call>{"name": "add", "arguments": {"a": "\ud800"}}</tool_call>', "surrogates"),
        (r'<tool_call>{"name": "\ud83d", "arguments": {"\udfff": 1}}</tool_call>', "surrogates"),
        (r'<tool_call>{"name": "add", "arguments": "{\"a\": \"\\ud800\"}"}</tool_call>', "surrogates"),
        (tagged('{"name": "add", "arguments": {"a": NaN}}'), "NaN is no finite number"),
        (tagged('{"name": "add", "arguments": {"a": -1e999}}'), "inf is no finite number"),
        (tagged('{"name": "add", "arguments": {"a": ' + 5000 * "9" + "}}"), "not JSON"),
        ('{"name": "add", "arguments": {"a": ' + 45 * "[" + 45 * "]" + "}}", "too many levels"),
        ('{"name": "add", "arguments": {"a": ' + 978 * "[" + 978 * "]" + "}}", "too many levels|recursion"),
    ],
)
def test_a_call_that_does_not_parse_has_a_message_for_the_model(text: str, message: str) -> None:
    *_, error = tool_calls(text, TOOLS)
    assert re.search(message, str(error))
    assert failed_call(error) == f"Error: ValueError: {error}"


def test_what_a_model_is_told_of_a_failed_call_is_short_and_has_whole_characters() -> None:
    assert len(failed_call(KeyError("x" * 10**6))) == 1000
    assert failed_call(OSError("\ud800")) == "Error: OSError: ?"


def test_tags_that_are_control_tokens_stay_in_a_completion_s_text() -> None:
    tokenizer = bytes_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    text = decode(tokenizer, tokenizer.encode(f"<|im_start|>{tagged(CALL)}<|im_end|>", add_special_tokens=False))
    assert read(text) == [{"x": "a"}]
    assert text == tagged(CALL)
