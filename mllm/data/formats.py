"""What a record may hold: texts, and chats in TRL's form, ShareGPT's or as a question with its answer; preferences."""

import re
from typing import Any

from mllm.data.records import Record
from mllm.errors import UserError

ROLES = {name: name for name in ("system", "user", "assistant", "tool")} | {"human": "user", "gpt": "assistant"}
"""The role that a name means; the last two are ShareGPT's."""


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

    If it `needs_answer`, the assistant must have a message, else there may be none, nor an `answer`.
    """
    if "messages" in record or "conversations" in record:
        chat = turns(record, "messages" if "messages" in record else "conversations")
        if needs_answer and all(message["role"] != "assistant" for message in chat):
            raise UserError("no message is the assistant's, so there is nothing to learn")
        return chat
    if "question" not in record:
        raise UserError(f"neither messages nor question{' and answer' * needs_answer} are there")
    chat = [{"role": "user", "content": text(record, "question")}]
    if needs_answer or "answer" in record:
        chat.append({"role": "assistant", "content": text(record, "answer")})
    return chat


def turns(record: Record, key: str) -> list[dict[str, Any]]:
    """The messages in `record[key]`, objects with role and content, or with ShareGPT's from and value.

    Other fields, as the assistant's `tool_calls`, are the template's; content beside those, or a tool's, may be null.
    """
    messages = record[key]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError(f"{key} must be a list of objects with role and content")
    chat = []
    for message in messages:
        names = ("from", "value") if "from" in message and "role" not in message else ("role", "content")
        if (known := ROLES.get(role := text(message, names[0]))) is None:
            raise UserError(f"role {role!r} is none of system, user, assistant and tool")
        others = {key: value for key, value in message.items() if value and key not in names}
        silent = not message.get(names[1]) and ("tool_calls" in others or known == "tool")
        chat.append(others | {"role": known, "content": "" if silent else text(message, names[1])})
    return chat


def pair_of(record: Record) -> tuple[Record, Record]:
    """A preference's two examples, of which the first was chosen; UserError where there are no such two.

    `chosen` and `rejected` are texts or lists of messages, behind a `prompt` (or `question`) of either kind. Without a
    list `prompt`, lists begin with what they have in common, which is the prompt; then a text `prompt` only repeats it.
    """
    chosen, rejected = record.get("chosen"), record.get("rejected")
    if chosen is None or rejected is None:
        raise UserError(f"{'rejected' if rejected is None else 'chosen'} is missing")
    shared: Record = {name: record[name] for name in ("prompt", "question", "tools") if name in record}
    if isinstance(chosen, list) and not isinstance(record.get("prompt"), list):
        answers = turns(record, "chosen"), turns(record, "rejected")
        common = next((n for n, (one, other) in enumerate(zip(*answers, strict=False)) if one != other), -1)
        if common < 0:
            raise UserError("one of chosen and rejected is the beginning of the other")
        prompt = answers[0][:common] or [{"role": "user", "content": text(record, "prompt")}]
        shared, chosen, rejected = {**shared, "prompt": prompt}, *(answer[common:] for answer in answers)
    elif "question" in shared and "prompt" not in shared:
        shared["prompt"] = [{"role": "user", "content": text(shared, "question")}]
        chosen, rejected = ([{"role": "assistant", "content": text(record, n)}] for n in ("chosen", "rejected"))
    shared.pop("question", None)
    return {**shared, "completion": chosen}, {**shared, "completion": rejected}


def labelled(record: Record) -> tuple[Record, bool]:
    """The example in a record with `prompt`, `completion` and `label`, and whether that is true; else UserError."""
    labels = {"true": True, "1": True, "false": False, "0": False}
    for name in ("prompt", "completion", "label"):
        if name not in record:
            raise UserError(f"{name} is missing")
    if (label := str(record["label"]).lower()) not in labels:
        raise UserError(f"label must be true or false, got {label:.20}")
    return {name: record[name] for name in ("prompt", "completion", "tools") if name in record}, labels[label]
