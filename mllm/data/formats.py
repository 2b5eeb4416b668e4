"""The formats of a record: a text, a chat (TRL's, ShareGPT's, or a question with its answer), or a preference."""

import json
import re
from collections.abc import Mapping
from typing import Any

from mllm.data.records import Record
from mllm.errors import UserError
from mllm.strict_json import check, refuse

ROLES = {name: name for name in ("system", "user", "assistant", "tool")} | {"human": "user", "gpt": "assistant"}
"""The role of each name; the last two names are ShareGPT's."""


def renamed(columns: Mapping[str, str], record: Record) -> Record:
    """The record with the fields of an example under their own names; UserError where a column is missing.

    An `input` that is not blank is appended to the question after an empty line. If `columns` names a format's field,
    the record's fields of other formats are ignored.
    """
    forms = {"messages", "conversations", "question", "prompt", "text"}
    taken = {*columns.values(), *(forms if forms & columns.keys() else ())}
    named = {name: value for name, value in record.items() if name not in taken}
    for name, column in columns.items():
        if column not in record and name != "input":
            raise UserError(f"{column} is missing, which data.columns.{name} names")
        named[name] = record.get(column)
    if "input" in columns and isinstance(context := named["input"], str) and context.strip():
        named["question"] = f"{text(named, 'question')}\n\n{context}"
    return named


def text(record: Record, key: str) -> str:
    """`record[key]`; UserError unless it is a string that isn't blank."""
    if key not in record:
        raise UserError(f"{key} is missing")
    value = record[key]
    if not isinstance(value, str):
        raise UserError(f"{key} must be a string, got {type(value).__name__}")
    if not value.strip():
        raise UserError(f"{key} is empty")
    if half := re.search("[\ud800-\udfff]", value):
        raise UserError(f"{key} holds {half.group()!r}, which is half a character")
    return value


def messages_of(record: Record, needs_answer: bool = True) -> list[dict[str, Any]]:
    """The chat in a record: `messages`, `conversations` (ShareGPT's), or `question` and `answer`; else UserError.

    If it `needs_answer`, the chat must have an assistant message or an `answer`; else both are optional.
    """
    if "messages" in record or "conversations" in record:
        chat = turns(record, "messages" if "messages" in record else "conversations")
        if needs_answer and not any(message["role"] == "assistant" and message.get("weight") != 0 for message in chat):
            raise UserError("no message is the assistant's and learned, so there is nothing to learn")
        return chat
    if "question" not in record:
        raise UserError(f"neither messages nor question{' and answer' * needs_answer} are there")
    chat = [{"role": "user", "content": text(record, "question")}]
    if needs_answer or "answer" in record:
        chat.append({"role": "assistant", "content": text(record, "answer")})
    return chat


def turns(record: Record, key: str) -> list[dict[str, Any]]:
    """The messages in `record[key]`, objects with role and content, or with ShareGPT's from and value.

    Other fields go to the template, such as the assistant's `tool_calls`, unless they are null. Content beside tool
    calls, or of a tool, may be null. An assistant's message with `weight: 0` or `train: false` is not learned.
    """
    messages = record[key]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError(f"{key} must be a list of objects with role and content")
    chat = []
    for message in messages:
        names = ("from", "value") if "from" in message and "role" not in message else ("role", "content")
        if (known := ROLES.get(role := text(message, names[0]))) is None:
            raise UserError(f"role {role!r} is none of system, user, assistant and tool")
        fields = {key: value for key, value in message.items() if value is not None and key not in names}
        if known == "assistant" and not is_learned(fields):
            fields["weight"] = 0
        if calls := [tool_call(call) for call in objects(fields.pop("tool_calls", None), "tool_calls")]:
            fields["tool_calls"] = calls
        silent = message.get(names[1]) in (None, "") and ("tool_calls" in fields or known == "tool")
        chat.append(fields | {"role": known, "content": "" if silent else text(message, names[1])})
    return chat


def is_learned(fields: dict[str, Any]) -> bool:
    """Whether a message is learned; removes its fields `weight` (OpenAI's) and `train`, which decide."""
    given = {name: fields.pop(name) for name in ("weight", "train") if name in fields}
    for name, value in given.items():
        if value not in (0, 1):
            raise UserError(f"{name} is {value!r:.20}: give true or false, 1 or 0")
    return all(given.values())


def parsed(value: Any, what: str) -> Any:
    """The value, parsed if it is a JSON text; UserError if it is not valid JSON."""
    try:
        value = json.loads(value, parse_constant=refuse) if isinstance(value, str) else value
        check(value)
        return value
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what} is no JSON ({error})") from None


def objects(value: Any, what: str) -> list[dict[str, Any]]:
    """The objects in a list, or an empty list for null; list and objects may be JSON texts. UserError otherwise."""
    items = parsed([] if value in (None, "") else value, what)
    items = [] if items is None else items
    items = [parsed(item, what) for item in items] if isinstance(items, list) else items
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise UserError(f"{what} must be a list of objects, or its JSON")
    return items


def tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call, with its arguments as an object; in OpenAI's calls they are a JSON text."""
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError("tool_calls must have a function with name and arguments")
    given = function.get("arguments")
    arguments = parsed({} if given in (None, "") else given, "tool_calls: arguments")
    if not isinstance(arguments, dict):
        raise UserError("tool_calls: arguments must be an object, or its JSON")
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def tools_of(record: Record) -> list[dict[str, Any]]:
    """The JSON schemas of the record's tools, which are a list or a JSON text; empty without tools."""
    tools = []
    for tool in objects(record.get("tools"), "tools"):
        function = tool.get("function", tool)
        if isinstance(function, dict) and "parameters" in function:
            function = {**function, "parameters": parsed(function["parameters"], "tools: parameters")}
        tools.append({**tool, "function": function} if "function" in tool else function)
    return tools


def pair_of(record: Record) -> tuple[Record, Record]:
    """The chosen and the rejected example of a preference; UserError if the record is no preference.

    `chosen` and `rejected` are texts or lists of messages, behind a `prompt` (or `question`) of either kind. Without a
    list `prompt`, the lists' common beginning is the prompt; a text `prompt` beside them only repeats it.
    """
    chosen, rejected = record.get("chosen"), record.get("rejected")
    if chosen is None or rejected is None:
        raise UserError(f"{'rejected' if rejected is None else 'chosen'} is missing")
    shared: Record = {name: record[name] for name in ("prompt", "question", "tools") if name in record}
    if isinstance(chosen, list) and not isinstance(record.get("prompt"), list):
        answers = turns(record, "chosen"), turns(record, "rejected")
        common = next((i for i, (first, second) in enumerate(zip(*answers, strict=False)) if first != second), -1)
        if common < 0:
            raise UserError("one of chosen and rejected is the beginning of the other")
        prompt = answers[0][:common]
        if not prompt and answers[0][0]["role"] == "assistant":
            prompt = [{"role": "user", "content": text(record, "prompt")}]
        shared, chosen, rejected = {**shared, "prompt": prompt}, *(answer[common:] for answer in answers)
    elif "question" in shared and "prompt" not in shared:
        shared["prompt"] = [{"role": "user", "content": text(shared, "question")}]
        chosen, rejected = ([{"role": "assistant", "content": text(record, name)}] for name in ("chosen", "rejected"))
    elif not isinstance(shared.get("prompt"), list):
        chosen, rejected = (text(record, name) for name in ("chosen", "rejected"))
    shared.pop("question", None)
    return {**shared, "completion": chosen}, {**shared, "completion": rejected}
