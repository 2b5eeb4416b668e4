"""The checkpoint's tokenizer and chat template, and a byte tokenizer for models made from scratch.

Tokenizer and template may be untrusted. No code in the folder is run. The template runs in Jinja's sandbox, without a
limit on time and memory. Documents, and content that isn't plain text, are not supported.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mllm.config.task import ChatTemplate, Form
from mllm.errors import UserError, brief
from mllm.model.folder import SMALL, local_folder, read_json, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:
    Tokenizer = Any  # transformers takes seconds to import: only the functions that make tokenizers do so

log = logging.getLogger(__name__)

Message = dict[str, Any]
"""{"role": "system" | "user" | "assistant" | "tool", "content": text}, and where tools are called `tool_calls`."""


@dataclass(frozen=True)
class Renderer:
    """A tokenizer with its chat template's settings, for data, tasks, evaluation and tools."""

    tokenizer: Tokenizer
    rule: ChatTemplate = "auto"
    """`auto`: the template renders messages only; `always`: texts as well; `never`: messages become texts."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""

    @property
    def template(self) -> str:
        """The chat template; with tools the template named `tool_use`, if the tokenizer has it."""
        return self.tokenizer.get_chat_template(tools=self.args.get("tools"))

    @property
    def form(self) -> Form:
        """The form of its prompts."""
        return "texts" if self.rule == "never" else "chats"

    def for_prompts(self, learned: Form | None, are_texts: bool) -> "Renderer":
        """The renderer of prompts: if they are texts, and there are no `args`, `auto` follows the model."""
        if self.rule != "auto":
            return self
        return replace(self, rule="never" if are_texts and not self.args and learned == "texts" else "always")


def warn_of_mismatch(who: str, learned: Form | None, what: str, form: Form, setting: str = "chat_template=") -> None:
    """Warn if a model gets another form of data than it was trained on."""
    if learned not in (None, form):
        way_out = "never leaves them texts" if form == "chats" else "always renders them"
        log.warning("%s knows %s, and %s are %s: %s%s", who, learned, what, form, setting, way_out)


BYTES_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
"""The byte tokenizer's template; it leaves out the roles, to save a tiny model tokens."""

DATE = date(2024, 7, 26)
"""The date in every template, as Llama 3's have without a clock, so that a run resumed tomorrow renders the same."""
CODES = {f"%{code}": DATE.strftime(f"%{code}") for code in "aAbBcdDeFHIjmMpSTuwxXyY"}
CODES |= {f"%-{code}": DATE.strftime(f"%{code}").lstrip("0") or "0" for code in "dHIjmMSy"}
CLOCK = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace('{code}', '{text}')" for code, text in CODES.items())
    + " }}{% endmacro %}"
)
"""Replaces the clock that transformers passes to templates."""
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>")
"""The tags that `mllm.data.turns` reads; some tokenizers have them as control tokens."""
BETWEEN = ("\n", ".", "a")
"""Texts to put before a text that is encoded as in the middle of a text; the first without a token across is taken."""
ANSWER = "The-answer-is-42."
"""A known answer: nothing in it is trimmed, and no template writes it."""


class MessagesError(UserError):
    """The template refuses the messages: the messages are at fault, not the tokenizer."""


def load_tokenizer(source: str) -> Tokenizer:
    """The tokenizer of a folder or hub id, or `bytes`; UserError if it is missing or can't be read.

    Only tokenizer.json is read. `AutoTokenizer` also reads older formats and may run a folder's code. Beside a Qwen2
    config.json, it replaces the normalizer and pre-tokenizer of tokenizer.json by Qwen's.
    """
    if source == "bytes":
        return bytes_tokenizer()
    from transformers import PreTrainedTokenizerFast

    folder = local_folder(source, SMALL, "model.tokenizer", "bytes")
    try:
        if not (file := folder / "tokenizer.json").is_file():
            raise FileNotFoundError("it has no tokenizer.json")
        if (settings := folder / "tokenizer_config.json").is_file() and "fast_tokenizer_files" in read_json(settings):
            raise ValueError("fast_tokenizer_files in tokenizer_config.json may name files elsewhere: remove it")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), tokenizer_file=str(file))
        if isinstance(templates := tokenizer.chat_template, dict):  # the names of the others would be files of exports
            kept = {name: templates[name] for name in ("default", "tool_use") if name in templates}
            tokenizer.chat_template = kept if len(kept) == 2 else templates.get("default")
        if begins_texts(folder) and tokenizer.bos_token_id not in (None, *tokenizer.encode("")):
            tokenizer.add_bos_token = True
        tokenizer.clean_up_tokenization_spaces = False  # it would decode "x != y" as "x!= y"
        return tokenizer
    except BaseException as error:  # the Rust library raises many kinds
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        way_out = "give a folder with tokenizer.json, a hub id, or bytes"
        raise UserError(f"model.tokenizer: none can be read from {source} ({brief(error)}): {way_out}") from None


def begins_texts(folder: Path) -> bool:
    """Whether the tokenizer in a folder begins texts with its `bos_token`, though its tokenizer.json may not say so.

    tokenizer_config.json decides, else the tokenizer's class or the model's family.
    """
    settings, model = (
        read_json(path) if (path := folder / name).is_file() else {}
        for name in ("tokenizer_config.json", "config.json")
    )
    if (setting := settings.get("add_bos_token")) is not None:
        return setting is True
    of_class = str(settings.get("tokenizer_class")).removesuffix("Fast") in ("GemmaTokenizer", "LlamaTokenizer")
    return of_class or str(model.get("model_type")).startswith("gemma")


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer's files so that transformers 4 and 5 can read them."""
    tokenizer.save_pretrained(folder)
    settings = read_json(path := folder / "tokenizer_config.json")
    if settings["tokenizer_class"] == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(names := settings.pop("extra_special_tokens", None), list):
        settings["additional_special_tokens"] = names
    write_json(path, settings)


def bytes_tokenizer() -> Tokenizer:
    """A tokenizer of 260 ids, 256 bytes and four control tokens; a byte's id is its value. Lossless on UTF-8 text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    # A byte's name in the vocabulary is the printable character that byte-level BPE writes for it, as GPT-2 does.
    vocabulary = {character: byte for byte, character in sorted(bytes_to_unicode().items())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|endoftext|>", "<|im_start|>"],
        chat_template=BYTES_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def stop_ids(tokenizer: Tokenizer, folder: Path | None = None, stop: Sequence[str] = ()) -> tuple[int, ...]:
    """The ids that end a completion, without duplicates.

    The ids are the tokenizer's end of sequence, the ids in the folder's generation_config.json, and the texts `stop`
    that are a single token. The chat template's control token at the end of the assistant's turn is one more id.
    UserError is raised if generation_config.json is unreadable, or there are no ids.
    """
    ids: list[int] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if folder is not None and (path := folder / "generation_config.json").is_file():
        listed = read_json(path).get("eos_token_id")
        known = set(tokenizer.get_vocab().values())
        for token in listed if isinstance(listed, list) else [] if listed is None else [listed]:
            if type(token) is not int or token not in known:
                raise UserError(f"{path}: eos_token_id: {token!r} is no id of the tokenizer: repair or remove it")
            ids.append(token)
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
        answered = render(Renderer(tokenizer), chat)
        closing = control_tokens(tokenizer).findall(answered.rpartition(ANSWER)[2])
        ids += [cast(int, tokenizer.convert_tokens_to_ids(token)) for token in closing[:1]]
    for text in stop:
        encoded = encode(tokenizer, text)
        ids += encoded if len(encoded) == 1 else []
    if not ids:
        raise UserError("rollout.stop: the tokenizer names no end of sequence; give a token that is one")
    return tuple(dict.fromkeys(ids))


def stop_strings(folder: Path | None) -> list[str]:
    """The stop texts in a folder's generation_config.json; UserError if the file is unreadable."""
    path = folder / "generation_config.json" if folder else None
    value = read_json(path).get("stop_strings") if path and path.is_file() else None
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise UserError(f"{path}: stop_strings: expected texts: repair or remove it")
    return texts


def check_fits(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise UserError if the tokenizer may give an id without a row in an embedding of `vocab_size` rows.

    Control tokens that nothing writes need no row: Gemma 3's text models have none for `<image_soft_token>`.
    """
    written = f"{tokenizer.bos_token} {tokenizer.eos_token} {tokenizer.pad_token} {tokenizer.chat_template}"
    controls = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    unused = {token for token in controls if token not in written}
    ids = {token: number for token, number in tokenizer.get_vocab().items() if token not in unused}
    token, highest = max(ids.items(), key=lambda item: item[1], default=("", -1))
    if highest >= vocab_size:
        fault = f"its token {token!r} has id {highest}, but the embedding has {vocab_size} rows"
        raise UserError(f"model.tokenizer: {fault}: use the tokenizer that the model was made with")


def encode_prompt(renderer: Renderer, messages: Sequence[Message]) -> list[int]:
    """The token ids of a prompt up to the assistant's turn, or of its text if the rule is `never`.

    UserError is raised if there are no tokens.
    """
    if renderer.rule == "never":
        ids = text_prompt(renderer.tokenizer, texts_of(messages, "user")[0])
    else:
        ids = encode(renderer.tokenizer, render(renderer, messages, add_generation_prompt=True))
    if not ids:
        raise MessagesError("messages: the tokenizer or its chat template makes nothing of them")
    return ids


def text_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a prompt that no template renders.

    The tokenizer's begin token (Llama 3's, Gemma's) comes first. UserError: the text contains a control token.
    """
    if match := control_tokens(tokenizer).search(text):
        raise MessagesError(f"text: {match.group()} is a control token: give messages, which the template renders")
    return [*first_tokens(tokenizer), *encode(tokenizer, text)]


@lru_cache(maxsize=8)
def first_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens at the beginning of a text: the tokenizer's `bos_token`, if it has one."""
    begins = tuple(token for token in tokenizer.encode("") if token == tokenizer.bos_token_id)
    if not begins and tokenizer.bos_token_id is not None and begins_chats(tokenizer):
        way_out = "where the model has learned that they do, set add_bos_token: true in tokenizer_config.json"
        fault = f"its chat template writes {tokenizer.bos_token}, and texts do not begin with it"
        log.warning("model.tokenizer: %s: %s", fault, way_out)
    return begins


def begins_chats(tokenizer: Tokenizer) -> bool:
    """Whether the chat template writes `bos_token` once, at the beginning; SmolLM2's begins every message with it."""
    turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    try:
        chat = render(Renderer(tokenizer), [*turn, *turn])
    except UserError:  # it has no template, or one for other chats
        return False
    return chat.startswith(tokenizer.bos_token) and chat.count(tokenizer.bos_token) == 1


def texts_of(messages: Sequence[Message], *roles: str) -> list[str]:
    """The contents of a chat with these roles, for use without the template; UserError for any other chat."""
    if [message["role"] for message in messages] != [*roles] or any(message.get("tool_calls") for message in messages):
        raise MessagesError("messages: with chat_template: never only one of the user, and its answer, can be texts")
    return [message["content"] for message in messages]


def render(renderer: Renderer, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
    """The chat rendered by the template; UserError if there is no template, or it refuses the chat."""
    return render_marked(renderer, messages, add_generation_prompt=add_generation_prompt)[0]


def render_marked(
    renderer: Renderer, messages: Sequence[Message], **options: Any
) -> tuple[str, list[list[tuple[int, int]]]]:
    """The chat rendered by the template; with `return_assistant_tokens_mask` also the `{% generation %}` spans.

    A message with the text of a control token is an error: Hugging Face's pipeline would read it as the token.
    """
    tokenizer = renderer.tokenizer
    if not tokenizer.chat_template:
        raise UserError("model.tokenizer: it has no chat template: use one that has, or set chat_template: never")
    for text in strings_in([*messages, {**renderer.args}]):
        if match := control_tokens(tokenizer).search(text):
            raise MessagesError(f"messages: {match.group()} is a control token, which only the chat template may write")
    options |= {**tokenizer.special_tokens_map, "date_string": DATE.strftime("%d %b %Y"), **renderer.args}
    try:
        if takes_thoughts_apart(renderer.template):
            messages = [with_thought_apart(message) for message in messages]
        return apply_template(renderer.template, messages, options)
    except Exception as error:  # the template is a program, which may fail in any way
        raise MessagesError(f"messages: the tokenizer's chat template refuses them: {brief(error)}") from None


def apply_template(
    template: str, messages: Sequence[Message], options: Mapping[str, Any]
) -> tuple[str, list[list[tuple[int, int]]]]:
    """The rendered chat, and the parts that the template marks; raises any error of the template."""
    from transformers.utils.chat_template_utils import render_jinja_template

    clock = CLOCK if "strftime_now" in template else ""
    rendered: Any = render_jinja_template([list(messages)], chat_template=clock + template, **options)
    return rendered[0][0], rendered[1]


@lru_cache(maxsize=8)
def takes_thoughts_apart(template: str) -> bool:
    """Whether the template takes a thought from `reasoning_content` alone, as Qwen3.8's.

    Such a template writes an empty thought before a content that begins with a thought.
    """
    if "reasoning_content" not in template:
        return False
    whole = {"role": "assistant", "content": f"<think>\n{ANSWER}\n</think>\n\nYes."}
    try:
        texts = [
            apply_template(template, [{"role": "user", "content": "?"}, answer], {})[0]
            for answer in (whole, with_thought_apart(whole))
        ]
    except Exception:  # a template that needs more than these messages is taken as it is
        return False
    return texts[1].count(ANSWER) == 1 and texts[0].count("<think>") > texts[1].count("<think>")


def with_thought_apart(message: Message) -> Message:
    """The message with its content's thought moved to `reasoning_content`, as Qwen3.5's template separates them."""
    before, close, content = str(message["content"]).rpartition("</think>")
    if message["role"] != "assistant" or not close or message.get("reasoning_content"):
        return message
    thought = before.partition("</think>")[0].rpartition("<think>")[2].strip("\n")
    return {**message, "reasoning_content": thought, "content": content.lstrip("\n")}


def strings_in(value: Any) -> list[str]:
    """All texts in a nested value, names of fields too."""
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return [value] if isinstance(value, str) else [text for part in parts for text in strings_in(part)]


def encode_after(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """The ids of a text that follows another text.

    Some tokenizers, such as Llama 2's, begin a text with a space of their own, which stands nowhere else.
    """
    if before and marks_beginnings(tokenizer):
        controls = [match for match in control_tokens(tokenizer).finditer(before) if match.end() == len(before)]
        for anchor in [match.group() for match in controls] or BETWEEN:
            first = encode(tokenizer, anchor)
            ids = encode(tokenizer, anchor + text)
            if ids[: len(first)] == first:
                return ids[len(first) :]
    return encode(tokenizer, text)


@lru_cache(maxsize=8)
def marks_beginnings(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer treats the beginning of a text differently from its middle."""
    if any(token.rstrip for token in tokenizer.added_tokens_decoder.values()):  # Phi-3's take white space behind them
        return True
    return any(encode(tokenizer, x + "a")[len(encode(tokenizer, x)) :] != encode(tokenizer, "a") for x in BETWEEN)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The token ids of a text, without added special tokens; UserError if the tokenizer fails."""
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # the Rust library raises it for a vocabulary that can't encode the text
        raise UserError(f"model.tokenizer: it can't encode {text:.40}: {brief(error)}") from None


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of sampled tokens without control tokens, except for those around a thought or a tool call."""
    left_out = left_out_of_texts(tokenizer)
    return cast(str, tokenizer.decode([token for token in tokens if token not in left_out]))


@lru_cache(maxsize=8)
def left_out_of_texts(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids of the control tokens that a completion's text does not have."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(token for token, name in added if name.special and name.content not in TAGS)


@lru_cache(maxsize=8)
def control_tokens(tokenizer: Tokenizer) -> re.Pattern[str]:
    """A pattern that matches the text of any control token; cached, since Llama 3 has many."""
    names = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.compile("|".join(names) or r"(?!)")
