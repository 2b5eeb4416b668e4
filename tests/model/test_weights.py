"""Models are loaded and saved bit for bit, as transformers does, one parameter at a time, and never half a folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_model import FAMILIES
from test_peft import abstract_model
from tiny import FIXTURES, load_weights
from transformers import AutoConfig

from mllm.config.model import LoraConfig, MeshConfig, ModelConfig
from mllm.errors import UserError
from mllm.model import load, peft, weights
from mllm.model.architecture import FULL, KNOWN_KEYS, LINEAR, Architecture
from mllm.model.folder import replacing
from mllm.model.original import Original
from mllm.model.presets import PRESETS
from mllm.parallel.mesh import make_mesh


def assert_same_bits(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def tensors_in(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    tensors = [one for path in folder.glob("*.safetensors") for one in load_file(path).items()]
    return {name: (str(array.dtype), array.shape, array.tobytes()) for name, array in tensors}


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "untied_sharded", tmp_path / "sharded"))


def test_a_model_and_its_weights_are_of_one_revision(monkeypatch) -> None:
    requests = []

    def local_folder(source, *patterns, revision=None):
        requests.append((source, revision))
        return FIXTURES / "llama"

    monkeypatch.setattr(load, "local_folder", local_folder)
    monkeypatch.setattr(load, "check_fits", lambda *_: None)  # the bytes have more ids than the model has rows
    model = ModelConfig(source="a/b", revision="1" * 40, tokenizer="bytes")
    load.load_model(model, make_mesh(MeshConfig(fsdp=1)), packed=False).initial_params()
    assert requests == [("a/b", "1" * 40)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_saved_tensors_match_transformers_to_the_bit(name: str, tmp_path: Path) -> None:
    params, config = load_weights(FIXTURES / name), weights.read_config(FIXTURES / name)
    weights.save(tmp_path, config, params, dtype=jnp.bfloat16 if "bfloat16" in name else jnp.float32)
    assert tensors_in(tmp_path) == tensors_in(FIXTURES / name)
    assert weights.read_config(tmp_path) == config
    ours, published = (AutoConfig.from_pretrained(folder).to_dict() for folder in (tmp_path, FIXTURES / name))
    assert all(ours[key] == published[key] for key in KNOWN_KEYS & published.keys()), (ours, published)
    assert_same_bits(load_weights(tmp_path), params)


def test_exported_llama_positions_load_in_transformers_4() -> None:
    """As in the published config.json, `rope_scaling` and rope_theta stand in place of `rope_parameters`."""
    llama = PRESETS["meta-llama/Llama-3.2-1B"]
    exported = {key: value for key, value in llama.to_hf().items() if key != "rope_parameters"}
    published = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert exported["rope_scaling"] == {"rope_type": "llama3", **published, "original_max_position_embeddings": 8192}
    assert Architecture.from_hf(exported, "test") == llama


def test_the_text_part_of_a_multimodal_gemma_3_is_read(tmp_path: Path) -> None:
    texts = load_file(FIXTURES / "gemma3" / "model.safetensors")
    images = {"vision_tower.embeddings.patch_embedding.bias": np.zeros(3, np.float32)}
    save_file({f"language_model.{name}": x for name, x in texts.items()} | images, tmp_path / "model.safetensors")
    settings = json.loads((FIXTURES / "gemma3" / "config.json").read_text())
    config = {"model_type": "gemma3", "tie_word_embeddings": True, "text_config": settings, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert weights.read_config(tmp_path) == weights.read_config(FIXTURES / "gemma3")
    assert_same_bits(load_weights(tmp_path), load_weights(FIXTURES / "gemma3"))


PUBLISHED = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
PUBLISHED |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}


def test_the_sparse_gemma_3_4b_config_is_the_preset() -> None:
    """Five sliding layers stand before each full layer."""
    sizes = Architecture.from_hf({"model_type": "gemma3", "text_config": PUBLISHED}, "test")
    assert sizes == PRESETS["google/gemma-3-4b-it"] == Architecture.from_hf(sizes.to_hf(), "test")
    assert (sizes.vocab_size, sizes.num_attention_heads, sizes.num_key_value_heads) == (262_208, 8, 4)
    kinds = [(kind.window, kind.rope_theta, kind.rope_scaling) for kind in sizes.kinds]
    assert kinds == [(None, 1e6, 8.0), (1024, 1e4, None)]
    assert "".join(map(str, sizes.kind_of_layer)) == "111110" * 5 + "1111"


def test_shards_are_small_and_listed_by_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 10_000  # some tensors are larger, and get a file of their own
    config = weights.read_config(FIXTURES / "untied_sharded")
    params = load_weights(FIXTURES / "untied_sharded")
    monkeypatch.setattr(weights, "SHARD_BYTES", limit)
    weights.save(tmp_path, config, params, dtype=jnp.float32, stop_ids=(7, 9), pad_id=3)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert {*index["weight_map"].values()} == {path.name for path in tmp_path.glob("*.safetensors")}
    saved = [[tensor.nbytes for tensor in load_file(path).values()] for path in tmp_path.glob("*.safetensors")]
    assert len(saved) > 2
    assert all(sum(sizes) <= limit or len(sizes) == 1 for sizes in saved)
    assert sum(map(sum, saved)) == index["metadata"]["total_size"]
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [7, 9], "pad_token_id": 3}
    assert_same_bits(load_weights(tmp_path), params)


def test_a_tensor_with_a_number_that_is_not_finite_is_named(tmp_path: Path) -> None:
    folder, name = Path(shutil.copytree(FIXTURES / "grouped_bfloat16", tmp_path / "model")), "model.norm.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name][-1] = -np.inf
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=rf"model\.safetensors: tensor {name} has numbers that are not finite"):
        load_weights(folder)


@pytest.mark.parametrize(
    ("name", "other", "of"),
    [
        ("tied", "lm_head.weight", "model.embed_tokens.weight"),
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", "model.norm.weight"),  # in Llama 2
    ],
)
def test_a_copied_embedding_and_rotary_frequencies_are_left_out(name, other, of, tmp_path):
    folder = Path(shutil.copytree(FIXTURES / name, tmp_path / name))
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, other: tensors[of]}, folder / "model.safetensors")
    assert_same_bits(load_weights(folder), load_weights(FIXTURES / name))


def test_saving_replaces_an_export_and_refuses_foreign_files(sharded: Path) -> None:
    config, before = weights.read_config(FIXTURES / "tied"), bytes_in(sharded)
    with pytest.raises(UserError, match=r"expected\.npz: no export wrote this"):
        weights.save(sharded, config, load_weights(FIXTURES / "tied"))
    assert bytes_in(sharded) == before
    (sharded / "expected.npz").unlink()
    (sharded / "tokenizer.json").write_text("{}")
    also = lambda folder: (folder / "vocab.json").write_text("{}")  # noqa: E731
    weights.save(sharded, config, load_weights(FIXTURES / "tied"), also=also)
    assert set(bytes_in(sharded)) == {"config.json", "generation_config.json", "model.safetensors", "vocab.json"}
    assert list(sharded.parent.iterdir()) == [sharded]


@pytest.mark.parametrize("stage", ["files", "files, after a kill", "last rename"])
def test_an_interrupted_save_keeps_the_earlier_export(stage, sharded, monkeypatch):
    rename = Path.rename

    def first_rename_only(path: Path, target: Path) -> Path:
        if path.name == ".sharded.unfinished":
            raise KeyboardInterrupt
        return rename(path, target)

    (sharded / "expected.npz").unlink()
    before = bytes_in(sharded)
    if stage == "last rename":
        monkeypatch.setattr(Path, "rename", first_rename_only)
    elif "kill" in stage:
        sharded.rename(sharded.with_name(".sharded.previous"))

    def save() -> None:
        with replacing(sharded) as unfinished:
            (unfinished / "config.json").write_text("{}")
            if "files" in stage:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save()
    assert bytes_in(sharded) == before
    assert list(sharded.parent.iterdir()) == [sharded]


# A Qwen3.5 of texts and images: its texts' part is read and written under its names, and the rest is copied

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


@pytest.mark.slow
def test_the_text_part_is_read_and_the_rest_is_announced(whole: Path, capfd: pytest.CaptureFixture):
    assert weights.read_config(whole) == weights.read_config(TEXTS)
    loaded, expected = load_weights(whole), load_weights(TEXTS)
    assert f"{whole}: 2 tensors are not of the language model and are left out\n" in capfd.readouterr().err
    for leaf, same in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, same, rtol=2**-8)


@pytest.mark.slow
def test_an_export_is_the_source_folder_with_new_parameters(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "SHARD_BYTES", 20_000)
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
    weights.save(tmp_path / "chats", sizes, params, learned="chats", original=Original.open(out))
    assert json.loads((tmp_path / "chats/config.json").read_text()) == kept
    assert Original.open(TEXTS) is None


@pytest.mark.slow
def test_adapters_are_written_under_the_names_of_the_source(whole: Path, tmp_path: Path) -> None:
    sizes = weights.read_config(whole)
    lora, _ = peft.resolve(LoraConfig(rank=2, alpha=4.0), sizes)
    assert lora.targets == ("q", "k", "v", "o", "gate", "up", "down", "qkv", "z", "beta", "decay", "out")
    _, shapes, _ = abstract_model("qwen3_5", lora)
    adapters = jax.tree.map(lambda x: np.full(x.shape, 0.5, np.float32), shapes)
    for place, original, prefix in (("own", None, "model."), ("as", Original.open(whole), "model.language_model.")):
        peft.save(tmp_path / place, sizes, lora, adapters, str(whole), original=original)
        names = load_file(tmp_path / place / peft.FILE).keys()
        assert f"base_model.model.{prefix}layers.0.linear_attn.in_proj_qkv.lora_A.weight" in names
        assert all(name.startswith(f"base_model.model.{prefix}layers.") for name in names)
        assert set(peft.read_config(tmp_path / place).targets) == set(lora.targets)
        loaded = peft.load(tmp_path / place, shapes, sizes)
        assert jax.tree.all(jax.tree.map(np.array_equal, loaded, adapters))


def test_a_product_that_the_model_lacks_has_no_adapter() -> None:
    sizes = weights.read_config(FIXTURES / "qwen3")
    assert peft.resolve(LoraConfig(rank=2, alpha=4.0), sizes)[0].targets == ("q", "k", "v", "o", "gate", "up", "down")
    with pytest.raises(UserError, match=r"model\.lora\.targets: the model has no product qkv, but q, k, v, o, gate, "):
        peft.resolve(LoraConfig.model_validate({"rank": 2, "alpha": 4.0, "targets": ["in_proj_qkv"]}), sizes)


def test_qwen3_6_and_3_8_configs_give_the_sizes_of_qwen3_5() -> None:
    """The keys of both published 27B that Qwen3.5's has not, or has elsewhere."""
    preset = PRESETS["Qwen/Qwen3.5-27B"]
    assert preset.layer_types == (LINEAR, LINEAR, LINEAR, FULL) * 16
    rope = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_theta": 10_000_000, "rope_type": "default"}
    texts = preset.to_hf() | {"rope_parameters": rope | {"partial_rotary_factor": 0.25}, "output_gate_type": "swish"}
    texts |= {"full_attention_interval": 4, "mamba_ssm_dtype": "float32", "mtp_use_dedicated_embeddings": False}
    published = {"model_type": "qwen3_5", "language_model_only": False, "text_config": texts, "vision_config": {}}
    assert Architecture.from_hf(published, "config.json") == preset
