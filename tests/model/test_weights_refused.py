"""A model's folder that is not whole, or not to be trusted, is refused in one line that names the file or tensor."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_weights import load, sharded, tied

from mllm.errors import UserError
from mllm.model import weights

__all__ = ["sharded", "tied"]  # fixtures, taken by name


def edit(path: Path, change: Callable[[dict], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def error_of(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        load(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_missing_folder(tmp_path: Path) -> None:
    assert error_of(tmp_path / "nothing") == f"{tmp_path / 'nothing'}: no such folder"


def test_a_missing_config(tied: Path) -> None:
    (tied / "config.json").unlink()
    assert error_of(tied).startswith(f"{tied / 'config.json'}: missing")


def test_a_config_that_is_not_json(tied: Path) -> None:
    (tied / "config.json").write_text("{'hidden_size': 32")
    assert error_of(tied).startswith(f"{tied / 'config.json'}: not readable as JSON")


def test_a_config_of_another_architecture(tied: Path) -> None:
    edit(tied / "config.json", lambda config: config.update(model_type="llama"))
    assert error_of(tied) == f"{tied / 'config.json'}: model_type is 'llama'; this model supports only 'qwen2'"


def test_a_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    assert error_of(sharded).startswith(f"{sharded / 'model-00002-of-00003.safetensors'}: this shard is missing")


@pytest.mark.parametrize("kept", [0, 5, 100, -1], ids=["empty", "within the length", "within the header", "by a byte"])
def test_a_truncated_file(kept: int, tied: Path) -> None:
    file = tied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert error_of(tied).startswith(f"{file}: truncated or not a safetensors file")


def test_a_missing_tensor(tied: Path) -> None:
    edit_tensors(tied, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias"))
    assert "tensor model.layers.1.self_attn.k_proj.bias is missing" in error_of(tied)


def test_a_tensor_that_is_not_in_the_shard_that_the_index_names(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    edit(index, lambda index: index["weight_map"].update({"model.norm.weight": "model-00001-of-00003.safetensors"}))
    message = error_of(sharded)
    assert message.startswith(f"{sharded / 'model-00001-of-00003.safetensors'}: tensor model.norm.weight is missing")


def test_a_tensor_of_the_wrong_shape(tied: Path) -> None:
    edit_tensors(tied, lambda tensors: tensors.update({"model.norm.weight": np.ones(31, np.float32)}))
    assert error_of(tied) == (
        f"{tied / 'model.safetensors'}: tensor model.norm.weight has shape [31]; by config.json it must be [32]"
    )


def test_a_quantised_tensor(tied: Path) -> None:
    edit_tensors(tied, lambda tensors: tensors.update({"model.norm.weight": np.ones(32, np.int8)}))
    assert "tensor model.norm.weight is stored as I8" in error_of(tied)


@pytest.mark.parametrize("name", ["model.layers.2.input_layernorm.weight", "score.weight"])
def test_a_surplus_tensor(name: str, tied: Path) -> None:
    edit_tensors(tied, lambda tensors: tensors.update({name: np.ones(32, np.float32)}))
    assert f"tensor {name} is not part of this model" in error_of(tied)


def test_a_tied_head_that_is_the_embedding_once_more_is_left_out(
    tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "COMPARED", 200)  # seven rows at a time, of 96
    alone = load(tied)
    edit_tensors(tied, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    for one, other in zip(jax.tree.leaves(load(tied)), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "change",
    [
        lambda embed: embed + np.eye(*embed.shape, -95, dtype=np.float32),  # in its last row alone
        lambda embed: embed[:-1],
        lambda embed: embed.astype(np.float16),
        lambda embed: embed.astype(np.int8),
        lambda embed: embed.ravel(),
    ],
    ids=["another value", "another size", "another dtype", "quantised", "another rank"],
)
def test_a_tied_head_that_is_another_than_the_embedding(change: Callable[[Any], Any], tied: Path) -> None:
    edit_tensors(tied, lambda tensors: tensors.update({"lm_head.weight": change(tensors["model.embed_tokens.weight"])}))
    message = error_of(tied)
    assert f"{tied / 'model.safetensors'}: tensor lm_head.weight is not the embedding" in message
    assert "tie_word_embeddings" in message


def header(**changes: Any) -> dict[str, Any]:
    return {"model.norm.weight": {"dtype": "F32", "shape": [32], "data_offsets": [0, 128], **changes}}


@pytest.mark.parametrize(
    ("said", "length"),
    [
        (b"{}", 2**63),
        (b"{}", 2**64 - 1),
        (b"{}", 101_000_000),
        (b"{}", 1000),
        (b"\xff\xff", None),
        (b"[]", None),
        (b"[" * 5000, None),
        (header(dtype="PICKLE"), None),
        (header(shape=[-32]), None),
        (header(shape=[2**40, 2**40]), None),
        (header(shape=[33]), None),
        (header(data_offsets=[-128, 0]), None),
        (header(data_offsets=[128, 0]), None),
        (header(data_offsets=[64, 192]), None),
        (header(data_offsets=[0, 2**62]), None),
        ({**header(), "model.norm.bias": header()["model.norm.weight"]}, None),
    ],
    ids=[
        "longer than there are numbers", "longer than memory", "longer than any", "longer than the file", "no text",
        "a list", "nested", "an unknown dtype", "a negative size", "a size that overflows", "a size that lies",
        "an offset before the data", "an end before the start", "a hole", "an end past the file", "an overlap",
    ],
)  # fmt: skip
def test_a_header_that_lies(said: Any, length: int | None, tied: Path) -> None:
    file, text = tied / "model.safetensors", said if isinstance(said, bytes) else json.dumps(said).encode()
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(128))
    assert error_of(tied).startswith(f"{file}: truncated or not a safetensors file")


def test_a_name_that_a_terminal_would_obey_is_shown_harmless(tied: Path) -> None:
    edit_tensors(tied, lambda tensors: tensors.update({"\x1b[2J\n": np.ones(32, np.float32)}))
    assert r"tensor \x1b[2J\n is not part of this model" in error_of(tied)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pt", "consolidated.00.pth"])
def test_pickled_weights_are_named_and_never_opened(name: str, tied: Path) -> None:
    (tied / "model.safetensors").rename(tied / name)
    (tied / name).chmod(0)
    assert f"only pickled weights ({name}), which are never opened" in error_of(tied)


def test_a_folder_without_weights(tied: Path) -> None:
    (tied / "model.safetensors").unlink()
    assert error_of(tied).startswith(f"{tied}: has neither model.safetensors nor model.safetensors.index.json")


@pytest.mark.parametrize("place", ["../outside.safetensors", "/tmp/outside.safetensors", "sub/inside.safetensors"])
def test_an_index_that_reaches_out_of_the_folder(place: str, sharded: Path) -> None:
    shutil.copy(sharded / "model-00001-of-00003.safetensors", sharded.parent / "outside.safetensors")
    index = sharded / "model.safetensors.index.json"
    edit(index, lambda index: index["weight_map"].update({"model.norm.weight": place}))
    assert error_of(sharded) == f"{index}: {place!r} is not the name of a file in this folder"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-00001-of-00003.pt", "tokenizer.model", ".."])
def test_an_index_that_names_files_of_another_kind(name: str, sharded: Path) -> None:
    (sharded / "pytorch_model.bin").write_bytes((sharded / "model-00001-of-00003.safetensors").read_bytes())
    index = sharded / "model.safetensors.index.json"
    edit(index, lambda index: index["weight_map"].update({"model.norm.weight": name}))
    assert error_of(sharded) == f"{index}: {name!r} is no safetensors file, and others are never opened"


@pytest.mark.parametrize(
    "name", ["a" * 300 + ".safetensors", "a\0b.safetensors"], ids=["a name that is too long", "a NUL"]
)
def test_an_index_with_a_name_that_no_file_has(name: str, sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    edit(index, lambda index: index["weight_map"].update({"model.norm.weight": name}))
    assert "this shard is missing" in error_of(sharded)


def test_links_are_followed_because_the_hubs_cache_is_made_of_them(sharded: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in sharded.iterdir():
        (snapshot / path.name).symlink_to(path)
    for one, other in zip(jax.tree.leaves(load(snapshot)), jax.tree.leaves(load(sharded)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("target", ["/etc/passwd", "/dev/zero", "."])
def test_a_link_to_something_else_is_refused_and_nothing_of_it_is_shown(target: str, sharded: Path) -> None:
    file = sharded / "model-00001-of-00003.safetensors"
    file.unlink()
    file.symlink_to(target)
    message = error_of(sharded)
    assert message.startswith(f"{file}: ")
    assert "root" not in message.removeprefix(str(file))


def test_an_index_without_a_map(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text("{}")
    assert error_of(sharded).startswith(f"{index}: weight_map is missing")


# Where a model comes from


def test_a_local_folder_is_used_as_it_is(tied: Path) -> None:
    assert weights.fetch_folder(str(tied)) == tied


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf", "model.zip", "models/model.zip"])
def test_a_file_is_no_folder_and_no_hub_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(UserError, match=rf"{name}: is not a folder \(archives and single files are never opened\)"):
        weights.fetch_folder(name)


@pytest.mark.parametrize("source", ["/no/such/folder", "folder", "Qwen/Qwen2.5-0.0B", "a/b/c", "~nobody-here/model"])
def test_what_is_neither_a_folder_nor_to_be_had_from_the_hub_is_one_line_within_seconds(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    start = time.monotonic()
    with pytest.raises(UserError, match=r"model\.init=random") as error:
        weights.fetch_folder(source)
    assert time.monotonic() - start < 10
    assert str(error.value).startswith(f"{source}: no such folder")
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""
