"""Adapters in PEFT's format: peft's adapters compute the same here, exports are written alike, others are refused.

The adapters in tests/fixtures (peft, peft_gemma3, peft_qwen3_5) were written by peft.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from runs import edit
from safetensors.numpy import load_file, save_file
from tiny import FIXTURES, logits

from mllm.config.model import LoraConfig, LoraTarget, MeshConfig, ModelConfig
from mllm.errors import UserError
from mllm.model import peft, weights
from mllm.model.decoder import Decoder
from mllm.model.layout import Layout, Params
from mllm.model.load import load_model
from mllm.model.lora import Lora, split_adapters
from mllm.parallel.mesh import make_mesh

PEFT, BASE = FIXTURES / "peft", "untied_sharded"
SIZES = weights.read_config(FIXTURES / BASE)
ALL: tuple[LoraTarget, ...] = ("q", "k", "v", "o", "gate", "up", "down", "head")
DELTA: tuple[LoraTarget, ...] = (*ALL[:-1], "qkv", "z", "beta", "decay", "out")


def abstract_model(base: str, lora: Lora, **mesh: int) -> tuple[nnx.GraphDef, Params, Params]:
    """The graph of a fixture with adapters, and the shapes of its adapters and of its frozen parameters."""
    sizes = weights.read_config(FIXTURES / base)
    graphdef, params = nnx.split(Decoder.abstract(sizes, dtype=jnp.float32, lora=lora))
    layout = Layout.of(make_mesh(MeshConfig(**{"fsdp": 1, **mesh})), sizes)
    return graphdef, *split_adapters(layout.abstract_parameters(params))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "targets"),
    [("peft", BASE, ALL), ("peft_gemma3", "gemma3", ALL[:-1]), ("peft_qwen3_5", "qwen3_5", DELTA)],
)
def test_peft_adapters_give_peft_logits_on_four_devices(name, model, targets):
    lora, folder = peft.resolve(LoraConfig(source=str(FIXTURES / name)), sizes := weights.read_config(FIXTURES / model))
    assert (lora, folder) == (Lora(rank=3, alpha=6.0, targets=targets), FIXTURES / name)
    graphdef, adapters, frozen = abstract_model(model, lora, fsdp=2, tp=2)
    stored = weights.load(FIXTURES / model, frozen, sizes)
    whole = nnx.merge_state(stored, peft.load(folder, adapters, sizes))
    expected, base = np.load(folder / "expected.npz")["logits"], np.load(FIXTURES / model / "expected.npz")
    assert np.abs(expected - base["logits"]).max() > 1
    result = logits(graphdef, whole, base["tokens"], base["positions"])
    np.testing.assert_allclose(result, expected, atol=1e-4, rtol=0)


def test_adapters_are_written_in_peft_s_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SHARD_BYTES", 1)  # however large, they are one file
    lora = peft.read_config(PEFT)
    peft.save(tmp_path / "adapter", SIZES, lora, peft.load(PEFT, abstract_model(BASE, lora)[1], SIZES), BASE)
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [peft.CONFIG, peft.FILE]
    ours, theirs = (load_file(folder / peft.FILE) for folder in (tmp_path / "adapter", PEFT))
    del theirs["base_model.model.lm_head.base_layer.weight"]
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == np.float32
        np.testing.assert_array_equal(tensor, theirs[name])
    written, theirs = (json.loads((folder / peft.CONFIG).read_text()) for folder in (tmp_path / "adapter", PEFT))
    for one in (written, theirs):
        one["target_modules"].sort()
    assert written.items() <= theirs.items()
    for rslora in (False, True):
        peft.save(tmp_path / "adapter", SIZES, replace(lora, rslora=rslora), nnx.State({}), BASE)
        assert json.loads((tmp_path / "adapter" / peft.CONFIG).read_text())["use_rslora"] is rslora


def test_adapters_say_that_they_have_learned_texts(tmp_path: Path) -> None:
    taught = tmp_path / "adapter"
    peft.save(taught, SIZES, peft.read_config(PEFT), nnx.State({}), BASE, "texts")
    for source, learned in ((PEFT, "chats"), (taught, "texts")):
        settings = {"source": str(FIXTURES / "tiny_sft"), "tokenizer": "bytes", "lora": {"source": str(source)}}
        model = ModelConfig.model_validate(settings)
        assert load_model(model, make_mesh(MeshConfig(fsdp=1)), packed=False).learned == learned


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("lora_alpha", None),
        ("lora_alpha", float("inf")),
        ("target_modules", ["q_proj", "embed_tokens"]),
        ("use_dora", True),
        ("a_field_of_a_later_peft", 0.5),
    ],
)
def test_unsupported_adapter_settings_are_refused_by_field(field: str, value: Any, tmp_path: Path) -> None:
    edit(Path(shutil.copy(PEFT / peft.CONFIG, tmp_path)), **{field: value})
    with pytest.raises(UserError, match=rf"adapter_config.json: {field} is .*; supported is only "):
        peft.read_config(tmp_path)


def test_settings_must_agree_with_those_of_the_lora_source() -> None:
    same = LoraConfig(source=str(PEFT), rank=3, alpha=6, rslora=False, targets=ALL[::-1])
    assert peft.resolve(same, SIZES)[1] == PEFT
    for name, value in {"rank": 4, "rslora": True, "targets": ("q", "v")}.items():
        with pytest.raises(UserError, match=f"model.lora.{name}: the adapters of .* have .*, not .*: leave it"):
            peft.resolve(LoraConfig.model_validate({"source": str(PEFT), name: value}), SIZES)


def test_missing_and_pickled_adapters_are_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(PEFT, tmp_path / "adapter"))
    abstract = abstract_model(BASE, peft.read_config(PEFT))[1]
    tensors, name = load_file(PEFT / peft.FILE), "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    del tensors[name]
    save_file(tensors, folder / peft.FILE)
    with pytest.raises(UserError, match=f"tensor {name} is missing; adapter_config.json and the model asks"):
        peft.load(folder, abstract, SIZES)
    (folder / peft.FILE).rename(folder / "adapter_model.bin")
    with pytest.raises(UserError, match=r"adapter_model\.safetensors: missing; other files, as adapter_model\.bin"):
        peft.load(folder, abstract, SIZES)
