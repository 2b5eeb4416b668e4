"""Only the assistant's messages are learned, by any template. The judge gives each message its own alphabet."""

import re
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import pytest
from templates import PUBLIC, Public
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mllm.errors import UserError
from mllm.model.examples import encode_example, encode_text, warn_once
from mllm.model.tokenizer import Renderer, control_tokens, encode, encode_prompt, load_tokenizer, render

TEXTS = ["Yes", " Yes\n", "Yes.\n\nNo", "user\nYes", "USER: Yes ASSISTANT: No", "assistant", "\n\nä, b?", "</s"]
THOUGHTS = ["<think>\nhm\n</think>\n\nYes", "<think>Yes</think>No", "a </think> b"]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
LETTERS = re.compile(r"</?think>|[a-zA-Z]")


def some_chat(public: Public, rng: Random) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        chat.append({"role": "system", "content": rng.choice(TEXTS)})
    for _ in range(rng.randint(1, 3)):
        chat.append({"role": "user", "content": rng.choice(TEXTS)})
        while public.calls and rng.random() < 0.4:
            calls = [call(rng) for _ in range(rng.randint(1, 2))]
            chat.append({"role": "assistant", "content": "", "tool_calls": calls})
            chat.append({"role": "tool", "content": rng.choice(TEXTS)})
        chat.append({"role": "assistant", "content": rng.choice(TEXTS + THOUGHTS)})
        if rng.random() < 0.2:
            chat[-1]["reasoning_content"] = rng.choice(TEXTS)
        if "im_start" in public.template and rng.random() < 0.1:
            chat.append({"role": "assistant", "content": rng.choice(TEXTS)})
    return chat


def call(rng: Random) -> dict[str, Any]:
    function = {"name": rng.choice(["add", "Yes"]), "arguments": {"x": rng.choice(["Yes", 3, {"y": None}])}}
    return rng.choice([function, {"type": "function", "function": function}])


def signed(value: Any, number: int) -> Any:
    """The value with its letters in the alphabet of a message, but for tags that templates look for."""
    if isinstance(value, str):
        return LETTERS.sub(lambda m: m[0] if m[0][0] == "<" else chr(0xE000 + 256 * number + ord(m[0])), value)
    if isinstance(value, dict):
        return {name: item if name == "type" else signed(item, number) for name, item in value.items()}
    return [signed(item, number) for item in value] if isinstance(value, list) else value


def judge(renderer: Renderer, chat: list[dict[str, Any]], first: int = 0) -> None:
    """Assert the rules of a chat's tokens, and of its learned tokens."""
    tokenizer = renderer.tokenizer
    ids, mask = encode_example(renderer, chat, first)
    text = render(renderer, chat)
    owned = render(renderer, [signed(m, n) | {"role": m["role"]} for n, m in enumerate(chat)])
    assert (tokenizer.decode(ids), len(owned)) == (text, len(text))
    owners = [(ord(c) - 0xE000) // 256 if c >= "\ue000" else None for c in owned]
    place, runs = 0, []
    for learned, group in groupby(zip(ids, mask, strict=True), lambda pair: pair[1]):
        end = place + len(tokenizer.decode([token for token, _ in group]))
        runs += [(place, end)] if learned else []
        place = end
    turns = [turn for turn in range(first, len(chat)) if chat[turn]["role"] == "assistant"]
    assert [{*owners[start:end]} - {None} for start, end in runs] == [{turn} for turn in turns]
    header = render(renderer, chat[: turns[0]], add_generation_prompt=True)
    opened = header.removeprefix(render(renderer, chat[: turns[0]]))
    header = opened.partition("<think>")[0]
    controls = [match.span() for match in control_tokens(tokenizer).finditer(text)]
    for turn, (start, end) in zip(turns, runs, strict=True):
        letters = [place for place, owner in enumerate(owners) if owner == turn]
        assert start <= letters[0] <= letters[-1] < end
        # A prompt's opening of the thought is not learned where the chat also has it. Of two thoughts one is content.
        twice = "<think>" in chat[turn]["content"] and chat[turn].get("reasoning_content")
        assert text[:start].endswith(opened) or text[:start].endswith(header)
        assert text[:start].endswith(opened) or twice or not text[start:].startswith(opened.removeprefix(header))
        inside = [span for span in controls if start <= span[0] and span[1] <= end]
        opening, closing = ([s for s in inside if (s[0] > letters[-1]) == behind] for behind in (False, True))
        assert [text[a:b] for a, b in opening] == ["[TOOL_CALLS]"] * ("[TOOL_CALLS]" in text[start:end])
        is_ended = turn == len(chat) - 1 or "ASSISTANT" not in tokenizer.chat_template
        assert [span[1] for span in closing] == [end] * is_ended
        if "tool_calls" not in chat[turn]:  # the template adds white space or an empty thought
            added = owned[start : letters[0]] + owned[letters[-1] + 1 : closing[0][0] if closing else end]
            assert not re.search("[a-zA-Z]", re.sub("</?think>|</s$", "", added))
    prompt = encode_prompt(renderer, chat[: turns[0]])
    if text.startswith(tokenizer.decode(prompt)):
        assert (ids[: len(prompt)], mask.index(True)) == (prompt, len(prompt))


def chats(name: str, count: int) -> list[tuple[Renderer, list[dict[str, Any]], int]]:
    public, rng = PUBLIC[name], Random(name)
    renderer, examples = Renderer(public.tokenizer()), []
    for _ in range(count):
        chat = some_chat(public, rng)
        used = Renderer(renderer.tokenizer, args={"tools": TOOLS}) if public.calls and rng.random() < 0.5 else renderer
        answers = [turn for turn, message in enumerate(chat) if message["role"] == "assistant"]
        examples.append((used, chat, rng.choice([0, *answers])))
    return examples


@pytest.mark.parametrize("name", PUBLIC)
def test_only_assistant_turns_of_random_chats_are_learned(name: str) -> None:
    for renderer, chat, first in chats(name, 25):
        judge(renderer, chat, first)


def learned(tokenizer: Any, chat: list[dict[str, Any]], first: int = 0) -> list[str]:
    ids, mask = encode_example(Renderer(tokenizer), chat, first)
    groups = groupby(zip(ids, mask, strict=True), lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in group]) for is_learned, group in groups if is_learned]


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


def test_a_thought_is_learned_once_and_in_the_sampler_s_form() -> None:
    """A thought may be in the content or in its own field."""
    tokenizer, user = PUBLIC["qwen3.8"].tokenizer(), {"role": "user", "content": "1+1="}
    inside = {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n2"}
    apart = {"role": "assistant", "reasoning_content": "Easy.", "content": "2"}
    for answer in (inside, apart):
        assert learned(tokenizer, [user, answer]) == ["Easy.\n</think>\n\n2<|im_end|>"]


def test_marked_and_unmarked_templates_learn_the_same_tokens() -> None:
    """The first message of the chat may be the assistant's."""
    public = PUBLIC["smollm3"]
    chat = [{"role": "assistant", "content": "Hello"}, *turns("a", "b")]
    assert learned(public.tokenizer(), chat) == ["Hello<|im_end|>", "<think>\n\n</think>\nb<|im_end|>"]
    bare = public.tokenizer(re.sub("{% (end)?generation %}", "", public.template))
    for renderer, chat, first in chats("smollm3", 20):
        assert encode_example(replace(renderer, tokenizer=bare), chat, first) == encode_example(renderer, chat, first)


def test_a_mark_miscounted_in_a_macro_is_an_error() -> None:
    template = (
        "{% macro say(m) %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}"
    )
    with pytest.raises(UserError, match="generation %} in a macro"):
        learned(PUBLIC["qwen3"].tokenizer(template), turns("a", "Yes"))


SAID = "{% for m in messages %}<|START|>{{ m.role }}<|SAYS|>{{ m.content }}"
MARKED = SAID.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}END{% endgeneration %}"
    "{% else %}{{ m.content }}<|END|>{% endif %}",
)
CALLS = (
    "{% for c in m.tool_calls or [] %}<call>{{ c.name }}: {{ c.arguments.x or c.arguments.Quartz }}</call>{% endfor %}"
)
ASKS = "{% endfor %}{% if add_generation_prompt %}<|START|>assistant<|SAYS|>{% endif %}"
CALLING = [*turns("a"), {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"x": "1"}}]}]
CALLED = [*CALLING, {"role": "tool", "content": "c", "name": "add"}, *turns("d", "e")[1:]]


CONTROLS = ("<|START|>", "<|SAYS|>", "<|SAID|>", "<|END|>")
TURN_ENDS = {
    "Command": (SAID + "{{ '<|SAID|>' if m.role == 'assistant' }}<|END|>", ["b<|SAID|><|END|>", "d<|SAID|><|END|>"]),
    "LFM2.5": (
        SAID + CALLS.replace("</call>", "<|SAID|>") + "{{ '\\n<|END|>' }}",
        ["<call>add: 1<|SAID|>\n<|END|>", "e\n<|END|>"],
    ),
    "GLM": (SAID + CALLS, ["<call>add: 1</call>", "e"]),
    "Gemma 4": (SAID + CALLS + "{{ '<|END|>' if not m.tool_calls }}", ["<call>add: 1</call>", "e<|END|>"]),
    "the result has the call's name": (SAID.replace("role", "name or m.role") + CALLS, ["<call>add: 1</call>", "e"]),
    "gpt-oss": (
        SAID + CALLS + "{{ '<|END|>' if loop.last and m.role == 'assistant' else '<|SAID|>' }}",
        ["<call>add: 1</call>", "e<|END|>"],
    ),
    "gpt-oss marked": (
        MARKED.replace("END{", "{{ '<|END|>' if loop.last else '<|SAID|>' }}\n{"),
        ["b<|SAID|>", "d<|END|>"],
    ),
    "Phi-3 marked": (MARKED.replace("END{", "<|SAID|>\n{"), ["b<|SAID|>", "d<|SAID|>"]),
}


@pytest.mark.parametrize("name", TURN_ENDS)
def test_a_turn_is_learned_with_its_call_closing_and_end(name: str) -> None:
    template, expected = TURN_ENDS[name]
    chat = CALLED if "tool_calls" in template else turns(*"abcd")
    template += ASKS + "{% generation %}<|END|>{% endgeneration %}" * (name == "Phi-3 marked")
    assert learned(Public(template, CONTROLS).tokenizer(), chat) == expected


def test_parts_that_a_template_leaves_out_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    chat, spoken = [{"role": "system", "content": "s"}, *turns("a", "<think>b</think>c")], SAID + "<|END|>" + ASKS
    for old, new, part in (
        ("in messages", "in messages if m.role != 'system'", "what the system says"),
        ("m.content", "m.content.split('</think>')[-1]", "thoughts"),
        ("", "", ""),
    ):
        caplog.clear()
        warn_once.cache_clear()
        for _ in range(2):
            assert "c<|END|>" in learned(Public(spoken.replace(old, new), CONTROLS).tokenizer(), chat)[0]
        assert [part in record.message for record in caplog.records] == [True] * bool(part)
    first = CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    twice = [*turns("a"), {**CALLING[1], "tool_calls": CALLING[1]["tool_calls"] * 2}]
    for template, chat, part in (
        (SAID.replace("in messages", "in messages if m.role != 'tool'") + CALLS + ASKS, CALLED, "what the tool says"),
        (SAID + first + "<|END|>" + ASKS, twice, "tool calls"),
        (PUBLIC["phi"].template, CALLING, "tool calls"),
        (
            spoken.replace("{{ m.content }}", "{{ loop.last and m.content or 'gone' }}"),
            turns(*"abcd"),
            "what the assistant",
        ),
    ):
        with pytest.raises(UserError, match=f"leaves out {part}"):
            learned(Public(template, (*CONTROLS, *PUBLIC["phi"].controls)).tokenizer(), chat)


def test_a_template_that_writes_an_answer_twice_is_an_error() -> None:
    quoted = "{% if loop.index0 > 1 %}You said {{ messages[loop.index0 - 1].content }}: {% endif %}{{ m.content }}"
    template = PUBLIC["phi"].template.replace("{{ m.content }}", quoted)
    with pytest.raises(UserError, match="writes what the assistant says twice"):
        learned(PUBLIC["phi"].tokenizer(template), turns("a", "Yes", "b", "No"))


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_a_middle_piece_is_not_encoded_as_a_text_start(scheme: str) -> None:
    """Metaspace's own space before a text stands neither before an answer nor before a completion."""
    pieces = ["<unk>", "<s>", "</s>", "\u2581a", *"\u2581\nab[]INST/"]
    vocabulary = [(piece, -float(number)) for number, piece in enumerate(pieces)]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.add_special_tokens(["<s>", "</s>"])
    body = "{{ '[INST]' + m.content + '[/INST]' if m.role == 'user' else m.content + '</s>' }}"
    template = "{% for m in messages %}" + body + "{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=template)
    names = {name: tokenizer.convert_tokens_to_ids(name) for name in ("a", "</s>")}
    for ids, mask in (encode_example(Renderer(tokenizer), turns("b", "a")), encode_text(tokenizer, "b", "a")):
        assert [token for token, is_learned in zip(ids, mask, strict=True) if is_learned] == [*names.values()]
    assert tokenizer.tokenize("a") == ["\u2581a"]


def test_a_control_token_takes_white_space_between_pieces() -> None:
    """Phi-3's `<|end|>` takes the newline, as it does in a prompt that is tokenized at once."""
    tokenizer = PUBLIC["phi"].tokenizer()
    tokenizer.add_tokens([AddedToken("<|end|>", special=True, rstrip=True)])
    chat = turns("a", "b", "c", "d")
    assert encode_example(Renderer(tokenizer), chat)[0] == encode(tokenizer, render(Renderer(tokenizer), chat))


def test_every_template_has_the_same_date() -> None:
    prompt = render(Renderer(PUBLIC["smollm3"].tokenizer()), turns("a"))
    assert "Today Date: 26 July 2024" in prompt
    american = PUBLIC["phi"].tokenizer("{{ strftime_now('%-m/%-d/%y %-I %p') }}{{ messages }}")
    assert render(Renderer(american), turns("a")).startswith("7/26/24 12 AM")


def test_decoding_keeps_spaces_and_the_template_for_tools(tmp_path: Path) -> None:
    public = PUBLIC["qwen3"]
    tokenizer = public.tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.chat_template = {"default": public.template, "tool_use": "tools! " + public.template, "rag": "no"}
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.decode(loaded.encode("x != y , z")) == "x != y , z"
    assert loaded.clean_up_tokenization_spaces is False  # version 5.23 cleans nothing, 5.3 does
    with_tools = Renderer(loaded, args={"tools": TOOLS})
    assert render(with_tools, turns("a")).startswith("tools! <|im_start|>system")
    assert render(Renderer(loaded), turns("a")).startswith("<|im_start|>user")
    assert "rag" not in loaded.chat_template
