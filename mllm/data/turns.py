"""Conversations in tokens: the first prompt, what follows a sampled turn, and the tool calls in its text.

What was sampled is never decoded and encoded again. The template says what follows: it renders a known answer with the
new messages, and what it writes behind the answer is encoded. Only thoughts between <think> and </think> are known as
such. Tool calls are parsed here, since transformers does it for tokenizers with a `response_template` alone, which
Qwen's, Llama 3's and Hermes's lack.
"""

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
from mllm.strict_json import check, refuse, whole_characters

log = logging.getLogger(__name__)

Tools = list[dict[str, Any]]
"""JSON schemas of functions, as `tool_schemas` makes them."""
Call = tuple[str, dict[str, Any]]
"""The name of a function, and its arguments."""

THOUGHT = "<think>\nI think.\n</think>\n\n"
THOUGHTS = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAG, ENDS = re.compile(r"</?think>|<tool_call>|<function="), re.compile(r"</?tool_call>")
NAMED = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"]*)"')
CALLED = {"type", "name", "parameters", "arguments"}
"""The fields of a call without tags: an answer may be JSON that has a name, too."""
FUNCTION, PARAMETER = re.compile(r"<function=([^>\n]+)>\s*"), re.compile(r"<parameter=([^>\n]+)>")
VALUE_ENDS = re.compile(r"</parameter>\s*(?=<parameter=[^>\n]+>|</function>|</tool_call>)")
CALL_ENDS = re.compile(r"</parameter>\s*(?=</function>\s*(?:</tool_call>|<function=|\Z))")
"""What ends a value: `</parameter>` with structure behind it, best the end of the whole call."""
LONGEST_ERROR = 1000
DEEPEST = 40
"""The most levels of a tool call, which crosses to the trainer in a message of a few more."""


def prompt_tokens(renderer: Renderer, messages: Sequence[Message], tools: Tools | None) -> list[int]:
    """The ids of a conversation's first prompt, with the tools as the template renders them; UserError for none."""
    return encode_prompt(with_tools(renderer, tools), messages)


def with_tools(renderer: Renderer, tools: Tools | None) -> Renderer:
    return replace(renderer, args={**renderer.args, "tools": tools}) if tools else renderer


def observation_tokens(renderer: Renderer, messages: Sequence[Message], ended: bool, tools: Tools | None) -> list[int]:
    """The ids that the template puts between a sampled turn and the next one: the new messages, of user or tool.

    `ended` says whether the sampled turn has a token that ended it, which then stands for the template's own. The text
    of a control token in a message is broken by a space, since it often repeats what was sampled. UserError is raised
    where the template or the tokenizer refuses the messages.
    """
    text, start, end = after_answer(with_tools(renderer, tools), messages)
    if not ended or start == end:
        return encode_after(renderer.tokenizer, ANSWER, text)
    return encode_after(renderer.tokenizer, text[start:end], text[end:])


def after_answer(renderer: Renderer, messages: Sequence[Message]) -> tuple[str, int, int]:
    """The text behind an answer with these messages after it, and where in it the token is that ends the answer.

    Both places are 0 where no token ends it.
    """
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    new = [readable(renderer.tokenizer, message) for message in messages]
    text = render(renderer, [*chat, *new], add_generation_prompt=True).partition(ANSWER)[2]
    last = render(renderer, chat).partition(ANSWER)[2]
    found = control_tokens(renderer.tokenizer).search(last)
    return (text, *found.span()) if found and text.startswith(last[: found.end()]) else (text, 0, 0)


def readable(tokenizer: Tokenizer, message: Message) -> Message:
    """The message with a space in the text of each control token, and without half characters."""

    def broken(found: re.Match[str]) -> str:
        return f"{found.group()[0]} {found.group()[1:]}"

    def clean(value: Any) -> Any:
        return control_tokens(tokenizer).sub(broken, whole_characters(value))

    return {name: clean(value) if isinstance(value, str) else value for name, value in message.items()}


def check_turns(renderer: Renderer, tools: Tools | None, keep_thoughts: bool) -> None:
    """Raise UserError where the template renders earlier turns otherwise than they were sampled and given.

    Two answers with thoughts are rendered, and messages after them: of a tool if there are tools, else of the user. A
    template may drop the thoughts if `keep_thoughts`, which must then have an effect.
    """
    if renderer.rule == "never":
        raise UserError("chat_template: never renders no turns, which an environment needs: remove it")
    template = f"the chat template of {renderer.tokenizer.name_or_path or 'the tokenizer'}"
    chat = [{"role": "user", "content": "What is 6 times 7?"}]
    told = render(renderer, chat)
    renderer = with_tools(renderer, tools)
    if tools and render(renderer, chat) == told:
        log.warning("%s leaves tools out: a model that does not know them must read of them in its prompt", template)
    kept = render(renderer, chat, add_generation_prompt=True)
    begins = kept.removeprefix(render(renderer, chat))
    thought = "" if "</think>" in begins else THOUGHT
    sampled = thought.removeprefix("".join(begins.partition("<think>")[1:])) + ANSWER
    for number in range(2):
        new = {"role": "tool" if tools else "user", "content": f"Message {number}."}
        chat += [{"role": "assistant", "content": thought + ANSWER}, new]
        kept += sampled + after_answer(renderer, [new])[0]
    found = render(renderer, chat, add_generation_prompt=True)
    if found == kept and keep_thoughts:
        raise UserError(f"task.keep_thoughts: {template} keeps them itself: remove it")
    if THOUGHTS.sub("", found) != THOUGHTS.sub("", kept):
        raise UserError(f"model.tokenizer: {template} rewrites earlier turns: use one that appends to them")
    if found != kept and not keep_thoughts:
        ways = "set task.keep_thoughts: true, or the template's own switch in task.template_args"
        raise UserError(f"model.tokenizer: {template} drops the thoughts of earlier turns: {ways}")


def tool_schemas(functions: Iterable[Callable[..., Any]]) -> Tools:
    """The JSON schemas of functions or methods; UserError where type hints or the Google docstring lack something."""
    from transformers.utils import get_json_schema

    schemas = []
    for function in functions:
        try:
            schemas.append(get_json_schema(function))
        except Exception as error:  # it has kinds of its own, and evaluates what the hints name
            name = getattr(function, "__name__", str(function))
            way_out = "give type hints and a Google docstring with all arguments"
            raise UserError(f"the tool {name} can't be described: {brief(error)}: {way_out}") from None
    return schemas


def tool_calls(text: str, tools: Tools | None = None) -> list[Call | ValueError]:
    """The calls in an answer, in their order, and an error, with a message for the model, for each that can't be read.

    Thoughts call nothing, also those that never end. Forms: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
    of Qwen and Hermes; Qwen3-Coder's `<function=...>`, in these tags or without, any number of both; Llama 3's
    `{"name": ..., "parameters": {...}}` as the whole answer, several with semicolons between. A value is read where it
    begins, and a closing tag counts where structure follows it, so that arguments may have the texts of tags.
    """
    tools = tools or []
    for rest in (text.strip(), text.partition("</think>")[2].strip()):
        if (calls := whole_answer(rest, tools)) is not None:
            return calls
    found: list[Call | ValueError] = []
    place, has_thought = 0, False
    while tag := TAG.search(text, place):
        place = tag.end()
        if tag.group() == "<think>":
            place = text.find("</think>", place) + len("</think>")
            if place < len("</think>"):
                break
            has_thought = True
        elif tag.group() == "</think>":
            found = found if has_thought else []  # the prompt has opened the thought
            has_thought = True
        elif tag.group() == OPEN:
            calls, place = tagged_calls(text, place, tools)
            found += calls
        else:
            try:
                call, place = function_call(text, tag.start(), tools)
                found.append(call)
            except ValueError as error:
                found.append(error)
    return found


def whole_answer(text: str, tools: Tools) -> list[Call | ValueError] | None:
    """The calls that an answer without tags consists of; None where it is none of calls, be it JSON."""
    must_call = text.startswith("<|python_tag|>")
    named = NAMED.match(text)
    is_known = named is not None and any(tool["function"]["name"] == named[1] for tool in tools)
    calls: list[Call | ValueError] = []
    place = len("<|python_tag|>") if must_call else 0
    try:
        while place < len(text) and (must_call or text[0] == "{"):
            value, call, place = json_call(text, place)
            if not (must_call or (value.keys() <= CALLED and not value.keys().isdisjoint(("parameters", "arguments")))):
                return None
            calls.append(call)
            place = behind_space(text, place)
    except ValueError as error:
        return [error] if must_call or is_known else None
    return calls or None


def tagged_calls(text: str, place: int, tools: Tools) -> tuple[list[Call | ValueError], int]:
    """The calls in a `<tool_call>` that opens before `place`, and the place behind it."""
    calls: list[Call | ValueError] = []
    try:
        while not text.startswith(CLOSE, place := behind_space(text, place)):
            if place == len(text) or text.startswith(OPEN, place):
                return [ValueError(f"a tool call has no {CLOSE} at its end")], place
            if text.startswith("<function=", place):
                call, place = function_call(text, place, tools)
            else:
                _, call, place = json_call(text, place)
            calls.append(call)
    except ValueError as error:
        closed = [match.start() if match.group() == OPEN else match.end() for match in ENDS.finditer(text, place)]
        return [*calls, error], min(closed, default=len(text))
    return calls or [ValueError("a tool call is not JSON: it is empty")], place + len(CLOSE)


def behind_space(text: str, place: int) -> int:
    """The place behind white space and semicolons."""
    return len(text) - len(text[place:].lstrip("; \t\r\n"))


def json_call(text: str, place: int) -> tuple[dict[str, Any], Call, int]:
    """The object that begins in a text, the call that it is, and the place behind it; ValueError where it is none."""
    try:
        value, end = json.JSONDecoder(strict=False, parse_constant=refuse).raw_decode(text, place)
        arguments = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
        if isinstance(arguments, str):  # as OpenAI's
            arguments = json.loads(arguments, parse_constant=refuse)
        check([value, arguments], DEEPEST)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a tool call is not JSON: {error}") from None
    if not isinstance(arguments, dict) or not isinstance(value.get("name"), str):
        raise ValueError('a tool call must be {"name": a text, "arguments": an object}')
    return value, (value["name"], arguments), end


def function_call(text: str, place: int, tools: Tools) -> tuple[Call, int]:
    """The call `<function=NAME><parameter=NAME>VALUE</parameter>...</function>` at a place, and the place behind it."""
    if not (head := FUNCTION.match(text, place)):
        raise ValueError("a tool call must be <function=NAME>")
    name, place = head[1], head.end()
    schemas = [tool["function"].get("parameters", {}) for tool in tools if tool["function"]["name"] == name]
    properties = schemas[0].get("properties", {}) if schemas else {}
    arguments: dict[str, Any] = {}
    while parameter := PARAMETER.match(text, place):
        end = VALUE_ENDS.search(text, parameter.end())
        last = CALL_ENDS.search(text, parameter.end())
        if end and last and end.start() < last.start() and OPEN not in text[end.end() : last.start()]:
            end = last if not PARAMETER.match(text, end.end()) else end
        if not end:
            raise ValueError(f"the parameter {parameter[1]:.40} has no </parameter> at its end")
        value = text[parameter.end() : end.start()].removeprefix("\n").removesuffix("\n")
        arguments[parameter[1]] = typed(value, properties.get(parameter[1], {}))
        place = end.end()
    if not text.startswith(("</function>", CLOSE), place):
        raise ValueError("a tool call has no </function> at its end")
    return (name, arguments), place + len("</function>") * text.startswith("</function>", place)


def typed(text: str, schema: Mapping[str, Any]) -> Any:
    """The value of an argument that is written without quotes: a text where the schema allows one, else JSON's."""
    kinds = schema.get("type", [])
    if "string" in ([kinds] if isinstance(kinds, str) else kinds):
        return None if text == "null" and schema.get("nullable") else text
    try:
        value = json.loads(text, parse_constant=refuse)
        check(value, DEEPEST)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text, text)
    return value


def failed_call(error: Exception) -> str:
    """The answer to a call that does not parse, or whose tool raised the error."""
    return whole_characters(f"Error: {type(error).__name__}: {error}"[:LONGEST_ERROR])
