"""What a record may hold: texts, and chats in TRL's form, ShareGPT's or as a question with its answer."""

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
