"""Tokenizers: the byte tokenizer is lossless, and the chat template decides which tokens are the assistant's."""

import json
import shutil
from pathlib import Path

import pytest
from runs import edit
from templates import PUBLIC
from test_examples import turns
from tiny import FIXTURES, TEACHER
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from mllm.config.model import MeshConfig, ModelConfig
from mllm.data.formats import pair_of
from mllm.data.tokenizing import encode_record
from mllm.errors import UserError
from mllm.model.examples import encode_example
from mllm.model.load import load_model
from mllm.model.tokenizer import (
    Renderer,
    bytes_tokenizer,
    check_fits,
    encode_prompt,
    load_tokenizer,
    save_tokenizer,
    stop_ids,
)
from mllm.model.weights import read_config, write_settings
from mllm.parallel.mesh import make_mesh

BYTES = bytes_tokenizer()
ENDOFTEXT, START, END, PAD = 256, 257, 258, 259
CHAT = turns("3+4=", "7", "a", "b")


def test_a_byte_tokenizer_reloads_beside_a_qwen2_config(tmp_path: Path) -> None:
    save_tokenizer(BYTES, tmp_path)
    by_transformers = AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    codes = [*range(0x3000), *range(0x3000, 0xD800, 1009), *range(0xE000, 0x110000, 1009)]  # none is a surrogate
    plain, controls = "".join(map(chr, codes)), "<|im_start|>hi x != y<|im_end|>"
    for loaded in (BYTES, by_transformers, load_tokenizer(str(tmp_path))):
        assert loaded.encode(plain) == list(plain.encode())
        assert loaded.encode(controls) == BYTES.encode(controls)
        assert [loaded.decode(loaded.encode(text)) for text in (plain, controls)] == [plain, controls]
        assert loaded.chat_template == BYTES.chat_template
        assert loaded.all_special_ids == BYTES.all_special_ids
        assert stop_ids(loaded) == (END,)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())  # names that transformers 4 also knows
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<|endoftext|>", "<|im_start|>"]
    assert "extra_special_tokens" not in settings


def test_only_control_tokens_that_nothing_writes_need_no_row() -> None:
    """Gemma 3's text models have no row for the token of images."""
    tokenizer = bytes_tokenizer()
    check_fits(tokenizer, 260)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    check_fits(tokenizer, 260)
    for use in ({"chat_template": f"<image_soft_token>{BYTES.chat_template}"}, {"eos_token": "<image_soft_token>"}):
        writing = bytes_tokenizer()
        for name, value in use.items():
            setattr(writing, name, value)
        writing.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
        with pytest.raises(UserError, match=r"model\.tokenizer: its token '<image_soft_token>' has id 260, but"):
            check_fits(writing, 260)
    tokenizer.add_tokens(["more"])
    with pytest.raises(UserError, match=r"its token 'more' has id 261, but the embedding has 260 rows"):
        check_fits(tokenizer, 260)


def test_template_variables_reach_prompts_and_examples() -> None:
    """`enable_thinking: false` makes Qwen3.5's template begin the answer with an empty thought."""
    tokenizer, thought = PUBLIC["qwen3.5"].tokenizer(), "<think>\n\n</think>\n\n"
    quiet = Renderer(tokenizer, args={"enable_thinking": False})
    prompt, opened = (encode_prompt(renderer, CHAT[:1]) for renderer in (quiet, Renderer(tokenizer)))
    assert tokenizer.decode(prompt) == tokenizer.decode(opened).removesuffix("<think>\n") + thought
    ids, learned = encode_example(quiet, CHAT[:2])
    assert learned.index(True) == len(prompt)  # the sampler never writes the thought, so it is not learned either
    assert ids[: len(prompt)] == prompt


def test_no_template_makes_a_prompt_bos_and_the_user_text() -> None:
    assert encode_prompt(Renderer(BYTES, "never"), CHAT[:1]) == [*b"3+4="]
    llama = bytes_tokenizer()
    llama.bos_token = "<|endoftext|>"
    begins = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", ENDOFTEXT)])
    llama.backend_tokenizer.post_processor = begins
    assert encode_prompt(Renderer(llama, "never"), CHAT[:1]) == [ENDOFTEXT, *b"3+4="]
    for messages in (CHAT[:3], [{"role": "system", "content": "Add."}, CHAT[0]]):
        with pytest.raises(UserError, match="never only one of the user, and its answer, can be texts"):
            encode_prompt(Renderer(BYTES, "never"), messages)


def test_a_model_without_a_template_takes_texts_and_no_chats(tmp_path: Path) -> None:
    model = ModelConfig(source=str(shutil.copytree(TEACHER["source"], tmp_path / "model")))
    (tmp_path / "model/chat_template.jinja").unlink()
    policy = load_model(model, make_mesh(MeshConfig(fsdp=1)), packed=False)
    assert policy.learned == "texts"
    with pytest.raises(UserError, match="it has no chat template"):
        encode_prompt(Renderer(policy.tokenizer, "always"), CHAT[:1])


@pytest.mark.parametrize(
    ("settings", "model_type", "begins"),
    [
        ({"add_bos_token": True}, "llama", True),
        ({"tokenizer_class": "GemmaTokenizer"}, None, True),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": None}, "llama", True),
        ({}, "gemma3_text", True),
        ({"tokenizer_class": "GemmaTokenizer", "add_bos_token": False}, "gemma3_text", False),
        ({}, "llama", False),  # as SmolLM2
        ({"add_bos_token": True, "bos_token": None}, "gemma3_text", False),
    ],
    ids=str,
)
def test_texts_begin_with_the_first_token_of_the_family(settings, model_type, begins, tmp_path):
    """Mirrors of Gemma 4 have a tokenizer.json that adds no such token. Learned texts and raw prompts begin alike."""
    tokenizer = bytes_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    edit(tmp_path / "tokenizer_config.json", **settings)
    loaded = load_tokenizer(str(tmp_path))
    first = [260] if begins else []
    renderer = Renderer(loaded, "never")
    assert encode_prompt(renderer, CHAT[:1]) == [*first, *b"3+4="]
    pair = {"prompt": "3+4=", "chosen": "7", "rejected": "8"}
    encoded = [encode_record(renderer, one)[0] for one in ({"text": "7"}, *pair_of(pair))]
    assert encoded == [[*first, *text, END] for text in (b"7", b"3+4=7", b"3+4=8")]


def test_a_first_token_only_in_the_template_is_warned_of(caplog) -> None:
    messages = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    literal, smollm2 = (PUBLIC["llama3"].tokenizer(template) for template in ("<|begin|>" + messages, messages))
    smollm2.bos_token = "<|im_start|>"
    for tokenizer in (PUBLIC["llama3"].tokenizer(), literal, smollm2, BYTES):
        for text in ("3+4=", "7"):
            encode_prompt(Renderer(tokenizer, "never"), [{"role": "user", "content": text}])
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert "its chat template writes <|begin|>, and texts do not begin with it" in record.getMessage()


def test_the_first_token_is_not_written_twice() -> None:
    gemma = PUBLIC["gemma3"].tokenizer()
    begins = [("<bos>", gemma.bos_token_id)]
    gemma.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=begins)
    ids, _ = encode_example(Renderer(gemma), CHAT)
    assert ids.count(gemma.bos_token_id) == 1
    with pytest.raises(UserError, match="template refuses them: roles must alternate"):
        encode_example(Renderer(gemma), [*CHAT[:2], {"role": "system", "content": "Add."}, *CHAT[2:]])


def test_stop_ids_are_gathered_without_duplicates(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, ENDOFTEXT]}))
    assert stop_ids(BYTES, tmp_path, stop=("\n", "two tokens")) == (END, ENDOFTEXT, ord("\n"))
    assert stop_ids(BYTES, tmp_path / "missing") == (END,)


def test_a_base_model_stops_at_the_turn_end_of_its_template() -> None:
    """A model without any such token is refused."""
    base = bytes_tokenizer()
    base.chat_template, base.eos_token = PUBLIC["qwen2.5"].template, "<|endoftext|>"
    assert stop_ids(base) == (ENDOFTEXT, END)
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))
    with pytest.raises(UserError, match="no end of sequence"):
        stop_ids(bare)


def test_exported_bos_and_eos_ids_match_the_tokenizer(tmp_path):
    """The class of the configuration has other defaults."""
    architecture = read_config(FIXTURES / "llama")
    for bos, ends, eos in ((3, (4,), 4), (None, (4, 7), [4, 7])):
        write_settings(tmp_path, architecture, "float32", ends, pad_id=5, bos_id=bos)
        config = AutoConfig.from_pretrained(tmp_path)
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (bos, eos, 5)
