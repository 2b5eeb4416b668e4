"""Folders that are no model, or hold no tokenizer or chat template: how to spoil a whole one, and words of the line.

Code that a folder smuggles in would write the file `mark(folder)`.
"""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

Spoil = Callable[[Path], Any]
"""Spoils a folder that holds a whole model."""
WEIGHTS, INDEX, SHARD = "model.safetensors", "model.safetensors.index.json", "model-00001-of-00001.safetensors"
NORM, PICKLE, CONFIG = "model.norm.weight", "pytorch_model.bin", "config.json"
TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"


def mark(folder: Path) -> Path:
    """The file, beside the folder, that shows that code of the folder was run."""
    return folder.parent / "code-was-run"


class Bomb:
    """Loading a pickle of it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def edit(name: str, **changes: Any) -> Spoil:
    """Change settings in a JSON file; those that are None are removed."""

    def spoil(model: Path) -> None:
        settings = json.loads((model / name).read_text()) | changes
        (model / name).write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))

    return spoil


def file(name: str, content: bytes | str) -> Spoil:
    """Write a file; in a text, `{mark}` becomes the mark's path."""
    return lambda model: (model / name).write_bytes(
        content if isinstance(content, bytes) else content.replace("{mark}", str(mark(model))).encode()
    )


def without(pattern: str) -> Spoil:
    return lambda model: [path.unlink() for path in model.glob(pattern)]


def instead(name: str, make: Callable[[Path], Any]) -> Spoil:
    """Put something else in a file's place."""
    return each(without(name), lambda model: make(model / name))


def each(*spoils: Spoil) -> Spoil:
    return lambda model: [spoil(model) for spoil in spoils]


def tensors(change: Callable[[dict[str, np.ndarray]], Any]) -> Spoil:
    def spoil(model: Path) -> None:
        loaded = load_file(model / WEIGHTS)
        change(loaded)
        save_file(loaded, model / WEIGHTS)

    return spoil


def norm(change: Callable[[np.ndarray], Any]) -> Spoil:
    return tensors(lambda loaded: loaded.update({NORM: change(loaded[NORM])}))


def head(change: Callable[[np.ndarray], Any]) -> Spoil:
    return tensors(lambda loaded: loaded.update({"lm_head.weight": change(loaded["model.embed_tokens.weight"])}))


def last_row_changed(embed: np.ndarray) -> np.ndarray:
    return embed + np.eye(*embed.shape, 1 - len(embed)).astype(embed.dtype)


def one_more(name: str) -> Spoil:
    return tensors(lambda loaded: loaded.update({name: np.ones(260, np.float32)}))


def index(name: Any, *more: str) -> Spoil:
    """Name the weights as a shard, and write an index in which all tensors, and more, lie in the file `name`."""

    def spoil(model: Path) -> None:
        names = [*load_file(model / WEIGHTS), *more]
        (model / WEIGHTS).rename(model / SHARD)
        (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, name)}))

    return spoil


def pickled(name: str) -> Spoil:
    return lambda model: (model / name).write_bytes(pickle.dumps(Bomb(mark(model))))


def template(text: str) -> Spoil:
    return file("chat_template.jinja", text)


AUTO_MAP = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil"}
EVIL = "open('{mark}', 'w')\nclass Evil: pass\n"
OWN_CODE = each(
    without("tokenizer*"),
    file("vocab.json", "{}"),
    file("merges.txt", ""),
    file("evil.py", EVIL),
    file(SETTINGS, json.dumps({"tokenizer_class": "Evil", "auto_map": AUTO_MAP})),
    edit("config.json", auto_map=AUTO_MAP),
)
"""A folder that asks for its own code to be run, as folders do that want trust_remote_code."""
BROKEN = "model.safetensors: truncated or not a safetensors file"
NOT_HERE, MISSING = "is not the name of a file in this folder", "safetensors: this shard is missing"
OTHER_HEAD = "tensor lm_head.weight is not the embedding, but config.json says tie_word_embeddings"
NO_END = "generation_config.json: eos_token_id: -1 is no id of the tokenizer"
NO_TOKENIZER = "model.tokenizer: none can be read from {model} ("
REFUSES = "messages: the tokenizer's chat template refuses them: "
CHARACTER_MAP = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
EXPRESSION = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
EMPTY = {"type": "BPE", "vocab": {}, "merges": []}
NEVER_ENDS = "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"
LEAVES = "{{ cycler.__init__.__globals__.os.system('touch {mark}') }}"

MODELS: dict[str, tuple[Spoil, str]] = {
    "no weights": (without(WEIGHTS), "{model}: has neither model.safetensors nor model.safetensors.index.json"),
    "no configuration": (without(CONFIG), "config.json: missing"),
    "pickled weights": (each(without(WEIGHTS), pickled(PICKLE)), f"{{model}}: only pickled weights ({PICKLE})"),
    "a pickle named as safetensors": (pickled(WEIGHTS), BROKEN),
    "a pickle in the index": (each(pickled(PICKLE), index(PICKLE)), f"index.json: '{PICKLE}' is no safetensors file"),
    "an index that leaves the folder": (index(f"../whole/{WEIGHTS}"), f"index.json: '../whole/{WEIGHTS}' {NOT_HERE}"),
    "an index of absolute paths": (index("/etc/passwd"), f"index.json: '/etc/passwd' {NOT_HERE}"),
    "an index of missing tensors": (index(SHARD, "no.tensor"), f"tensor no.tensor is missing; {INDEX} says that it is"),
    "a damaged index": (each(index(SHARD), file(INDEX, "[" * 100_000)), "index.json: not readable as JSON"),
    "a missing shard": (index("b.safetensors"), f"/b.{MISSING}"),
    "a link to something else": (instead(WEIGHTS, lambda path: path.symlink_to("/etc/passwd")), BROKEN),
    "weights of another dtype": (norm(lambda x: x.astype(np.int32)), f"{NORM} is stored as I32; only F32, BF16, F16"),
    "a missing tensor": (tensors(lambda loaded: loaded.pop(NORM)), f"tensor {NORM} is missing"),
    "a tensor too many": (one_more("lm_head.bias"), "tensor lm_head.bias is not part of this model"),
    "a head whose last row is not the embedding's": (head(last_row_changed), OTHER_HEAD),
    "a head of another size": (head(lambda embed: embed[:-1].copy()), OTHER_HEAD),
    "a name of control characters": (one_more("\x1b[2J\n"), r"tensor \x1b[2J\n is not part of this model"),
    "another family's tensors": (edit(CONFIG, model_type="llama"), "0.self_attn.k_proj.bias is not part of this model"),
    "a tensor of another shape": (norm(lambda x: x[:-1].copy()), f"{NORM} has shape [31]; by config.json it must be"),
    "a configuration that is a pipe": (instead(CONFIG, os.mkfifo), "config.json: missing"),
    "a configuration in Python": (file(CONFIG, "{'hidden_size': 32}"), "config.json: not readable as JSON"),
    "no tokenizer": (without("tokenizer*"), f"{NO_TOKENIZER}it has no tokenizer.json"),
    "its own code as a tokenizer": (OWN_CODE, NO_TOKENIZER),
    "half a tokenizer": (file(TOKENIZER, '{"version": "1.0", "model": {'), NO_TOKENIZER),
    "a tokenizer of an unknown kind": (edit(TOKENIZER, model={"type": "Evil"}), NO_TOKENIZER),
    "a character map that is damaged": (edit(TOKENIZER, normalizer=CHARACTER_MAP), NO_TOKENIZER),
    "an expression that is damaged": (edit(TOKENIZER, pre_tokenizer=EXPRESSION), NO_TOKENIZER),
    "an empty vocabulary": (edit(TOKENIZER, model=EMPTY), "model.tokenizer: it can't write user: its vocabulary is"),
    "more tokens than the model": (
        file(SETTINGS, '{"eos_token": "<|one more|>"}'),
        "'<|one more|>' has id 260, but the",
    ),
    "an end of sequence that is no token": (file("generation_config.json", '{"eos_token_id": -1}'), NO_END),
    "no template": (without("chat_template.jinja"), "model.tokenizer: it has no chat template"),
    "a template that is damaged": (template("{% for"), REFUSES + "unexpected 'end of template'"),
    "a template that refuses": (template("{{ raise_exception('only tools') }}"), REFUSES + "only tools"),
    "a template that calls itself": (template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), REFUSES + "maximum"),
    "a template that never ends": (template(NEVER_ENDS), "its chat template took longer than 0.1 s"),
    "a template of a huge power": (template("{{ 9**9**9**9 }}"), "model.tokenizer: its chat template takes a power"),
    "a template of two megabytes": (template("x" * 2**21), "model.tokenizer: its chat template is no text of up to"),
    "a template that reads files": (template("{% include '/etc/passwd' %}"), REFUSES + "no loader for this"),
    "a template that leaves its sandbox": (template(LEAVES), REFUSES + "access to attribute '__init__' of 'type'"),
}
"""By what is wrong with the folder."""

WHOLE, NUMBER = "must be a positive whole number up to", "must be a positive number up to 1000000000000"
MODELS |= {
    f"the setting {changes}": (edit(CONFIG, **changes), f"config.json: {words}")
    for changes, words in (
        ({"model_type": "gemma3"}, "model_type is 'gemma3'; supported are qwen2, qwen3, llama"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias is True; this model supports only False"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor is missing"),
        ({"hidden_size": "32"}, f"hidden_size {WHOLE} 2147483647, not '32'"),
        ({"num_attention_heads": 5, "head_dim": None}, "hidden_size 32 is not divisible by num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not divisible by num_key_value_heads"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_theta": 10**400}}, f"rope_theta {NUMBER}"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_parameters.rope_type is 'yarn'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, not 'yes'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {{'bits': 4}}"),
    )
}
