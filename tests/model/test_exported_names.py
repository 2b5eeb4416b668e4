"""transformers 4 and 5 read what is written of a tokenizer and its ids, which no default of a class replaces."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from mllm.model.architecture import Architecture
from mllm.model.tokenizer import bytes_tokenizer, load_tokenizer, save_tokenizer
from mllm.model.weights import write_settings

LLAMA = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 260}
LLAMA |= {"num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}


VERSION_4 = Path(".venv/transformers-4")
"""Where `pip install --target .venv/transformers-4 'transformers<5'` puts the older one, beside that of the tests."""


@pytest.mark.skipif(not VERSION_4.exists(), reason=f"{VERSION_4} has no older transformers")
def test_version_4_reads_an_export_as_version_5_does(tmp_path):
    save_tokenizer(bytes_tokenizer(), tmp_path)
    write_settings(tmp_path, Architecture.from_hf(LLAMA, "config.json"), "float32", (4,), pad_id=5, bos_id=3)
    read = """import json, sys, transformers
folder, text = sys.argv[1:]
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
config = transformers.AutoConfig.from_pretrained(folder)
ids = tokenizer.encode(text)
facts = ids, tokenizer.decode(ids), tokenizer.all_special_ids
print(json.dumps([transformers.__version__, *facts, config.bos_token_id, config.eos_token_id, config.rope_theta]))"""
    text = "<|im_start|>hi x != y<|im_end|>"
    command, place = [sys.executable, "-c", read, str(tmp_path), text], {"PYTHONPATH": str(VERSION_4.absolute())}
    found = subprocess.run(command, env={**os.environ, **place}, capture_output=True, text=True, check=True)
    version, *facts = json.loads(found.stdout)
    assert version.startswith("4.")
    tokenizer = bytes_tokenizer()
    assert facts == [tokenizer.encode(text), text, tokenizer.all_special_ids, 3, 4, 10_000.0]


def test_a_tokenizer_has_no_name_that_is_version_5_s_alone(tmp_path):
    save_tokenizer(bytes_tokenizer(), tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<|endoftext|>", "<|im_start|>"]
    assert "extra_special_tokens" not in settings
    text = "<|im_start|>hi x != y<|im_end|>"
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))):
        assert loaded.encode(text) == bytes_tokenizer().encode(text)
        assert loaded.decode(loaded.encode(text)) == text
        assert loaded.all_special_ids == bytes_tokenizer().all_special_ids


def test_the_ids_that_begin_and_end_a_text_are_those_of_the_tokenizer_and_not_of_the_class(tmp_path):
    architecture = Architecture.from_hf(LLAMA, "config.json")
    for bos, ends, eos in ((3, (4,), 4), (None, (4, 7), [4, 7])):
        write_settings(tmp_path, architecture, "float32", ends, pad_id=5, bos_id=bos)
        config = AutoConfig.from_pretrained(tmp_path)
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (bos, eos, 5)
