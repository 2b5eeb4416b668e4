"""Tokenizes examples: the token ids of a text or a chat, and which tokens are learned.

In a chat the assistant's content is learned, with the token that ends its turn. Templates rewrite messages (they trim
them, drop thoughts, format tool calls), so a message can't be found by searching for its content. Instead the template
renders the chat again with other words in one assistant message; the part that differs is that message. Each learned
piece is tokenized by itself, as in sampling.
"""

import logging
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any, NamedTuple

from mllm.errors import UserError
from mllm.model.tokenizer import (
    ANSWER,
    Message,
    MessagesError,
    Renderer,
    Tokenizer,
    control_tokens,
    encode_after,
    render,
    render_marked,
    text_prompt,
)

log = logging.getLogger(__name__)
warn_once = lru_cache(maxsize=8)(log.warning)
"""Logs a line once, since all examples may be alike."""

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
REWORDED = ("Quartz.", "Fjord!", "Waltz;")
"""Replacement words for a message: at least one begins and ends differently from the message."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""The possible field names of a message's thought."""


class Span(NamedTuple):
    """A part of a text."""

    start: int
    end: int


def encode_text(tokenizer: Tokenizer, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
    """The token ids of prompt and completion, without a chat template, and which of them are learned.

    Prompt and completion are tokenized separately, as in sampling; an end of sequence follows. UserError is raised if
    the tokenizer has no end of sequence, or a piece has the text of a control token.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("model.tokenizer: it names no end of sequence, which text without a chat template needs")
    before = text_prompt(tokenizer, prompt)
    text_prompt(tokenizer, completion)
    after = encode_after(tokenizer, prompt, completion)
    return [*before, *after, tokenizer.eos_token_id], [False] * len(before) + [True] * (len(after) + 1)


def encode_example(
    renderer: Renderer, messages: Sequence[Message], first_learned: int = 0
) -> tuple[list[int], list[bool]]:
    """The ids of a whole chat, and which of them are learned: the assistant's in `messages[first_learned:]`.

    A message with the field `weight: 0` is not learned.
    If the template has `{% generation %}` marks, the marked text is learned. UserError is raised if the template is
    missing, fails, leaves a learned message out, or doesn't separate the assistant's turns.
    """
    text = render(renderer, messages)
    learned = (turn for turn in range(first_learned, len(messages)) if messages[turn].get("weight") != 0)
    turns = [turn for turn in learned if messages[turn]["role"] == "assistant"]
    find_spans = marked_spans if GENERATION.search(renderer.template) else turn_spans
    borders = [0, *chain.from_iterable(find_spans(renderer, messages, turns, text)), len(text)]
    if borders != sorted(borders):
        raise UserError(MIXED_TURNS)
    check_others(renderer, messages)
    ids: list[int] = []
    mask: list[bool] = []
    for number, (start, end) in enumerate(pairwise(borders)):
        tokens = encode_after(renderer.tokenizer, text[:start], text[start:end])
        ids += tokens
        mask += [number % 2 == 1] * len(tokens)
    return ids, mask


def check_others(renderer: Renderer, messages: Sequence[Message]) -> None:
    """Raise UserError if the template drops a user's or tool's message; warn if it drops the system message."""
    others = [turn for turn, message in enumerate(messages) if message["role"] != "assistant" and message["content"]]
    words = {turn: f"Quartz {turn}." for turn in others}
    chat = [{**message, "content": words.get(turn, message["content"])} for turn, message in enumerate(messages)]
    reworded = render(renderer, chat)
    for role in [messages[turn]["role"] for turn in others if words[turn] not in reworded]:
        if role != "system":
            raise MessagesError(f"{LEAVES_OUT} what the {role} says: use one that has it")
        warn_once(f"{LEAVES_OUT} what the system says: use one that has it, or let the user say it")


LEAVES_OUT = "messages: the tokenizer's chat template leaves out"
MIXED_TURNS = (
    "model.tokenizer: its chat template rewrites earlier turns, so the assistant's can't be told from the others: "
    "mark them in the template with {% generation %}"
)


def turn_spans(renderer: Renderer, messages: Sequence[Message], turns: Sequence[int], text: str) -> Iterator[Span]:
    """The parts of `text` (the rendered chat) that are the assistant's, from where it begins to where its turn ends.

    Text behind the token that ends a turn, such as Qwen's newline, does not belong to it: sampling stops before.
    """
    for turn in turns:
        if turn == 0:
            raise MessagesError("messages: the first is the assistant's, so it answers nothing: begin with the user's")
        content = content_span(renderer, messages, turn, text)
        start, end = (
            turn_start(renderer, messages, turn, text, content),
            turn_end(renderer, messages, turn, text, content),
        )
        if not start <= content.start:
            raise UserError(MIXED_TURNS)
        yield Span(start, end)


def marked_spans(renderer: Renderer, messages: Sequence[Message], turns: Sequence[int], text: str) -> Iterator[Span]:
    """The parts of `text` that the template marks with `{% generation %}` in the assistant's messages `turns`."""
    _, (marked,) = render_marked(renderer, messages, return_assistant_tokens_mask=True)
    controls, limits = control_tokens(renderer.tokenizer), []
    for turn in (turn for turn, message in enumerate(messages) if message["role"] == "assistant"):
        content = content_span(renderer, messages, turn, text)
        limits.append((turn, content, turn_end(renderer, messages, turn, text, content)))
    for start, end in marked:
        overlapped = [limit for limit in limits if start < limit[2] and limit[1].start < end]
        if not overlapped and not controls.sub("", text[start:end]).strip():
            continue  # Phi-3's end of sequence stands behind the end of the last turn
        # Transformers counts wrongly inside of a macro: marks then begin and end too early.
        if not overlapped or any(start < content.start and end < content.end for _, content, _ in overlapped):
            raise UserError(
                "model.tokenizer: its chat template has {% generation %} in a macro, or around other messages: move it"
            )
        for turn, content, last in overlapped:
            try:
                first = turn_start(renderer, messages, turn, text, content)
            except UserError:  # only the template knows
                first = start
            if not controls.sub("", behind := text[last:end]).strip():  # an end that only earlier turns have
                last += len(behind.rstrip())
            if turn in turns:
                yield Span(max(start, first), min(end, last))


def content_span(renderer: Renderer, messages: Sequence[Message], turn: int, text: str, prompts: bool = False) -> Span:
    """The part of `text` that the template made of a message: the part that changes with the message's words.

    `text` is the rendered chat, as a prompt if `prompts`. UserError is raised where the template leaves out the
    message, or its calls of tools.
    """
    message = messages[turn]
    stripped, calls = message["content"].strip(), message.get("tool_calls")
    words = next(words for words in REWORDED if words[0] != stripped[:1] and words[-1] != stripped[-1:])

    def reworded(**changes: Any) -> str:
        chat = [*messages[:turn], {**message, **changes}, *messages[turn + 1 :]]
        return render(renderer, chat, add_generation_prompt=prompts)

    changes: dict[str, Any] = {"content": words} if stripped or not calls else {}
    changes |= {name: words for name in THOUGHTS if message.get(name)}
    if calls:
        changes["tool_calls"] = [reworded_call(call, words) for call in calls]
        if reworded(tool_calls=changes["tool_calls"]).count(words) < len(calls):
            raise MessagesError(f"{LEAVES_OUT} tool calls: use one that has them")
    changed = reworded(**changes)
    if changed == text:
        raise MessagesError(f"{LEAVES_OUT} what the {message['role']} says")
    most = len(changes) + (len(calls) - 1 if calls else 0)
    if changed.count(words) - text.count(words) > most:
        raise MessagesError(f"messages: the tokenizer's chat template writes what the {message['role']} says twice")
    if turn == len(messages) - 1 and not calls and (len(changes) > 1 or "</think>" in stripped):
        thinking = changed if len(changes) > 1 else reworded(content=f"<think>{words}</think>{words}")
        if thinking.count(words) < 2:
            warn_once(f"{LEAVES_OUT} thoughts, also the last turn's: use one that has them")
    start = common(text, changed)
    return Span(start, len(text) - common(text[start:][::-1], changed[start:][::-1]))


def reworded_call(call: Message, words: str) -> Message:
    """A call of the same tool, in the same form, with another argument; the result's header may have the name."""
    function = {**call.get("function", call), "arguments": {re.sub(r"\W", "", words): words}}
    return {**call, "function": function} if "function" in call else function


def turn_start(renderer: Renderer, messages: Sequence[Message], turn: int, text: str, content: Span) -> int:
    """The position in `text` where the assistant begins: after the text that the template adds to a prompt."""
    before = render(renderer, messages[:turn], add_generation_prompt=True)
    unopened = before.removesuffix("<think>\n")
    for opening in (before, unopened):
        if text.startswith(opening) and len(opening) <= content.start:
            return len(opening)
    if turn == 0:
        raise UserError(MIXED_TURNS)
    # Earlier messages are rendered otherwise than in a prompt, but the text after the last message is the same. A
    # thought that the prompt opens may be missing, unless the content itself begins with a thought.
    last = content_span(renderer, messages, turn - 1, text).end
    behind = before[content_span(renderer, messages[:turn], turn - 1, before, prompts=True).end :]
    for opening in (behind, behind.partition("<think>")[0]):
        if text.startswith(opening, last) and last + len(opening) <= content.start:
            return last + len(opening)
    raise UserError(MIXED_TURNS)


def turn_end(renderer: Renderer, messages: Sequence[Message], turn: int, text: str, content: Span) -> int:
    """The end of the control tokens that close the assistant's turn, or of its content if there are no such tokens."""
    calls, closing = messages[turn].get("tool_calls"), ending(renderer.tokenizer, renderer.template)
    if turn < len(messages) - 1 and (calls or not closing):
        return call_end(renderer, messages, turn, text, content) if calls else content.end
    first = last = 0
    for token in control_tokens(renderer.tokenizer).finditer(text, content.start):
        if token.end() > content.end:
            if first and text[last : token.start()].strip():
                break
            first, last = first or token.end(), token.end()
            if closing and text.endswith(closing, 0, last):  # it may stand behind the token that ends a call
                return last
    return first or len(text)


def call_end(renderer: Renderer, messages: Sequence[Message], turn: int, text: str, content: Span) -> int:
    """The end of a turn's last call of a tool: the text that closes it in a chat that ends there closes it here."""
    chat = messages[: turn + 1]
    alone = render(renderer, chat)
    span = content_span(renderer, chat, turn, alone)
    closing = alone[span.end : turn_end(renderer, chat, turn, alone, span)]
    for end in (closing, control_tokens(renderer.tokenizer).sub("", closing)):
        if text.startswith(end, content.end):
            return content.end + len(end)
    raise UserError(MIXED_TURNS)


@lru_cache(maxsize=8)
def ending(tokenizer: Tokenizer, template: str) -> str:
    """The control tokens that the template writes after every assistant turn, not only after the last."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    behind = [render(Renderer(tokenizer), messages).rpartition(ANSWER)[2] for messages in (chat, [*chat, chat[0]])]
    match = re.search(f"({control_tokens(tokenizer).pattern})+", behind[0][: common(*behind)])
    return match.group() if match else ""


def common(first: str, second: str) -> int:
    """The length of the common prefix of two texts."""
    most = min(len(first), len(second))
    return bisect_left(range(most), True, key=lambda last: first[: last + 1] != second[: last + 1])
