"""A restore reads each byte of a checkpoint once over all processes, and holds little beside what it gives."""

import json
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore
from runs import join_group, outputs, start_two

from mllm.config.model import MeshConfig, OptimizerConfig
from mllm.config.schema import CheckpointConfig
from mllm.parallel import watch
from mllm.parallel.mesh import make_mesh, sharding
from mllm.run.checkpoint import Checkpoints
from mllm.run.state import RunState
from mllm.store.arrays import read_arrays
from mllm.store.run_store import RunStore
from mllm.train.optimizer import make_optimizer
from mllm.train.step import abstract_state, init_state

MIB = 2**20
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=0.1), 10)
AXES = {"embed": ("vocab", "embed"), "layers": ("layers", "embed", "mlp"), "norm": ("embed",)}
SHAPES = {"embed": (3 * 2**13, 1024), "layers": (3, 1024, 1200), "norm": (1024,)}
"""110 MiB in float32, three times with the optimizer's moments."""
MESHES = MeshConfig(dp=2, fsdp=2, tp=2), MeshConfig(fsdp=8)
"""Where two processes have copies of everything, and where they have none."""


def params(mesh_config):
    mesh = make_mesh(mesh_config)
    rng = np.random.default_rng(0)
    return {
        name: jax.device_put(rng.random(shape, np.float32), sharding(mesh, AXES[name]))
        for name, shape in SHAPES.items()
    }


def memory(name):
    """A line of /proc/self/status, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def bytes_read():
    counts = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for count in counts for value in count["values"])


def restore_and_measure(run_dir):
    """In each of two processes: what restores on meshes read and hold, as a line of JSON."""
    join_group()
    measured = []
    for mesh_config in MESHES:
        expected = params(mesh_config)
        like = abstract_state(expected, OPTIMIZER)
        checkpoints = Checkpoints(RunStore(run_dir), CheckpointConfig())
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        memory_before, read_before = memory("VmRSS"), bytes_read()
        state = checkpoints.restore(like)
        held = memory("VmHWM") - memory_before
        read = bytes_read() - read_before
        shards = 0
        for leaf in jax.tree.leaves(state.train):
            shards += sum({str(shard.index): shard.data.nbytes for shard in leaf.addressable_shards}.values())
        measured.append({"read": read, "above the shards": held - shards})
        for name, leaf in expected.items():
            for mine, found in zip(leaf.addressable_shards, state.train.params[name].addressable_shards, strict=True):
                np.testing.assert_array_equal(mine.data, found.data)
        del expected, state, leaf, mine, found
    print(json.dumps(measured), flush=True)
    watch.watch.finish(None)


def save(run_dir):
    """Save a state as eight devices of one process have it; returns its bytes."""
    train = init_state(params(MeshConfig(fsdp=2, tp=4)), OPTIMIZER)
    with closing(Checkpoints(RunStore(run_dir), CheckpointConfig())) as checkpoints:
        checkpoints.save(RunState(1, train, {}), "seed: 0\n")
    return sum(leaf.nbytes for leaf in jax.tree.leaves(train))


@pytest.mark.slow
def test_two_processes_read_each_byte_once_and_hold_little_beside_their_shards(tmp_path):
    stored = save(str(tmp_path / "run"))
    command = f"import test_chunks; test_chunks.restore_and_measure({str(tmp_path / 'run')!r})"
    said = outputs(start_two(["-c", command]))
    for one, other in zip(*(json.loads(output.splitlines()[-1]) for output in said), strict=True):
        print(one, other)
        assert stored <= one["read"] + other["read"] < stored + MIB // 2
        assert max(one["above the shards"], other["above the shards"]) < 152 * MIB


def test_a_chunk_that_can_not_be_read_ends_a_restore_and_no_later_one_is_read():
    spec = {"driver": "zarr", "kvstore": "memory://", "metadata": {"shape": [64], "chunks": [4], "dtype": "<f4"}}
    like = jax.ShapeDtypeStruct((64,), np.float32, sharding=sharding(make_mesh(MeshConfig()), (None,)))
    array = tensorstore.open(spec, create=True).result()
    array.write(1).result()
    np.testing.assert_array_equal(read_arrays({"a": array}, {"a": like}, print)["a"], np.ones(64))
    array.kvstore.write("3", b"damaged").result()
    with pytest.raises(ValueError, match=r"Error reading"):
        read_arrays({"a": array}, {"a": like}, print)
