"""A Qwen3.5 of texts and images: its texts' part is read and written under its names, and the rest is copied."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tiny import load_weights

from mllm.config.model import LoraConfig, MeshConfig
from mllm.errors import UserError
from mllm.model import peft, weights
from mllm.model.architecture import FULL, LINEAR
from mllm.model.decoder import Decoder
from mllm.model.layout import Layout
from mllm.model.lora import split_adapters
from mllm.model.original import Original
from mllm.model.presets import PRESETS
from mllm.parallel.mesh import make_mesh

FIXTURES = Path(__file__).parent.parent / "fixtures"
TEXTS = FIXTURES / "qwen3_5"
TRAINED = load_file(TEXTS / "model.safetensors")


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """The fixture as transformers and the hub name a model of texts and images; A_log is in float32 there."""
    folder = tmp_path / "whole"
    folder.mkdir()
    tensors = {name.replace("model.", "model.language_model."): x for name, x in TRAINED.items()}
    tensors = {name: x if "A_log" in name else x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
    tensors |= {"model.visual.patch_embed.proj.weight": np.ones((2, 3, 2, 4, 4), np.float32)}
    tensors |= {"mtp.layers.0.self_attn.k_norm.weight": np.ones(16, ml_dtypes.bfloat16)}
    save_file(tensors, folder / "model.safetensors")
    settings = json.loads((TEXTS / "config.json").read_text()) | {"dtype": "bfloat16"}
    config = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "dtype": "bfloat16"}
    config |= {"vision_config": {"depth": 1}, "image_token_id": 7, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config | {"text_config": settings}))
    (folder / "preprocessor_config.json").write_text('{"size": 3}')
    return folder


def test_the_texts_part_is_read_alone_and_one_line_says_what_is_left_out(whole: Path, capfd: pytest.CaptureFixture):
    assert weights.read_config(whole) == weights.read_config(TEXTS)
    found, expected = load_weights(whole), load_weights(TEXTS)
    assert f"{whole}: 2 tensors are not of the language model and are left out\n" in capfd.readouterr().err
    for leaf, same in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, same, rtol=2**-8)


@pytest.mark.parametrize("limit", [20_000, 10**9])
def test_an_export_is_the_folder_that_was_read_with_other_parameters(
    whole: Path, tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SHARD_BYTES", limit)
    params, out = jax.tree.map(lambda x: 2 * x, load_weights(whole)), tmp_path / "out"
    sizes, original = weights.read_config(whole), Original.open(whole)
    weights.save(out, sizes, params, stop_ids=[3], learned="texts", original=original)
    before = load_file(whole / "model.safetensors")
    after = {name: x for file in out.glob("*.safetensors") for name, x in load_file(file).items()}
    assert {name: (x.dtype, x.shape) for name, x in after.items()} == {n: (x.dtype, x.shape) for n, x in before.items()}
    for name, x in after.items():
        times = 2 if "language_model" in name or "lm_head" in name else 1
        np.testing.assert_array_equal(x.astype(np.float32), times * before[name].astype(np.float32))
    kept = json.loads((whole / "config.json").read_text())
    assert json.loads((out / "config.json").read_text()) == kept | {weights.LEARNED: "texts"}
    assert (out / "preprocessor_config.json").read_text() == '{"size": 3}'
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": [3]}
    assert weights.read_config(out) == sizes
    assert Original.open(TEXTS) is None


def test_adapters_of_all_products_are_written_under_the_names_that_were_read_and_read_under_both(
    whole: Path, tmp_path: Path
) -> None:
    sizes = weights.read_config(whole)
    lora, _ = peft.resolve(LoraConfig(rank=2, alpha=4.0), sizes)
    assert lora.targets == ("q", "k", "v", "o", "gate", "up", "down", "qkv", "z", "beta", "decay", "out")
    layout = Layout.of(make_mesh(MeshConfig()), sizes)
    shapes, _ = split_adapters(layout.abstract_parameters(nnx.state(Decoder.abstract(sizes, lora=lora))))
    adapters = jax.tree.map(lambda x: jnp.full(x.shape, 0.5), shapes)
    for place, original, prefix in (("own", None, "model."), ("as", Original.open(whole), "model.language_model.")):
        peft.save(tmp_path / place, sizes, lora, adapters, str(whole), original=original)
        names = load_file(tmp_path / place / peft.FILE).keys()
        modules = {name.split(".lora_")[0].rpartition(".")[2] for name in names}
        assert modules == set(json.loads((tmp_path / place / peft.CONFIG).read_text())["target_modules"])
        assert f"base_model.model.{prefix}layers.0.linear_attn.in_proj_qkv.lora_A.weight" in names
        assert f"base_model.model.{prefix}layers.2.self_attn.q_proj.lora_B.weight" in names
        assert all(name.startswith(f"base_model.model.{prefix}layers.") for name in names)
        assert set(peft.read_config(tmp_path / place).targets) == set(lora.targets)
        found = peft.load(tmp_path / place, shapes, sizes)
        assert jax.tree.all(jax.tree.map(lambda one, other: bool((one == other).all()), found, adapters))


def test_a_product_that_the_model_lacks_has_no_adapter() -> None:
    sizes = weights.read_config(FIXTURES / "qwen3")
    assert peft.resolve(LoraConfig(rank=2, alpha=4.0), sizes)[0].targets == ("q", "k", "v", "o", "gate", "up", "down")
    with pytest.raises(UserError, match=r"model\.lora\.targets: the model has no product qkv, but q, k, v, o, gate, "):
        peft.resolve(LoraConfig.model_validate({"rank": 2, "alpha": 4.0, "targets": ["in_proj_qkv"]}), sizes)


def test_published_sizes_have_three_delta_nets_before_each_full_layer_and_the_parameters_of_their_names() -> None:
    """Parameters of the texts' part: counted from the published sizes."""
    for name, layers, full, billions in (
        ("0.8B", 24, 6, 0.75),
        ("4B", 32, 8, 4.2),
        ("9B", 32, 8, 9.0),
        ("27B", 64, 16, 26.9),
    ):
        sizes = PRESETS[f"Qwen/Qwen3.5-{name}"]
        assert sizes.layer_types == (LINEAR, LINEAR, LINEAR, FULL) * (layers // 4)
        assert (sizes.period, len(sizes.layers_of("layers")), sizes.kind_of_layer) == (4, full, (0,) * full)
        count = sum(x.size for x in jax.tree.leaves(nnx.state(Decoder.abstract(sizes))))
        assert count / 1e9 == pytest.approx(billions, rel=0.02)
