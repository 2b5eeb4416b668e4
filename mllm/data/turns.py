"""Conversations in tokens: the first prompt, what follows a sampled turn, and the tool calls in its text.

What was sampled is never decoded and encoded again. The template says what follows: it renders a known answer with the
new messages, and what it writes behind the answer is encoded. Only thoughts between <think> and </think> are known as
such. Tool calls are parsed here, since transformers does it for tokenizers with a `response_template` alone, which
those of Qwen, Llama 3 and Hermes lack.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
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
    """The message in which no text is that of a control token, and no character a half one."""

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


def tool_calls(text: str) -> list[Call]:
    """The names and arguments of the calls in an answer, behind its thoughts; none where it calls no tool.

    Forms: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` of Qwen and Hermes, any number of them;
    Qwen3-Coder's `<function=...>` in these tags, whose values are JSON or else texts; Llama 3's
    `{"name": ..., "parameters": {...}}` as the whole answer, several with semicolons between. ValueError is raised,
    with a message for the model, where a call doesn't parse.
    """
    said = text.rpartition("</think>")[2].strip()
    if "<tool_call>" in said:
        calls = list[Call]()
        for part in said.split("<tool_call>")[1:]:
            body, closed, _ = part.partition("</tool_call>")
            if not closed:
                raise ValueError("a tool call has no </tool_call> at its end")
            calls += [tagged_call(body)] if body.lstrip().startswith("<function=") else json_calls(body)
        return calls
    if said.startswith("<|python_tag|>") or re.match(r'\{\s*"(type|name)"\s*:', said):
        return json_calls(said.removeprefix("<|python_tag|>"))
    return []


def json_calls(text: str) -> list[Call]:
    """The calls that a text consists of, one or more with semicolons between; ValueError where it has anything else."""
    calls, rest = list[Call](), text.strip()
    while rest or not calls:
        try:
            value, end = json.JSONDecoder(strict=False, parse_constant=refuse).raw_decode(rest)
            arguments = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
            if isinstance(arguments, str):  # as OpenAI's
                arguments = json.loads(arguments, parse_constant=refuse)
            check([value, arguments], DEEPEST)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a tool call is not JSON: {error}") from None
        if not isinstance(arguments, dict) or not isinstance(value.get("name"), str):
            raise ValueError('a tool call must be {"name": a text, "arguments": an object}')
        calls.append((value["name"], arguments))
        rest = rest[end:].lstrip("; \n")
    return calls


def tagged_call(text: str) -> Call:
    """The call `<function=NAME><parameter=NAME>VALUE</parameter>...</function>`; ValueError where it is none."""
    head, *parts = text.partition("</function>")[0].split("<parameter=")
    arguments: dict[str, Any] = {}
    for part in parts:
        name, _, rest = part.partition(">")
        value, closed, _ = rest.partition("</parameter>")
        if not closed:
            raise ValueError(f"the parameter {name:.40} has no </parameter> at its end")
        try:
            arguments[name] = json.loads(value, parse_constant=refuse)
            check(arguments[name], DEEPEST)
        except (ValueError, RecursionError):
            arguments[name] = value.removeprefix("\n").removesuffix("\n")
    return head.strip().removeprefix("<function=").removesuffix(">"), arguments


def failed_call(error: Exception) -> str:
    """The answer to a call that does not parse, or whose tool raised the error."""
    return whole_characters(f"Error: {type(error).__name__}: {error}"[:LONGEST_ERROR])
