"""The model that a configuration asks for: its sizes, where its parts come from, and what only the seed decides.

What a config.json may not say: tests/run/bad_models.py.
"""

import math
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from tiny import ARCHITECTURE, config

from mllm.config.model import ModelConfig
from mllm.errors import UserError
from mllm.model.architecture import Architecture
from mllm.model.decoder import Decoder
from mllm.model.load import find_model, load_policy
from mllm.model.presets import PRESETS
from mllm.parallel.mesh import make_mesh

SMALL = {key: value for key, value in ARCHITECTURE.items() if key != "rope_theta"}
FIXTURE = Path(__file__).parent.parent / "fixtures" / "tied"


def policy_of(settings):
    return load_policy(settings, make_mesh(settings.mesh))


def test_a_random_model_may_take_its_sizes_from_a_folder_without_its_parameters():
    """tests/tools/test_tools.py loads what a folder holds."""
    model = ModelConfig(init="random", source=str(FIXTURE), tokenizer="bytes")
    folder, sizes = find_model(model)
    assert (folder, sizes.vocab_size) == (FIXTURE, 96)


def test_a_random_model_of_an_unknown_name_is_refused():
    with pytest.raises(UserError, match=r"model.source: Qwen/Qwen9 is neither a folder nor one of"):
        find_model(ModelConfig(init="random", source="Qwen/Qwen9"))


def test_the_seed_alone_decides_the_first_parameters_whatever_the_mesh():
    settings = config(), config(mesh={"dp": 2, "fsdp": 2, "tp": 2}), config(seed=1)
    first, again, other = (policy_of(one).initial_params() for one in settings)
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (again, first)))
    assert not np.array_equal(other["embed"][...], first["embed"][...])


@pytest.mark.parametrize("section", [{"data": {"max_length": 49}}, {"rollout": {"max_prompt_length": 45}}], ids=str)
def test_rows_longer_than_the_models_positions_are_refused(section):
    architecture = {**ARCHITECTURE, "max_position_embeddings": 48}
    assert policy_of(config("sft", model={"architecture": architecture})).architecture.max_position_embeddings == 48
    with pytest.raises(UserError, match=r"49 tokens, but the model has max_position_embeddings 48"):
        policy_of(config("sft", model={"architecture": architecture}, **section))


@pytest.mark.parametrize(
    "rope",
    [{"rope_theta": 500.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}],
    ids=["on top, as before transformers 5", "nested, as since"],
)
def test_the_rotary_base_is_found_in_both_places(rope: dict) -> None:
    assert Architecture.from_hf(SMALL | rope, "config.json").rope_theta == 500.0


@pytest.mark.parametrize(
    ("published", "parameters"),
    [
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-3B", 3_085_938_688),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("meta-llama/Llama-3.2-3B", 3_212_749_824),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
    ],
)
def test_presets_have_as_many_parameters_as_the_published_checkpoints(published: str, parameters: int) -> None:
    assert published in PRESETS
    for name in {published, f"{published}-Instruct"} & PRESETS.keys():
        leaves = jax.tree.leaves(nnx.state(Decoder.abstract(PRESETS[name])))
        assert sum(math.prod(leaf.shape) for leaf in leaves) == parameters
