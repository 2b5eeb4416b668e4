"""What was saved comes back to the bit; damage costs one checkpoint, never the run."""

import logging
import re
import shutil
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mllm import transfer
from mllm.checkpoint import BEST, Checkpoints
from mllm.config import CheckpointConfig, MeshConfig, OptimizerConfig
from mllm.errors import UserError
from mllm.mesh import make_mesh, sharding
from mllm.optimizer import make_optimizer
from mllm.train_step import abstract_state, init_state

POSITION = {"data": {"next_index": 3}, "num_tokens": 12}
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=0.1), 10)


def make_state(mesh_config=None, value=0.0):
    """A state whose arrays all differ, of a model of two parameters."""
    mesh = make_mesh(mesh_config or MeshConfig())
    layout = {"embed": ("vocab", "embed"), "norm": ("embed",)}
    params = {
        name: jax.device_put(jnp.arange(float(8 ** len(axes))).reshape((8,) * len(axes)) + value, sharding(mesh, axes))
        for name, axes in layout.items()
    }
    state = init_state(params, OPTIMIZER)
    return jax.tree.map(lambda leaf: leaf + 1 if leaf.ndim else leaf, state)


def like(mesh_config=None):
    return abstract_state(make_state(mesh_config).params, OPTIMIZER)


def save(folder, steps, metrics=None, **settings):
    with closing(Checkpoints(folder, CheckpointConfig(**settings))) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(value=step), POSITION, "seed: 0\n", (metrics or {}).get(step, {}))
        checkpoints.wait()


def assert_equal(state, other):
    for mine, yours in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(mine, yours)


def kept(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def test_a_state_comes_back_to_the_bit_with_its_position(tmp_path):
    save(tmp_path, [1, 2])
    with closing(Checkpoints(tmp_path, CheckpointConfig())) as checkpoints:
        restored = checkpoints.restore(like())
    assert restored.step == 2
    assert restored.position == POSITION
    assert_equal(restored.state, make_state(value=2))


def test_another_mesh_restores_it(tmp_path):
    save(tmp_path, [1])
    mesh = MeshConfig(fsdp=2, tp=4)
    with closing(Checkpoints(tmp_path, CheckpointConfig())) as checkpoints:
        restored = checkpoints.restore(like(mesh))
    assert_equal(restored.state, make_state(value=1))
    assert restored.state.params["embed"].sharding.shard_shape((8, 8)) == (2, 4)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(transfer, "SECONDS", 0)
    params = {"embed": jnp.arange(2.0**21).reshape(2**12, 2**9), "norm": jnp.ones(8)}
    params = jax.device_put(params, sharding(make_mesh(MeshConfig()), ()))
    state = init_state(params, OPTIMIZER)
    with closing(Checkpoints(tmp_path, CheckpointConfig())) as checkpoints:
        checkpoints.save(1, state, POSITION, "seed: 0\n", {})
        assert kept(tmp_path) == []
        for leaf in jax.tree.leaves(state):
            leaf.delete()  # as the next update does
        checkpoints.wait()
        assert kept(tmp_path) == [1]
        restored = checkpoints.restore(abstract_state(params, OPTIMIZER))
    np.testing.assert_array_equal(restored.state.params["embed"].ravel(), np.arange(2.0**21))
    bars = capsys.readouterr().err
    assert re.search(r"saving checkpoint 1: .*B/s\]", bars)
    assert re.search(r"checkpoint 1: 100%.* 25.2M/25.2M .*B/s\]", bars)


def test_an_empty_folder_restores_nothing(tmp_path):
    with closing(Checkpoints(tmp_path, CheckpointConfig())) as checkpoints:
        assert checkpoints.restore(like()) is None


def test_the_newest_are_kept_and_the_best_beside_them(tmp_path):
    scores = {step: {BEST: score} for step, score in {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.3, 5: 0.4}.items()}
    save(tmp_path / "newest", range(1, 6), scores, keep=2)
    save(tmp_path / "best", range(1, 6), scores, keep=2, keep_best=True)
    assert kept(tmp_path / "newest") == [4, 5]
    assert kept(tmp_path / "best") == [2, 4, 5]


def damage_by_deleting_arrays(folder):
    shutil.rmtree(folder / "params")


def damage_by_truncating(folder):
    for path in (folder / "params").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_by_deleting_the_position(folder):
    shutil.rmtree(folder / "position")


@pytest.mark.parametrize("damage", [damage_by_deleting_arrays, damage_by_truncating, damage_by_deleting_the_position])
def test_a_damaged_newest_checkpoint_is_put_aside_and_the_one_before_taken(tmp_path, caplog, damage):
    save(tmp_path, [1, 2])
    damage(tmp_path / "2")
    with caplog.at_level(logging.WARNING), closing(Checkpoints(tmp_path, CheckpointConfig())) as checkpoints:
        restored = checkpoints.restore(like())
        assert_equal(restored.state, make_state(value=1))
        checkpoints.save(2, make_state(value=7), POSITION, "", {})
        checkpoints.wait()
        assert_equal(checkpoints.restore(like()).state, make_state(value=7))
    assert restored.step == 1
    assert "checkpoint 2 can't be read" in caplog.text
    assert (tmp_path / "damaged_2").is_dir()


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew_by_itself(tmp_path):
    save(tmp_path, [1])
    damage_by_deleting_arrays(tmp_path / "1")
    for _ in range(2):  # nor when it is asked again
        with (
            closing(Checkpoints(tmp_path, CheckpointConfig())) as checkpoints,
            pytest.raises(UserError, match="none of its 1 checkpoints can be read"),
        ):
            checkpoints.restore(like())
        assert kept(tmp_path) == [1]


def test_parameters_are_read_without_the_optimizer(tmp_path):
    save(tmp_path, [1, 2])
    shutil.rmtree(tmp_path / "1" / "optimizer")
    with closing(Checkpoints(tmp_path, CheckpointConfig(), read_only=True)) as checkpoints:
        assert checkpoints.restore_params(like().params, None)[0] == 2
        step, params = checkpoints.restore_params(like().params, 1)
        with pytest.raises(UserError, match=r"no checkpoint 3; there are \[1, 2\]"):
            checkpoints.restore_params(like().params, 3)
    assert step == 1
    assert_equal(params, make_state(value=1).params)
