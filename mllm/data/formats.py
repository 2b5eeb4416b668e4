"""The formats of SFT's records, and the tokens that each makes; TRL's dataset formats, ShareGPT's, and plain questions.

A chat is rendered by the tokenizer's template; texts are taken as they are, with an end of sequence.
"""

from typing import Any

from mllm.data.records import Record, messages_of, text, turns
from mllm.errors import UserError
from mllm.model.tokenizer import Tokenizer, encode_example, encode_text


def encode_record(tokenizer: Tokenizer, place: str, record: Record) -> tuple[list[int], list[bool]]:
    """The ids of a record, and which of them are learned; UserError, which names the place, where it is in no format.

    `messages`, `conversations`, `question` and `answer`: the assistant's turns are learned. `prompt` and `completion`:
    the completion is, be they texts or lists of messages. `text`: every token is. The first of these that a record has
    counts.
    """
    if not {"messages", "conversations", "question"}.isdisjoint(record):
        pieces: tuple[Any, ...] = (encode_example, messages_of(place, record))
    elif isinstance(record.get("prompt"), list):
        prompt = turns(place, record, "prompt")
        completion = messages_of(place, {"messages": record.get("completion", [])})
        pieces = (encode_example, prompt + completion, len(prompt))
    elif "completion" in record:
        pieces = (encode_text, text(place, record, "prompt"), text(place, record, "completion"))
    elif "text" in record:
        pieces = (encode_text, "", text(place, record, "text"))
    else:
        known = "messages, conversations, question and answer, prompt and completion, text"
        raise UserError(f"{place}: none of {known} is there")
    encode, *arguments = pieces
    try:
        return encode(tokenizer, *arguments)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
