"""A folder of weights that is damaged, or not to be trusted, is refused in one line that names the file or tensor.

What a run says of such a folder, and that no code of it is run, is in tests/run/test_bad_input.py.
"""

import json
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


def test_a_tensor_that_is_not_in_the_shard_that_the_index_names_is_refused(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    edit(index, lambda index: index["weight_map"].update({"model.norm.weight": "model-00001-of-00003.safetensors"}))
    message = error_of(sharded)
    assert message.startswith(f"{sharded / 'model-00001-of-00003.safetensors'}: tensor model.norm.weight is missing")


def test_a_tied_head_that_copies_the_embedding_is_left_out(
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
def test_a_tied_head_that_differs_from_the_embedding_is_refused(change: Callable[[Any], Any], tied: Path) -> None:
    edit_tensors(tied, lambda tensors: tensors.update({"lm_head.weight": change(tensors["model.embed_tokens.weight"])}))
    message = error_of(tied)
    assert f"{tied / 'model.safetensors'}: tensor lm_head.weight is not the embedding" in message
    assert "tie_word_embeddings" in message


HEADER = {"model.norm.weight": {"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}}


WRONG_HEADERS = {
    "longer than memory": b"{}",
    "no text": b"\xff\xff",
    "nested": b"[" * 5000,
    "unknown dtype": json.dumps(HEADER).replace("F32", "PICKLE").encode(),
    "size that overflows": json.dumps(HEADER).replace("[32]", f"[{2**40}, {2**40}]").encode(),
    "hole": json.dumps(HEADER).replace("[0, 128]", "[64, 192]").encode(),
    "end past the file": json.dumps(HEADER).replace("[0, 128]", f"[0, {2**62}]").encode(),
}


@pytest.mark.parametrize("fault", WRONG_HEADERS)
def test_a_wrong_header_is_refused(fault: str, tied: Path) -> None:
    file, content = tied / "model.safetensors", WRONG_HEADERS[fault]
    length = 2**64 - 1 if fault == "longer than memory" else len(content)
    file.write_bytes(length.to_bytes(8, "little") + content + bytes(128))
    assert error_of(tied).startswith(f"{file}: truncated or not a safetensors file")


def test_control_characters_in_a_tensor_s_name_are_escaped(tied: Path) -> None:
    edit_tensors(tied, lambda tensors: tensors.update({"\x1b[2J\n": np.ones(32, np.float32)}))
    assert r"tensor \x1b[2J\n is not part of this model" in error_of(tied)


@pytest.mark.parametrize(
    "name", ["a" * 300 + ".safetensors", "a\0b.safetensors"], ids=["a name that is too long", "a NUL"]
)
def test_an_index_with_an_impossible_file_name_is_refused(name: str, sharded: Path) -> None:
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
