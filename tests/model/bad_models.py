"""Models' folders that are refused, by what spoils them, and the words that say so; and files that are none.

What would be run as code writes the file that `mark` names. `{path}` is the file that is spoilt, `{model}` the folder.
"""

import io
import json
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file


def mark(folder: Path) -> Path:
    """The file that shows that code was run: it lies beside the folder."""
    return folder.parent / "code-was-run"


class Bomb:
    """A pickle of it writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def archive(kind: str, folder: Path) -> bytes:
    """A file that holds something, as its kind has it."""
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as file:
            file.writestr("config.json", "{}")
    elif kind == "tar":
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            tar.addfile(tarfile.TarInfo("config.json"))
    elif kind == "npz":
        np.savez(buffer, weights=np.array([Bomb(mark(folder))], dtype=object))
    elif kind == "bin":
        buffer.write(pickle.dumps(Bomb(mark(folder))))
    else:
        buffer.write(b"GGUF\x03\x00\x00\x00" + bytes(100))
    return buffer.getvalue()


ARCHIVES = ("zip", "tar", "npz", "gguf", "bin", "safetensors", "jsonl")


# A model's folder: each function spoils one and returns what must be said of it

Spoil = Callable[[Path], str]


def edit(path: Path, **changes: Any) -> None:
    """Settings in a JSON file; those that are None are removed."""
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def with_header(file: Path, change: Callable[[dict[str, Any]], Any], length: int | None = None) -> None:
    header, data = header_of(file)
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def with_index(model: Path, places: Any) -> Path:
    """Its tensors in one shard, and an index that says `places` (of the names of the tensors) of them."""
    names = list(load_file(model / "model.safetensors"))
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places(names)}))
    return index


def without_weights(model: Path) -> str:
    (model / "model.safetensors").unlink()
    return f"{model}: has neither model.safetensors nor model.safetensors.index.json"


def without_config(model: Path) -> str:
    (model / "config.json").unlink()
    return f"{model / 'config.json'}: missing"


def with_pickled_weights_alone(model: Path) -> str:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(archive("bin", model))
    return f"{model}: only pickled weights (pytorch_model.bin), which are never opened"


def with_a_pickle_under_the_name_of_safetensors(model: Path) -> str:
    (model / "model.safetensors").write_bytes(archive("bin", model))
    return f"{model / 'model.safetensors'}: truncated or not a safetensors file"


def with_a_pickle_in_the_index(model: Path) -> str:
    (model / "pytorch_model.bin").write_bytes(archive("bin", model))
    index = with_index(model, lambda names: dict.fromkeys(names, "pytorch_model.bin"))
    return f"{index}: 'pytorch_model.bin' is no safetensors file, and others are never opened"


def with_an_index_that_leaves_the_folder(model: Path) -> str:
    index = with_index(model, lambda names: dict.fromkeys(names, "../whole/model.safetensors"))
    return f"{index}: '../whole/model.safetensors' is not the name of a file in this folder"


def with_an_index_of_absolute_paths(model: Path) -> str:
    index = with_index(model, lambda names: dict.fromkeys(names, "/etc/passwd"))
    return f"{index}: '/etc/passwd' is not the name of a file in this folder"


def with_an_index_of_numbers(model: Path) -> str:
    index = with_index(model, lambda names: dict.fromkeys(names, 1))
    return f"{index}: weight_map is missing or not a mapping of tensors to files"


def with_an_index_of_what_is_not_there(model: Path) -> str:
    index = with_index(
        model, lambda names: dict.fromkeys([*names, "no.such.tensor"], "model-00001-of-00001.safetensors")
    )
    return f"tensor no.such.tensor is missing; {index.name} says that it is there"


def with_a_damaged_index(model: Path) -> str:
    index = with_index(model, dict.fromkeys)
    index.write_text("[" * 100_000)
    return f"{index}: not readable as JSON"


def without_a_shard(model: Path) -> str:
    with_index(model, lambda names: dict.fromkeys(names, "model-00002-of-00002.safetensors"))
    return f"{model / 'model-00002-of-00002.safetensors'}: this shard is missing"


def with_a_link_to_something_else(model: Path) -> str:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("/etc/passwd")
    return f"{model / 'model.safetensors'}: truncated or not a safetensors file"


def truncated(model: Path) -> str:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return f"{path}: truncated or not a safetensors file"


def with_a_header_longer_than_the_file(model: Path) -> str:
    with_header(model / "model.safetensors", lambda header: None, length=2**40)
    return f"{model / 'model.safetensors'}: truncated or not a safetensors file"


def with_overlapping_tensors(model: Path) -> str:
    with_header(model / "model.safetensors", lambda header: header.update({"one.more": header["model.norm.weight"]}))
    return f"{model / 'model.safetensors'}: truncated or not a safetensors file"


def with_negative_offsets(model: Path) -> str:
    lie = {"dtype": "F32", "shape": [32], "data_offsets": [-128, 0]}
    with_header(model / "model.safetensors", lambda header: header.update({"model.norm.weight": lie}))
    return f"{model / 'model.safetensors'}: truncated or not a safetensors file"


def with_weights_of_another_dtype(model: Path) -> str:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int32)
    save_file(tensors, model / "model.safetensors")
    return "tensor model.norm.weight is stored as I32; only F32, BF16, F16 can be read"


def without_a_tensor(model: Path) -> str:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors")
    return "tensor model.norm.weight is missing"


def with_a_tensor_too_many(model: Path) -> str:
    tensors = load_file(model / "model.safetensors")
    save_file({**tensors, "lm_head.bias": np.ones(260, np.float32)}, model / "model.safetensors")
    return "tensor lm_head.bias is not part of this model"


def with_a_head_that_is_not_the_embedding(model: Path) -> str:
    tensors = load_file(model / "model.safetensors")
    head = tensors["model.embed_tokens.weight"] + np.float32(1)
    save_file({**tensors, "lm_head.weight": head}, model / "model.safetensors")
    return "tensor lm_head.weight is not the embedding, but config.json says tie_word_embeddings"


def with_a_tensor_of_another_shape(model: Path) -> str:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].copy()
    save_file(tensors, model / "model.safetensors")
    return "tensor model.norm.weight has shape [31]; by config.json it must be [32]"


def config_with(said: str, **changes: Any) -> Spoil:
    """A config.json with these settings; `said` follows its name."""

    def spoil(model: Path) -> str:
        edit(model / "config.json", **changes)
        return f"{model / 'config.json'}: {said}"

    spoil.__name__ = "config_with_" + "_".join(f"{key}_{value!r:.40}" for key, value in changes.items())
    return spoil


def file_with(name: str, content: bytes, said: str) -> Spoil:
    """A file of the folder with this content; `said` may name it as {path}, and the folder as {model}."""

    def spoil(model: Path) -> str:
        (model / name).write_bytes(content)
        return said.format(path=model / name, model=model)

    spoil.__name__ = f"{name}_with_{content[:20]!r}"
    return spoil


def with_the_config_a_pipe(model: Path) -> str:
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    return f"{model / 'config.json'}: missing"


MODELS: tuple[Spoil, ...] = (
    without_weights,
    without_config,
    with_pickled_weights_alone,
    with_a_pickle_under_the_name_of_safetensors,
    with_a_pickle_in_the_index,
    with_an_index_that_leaves_the_folder,
    with_an_index_of_absolute_paths,
    with_an_index_of_numbers,
    with_an_index_of_what_is_not_there,
    with_a_damaged_index,
    without_a_shard,
    with_a_link_to_something_else,
    truncated,
    with_a_header_longer_than_the_file,
    with_overlapping_tensors,
    with_negative_offsets,
    with_weights_of_another_dtype,
    without_a_tensor,
    with_a_tensor_too_many,
    with_a_head_that_is_not_the_embedding,
    with_a_tensor_of_another_shape,
    with_the_config_a_pipe,
    file_with("config.json", b"{'hidden_size': 32}", "{path}: not readable as JSON"),
    file_with("config.json", b"[" * 100_000, "{path}: not readable as JSON: "),
    file_with("config.json", b"\xff\xfe{}", "{path}: not readable as JSON: 'utf-8' codec can't decode"),
    file_with("config.json", b"[]", "{path}: expected a JSON object"),
    config_with("model_type is 'llama'; this model supports only 'qwen2'", model_type="llama"),
    config_with("hidden_size is missing", hidden_size=None),
    config_with("hidden_size must be a positive whole number up to 2147483647, not '32'", hidden_size="32"),
    config_with("hidden_size must be a positive whole number up to 2147483647, not -32", hidden_size=-32),
    config_with("num_attention_heads must be a positive whole number", num_attention_heads=0),
    config_with("hidden_size 32 is not divisible by num_attention_heads (5)", num_attention_heads=5, head_dim=None),
    config_with("num_hidden_layers must be a positive whole number up to 10000", num_hidden_layers=10**9),
    config_with("rope_scaling is {'type': 'yarn', 'factor': 4.0}", rope_scaling={"type": "yarn", "factor": 4.0}),
    config_with("rope_parameters must be a mapping", rope_parameters=[1]),
    config_with("rms_norm_eps must be a positive number", rms_norm_eps=float("nan")),
    config_with("layer_types must be a list, not 5", layer_types=5),
    config_with("tie_word_embeddings must be true or false, not 'yes'", tie_word_embeddings="yes"),
    config_with("quantization_config is {'bits': 4}", quantization_config={"bits": 4}),
    config_with("use_sliding_window is True", use_sliding_window=True),
)
