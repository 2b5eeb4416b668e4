"""Folders that are no model, or hold no tokenizer or chat template: how to spoil a folder, and words of the line.

Code that a folder smuggles in would write a file into the current folder, where the tests see it.
"""

import json
import os
from functools import partial

import numpy as np
import runs
from safetensors.numpy import load_file, save_file

WEIGHTS, INDEX, SHARD = "model.safetensors", "model.safetensors.index.json", "model-00001-of-00001.safetensors"
NORM, PICKLE, CONFIG = "model.norm.weight", "pytorch_model.bin", "config.json"
TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"


# Each function gives a function that spoils the folder of a whole model.


def edit(name, **changes):
    return lambda model: runs.edit(model / name, **changes)


def file(name, text):
    return lambda model: (model / name).write_text(text)


def without(name):
    return lambda model: (model / name).unlink()


def each(*spoils):
    return lambda model: [spoil(model) for spoil in spoils]


def tensor(name, make, of=NORM):
    """Store as `name` what `make` makes of a tensor."""

    def spoil(model):
        tensors = load_file(model / WEIGHTS)
        save_file(tensors | {name: make(tensors[of])}, model / WEIGHTS)

    return spoil


def index(name, *more):
    """Name the weights as a shard, and write an index that has every tensor, and more, in the file `name`."""

    def spoil(model):
        names = [*load_file(model / WEIGHTS), *more]
        (model / WEIGHTS).rename(model / SHARD)
        (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, name)}))

    return spoil


template = partial(file, "chat_template.jinja")
pickled = partial(file, text="cos\nsystem\n(S'touch code-was-run'\ntR.")
"""Write a pickle; loading it runs a command."""
AUTO_MAP = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil"}
EVIL = "open('code-was-run', 'w')\nclass Evil: pass\n"
OWN_CODE = each(
    edit(CONFIG, auto_map=AUTO_MAP),
    edit(SETTINGS, auto_map=AUTO_MAP, tokenizer_class="Evil"),
    *(file(name, EVIL) for name in ("evil.py", "__init__.py", "conftest.py", "sitecustomize.py")),
    pickled(PICKLE),
)
"""The folder asks for its own code to be run, as folders do that want trust_remote_code."""
NO_VOCABULARY = each(without(TOKENIZER), file("vocab.json", "{}"), file("merges.txt", ""))
LAST_ROW_CHANGED = tensor("lm_head.weight", lambda x: np.concatenate([x[:-1], x[-1:] + 1]), "model.embed_tokens.weight")
OTHER_HEAD = "tensor lm_head.weight is not the embedding, but config.json says tie_word_embeddings"
NO_TOKENIZER = "model.tokenizer: none can be read from {model} ("
REFUSES = "messages: the tokenizer's chat template refuses them: "
LEAVES = "{{ cycler.__init__.__globals__.os.system('touch code-was-run') }}"

MODELS = {
    "no weights": (without(WEIGHTS), "{model}: has neither model.safetensors nor model.safetensors.index.json"),
    "a pickle named as safetensors": (pickled(WEIGHTS), "model.safetensors: truncated or not a safetensors file"),
    "an index with control characters": (index("\x1b[2J.safetensors"), r"'\x1b[2J.safetensors' is not the name of"),
    "a missing shard": (index("b.safetensors"), "/b.safetensors: this shard is missing"),
    "weights of another dtype": (tensor(NORM, np.int32), f"{NORM} is stored as I32; only F32, BF16, F16"),
    "a tensor of another shape": (tensor(NORM, np.diff), f"{NORM} has shape [63]; by config.json it must be"),
    "a missing tensor": (edit(CONFIG, num_hidden_layers=3), "is missing; config.json asks for it"),
    "a tensor too many, by a hostile name": (tensor("\x1b[2J\n", np.copy), r"tensor \x1b[2J\n is not part of this"),
    "a head with another last row than the embedding's": (LAST_ROW_CHANGED, OTHER_HEAD),
    "a configuration that is a pipe": (each(without(CONFIG), lambda x: os.mkfifo(x / CONFIG)), "config.json: missing"),
    "its own code as a tokenizer": (each(OWN_CODE, NO_VOCABULARY), f"{NO_TOKENIZER}it has no tokenizer.json"),
    "more tokens than the model": (edit(SETTINGS, eos_token="<|one more|>"), "'<|one more|>' has id 260, but the"),
    "a template that reads files": (template("{% include '/etc/passwd' %}"), REFUSES + "no loader for this"),
    "a template that leaves its sandbox": (template(LEAVES), REFUSES + "access to attribute '__init__' of 'type'"),
}
MODELS |= {
    f"the setting {changes}": (edit(CONFIG, **changes), f"config.json: {words}")
    for changes, words in (
        ({"model_type": "gemma2"}, "model_type is 'gemma2'; supported are qwen2, qwen3, qwen3_5_text"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias is True; this model supports only False"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor is missing"),
        ({"hidden_size": "32"}, "hidden_size must be a positive whole number up to 2147483647, not '32'"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'; this model supports only 'silu' or 'swish'"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 2]}, "no_rope_layers must be a list of 2, each 0 or 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_parameters.rope_type is 'yarn'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {{'bits': 4}}"),
    )
}
