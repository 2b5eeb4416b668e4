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


@pytest.mark.parametrize("max_grad_norm", [None, 1.0, 3.0])
def test_updates_are_optax_s_with_clipping_weight_decay_and_the_schedule(max_grad_norm):
    params, gradients = {"v": jnp.arange(2.0), "w": jnp.arange(4.0)}, {"v": jnp.ones(2), "w": jnp.arange(4.0) - 1}
    ours = make_optimizer(config(weight_decay=0.3, max_grad_norm=max_grad_norm, b2=0.95, schedule="linear"), 10)
    decay = optax.adamw(optax.linear_schedule(0.1, 0.0, 10), 0.9, 0.95, 1e-8, weight_decay=0.3)
    theirs = decay if max_grad_norm is None else optax.chain(optax.clip_by_global_norm(max_grad_norm), decay)
    state, their_state = ours.init(params), theirs.init(params)
    for scale in (1, 100):  # norms of 2.8 and 283: the second update shows how the first was clipped
        scaled = jax.tree.map(lambda leaf, scale=scale: scale * leaf, gradients)
        update, state = ours.update(scaled, state, params)
        expected, their_state = theirs.update(scaled, their_state, params)
        jax.tree.map(np.testing.assert_array_equal, update, expected)
