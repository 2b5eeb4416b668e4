"""The schedule, weight decay and its exceptions, clipping, the updates of AdamW, and updates of bfloat16 numbers.

bfloat16 numbers are updated without a bias, though an update is far below the distance of two of them.
"""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tiny import ARCHITECTURE, random_batch

from mllm.config.model import LoraTarget, MeshConfig, OptimizerConfig
from mllm.config.run import BatchShape
from mllm.model.architecture import Architecture
from mllm.model.decoder import Decoder
from mllm.model.layout import LOGICAL_AXES, parameter_name
from mllm.model.lora import Lora
from mllm.parallel.mesh import make_mesh
from mllm.training.optimizer import decays, make_optimizer, make_schedule, update_key, updated
from mllm.training.step import Forward, TrainState, make_train_step


def config(**settings):
    return OptimizerConfig(**{"learning_rate": 0.1, **settings})


@pytest.mark.parametrize(("schedule", "middle"), [("constant", 0.1), ("linear", 0.06), ("cosine", 0.06)])
def test_the_rate_warms_up_and_falls_to_its_final_fraction(schedule, middle):
    final = {} if schedule == "constant" else {"final_fraction": 0.2}
    rate = make_schedule(config(schedule=schedule, warmup_steps=4, **final), steps=24)
    np.testing.assert_allclose([rate(step) for step in range(4)], [0.025, 0.05, 0.075, 0.1], rtol=1e-6)
    assert rate(4) == pytest.approx(0.1)
    assert rate(14) == pytest.approx(middle)
    assert rate(24) == pytest.approx(0.1 if schedule == "constant" else 0.02)


def test_dims_have_logical_axes_and_only_matrices_decay():
    applies = {}
    lora = Lora(rank=2, alpha=1.0, targets=get_args(LoraTarget))
    for family in ("qwen2", "qwen3", "gemma3_text", "qwen3_5_text"):  # together they have every parameter
        sizes = {**ARCHITECTURE, "model_type": family, "tie_word_embeddings": False, "full_attention_interval": 2}
        _, params = nnx.split(Decoder.abstract(Architecture.from_hf(sizes, "test"), lora=lora))
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            assert leaf.ndim == len(LOGICAL_AXES[parameter_name(path)])
        applies |= {parameter_name(path): value for path, value in jax.tree_util.tree_leaves_with_path(decays(params))}
    assert set(applies) == set(LOGICAL_AXES)
    exceptions = {name for name, value in applies.items() if not value}
    assert exceptions == {name for name in LOGICAL_AXES if name.endswith(("norm", "bias", "decay_log"))}


@pytest.mark.parametrize("max_grad_norm", [None, 3.0])
def test_updates_match_optax_with_clipping_decay_and_schedule(max_grad_norm):
    params, gradients = {"v": jnp.arange(2.0), "w": jnp.arange(4.0)}, {"v": jnp.ones(2), "w": jnp.arange(4.0) - 1}
    options = {"weight_decay": 0.3, "max_grad_norm": max_grad_norm, "b2": 0.95, "eps": 1e-6}
    ours = make_optimizer(config(**options, schedule="linear"), 10)
    decay = optax.adamw(optax.linear_schedule(0.1, 0.0, 10), 0.9, 0.95, 1e-6, weight_decay=0.3)
    theirs = decay if max_grad_norm is None else optax.chain(optax.clip_by_global_norm(max_grad_norm), decay)
    state, their_state = ours.init(params), theirs.init(params)
    for scale in (1, 100):  # norms of 2.8 and 283: the second update shows how the first was clipped
        scaled = jax.tree.map(lambda leaf, scale=scale: scale * leaf, gradients)
        update, state = ours.update(scaled, state, params)
        expected, their_state = theirs.update(scaled, their_state, params)
        jax.tree.map(np.testing.assert_array_equal, update, expected)


# Updates of bfloat16 numbers


@pytest.mark.parametrize("options", [{}, {"moment_dtype": "bfloat16"}], ids=str)
def test_moments_fall_as_slowly_as_b2_says(options):
    """A fall by 0.1 % is less than half the distance of two bfloat16 numbers: rounded to nearest they would stay."""
    optimizer, zeros = make_optimizer(config(b2=0.999, **options), 1), {"w": jnp.zeros(20_000)}
    params = zeros if options else jax.tree.map(lambda x: x.astype(jnp.bfloat16), zeros)
    state = optax.tree.map_params(optimizer, lambda x: jnp.full_like(x, 3.0), optimizer.init(params))

    @jax.jit
    def fall(state):
        once = lambda t, state: updated(optimizer, zeros, params, state, update_key(0, t))[1]  # noqa: E731
        return jax.lax.fori_loop(0, 100, once, state)

    nu = optax.tree.get(fall(state), "nu")["w"]
    assert nu.dtype == jnp.bfloat16
    assert float(nu.astype(jnp.float32).mean()) == pytest.approx(3 * 0.999**100, rel=2e-3)


def test_the_bits_depend_on_the_name_and_not_on_the_mesh():
    values = jax.random.uniform(jax.random.key(0), (64, 48))
    optimizer = optax.identity()

    @jax.jit
    def round_both(values):
        params = {name: jnp.zeros(values.shape, jnp.bfloat16) for name in "ab"}
        return updated(optimizer, {"a": values, "b": values}, params, optimizer.init(params), update_key(0, 0))[0]

    rounded = round_both(values)
    assert np.mean(rounded["a"] != rounded["b"]) > 0.1
    mesh = make_mesh(MeshConfig(dp=2, fsdp=2, tp=2))
    sharded = jax.device_put(values, NamedSharding(mesh, PartitionSpec("fsdp", "tp")))
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(round_both(sharded)["a"], rounded["a"])


class Average(Forward):
    """In the place of model and head: the loss is the mean of the parameters."""

    def __init__(self):
        self.shape, self.mesh = BatchShape(length=10, micro=1, total=1, shards=1), make_mesh(MeshConfig())

    def loss(self, params, batch, teacher=None):
        return jnp.mean(params["w"][...].astype(jnp.float32)), batch.weights

    def metrics(self, batch, outputs):
        return {}


def test_each_step_and_seed_round_in_a_way_of_their_own():
    """The rounding is the same each time."""
    optimizer, batch = make_optimizer(OptimizerConfig(learning_rate=1e-4), 10), random_batch(1, 10)
    params = nnx.State({"w": nnx.Param(jnp.linspace(0.1, 1, 4096, dtype=jnp.bfloat16))})
    updates = [make_train_step(Average(), optimizer, lambda count: 1e-4, seed) for seed in (0, 1)]

    def after(seed, step):
        state = TrainState(jax.tree.map(jnp.copy, params), optimizer.init(params), jnp.int32(step))
        return np.asarray(updates[seed](state, batch)[0].params["w"][...], np.float32)

    one, same, *others = after(0, 0), after(0, 0), after(0, 1), after(1, 0)
    np.testing.assert_array_equal(one, same)
    for other in others:
        assert 0.001 < np.mean(one != other) < 0.5
