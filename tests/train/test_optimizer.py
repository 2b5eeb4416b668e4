"""Schedules reach their ends, decay spares norms and biases, and the chain clips."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mllm.config.schema import OptimizerConfig
from mllm.model.decoder import LOGICAL_AXES, Qwen2, Qwen2Config, parameter_name
from mllm.train.optimizer import decays, make_optimizer, make_schedule


def config(**settings):
    return OptimizerConfig(**{"learning_rate": 0.1, **settings})


@pytest.mark.parametrize(("schedule", "middle"), [("constant", 0.1), ("linear", 0.06), ("cosine", 0.06)])
def test_the_rate_rises_over_the_warm_up_and_falls_to_its_fraction(schedule, middle):
    final = {} if schedule == "constant" else {"final_fraction": 0.2}
    rate = make_schedule(config(schedule=schedule, warmup_steps=4, **final), steps=24)
    np.testing.assert_allclose([rate(step) for step in range(4)], [0.025, 0.05, 0.075, 0.1], rtol=1e-6)
    assert rate(4) == pytest.approx(0.1)
    assert rate(14) == pytest.approx(middle)
    assert rate(24) == pytest.approx(0.1 if schedule == "constant" else 0.02)


def test_decay_touches_matrices_and_spares_every_norm_and_bias():
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 9,
    }
    architecture = Qwen2Config.from_hf({**sizes, "num_key_value_heads": 1}, "test")
    _, params = nnx.split(Qwen2.abstract(architecture))
    decayed = {parameter_name(path): value for path, value in jax.tree_util.tree_leaves_with_path(decays(params))}
    assert set(decayed) == set(LOGICAL_AXES)
    spared = {name for name, value in decayed.items() if not value}
    assert spared == {name for name in LOGICAL_AXES if name.endswith(("norm", "bias"))}


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_the_chain_clips_by_the_global_norm(name):
    params = {"w": jnp.ones(4)}
    huge, unit = {"w": jnp.full(4, 1e9)}, {"w": jnp.full(4, 0.5)}
    updates = []
    for gradients in (huge, unit):
        optimizer = make_optimizer(config(name=name, max_grad_norm=1.0), 10)
        update, _ = optimizer.update(gradients, optimizer.init(params), params)
        updates.append(update["w"])
    np.testing.assert_allclose(updates[0], updates[1], rtol=1e-5)


def test_adamw_is_optax_adamw():
    params, gradients = {"w": jnp.arange(4.0)}, {"w": jnp.arange(4.0) - 1}
    ours = make_optimizer(config(weight_decay=0.3, max_grad_norm=None, b2=0.95), 10)
    theirs = optax.adamw(0.1, 0.9, 0.95, 1e-8, weight_decay=0.3)
    update, _ = ours.update(gradients, ours.init(params), params)
    expected, _ = theirs.update(gradients, theirs.init(params), params)
    np.testing.assert_array_equal(update["w"], expected["w"])
