"""What config.json may say (what is refused: tests/run/bad_models.py), and models as published."""

import math

import jax
import pytest
from flax import nnx
from tiny import ARCHITECTURE

from mllm.model.architecture import PRESETS, Architecture
from mllm.model.decoder import Decoder

SMALL = {key: value for key, value in ARCHITECTURE.items() if key != "rope_theta"}


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
