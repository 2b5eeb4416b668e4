"""Writes chats for SFT, made by code: what the tasks in turns begin with."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from mllm import errors
from mllm.model.tokenizer import Message

CHATS = 20_000


def write_chats(document: str | None, chat: Callable[[int], list[Message]], arguments: Sequence[str] | None) -> int:
    """Write `chat` of 0, 1, ... as JSON lines, to the file that the command line names; returns the exit code 0."""
    parser = errors.ArgumentParser(document)
    parser.add_argument("out", type=Path, metavar="FILE", help=f"where {CHATS:,} chats are written as JSON lines")
    path = parser.parse_args(arguments).out
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"messages": chat(seed)}) + "\n" for seed in range(CHATS)))
    except OSError as error:
        raise errors.UserError(f"FILE: {path} can't be written ({error.strerror}); give another name") from None
    return 0
