"""The schedule, weight decay and its exceptions, clipping, and the updates of AdamW."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny import ARCHITECTURE

from mllm.config.model import LoraTarget, OptimizerConfig
from mllm.model.architecture import Architecture
from mllm.model.decoder import Decoder
from mllm.model.layout import LOGICAL_AXES, parameter_name
from mllm.model.lora import Lora
from mllm.train.optimizer import decays, make_optimizer, make_schedule


def config(**settings):
    return OptimizerConfig(**{"learning_rate": 0.1, **settings})


@pytest.mark.parametrize(("schedule", "middle"), [("constant", 0.1), ("linear", 0.06), ("cosine", 0.06)])
def test_the_rate_rises_over_the_warm_up_and_falls_to_its_final_fraction(schedule, middle):
    final = {} if schedule == "constant" else {"final_fraction": 0.2}
    rate = make_schedule(config(schedule=schedule, warmup_steps=4, **final), steps=24)
    np.testing.assert_allclose([rate(step) for step in range(4)], [0.025, 0.05, 0.075, 0.1], rtol=1e-6)
    assert rate(4) == pytest.approx(0.1)
    assert rate(14) == pytest.approx(middle)
    assert rate(24) == pytest.approx(0.1 if schedule == "constant" else 0.02)


def test_every_dim_has_a_logical_axis_and_weight_decay_applies_to_matrices_alone():
    applies = {}
    lora = Lora(rank=2, alpha=1.0, targets=get_args(LoraTarget))
    for family in ("qwen2", "qwen3"):  # together they have every parameter
        sizes = {**ARCHITECTURE, "model_type": family, "tie_word_embeddings": False}
        _, params = nnx.split(Decoder.abstract(Architecture.from_hf(sizes, "test"), lora=lora))
        assert all(
            leaf.ndim == len(LOGICAL_AXES[parameter_name(path)])
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        )
        applies |= {parameter_name(path): value for path, value in jax.tree_util.tree_leaves_with_path(decays(params))}
    assert set(applies) == set(LOGICAL_AXES)
    exceptions = {name for name, value in applies.items() if not value}
    assert exceptions == {name for name in LOGICAL_AXES if name.endswith(("norm", "bias"))}


def test_an_update_is_optax_s_with_weight_decay_and_the_schedule():
    params, gradients = {"w": jnp.arange(4.0)}, {"w": jnp.arange(4.0) - 1}
    ours = make_optimizer(config(weight_decay=0.3, max_grad_norm=None, b2=0.95, schedule="linear"), 10)
    theirs = optax.adamw(optax.linear_schedule(0.1, 0.0, 10), 0.9, 0.95, 1e-8, weight_decay=0.3)
    state, their_state = ours.init(params), theirs.init(params)
    for _ in range(2):
        update, state = ours.update(gradients, state, params)
        expected, their_state = theirs.update(gradients, their_state, params)
        np.testing.assert_array_equal(update["w"], expected["w"])


@pytest.mark.parametrize(("norm", "clipped"), [(1e9, 1.0), (1.5, 1.0), (0.5, 0.5)])
def test_gradients_are_clipped_by_their_global_norm(norm, clipped):
    """The first update does not depend on the gradients' scale, but the moments that it leaves do."""
    params = {"v": jnp.ones((2, 2)), "w": jnp.ones(12)}
    gradients = jax.tree.map(lambda leaf: jnp.full(leaf.shape, norm / 4), params)
    optimizer = make_optimizer(config(max_grad_norm=1.0), 10)
    _, state = optimizer.update(gradients, optimizer.init(params), params)
    share = 0.1  # of a gradient in the first moment
    np.testing.assert_allclose(optax.tree.norm(optax.tree.get(state, "mu")), share * clipped, rtol=1e-5)
