"""The model that a configuration asks for: where its parts come from, and that only the seed decides what is random."""

from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import ARCHITECTURE, config

from mllm.config.model import ModelConfig
from mllm.errors import UserError
from mllm.model.load import find_model, load_policy
from mllm.parallel.mesh import make_mesh

FIXTURE = Path(__file__).parent.parent / "fixtures" / "tied"


def policy_of(settings):
    return load_policy(settings, make_mesh(settings.mesh))


def leaves(params):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


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
    for got, expected in zip(leaves(again), leaves(first), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert not np.array_equal(other["embed"][...], first["embed"][...])


@pytest.mark.parametrize("section", [{"data": {"max_length": 49}}, {"rollout": {"max_prompt_length": 45}}], ids=str)
def test_rows_longer_than_the_models_positions_are_refused(section):
    architecture = {**ARCHITECTURE, "max_position_embeddings": 48}
    assert policy_of(config("sft", model={"architecture": architecture})).architecture.max_position_embeddings == 48
    with pytest.raises(UserError, match=r"49 tokens, but the model has max_position_embeddings 48"):
        policy_of(config("sft", model={"architecture": architecture}, **section))
