"""Folders that are no model, with the message that refuses each; and files that are no folder.

In a message `{model}` is the folder, and `{config}`, `{weights}`, `{index}` are its files. Code that a folder smuggles
in would write the file `mark(folder)`.
"""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file


def mark(folder: Path) -> Path:
    """The file, beside the folder, that shows that code of the folder was run."""
    return folder.parent / "code-was-run"


class Bomb:
    """Loading a pickle of it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def archive(kind: str, folder: Path) -> bytes:
    """The content of a file of this kind."""
    if kind == "bin":
        return pickle.dumps(Bomb(mark(folder)))
    if kind == "safetensors":
        return b"\x02" + bytes(7) + b"{}"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("config.json", "{}")
    return buffer.getvalue()


ARCHIVES = ("zip", "bin", "safetensors")

Spoil = Callable[[Path], Any]
"""Spoils a folder that holds a whole model."""
WEIGHTS, INDEX, SHARD = "model.safetensors", "model.safetensors.index.json", "model-00001-of-00001.safetensors"


def edit(path: Path, **changes: Any) -> None:
    """Change settings in a JSON file; those that are None are removed."""
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


def config(**changes: Any) -> Spoil:
    return lambda model: edit(model / "config.json", **changes)


def file(name: str, content: bytes) -> Spoil:
    return lambda model: (model / name).write_bytes(content)


def no_file(name: str) -> Spoil:
    return lambda model: (model / name).unlink()


def tensors(change: Callable[[dict[str, np.ndarray]], Any]) -> Spoil:
    def spoil(model: Path) -> None:
        loaded = load_file(model / WEIGHTS)
        change(loaded)
        save_file(loaded, model / WEIGHTS)

    return spoil


def index(name: Any, *more: str) -> Spoil:
    """Name the weights as a shard, and write an index in which all tensors, and more, lie in the file `name`."""

    def spoil(model: Path) -> None:
        names = [*load_file(model / WEIGHTS), *more]
        (model / WEIGHTS).rename(model / SHARD)
        (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, name)}))

    return spoil


def header(text: str, length: int | None = None) -> Spoil:
    """Weights with this header, whose length they state wrongly on request."""
    stated = (len(text) if length is None else length).to_bytes(8, "little")
    return file(WEIGHTS, stated + text.encode() + bytes(128))


def head(change: Callable[[np.ndarray], Any]) -> Spoil:
    return tensors(lambda loaded: loaded.update({"lm_head.weight": change(loaded["model.embed_tokens.weight"])}))


def last_row_changed(embed: np.ndarray) -> np.ndarray:
    return embed + np.eye(*embed.shape, 1 - len(embed)).astype(embed.dtype)


def norm(change: Callable[[np.ndarray], Any]) -> Spoil:
    return tensors(lambda loaded: loaded.update({NORM: change(loaded[NORM])}))


def one_more(name: str) -> Spoil:
    return tensors(lambda loaded: loaded.update({name: np.ones(260, np.float32)}))


def both(first: Spoil, second: Spoil) -> Spoil:
    return lambda model: (first(model), second(model))


def pickled(name: str) -> Spoil:
    return lambda model: (model / name).write_bytes(archive("bin", model))


def link(model: Path) -> None:
    (model / WEIGHTS).unlink()
    (model / WEIGHTS).symlink_to("/etc/passwd")


def pipe(model: Path) -> None:
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")


def cut(model: Path) -> None:
    (model / WEIGHTS).write_bytes((model / WEIGHTS).read_bytes()[:-100])


NORM = "model.norm.weight"
BROKEN = "{weights}: truncated or not a safetensors file"
PICKLE = "pytorch_model.bin"
NOT_HERE = "is not the name of a file in this folder"
YARN = {"type": "yarn", "factor": 4.0}
HEADER = json.dumps({NORM: {"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}})
OTHER_HEAD = "tensor lm_head.weight is not the embedding, but config.json says tie_word_embeddings"

MODELS: dict[str, tuple[Spoil, str]] = {
    "no weights": (no_file(WEIGHTS), "{model}: has neither model.safetensors nor model.safetensors.index.json"),
    "no configuration": (no_file("config.json"), "{config}: missing"),
    "pickled weights alone": (both(no_file(WEIGHTS), pickled(PICKLE)), f"{{model}}: only pickled weights ({PICKLE})"),
    "a pickle named as safetensors": (pickled(WEIGHTS), BROKEN),
    "a pickle in the index": (both(pickled(PICKLE), index(PICKLE)), f"{{index}}: '{PICKLE}' is no safetensors file"),
    "an index that leaves the folder": (index(f"../whole/{WEIGHTS}"), f"{{index}}: '../whole/{WEIGHTS}' {NOT_HERE}"),
    "an index of absolute paths": (index("/etc/passwd"), f"{{index}}: '/etc/passwd' {NOT_HERE}"),
    "an index of numbers": (index(1), "{index}: weight_map is missing or not a mapping of tensors to files"),
    "an index of missing tensors": (index(SHARD, "no.tensor"), f"tensor no.tensor is missing; {INDEX} says that it is"),
    "a damaged index": (both(index(SHARD), file(INDEX, b"[" * 100_000)), "{index}: not readable as JSON"),
    "a missing shard": (index("b.safetensors"), "{model}/b.safetensors: this shard is missing"),
    "a shard of a name that is too long": (index("a" * 300 + ".safetensors"), "this shard is missing"),
    "a shard of a name with a NUL": (index("a\0b.safetensors"), "this shard is missing"),
    "a link to something else": (link, BROKEN),
    "weights that are cut off": (cut, BROKEN),
    "weights of another dtype": (
        norm(lambda x: x.astype(np.int32)),
        f"{NORM} is stored as I32; only F32, BF16, F16 can",
    ),
    "a missing tensor": (tensors(lambda loaded: loaded.pop(NORM)), f"tensor {NORM} is missing"),
    "a tensor too many": (one_more("lm_head.bias"), "tensor lm_head.bias is not part of this model"),
    "a head whose last row is not the embedding's": (head(last_row_changed), OTHER_HEAD),
    "a head of another size": (head(lambda embed: embed[:-1].copy()), OTHER_HEAD),
    "a head of another dtype": (head(lambda embed: embed.astype(np.float16)), OTHER_HEAD),
    "a head of another rank": (head(np.ravel), OTHER_HEAD),
    "a name of control characters": (one_more("\x1b[2J\n"), r"tensor \x1b[2J\n is not part of this model"),
    "a header that is longer than memory": (header("{}", 2**64 - 1), BROKEN),
    "a header of no text": (file(WEIGHTS, b"\x02" + bytes(7) + b"\xff\xff" + bytes(128)), BROKEN),
    "a header of deep nesting": (header("[" * 5000), BROKEN),
    "a header of an unknown dtype": (header(HEADER.replace("F32", "PICKLE")), BROKEN),
    "a header whose size overflows": (header(HEADER.replace("[32]", f"[{2**40}, {2**40}]")), BROKEN),
    "a header with a hole": (header(HEADER.replace("[0, 128]", "[64, 192]")), BROKEN),
    "a header that ends past the file": (header(HEADER.replace("[0, 128]", f"[0, {2**62}]")), BROKEN),
    "another family's tensors": (config(model_type="llama"), "0.self_attn.k_proj.bias is not part of this model"),
    "a tensor of another shape": (
        norm(lambda x: x[:-1].copy()),
        f"{NORM} has shape [31]; by config.json it must be [32]",
    ),
    "a configuration that is a pipe": (pipe, "{config}: missing"),
    "a configuration in Python": (file("config.json", b"{'hidden_size': 32}"), "{config}: not readable as JSON"),
    "a configuration of deep nesting": (file("config.json", b"[" * 100_000), "{config}: not readable as JSON: "),
    "a configuration in UTF-16": (file("config.json", b"\xff\xfe{}"), "{config}: not readable as JSON: 'utf-8' codec"),
    "a configuration that is a list": (file("config.json", b"[]"), "{config}: expected a JSON object"),
    **{
        f"the setting {changes}": (config(**changes), f"{{config}}: {message}")
        for changes, message in (
            ({"model_type": "gemma3"}, "model_type is 'gemma3'; supported are qwen2, qwen3, llama"),
            ({"model_type": ["llama"]}, "model_type is ['llama']; supported are"),
            ({"model_type": "llama", "mlp_bias": True}, "mlp_bias is True; this model supports only False"),
            ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor is missing"),
            ({"hidden_size": "32"}, "hidden_size must be a positive whole number up to 2147483647, not '32'"),
            ({"hidden_size": -32}, "hidden_size must be a positive whole number up to 2147483647, not -32"),
            ({"num_attention_heads": 0}, "num_attention_heads must be a positive whole number"),
            ({"num_attention_heads": 5, "head_dim": None}, "hidden_size 32 is not divisible by num_attention_heads"),
            ({"num_key_value_heads": 3}, "num_attention_heads 4 is not divisible by num_key_value_heads"),
            ({"head_dim": 7}, "head_dim 7 is odd"),
            ({"vocab_size": 2**31}, "vocab_size must be a positive whole number up to 2147483647, not 2147483648"),
            ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
            ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
            ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
            ({"rope_parameters": {"rope_theta": None}}, "rope_theta is missing"),
            ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta must be a positive number up to 1000000000000"),
            ({"rms_norm_eps": True}, "rms_norm_eps must be a positive number up to 1000000000000000, not True"),
            ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a positive whole number up to 10000"),
            ({"rope_scaling": YARN}, "rope_parameters.rope_type is 'yarn'"),
            ({"rope_parameters": [1]}, "rope_parameters must be a mapping"),
            ({"layer_types": 5}, "layer_types must be a list, not 5"),
            ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, not 'yes'"),
            ({"quantization_config": {"bits": 4}}, "quantization_config is {{'bits': 4}}"),
            ({"use_sliding_window": True}, "use_sliding_window is True"),
        )
    },
}
"""By what is wrong with the folder: how to spoil a whole one, and the message."""


def message(text: str, model: Path) -> str:
    """A message of the tables, with the names of the folder's files."""
    return text.format(model=model, config=model / "config.json", weights=model / WEIGHTS, index=model / INDEX)
