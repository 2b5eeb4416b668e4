"""One table says which dimension lies along which mesh axis, and what can't be divided is refused by name."""

import jax
import numpy as np
import pytest

from mllm.batch import Batch
from mllm.config import MeshConfig
from mllm.errors import UserError
from mllm.mesh import RULES, check_divides, make_mesh, shard_batch, sharding
from mllm.model import LOGICAL_AXES


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(dp=2, fsdp=2, tp=2))


def test_every_dimension_of_every_parameter_is_in_the_table():
    assert {axis for axes in LOGICAL_AXES.values() for axis in axes} <= RULES.keys()


def test_no_parameter_uses_a_mesh_axis_twice():
    for name, axes in LOGICAL_AXES.items():
        used = [RULES[axis] for axis in axes if RULES[axis] is not None]
        assert len(set(used)) == len(used), name


def test_the_mesh_has_the_sizes_asked_for_and_takes_the_first_devices():
    mesh = make_mesh(MeshConfig(fsdp=2, tp=3))
    assert dict(mesh.shape) == {"dp": 1, "fsdp": 2, "tp": 3}
    assert list(mesh.devices.flat) == jax.devices()[:6]


def test_more_devices_than_there_are_is_an_error_that_counts_them():
    with pytest.raises(UserError, match=r"mesh: dp \* fsdp \* tp = 16, but there are 8 devices"):
        make_mesh(MeshConfig(dp=4, tp=4))


def test_a_layout_follows_the_table_and_none_is_never_sharded(mesh):
    assert sharding(mesh, ("vocab", "embed")).shard_shape((8, 8)) == (4, 4)
    assert sharding(mesh, ("batch", "time")).shard_shape((8, 8)) == (2, 8)
    assert sharding(mesh, (None, "layers")).shard_shape((8, 8)) == (8, 8)


def test_a_dimension_that_its_mesh_axis_does_not_divide_is_named(mesh):
    check_divides(mesh, "layers.k_weight", (3, 4, 6), ("layers", "kv_heads", "embed"))
    with pytest.raises(UserError, match=r"mesh.tp: 2 does not divide layers.k_weight's dimension kv_heads of 5"):
        check_divides(mesh, "layers.k_weight", (3, 5, 6), ("layers", "kv_heads", "embed"))


def test_a_batch_is_split_by_rows_and_absent_fields_stay_absent(mesh):
    numbers = np.arange(8 * 3).reshape(8, 3)
    batch = shard_batch(mesh, Batch(*[numbers] * 4, weights=numbers.astype(np.float32)))
    assert batch.advantages is None
    np.testing.assert_array_equal(batch.tokens, numbers)
    rows = {shard.device: shard.data[:, 0].tolist() for shard in batch.tokens.addressable_shards}
    grid = mesh.devices
    for dp in range(2):
        for fsdp in range(2):
            first = 2 * (2 * dp + fsdp)
            for device in grid[dp, fsdp]:
                assert rows[device] == numbers[first : first + 2, 0].tolist()


def test_several_processes_are_refused_rather_than_trained_wrongly(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match="2 processes"):
        make_mesh(MeshConfig())
