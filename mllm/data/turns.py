"""Tokenizes conversations: the first prompt, the tokens after a sampled turn, and the tool calls in its text.

Sampled tokens are never decoded and encoded again. The template renders a known answer with the new messages, and the
text after the answer is encoded. Only text between <think> and </think> is a thought. Tool calls are parsed here:
transformers parses them only for tokenizers with a `response_template`, which Qwen, Llama 3 and Hermes lack.
"""

import inspect
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mllm.errors import UserError, brief
from mllm.model.tokenizer import (
    ANSWER,
    Message,
    Renderer,
    Tokenizer,
    control_tokens,
    encode_after,
    encode_prompt,
    render,
)
from mllm.strict_json import check, refuse, unique, whole_characters

log = logging.getLogger(__name__)

Tools = list[dict[str, Any]]
"""JSON schemas of functions, as `tool_schemas` makes them."""
Call = tuple[str, dict[str, Any]]
"""The name of a function, and its arguments."""

THOUGHT = "<think>\nI think.\n</think>\n\n"
THOUGHTS = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON, VALUE_CLOSE = "<|python_tag|>", "</parameter>"
TAG, ENDS = re.compile(r"</?think>|<tool_call>|<function=|<\|python_tag\|>"), re.compile(r"</?tool_call>")
NAMED = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"]*)"')
CALLED = {"type", "name", "parameters", "arguments"}
"""The allowed fields of a call without tags: an answer that is no call may also be JSON with a name."""
FUNCTION, PARAMETER = re.compile(r"<function=([^>\n]+)>\s*"), re.compile(r"<parameter=([^>\n]+)>")
VALUE_ENDS = re.compile(r"</parameter>\s*(?=<parameter=[^>\n]+>|</function>|</tool_call>)")
WHOLE = re.compile(r"<parameter=|</function>\s*(?:</tool_call>|<function=|\Z)|</tool_call>\s*(?:<tool_call>|\Z)")
"""A value ends at a `</parameter>` that another parameter or a closing tag follows."""
DECODER = json.JSONDecoder(strict=False, parse_constant=refuse, object_pairs_hook=unique)
LONGEST_ERROR = 1000
DEEPEST = 40
"""The deepest nesting of a tool call; the message to the trainer adds a few levels."""


def prompt_tokens(renderer: Renderer, messages: Sequence[Message], tools: Tools | None) -> list[int]:
    """The token ids of a conversation's first prompt, tools included; UserError if there are none."""
    return encode_prompt(with_tools(renderer, tools), messages)


def opens_thought(renderer: Renderer, tokens: Sequence[int]) -> bool:
    """Whether a prompt ends with the beginning of a thought."""
    return str(renderer.tokenizer.decode(tokens[-16:])).rstrip().endswith("<think>")


def with_tools(renderer: Renderer, tools: Tools | None) -> Renderer:
    return replace(renderer, args={**renderer.args, "tools": tools}) if tools else renderer


def observation_tokens(renderer: Renderer, messages: Sequence[Message], ended: bool, tools: Tools | None) -> list[int]:
    """The token ids between two sampled turns: the new messages of user or tool, rendered by the template.

    `ended` says whether the sampled turn ends with a stop token, which replaces the template's end token. A space
    breaks up the text of a control token in a message, since an observation often repeats sampled text. UserError is
    raised if the template or the tokenizer refuses the messages.
    """
    text, start, end = after_answer(with_tools(renderer, tools), messages)
    if not ended or start == end:
        return encode_after(renderer.tokenizer, ANSWER, text)
    return encode_after(renderer.tokenizer, text[start:end], text[end:])


def after_answer(renderer: Renderer, messages: Sequence[Message]) -> tuple[str, int, int]:
    """The template's text from an answer over `messages` to the next answer. Also the span of the answer's end token in
    the text; 0, 0 without an end token."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    added = [readable(renderer.tokenizer, message) for message in messages]
    text = render(renderer, [*chat, *added], add_generation_prompt=True).partition(ANSWER)[2]
    ending = render(renderer, chat).partition(ANSWER)[2]
    end_token = control_tokens(renderer.tokenizer).search(ending)
    return (text, *end_token.span()) if end_token and text.startswith(ending[: end_token.end()]) else (text, 0, 0)


def readable(tokenizer: Tokenizer, message: Message) -> Message:
    """The message with a space in the text of each control token, and without lone surrogates."""

    def broken(match: re.Match[str]) -> str:
        return f"{match.group()[0]} {match.group()[1:]}"

    def clean(value: Any) -> Any:
        return control_tokens(tokenizer).sub(broken, whole_characters(value))

    return {name: clean(value) if isinstance(value, str) else value for name, value in message.items()}


def check_turns(renderer: Renderer, tools: Tools | None) -> None:
    """Raise UserError if the template would render earlier turns differently from the sampled and given turns.

    The probe has two answers with thoughts, each followed by a message of a tool (or of the user without tools). A
    template that drops thoughts gets a warning: the conversation keeps the thoughts.
    """
    if renderer.rule == "never":
        raise UserError("chat_template: never renders no turns, which an environment needs: remove it")
    template = f"the chat template of {renderer.tokenizer.name_or_path or 'the tokenizer'}"
    chat = [{"role": "user", "content": "What is 6 times 7?"}]
    rendered = render(renderer, chat)
    renderer = with_tools(renderer, tools)
    if tools and render(renderer, chat) == rendered:
        log.warning("%s leaves tools out: describe them in the prompt, if the model was not trained on them", template)
    expected = render(renderer, chat, add_generation_prompt=True)
    opening = expected.removeprefix(render(renderer, chat))
    thought = "" if "</think>" in opening else THOUGHT
    sampled = thought.removeprefix("".join(opening.partition("<think>")[1:])) + ANSWER
    for number in range(2):
        message = {"role": "tool" if tools else "user", "content": f"Message {number}."}
        chat += [{"role": "assistant", "content": thought + ANSWER}, message]
        expected += sampled + after_answer(renderer, [message])[0]
    actual = render(renderer, chat, add_generation_prompt=True)
    if THOUGHTS.sub("", actual) != THOUGHTS.sub("", expected):
        raise UserError(f"model.tokenizer: {template} rewrites earlier turns: use one that appends to them")
    if actual != expected:
        log.warning("%s drops the thoughts of earlier turns; the conversations keep the thoughts", template)


def tool_schemas(functions: Iterable[Callable[..., Any]]) -> Tools:
    """The JSON schemas of functions or methods; UserError if type hints or the Google docstring are incomplete."""
    from transformers.utils import get_json_schema

    schemas = []
    for function in functions:
        try:
            for parameter in inspect.signature(function).parameters.values():
                if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                    raise TypeError(f"no call can name its argument {parameter}")
            schemas.append(get_json_schema(function))
        except Exception as error:  # it has exceptions of its own, and evaluates the names in hints
            name = getattr(function, "__name__", str(function))
            way_out = "give type hints and a Google docstring with all arguments"
            raise UserError(f"the tool {name} can't be described: {brief(error)}: {way_out}") from None
    return schemas


def tool_calls(text: str, tools: Tools | None = None) -> list[Call | ValueError]:
    """The tool calls in an answer, in order; an unreadable call becomes an error with a message for the model.

    Calls inside a thought are ignored, even if the thought never ends. Formats:

    - Qwen and Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number.
    - Qwen3-Coder: `<function=...>`, inside `<tool_call>` or not, any number.
    - Llama 3: `{"name": ..., "parameters": {...}}` as the whole answer or after `<|python_tag|>`, separated by
      semicolons.

    A closing tag counts only if another tag or the end follows, so arguments may contain the texts of tags.
    """
    tools = tools or []
    results, position = untagged_calls(text, 0, tools)
    unclosed, before = 1, 0  # the prompt may have opened a thought
    while tag := TAG.search(text, position):
        calls, position = list[Call | ValueError](), tag.end()
        if tag.group() == "<think>":
            position = text.find("</think>", position)
            if position < 0:
                break
            unclosed, before = text.count("<think>", tag.start(), position), len(results)
        elif tag.group() == "</think>":
            if unclosed:
                results, unclosed = results[:before], unclosed - 1
            calls, position = untagged_calls(text, position, tools)
        elif tag.group() == OPEN:
            calls, position = tagged_calls(text, position, tools)
        elif tag.group() == PYTHON:
            calls, position = untagged_calls(text, tag.start(), tools)
        else:
            try:
                call, position = function_call(text, tag.start(), tools)
                calls = [call]
            except ValueError as error:
                calls = [error]
        results += calls
    return results


def untagged_calls(text: str, start: int, tools: Tools) -> tuple[list[Call | ValueError], int]:
    """The calls in the text from `start` to the next tag, and their end; no calls if the text has other content."""
    must_call = text.startswith(PYTHON, start)
    position = behind_space(text, start + len(PYTHON) * must_call)
    named = NAMED.match(text, position)
    is_known = named is not None and any(tool["function"]["name"] == named[1] for tool in tools)
    calls: list[Call | ValueError] = []
    try:
        while position < len(text) and not TAG.match(text, position) and (must_call or calls or text[position] == "{"):
            value, call, end = json_call(text, position)
            if not (must_call or calls or (value.keys() <= CALLED and len(value.keys() - {"type"}) > 1)):
                return [], start
            calls.append(call)
            position = behind_space(text, end)
    except ValueError as error:
        return ([*calls, error], position) if must_call or is_known else ([], start)
    return calls, position


def tagged_calls(text: str, position: int, tools: Tools) -> tuple[list[Call | ValueError], int]:
    """The calls in a `<tool_call>` that opens before `position`, and the position behind it."""
    calls: list[Call | ValueError] = []
    try:
        while not text.startswith(CLOSE, position := behind_space(text, position)):
            if position == len(text) or text.startswith(OPEN, position):
                return [ValueError(f"a tool call has no {CLOSE} at its end")], position
            if text.startswith("<function=", position):
                call, position = function_call(text, position, tools)
            else:
                _, call, position = json_call(text, position)
            calls.append(call)
    except ValueError as error:
        closed = (match.start() if match.group() == OPEN else match.end() for match in ENDS.finditer(text, position))
        return [*calls, error], next(closed, len(text))
    return calls or [ValueError("a tool call is not JSON: it is empty")], position + len(CLOSE)


def behind_space(text: str, position: int) -> int:
    """The position behind white space and semicolons."""
    return len(text) - len(text[position:].lstrip("; \t\r\n"))


def json_call(text: str, position: int) -> tuple[dict[str, Any], Call, int]:
    """The object at a position of a text, its call, and the position behind it; ValueError where it is no call."""
    try:
        value, end = DECODER.raw_decode(text, position)
        given = [value[key] for key in ("arguments", "parameters") if isinstance(value, dict) and key in value]
        arguments = given[0] if given else {}
        if isinstance(arguments, str):  # as OpenAI's
            arguments = DECODER.decode(arguments)
        check([value, arguments], DEEPEST)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a tool call is not JSON: {error}") from None
    is_call = isinstance(value, dict) and isinstance(value.get("name"), str) and isinstance(arguments, dict)
    if not is_call or len(given) > 1 or not (given or value.keys() <= CALLED):  # arguments under an unknown name
        raise ValueError('a tool call must be {"name": a text, "arguments": an object}')
    return value, (value["name"], arguments), end


def function_call(text: str, position: int, tools: Tools) -> tuple[Call, int]:
    """The call `<function=NAME><parameter=NAME>VALUE</parameter>...</function>` at a position, and its end."""
    if not (head := FUNCTION.match(text, position)):
        raise ValueError("a tool call must be <function=NAME>")
    name, position = head[1], head.end()
    schemas = [tool["function"].get("parameters", {}) for tool in tools if tool["function"]["name"] == name]
    properties = schemas[0].get("properties", {}) if schemas else {}
    arguments: dict[str, Any] = {}
    while parameter := PARAMETER.match(text, position):
        if parameter[1] in arguments:
            raise ValueError(f"the parameter {parameter[1]:.40} stands twice")
        end = value_end(text, parameter)
        value = text[parameter.end() : end.start()].removeprefix("\n").removesuffix("\n")
        arguments[parameter[1]] = typed(value, properties.get(parameter[1], {}))
        position = end.end()
    if not text.startswith(("</function>", CLOSE), position):
        raise ValueError("a tool call has no </function> at its end")
    return (name, arguments), position + len("</function>") * text.startswith("</function>", position)


def value_end(text: str, parameter: re.Match[str]) -> re.Match[str]:
    """The end of a parameter's value; tags of other parameters inside the value are paired if possible."""
    first = whole = None
    opened, position = 0, parameter.end()
    for end in VALUE_ENDS.finditer(text, position):
        if first and not whole and OPEN in text[position : end.start()]:
            break
        opened += len(PARAMETER.findall(text, position, end.start())) - text.count(VALUE_CLOSE, position, end.start())
        position, first = end.start(), first or end
        if WHOLE.match(text, end.end()):
            if opened == 0:
                return end
            whole = whole or end
    if first is None:
        raise ValueError(f"the parameter {parameter[1]:.40} has no {VALUE_CLOSE} at its end")
    return whole or first


def typed(text: str, schema: Mapping[str, Any]) -> Any:
    """The value of an argument that is written without quotes: a text where the schema allows text, else JSON."""
    given = [part.get("type", []) for part in (schema, *schema.get("anyOf", ()))]
    types = {name for names in given for name in ([names] if isinstance(names, str) else names)}
    if "string" in types:
        return None if text == "null" and (schema.get("nullable") or "null" in types) else text
    try:
        value = DECODER.decode(text)
        check(value, DEEPEST)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip().capitalize(), text)
    return value


def failed_call(error: BaseException) -> str:
    """The answer to a call that did not parse, or to a tool that raised the error."""
    return whole_characters(f"Error: {type(error).__name__}: {error}"[:LONGEST_ERROR])
