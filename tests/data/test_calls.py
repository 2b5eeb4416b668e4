"""Messages, calls of tools and tools reach the template as they were meant, in whatever form a record has them."""

import json
from typing import Any

import pytest

from mllm.data.formats import tools_of, turns
from mllm.data.tasks.task import Example, Task
from mllm.data.tokenizing import encode_record
from mllm.errors import UserError
from mllm.model.tokenizer import Renderer, bytes_tokenizer

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ARGUMENTS = {"x": 1, "y": {"z": "10001"}}


def tokenizer(tools: str = "{{ tools | tojson if tools }}") -> Any:
    found = bytes_tokenizer()
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    found.chat_template = (
        f"{tools}{{% for m in messages %}}<|im_start|>{{{{ m.content }}}}{calls}<|im_end|>{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    return found


def chat(call: Any) -> list[dict[str, Any]]:
    called = {"role": "assistant", "content": None, "tool_calls": call}
    return [
        {"role": "user", "content": "a"},
        called,
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "b"},
    ]


def call(arguments: Any, **others: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "arguments": arguments, **others}, **others}


@pytest.mark.parametrize(
    "calls",
    [
        [call(json.dumps(ARGUMENTS))],
        json.dumps([call(ARGUMENTS)]),
        [json.dumps(call(ARGUMENTS))],
        [call({**ARGUMENTS, "of another call": None}, id=None)],
    ],
    ids=["arguments are a text", "calls are a text", "a call is a text", "Arrow's nulls"],
)
def test_a_call_in_any_form_is_learned_as_the_object_that_it_means(calls: Any) -> None:
    renderer = Renderer(tokenizer())
    expected = encode_record(renderer, {"messages": chat([call(ARGUMENTS)])})
    assert encode_record(renderer, {"messages": chat(calls)}) == expected
    text = bytes(token for token, learned in zip(*expected[:2], strict=True) if learned and token < 256).decode()
    assert text == f"add{json.dumps(ARGUMENTS)}b"


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([call("[1]")], "arguments must be an object"),
        ([call("{")], "tool_calls: arguments is no JSON"),
        ([call('{"x": NaN}')], "tool_calls: arguments is no JSON"),
        ([{"type": "function"}], "must have a function with name"),
        ("add", "tool_calls is no JSON"),
        ([7], "must be a list of objects"),
    ],
)
def test_what_is_no_call_is_an_error(calls: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        turns({"messages": chat(calls)}, "messages")


@pytest.mark.parametrize("calls", ["[]", "null", [], None])
def test_no_calls_are_none_in_any_form(calls: Any) -> None:
    with pytest.raises(UserError, match="content"):
        turns({"messages": chat(calls)}, "messages")
    said = {"role": "assistant", "content": "b", "tool_calls": calls}
    assert turns({"messages": [said]}, "messages") == [{"role": "assistant", "content": "b"}]
    assert tools_of({"tools": calls}) == []


def test_null_in_arguments_that_are_a_text_was_meant() -> None:
    (_, message, *_) = turns({"messages": chat([call('{"x": null}')])}, "messages")
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": None}


def test_tools_may_be_a_text_have_arrow_s_nulls_and_are_never_left_out_in_silence() -> None:
    padded = {
        **TOOL,
        "strict": None,
        "function": {**TOOL["function"], "parameters": json.dumps({"type": "object", "properties": {}})},
    }
    for tools in (json.dumps([TOOL]), [json.dumps(TOOL)], [padded]):
        assert tools_of({"tools": tools}) == [TOOL]
    record = {"messages": chat([call(ARGUMENTS)]), "tools": [TOOL]}
    assert encode_record(Renderer(tokenizer()), record)[0][:9] == [*b'[{"type":']
    with pytest.raises(UserError, match="tools: the tokenizer's chat template leaves them out"):
        encode_record(Renderer(tokenizer(tools="")), record)
    with pytest.raises(UserError, match="tools: texts have no chat template"):
        encode_record(Renderer(tokenizer()), {"text": "a", "tools": [TOOL]})
    with pytest.raises(UserError, match="tools must be a list of objects"):
        encode_record(Renderer(tokenizer()), {**record, "tools": "7"})


def test_the_answers_in_a_task_s_prompt_are_not_learned() -> None:
    from mllm.algorithms.sft.source import task_documents

    shots = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2="},
    ]
    documents = task_documents(Task("shots", [Example(shots, "4", "4")], []), Renderer(bytes_tokenizer()), 64)
    document = documents[0]
    assert bytes(document.tokens[document.learned].tolist()[:-1]) == b"4"
