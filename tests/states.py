"""States of runs with small arrays, all different, and their checkpoints in a store."""

from contextlib import closing
from functools import cache

import jax
import jax.numpy as jnp

from mllm.config.model import MeshConfig, OptimizerConfig
from mllm.config.run import CheckpointConfig
from mllm.parallel.mesh import make_mesh, sharding
from mllm.run.checkpoint import Checkpoints
from mllm.run.state import RunState
from mllm.training.optimizer import make_optimizer
from mllm.training.step import abstract_state, init_state

POSITION = {"data": {"next_index": 3}, "num_tokens": 12}
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=0.1), 10)


@cache
def first_state(mesh_config=MeshConfig(fsdp=1)):  # noqa: B008
    """Parameters and optimizer of a model of two parameters; all arrays differ."""
    mesh = make_mesh(mesh_config)
    layout = {"embed": ("vocab", "embed"), "norm": ("embed",)}
    params = {
        name: jax.device_put(jnp.arange(64.0 ** len(axes)).reshape((64,) * len(axes)), sharding(mesh, axes))
        for name, axes in layout.items()
    }
    return jax.tree.map(lambda leaf: leaf + 1 if leaf.ndim else leaf, init_state(params, OPTIMIZER))


def make_state(step, mesh_config=MeshConfig(fsdp=1), value=None, **fields):  # noqa: B008
    """The state of a run after `step` updates; `value` (by default the step) makes its arrays different."""
    value = step if value is None else value
    return RunState(step, jax.tree.map(lambda leaf: leaf + value, first_state(mesh_config)), POSITION, **fields)


def like(mesh_config=MeshConfig(fsdp=1)):  # noqa: B008
    return abstract_state(first_state(mesh_config).params, OPTIMIZER)


def opened(store, **settings):
    return closing(Checkpoints(store, CheckpointConfig(**settings), frozen=None, known={}))


def save(store, *states, accuracies=None, **settings):
    """Save states, or the states of steps, with the accuracies of steps."""
    with opened(store, **settings) as checkpoints:
        for state in states:
            state = make_state(state) if isinstance(state, int) else state
            checkpoints.save(state, {"seed": 0}, {}, (accuracies or {}).get(state.step))
        checkpoints.wait()


def restored(store):
    with opened(store) as checkpoints:
        return checkpoints.restore(like())
