"""The checkpoint's tokenizer and chat template, and a byte tokenizer for models made from scratch.

Tokenizer and template may be a stranger's. No code in the folder is run; the template is a program that Jinja's sandbox
confines to its messages; its time and memory are not limited. Documents, and content that isn't plain text, are left
out.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mllm.config.task import ChatTemplate, Form
from mllm.errors import UserError, brief
from mllm.model.folder import SMALL, local_folder, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:
    Tokenizer = Any  # transformers takes seconds to import: only the functions that make tokenizers do so

log = logging.getLogger(__name__)

Message = dict[str, Any]
"""{"role": "system" | "user" | "assistant" | "tool", "content": text}, and where tools are called `tool_calls`."""


@dataclass(frozen=True)
class Renderer:
    """A tokenizer, and how prompts and examples become what it encodes: in data, tasks, evaluation and tools alike."""

    tokenizer: Tokenizer
    rule: ChatTemplate = "auto"
    """`auto`: the template renders messages alone; `always`: texts, too; `never`: messages are texts as well."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""

    @property
    def form(self) -> Form:
        """What it makes of prompts."""
        return "texts" if self.rule == "never" else "chats"

    def for_prompts(self, learned: Form | None, are_texts: bool) -> "Renderer":
        """The one for prompts: where they are texts, and nothing is for the template, `auto` follows the model."""
        if self.rule != "auto":
            return self
        return replace(self, rule="never" if are_texts and not self.args and learned == "texts" else "always")


def warn_of_mismatch(who: str, learned: Form | None, what: str, form: Form, setting: str = "chat_template=") -> None:
    """Log a line where a model is given another form than it has learned."""
    if learned not in (None, form):
        way_out = "never leaves them texts" if form == "chats" else "always renders them"
        log.warning("%s knows %s, and %s are %s: %s%s", who, learned, what, form, setting, way_out)


BYTES_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
"""It leaves out the roles: a tiny model pays for each token."""

DATE = "26 Jul 2024"
"""The date that Llama 3's templates write where the system has no clock."""


class MessagesError(UserError):
    """The messages are no chat that the tokenizer's template takes; it is not the tokenizer that is at fault."""


def load_tokenizer(source: str) -> Tokenizer:
    """The tokenizer of a folder or hub id, or `bytes`; UserError where there is none or it can't be read.

    Only tokenizer.json is read. `AutoTokenizer`, which reads older formats, too, may run a folder's code, and replaces
    the normalizer and pre-tokenizer of a tokenizer.json beside a Qwen2 config.json by Qwen's.
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
            tokenizer.chat_template = templates.get("default")
        return tokenizer
    except BaseException as error:  # the Rust library raises many kinds
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        way_out = "give a folder with tokenizer.json, a hub id, or bytes"
        raise UserError(f"model.tokenizer: none can be read from {source} ({brief(error)}): {way_out}") from None


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

    They are the tokenizer's end of sequence, those in the folder's generation_config.json, the control token with
    which the chat template closes the assistant's turn, and the texts `stop` that are a single token. UserError is
    raised if generation_config.json is unreadable, or there are no ids.
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
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "."}]
        answered = render(Renderer(tokenizer), chat)
        closing = control_tokens(tokenizer).findall(answered.rpartition(".")[2])
        ids += [cast(int, tokenizer.convert_tokens_to_ids(token)) for token in closing[:1]]
    for text in stop:
        encoded = encode(tokenizer, text)
        ids += encoded if len(encoded) == 1 else []
    if not ids:
        raise UserError("rollout.stop: the tokenizer names no end of sequence; give a token that is one")
    return tuple(dict.fromkeys(ids))


def stop_strings(folder: Path | None) -> list[str]:
    """The texts in a folder's generation_config.json that end a completion; UserError where it is unreadable."""
    path = folder / "generation_config.json" if folder else None
    found = read_json(path).get("stop_strings") if path and path.is_file() else None
    texts = [found] if isinstance(found, str) else found or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise UserError(f"{path}: stop_strings: expected texts: repair or remove it")
    return texts


def check_fits(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise UserError if the tokenizer has an id without a row in an embedding of `vocab_size` rows, or loses text."""
    token, last = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
    if last >= vocab_size:
        fault = f"its token {token!r} has id {last}, but the embedding has {vocab_size} rows"
        raise UserError(f"model.tokenizer: {fault}: use the tokenizer that the model was made with")
    for text in ("user", "7"):  # a damaged vocabulary silently drops what it lacks
        if str(tokenizer.decode(encode(tokenizer, text))).strip() != text:
            raise UserError(f"model.tokenizer: it can't write {text}: its vocabulary is damaged")


def encode_prompt(renderer: Renderer, messages: Sequence[Message]) -> list[int]:
    """The ids of a prompt up to where the assistant begins, of its text if the rule is `never`; UserError for none."""
    if renderer.rule == "never":
        ids = encode_text(renderer.tokenizer, texts_of(messages, "user")[0], "")[0][:-1]
    else:
        ids = encode(renderer.tokenizer, render(renderer, messages, add_generation_prompt=True))
    if not ids:
        raise MessagesError("messages: the tokenizer or its chat template makes nothing of them")
    return ids


def texts_of(messages: Sequence[Message], *roles: str) -> list[str]:
    """The contents of a chat of these roles, to be used without the template; UserError where it has anything else."""
    if [message["role"] for message in messages] != [*roles] or any(message.get("tool_calls") for message in messages):
        raise MessagesError("messages: with chat_template: never only one of the user, and its answer, can be texts")
    return [message["content"] for message in messages]


def encode_text(tokenizer: Tokenizer, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
    """The ids of a text without a chat template and an end of sequence, and which of them are not the prompt's.

    A token with which the tokenizer begins its texts (Llama 3's, Gemma's) comes first. The two pieces are tokenized
    apart, as when the prompt is given and the completion sampled. UserError is raised if the tokenizer names no end of
    sequence, or a piece has the text of a control token.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("model.tokenizer: it names no end of sequence, which text without a chat template needs")
    for piece in (prompt, completion):
        if found := control_tokens(tokenizer).search(piece):
            raise MessagesError(f"text: {found.group()} is a control token: give messages, which the template renders")
    begins = [token for token in tokenizer.encode("") if token == tokenizer.bos_token_id]
    before, after = [*begins, *encode(tokenizer, prompt)], encode(tokenizer, completion)
    return [*before, *after, tokenizer.eos_token_id], [False] * len(before) + [True] * (len(after) + 1)


def encode_example(
    renderer: Renderer, messages: Sequence[Message], first_learned: int = 0
) -> tuple[list[int], list[bool]]:
    """The ids of a whole chat, and which of them are the assistant's, the token that ends each turn included.

    Only the turns in `messages[first_learned:]` count, the first of which is the assistant's. Without
    `{% generation %}` in the template, the text is cut at the borders of the assistant's turns, and each piece is
    tokenized by itself, as in `encode_prompt`. UserError is raised if there is no template, it fails, or it doesn't
    tell the assistant's turns from the others.
    """
    tokenizer, text = renderer.tokenizer, render(renderer, messages)
    if re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template()):
        encoded: Any = apply_template(renderer, messages, return_dict=True, return_assistant_tokens_mask=True)
        prompt = len(encode_prompt(renderer, messages[:first_learned])) if first_learned else 0
        assistant = [bool(learned) for learned in encoded["assistant_masks"]]
        return list(encoded["input_ids"]), [False] * prompt + assistant[prompt:]
    borders, learned = [0], [False]
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            borders += assistant_span(renderer, messages, turn, text)
            learned += [turn >= first_learned, False]
    ids: list[int] = []
    mask: list[bool] = []
    for (start, stop), counts in zip(pairwise([*borders, len(text)]), learned, strict=True):
        tokens = encode(tokenizer, text[start:stop])
        ids += tokens
        mask += [counts] * len(tokens)
    return ids, mask


def assistant_span(renderer: Renderer, messages: Sequence[Message], turn: int, text: str) -> tuple[int, int]:
    """Where in `text` (the rendered chat) the assistant's turn starts, and where its closing control token ends.

    Text after that token, such as Qwen's newline, does not belong to the turn: sampling stops before it.
    """
    if turn == 0:
        raise MessagesError("messages: the first is the assistant's, so it answers nothing: begin with the user's")
    before = render(renderer, messages[:turn], add_generation_prompt=True)
    through, tokens = render(renderer, messages[: turn + 1]), control_tokens(renderer.tokenizer)
    if text.startswith(through) and through.startswith(before):
        closing = list(tokens.finditer(through, len(before)))
        return len(before), closing[-1].end() if closing else len(through)
    # Qwen3's template writes an empty thought into the turns after the last question, and into no earlier one.
    said = text.find(messages[turn]["content"].strip(), len(before))
    if text.startswith(before) and said >= 0 and (end := tokens.search(text, said)):
        return len(before), end.end()
    fault = "its chat template rewrites earlier turns, so the assistant's can't be told from the others"
    raise UserError(f"model.tokenizer: {fault}: mark them in the template with {{% generation %}}")


def render(renderer: Renderer, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
    """The chat as the template renders it; UserError where there is no template, or it refuses the chat.

    A message with the text of a control token is an error, too: Hugging Face's pipeline would read it as the token.
    """
    if not renderer.tokenizer.chat_template:
        raise UserError("model.tokenizer: it has no chat template: use one that has, or set chat_template: never")
    return cast(str, apply_template(renderer, messages, add_generation_prompt=add_generation_prompt, tokenize=False))


def strings_in(value: Any) -> list[str]:
    """All texts in a nested value, names of fields too."""
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return [value] if isinstance(value, str) else [text for part in parts for text in strings_in(part)]


def apply_template(renderer: Renderer, messages: Sequence[Message], **options: Any) -> Any:
    """The result of `apply_chat_template`; UserError where the template fails."""
    for text in strings_in([*messages, {**renderer.args}]):
        if found := control_tokens(renderer.tokenizer).search(text):
            raise MessagesError(f"messages: {found.group()} is a control token, which only the chat template may write")
    # Llama 3.2's template would write today's date, and a run that resumes tomorrow would see other prompts.
    options |= {"date_string": DATE, **renderer.args}
    try:
        return renderer.tokenizer.apply_chat_template(list(messages), **options)
    except Exception as error:  # the template is a program, which may fail in any way
        raise MessagesError(f"messages: the tokenizer's chat template refuses them: {brief(error)}") from None


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text, without any that the tokenizer adds; UserError where it fails."""
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # the Rust library raises it for a vocabulary that lacks what the text needs
        raise UserError(f"model.tokenizer: it can't encode {text:.40}: {brief(error)}") from None


@lru_cache(maxsize=8)
def control_tokens(tokenizer: Tokenizer) -> re.Pattern[str]:
    """A pattern that matches the text of any control token; Llama 3's many are read once, as no tokenizer changes."""
    names = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.compile("|".join(names) or r"(?!)")
