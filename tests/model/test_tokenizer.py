"""Tokenizers: the byte tokenizer is lossless, and the chat template decides which tokens are the assistant's."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from mllm.errors import UserError
from mllm.model.examples import encode_example
from mllm.model.tokenizer import (
    BYTES_TEMPLATE,
    Renderer,
    bytes_tokenizer,
    control_tokens,
    encode_prompt,
    load_tokenizer,
    stop_ids,
)

BYTES = bytes_tokenizer()
ENDOFTEXT, START, END, PAD = 256, 257, 258, 259

QWEN_TEMPLATE = (
    "{{ '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud.<|im_end|>\\n' }}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""What Qwen2.5-Instruct's template makes of chats without tools and a system's message."""

QWEN3_TEMPLATE = (
    "{% set ns = namespace(last=0) %}{% set thought = '<think>\\n\\n</think>\\n\\n' %}"
    "{% for message in messages if message.role == 'user' %}{% set ns.last = messages.index(message) %}{% endfor %}"
) + QWEN_TEMPLATE.replace(
    "message.content", "(thought if message.role == 'assistant' and loop.index0 > ns.last else '') + message.content"
)
"""As Qwen3's template does, this writes a thought into the turns after the last question only."""

LLAMA_TEMPLATE = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ '<|im_start|>system<|endoftext|>\\n\\nToday Date: ' + date_string + '<|im_end|>' }}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '<|endoftext|>\\n\\n' }}"
    "{{ message.content | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|endoftext|>\\n\\n' }}{% endif %}"
)
"""Llama 3.2's template, with other control tokens: it dates the system's message, and trims all others."""

GEMMA_TEMPLATE = (
    "{{ bos_token }}{% set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}"
    "{% for message in (messages[1:] if system else messages) %}"
    "{% if (message.role == 'user') == loop.index0 % 2 %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + ('model' if message.role == 'assistant' else 'user') + '\\n' }}"
    "{{ (system if loop.first else '') + message.content | trim + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}"
)
"""Gemma 3's template, with other control tokens: the system's message is put into the user's first turn."""

GENERATION_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<|im_start|>"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}<|im_start|>{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)

CHAT = [
    {"role": "user", "content": "3+4="},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "Sure?\n"},
    {"role": "assistant", "content": "\nYes,\n I am."},
]


def with_template(template: Any) -> PreTrainedTokenizerFast:
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def learned_text(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> str:
    """The assistant's tokens, with a bar between runs of them."""
    ids, assistant = encode_example(Renderer(tokenizer), messages)
    assert len(ids) == len(assistant)
    shown = [chr(token) if token < 256 else f"<{token}>" for token in ids]
    runs = "".join(token if mine else "\0" for token, mine in zip(shown, assistant, strict=True))
    return "|".join(run for run in runs.split("\0") if run)


@settings(max_examples=30)
@given(st.text())
def test_the_byte_tokenizer_decodes_what_it_encoded(text: str) -> None:
    assume(not control_tokens(BYTES).search(text))  # each of these is one id, and no message may contain one
    ids = BYTES.encode(text, add_special_tokens=False)
    assert ids == list(text.encode())
    assert BYTES.decode(ids) == text


def test_a_saved_byte_tokenizer_is_loaded_unchanged_beside_a_qwen2_config(tmp_path: Path) -> None:
    BYTES.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    loaded = load_tokenizer(str(tmp_path))
    text = "  don't 'S  \r\n\t１２３ Ⅷ e\u0301 😀"
    assert loaded.encode(text) == list(text.encode())
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.chat_template == BYTES.chat_template
    assert stop_ids(loaded) == (END,)


def test_a_prompt_ends_where_the_assistant_begins_and_is_a_prefix_of_the_example() -> None:
    prompt = encode_prompt(Renderer(BYTES), CHAT[:1])
    assert prompt == [START, *b"3+4=", END, START]
    ids, assistant = encode_example(Renderer(BYTES), CHAT[:2])
    assert ids == [*prompt, *b"7", END]
    assert assistant == [False] * len(prompt) + [True, True]


@pytest.mark.parametrize("template", [BYTES_TEMPLATE, QWEN_TEMPLATE, GENERATION_TEMPLATE])
def test_all_turns_of_the_assistant_and_nothing_else_are_learned(template: str) -> None:
    assert learned_text(with_template(template), CHAT) == f"7<{END}>|\nYes,\n I am.<{END}>"


def test_tokenizing_turn_by_turn_changes_no_token_of_the_rendered_text() -> None:
    tokenizer = with_template(QWEN_TEMPLATE)
    ids, _ = encode_example(Renderer(tokenizer), CHAT)
    assert ids == tokenizer.encode(tokenizer.apply_chat_template(CHAT, tokenize=False), add_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (5, "chat template refuses them"),
        ("{% for m in messages %}{{ loop.last and m.content or 'gone' }}{% endfor %}", "leaves out what the assistant"),
    ],
)
def test_a_template_that_fails_is_an_error_in_one_line(template: Any, message: str) -> None:
    """tests/run/bad_models.py has more of them."""
    with pytest.raises(UserError, match=message) as error:
        encode_example(Renderer(with_template(template)), CHAT)
    assert "\n" not in str(error.value)


def test_qwen3_s_thought_before_the_last_answer_is_learned_and_earlier_turns_have_none() -> None:
    thought = "<think>\n\n</think>\n\n"
    qwen3 = with_template(QWEN3_TEMPLATE)
    assert learned_text(qwen3, CHAT) == f"7<{END}>|{thought}\nYes,\n I am.<{END}>"
    assert learned_text(qwen3, CHAT[:2]) == f"{thought}7<{END}>"


def test_a_variable_of_the_template_reaches_it_in_prompts_and_examples() -> None:
    """`enable_thinking: false` makes Qwen3's template begin the answer with an empty thought."""
    thought = "<think>\n\n</think>\n\n"
    begins = "{% if enable_thinking is defined and not enable_thinking %}{{ thought }}{% endif %}{% endif %}"
    tokenizer = with_template(QWEN3_TEMPLATE.removesuffix("{% endif %}") + begins)
    quiet = Renderer(tokenizer, args={"enable_thinking": False})
    begun, asked = (encode_prompt(renderer, CHAT[:1]) for renderer in (quiet, Renderer(tokenizer)))
    assert begun == [*asked, *thought.encode()]
    ids, learned = encode_example(quiet, CHAT[:2])
    assert learned.index(True) == len(begun)  # the sampler never writes the thought, so it is not learned either
    assert ids[: len(begun)] == begun


def test_without_the_template_a_prompt_is_the_user_s_text_after_the_token_that_begins_texts() -> None:
    assert encode_prompt(Renderer(BYTES, "never"), CHAT[:1]) == [*b"3+4="]
    llama = bytes_tokenizer()
    llama.bos_token = "<|endoftext|>"
    begins = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", ENDOFTEXT)])
    llama.backend_tokenizer.post_processor = begins
    assert encode_prompt(Renderer(llama, "never"), CHAT[:1]) == [ENDOFTEXT, *b"3+4="]
    for messages in (CHAT[:3], [{"role": "system", "content": "Add."}, CHAT[0]]):
        with pytest.raises(UserError, match="never only one of the user, and its answer, can be texts"):
            encode_prompt(Renderer(BYTES, "never"), messages)


def test_llama_s_template_trims_answers_and_writes_the_same_date_every_day() -> None:
    llama = with_template(LLAMA_TEMPLATE)
    assert learned_text(llama, CHAT) == f"7<{END}>|Yes,\n I am.<{END}>"
    assert "Today Date: 26 Jul 2024" in llama.decode(encode_prompt(Renderer(llama), CHAT[:1]))
    assert stop_ids(llama) == (END,)


def test_gemma_s_template_writes_the_first_token_and_takes_a_system_s_message_at_the_start(tmp_path: Path) -> None:
    gemma = with_template(GEMMA_TEMPLATE)
    gemma.bos_token, gemma.eos_token = "<|endoftext|>", "<|pad|>"
    begins = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", ENDOFTEXT)])
    gemma.backend_tokenizer.post_processor = begins  # as Gemma's, which would write it before each piece
    system = {"role": "system", "content": "Add."}
    assert learned_text(gemma, [system, *CHAT]) == f"7<{END}>|Yes,\n I am.<{END}>"
    with pytest.raises(UserError, match="template refuses them: roles must alternate"):
        learned_text(gemma, [*CHAT[:2], system, *CHAT[2:]])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [PAD, END]}))
    assert stop_ids(gemma, tmp_path) == (PAD, END)


def test_a_template_that_renders_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="makes nothing of them"):
        encode_prompt(Renderer(with_template("{# nothing #}")), CHAT[:1])


def test_stop_ids_are_gathered_without_duplicates(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, ENDOFTEXT]}))
    assert stop_ids(BYTES, tmp_path, stop=("\n", "two tokens")) == (END, ENDOFTEXT, ord("\n"))
    assert stop_ids(BYTES, tmp_path / "missing") == (END,)


def test_a_base_model_stops_at_the_token_with_which_its_template_ends_a_turn() -> None:
    base = with_template(QWEN_TEMPLATE)
    base.eos_token = "<|endoftext|>"
    assert stop_ids(base) == (ENDOFTEXT, END)


def test_a_tokenizer_without_any_stop_is_refused() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))
    with pytest.raises(UserError, match="no end of sequence"):
        stop_ids(bare)
