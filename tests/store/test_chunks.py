"""Two processes read each byte of a checkpoint once, hold little beside what it gives, and agree on what is damaged."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore
from runs import join_group, outputs, spawn, start_two
from states import like, make_state, opened
from test_checkpoint import assert_equal, flip_bits, truncate

from mllm.config.model import MeshConfig
from mllm.parallel.mesh import make_mesh, sharding
from mllm.parallel.processes import gather_objects, is_writer
from mllm.store import arrays as stored_arrays
from mllm.store.checkpoints import Saving, load
from mllm.store.lock import hold
from mllm.store.run_store import RunStore

MIB = 2**20
AXES = {"embed": ("vocab", "embed"), "layers": ("layers", "embed", "mlp"), "norm": ("embed",)}
SHAPES = {"embed": (3 * 2**13, 1024), "layers": (3, 1024, 1200), "norm": (1024,)}
"""110 MiB in float32."""
MESHES = MeshConfig(dp=2, fsdp=2, tp=2), MeshConfig(fsdp=8)
"""Where two processes have copies of everything, and where they have none."""


def make_arrays(mesh_config):
    mesh, rng = make_mesh(mesh_config), np.random.default_rng(0)
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


def measure(store, mesh_config):
    """What a restore on this mesh reads, and holds beside the shards, in bytes."""
    expected = make_arrays(mesh_config)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), expected)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    memory_before, read_before = memory("VmRSS"), bytes_read()
    found, _ = load(store, 1, shapes)
    held, read = memory("VmHWM") - memory_before, bytes_read() - read_before
    for name, leaf in expected.items():
        for mine, restored in zip(leaf.addressable_shards, found[name].addressable_shards, strict=True):
            np.testing.assert_array_equal(mine.data, restored.data)
        held -= sum({str(shard.index): shard.data.nbytes for shard in found[name].addressable_shards}.values())
    return read, held


def restore_in_two(run_dir, url):
    """In each of two processes: what restores from a disk read and hold, as JSON; then damage to the second one's part.

    Checkpoint 3 can't be read there, and checkpoint 2 is another one.
    """
    join_group()
    print(json.dumps([measure(RunStore(run_dir), mesh_config) for mesh_config in MESHES]), flush=True)
    mesh = MeshConfig(dp=2, fsdp=4)
    with hold(store := RunStore(url)), opened(store, keep=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(make_state(step, mesh), "")
            checkpoints.wait()
        assert_equal(checkpoints.restore(like(mesh)), make_state(3, mesh))
        if is_writer():
            for step, damage in ((3, truncate), (2, flip_bits)):
                damage(store, step, "params.norm")
        gather_objects(None)
        assert checkpoints.restore(like(mesh)).step == 1


@pytest.mark.slow
@pytest.mark.parametrize("place", ["gs"], indirect=True)
def test_two_processes_read_each_byte_once_hold_little_and_agree_on_damage(store, url, tmp_path):
    arrays = make_arrays(MeshConfig(fsdp=2, tp=4))
    Saving(RunStore(tmp_path), 1, arrays, {}, keep=1, keep_best=False).wait()
    stored = sum(leaf.nbytes for leaf in arrays.values())
    said = outputs(start_two(["-c", f"import test_chunks; test_chunks.restore_in_two({str(tmp_path)!r}, {url!r})"]))
    measured = [json.loads(next(line for line in output.splitlines() if line[:2] == "[[")) for output in said]
    print(measured)
    for (read, held), (other_read, other_held) in zip(*measured, strict=True):
        assert stored <= read + other_read < stored + MIB // 2
        assert max(held, other_held) < 96 * MIB
    assert ["put aside as" in output for output in said] == [True, False]
    manifests = [name for name in store.entries("checkpoints") if name.endswith(".json")]
    assert manifests == ["1.json", "damaged_2.json", "damaged_3.json"]


def test_a_chunk_that_can_not_be_read_ends_a_restore_and_no_later_one_is_read():
    spec = {"driver": "zarr", "kvstore": "memory://", "metadata": {"shape": [64], "chunks": [4], "dtype": "<f4"}}
    like = jax.ShapeDtypeStruct((64,), np.float32, sharding=sharding(make_mesh(MeshConfig()), (None,)))
    array = tensorstore.open(spec, create=True).result()
    array.write(1).result()
    np.testing.assert_array_equal(stored_arrays.read_arrays({"a": array}, {"a": like}, id)["a"], np.ones(64))
    array.kvstore.write("3", b"damaged").result()
    with pytest.raises(ValueError, match=r"Error reading"):
        stored_arrays.read_arrays({"a": array}, {"a": like}, id)


@pytest.mark.parametrize(
    ("shape", "size"), [((1024, 1024), 2**21), ((151936, 896), 2**21), ((7, 3, 64), 2**10), ((), 4)]
)
def test_chunks_are_parts_of_shards_and_neither_too_large_nor_too_small(monkeypatch, shape, size):
    monkeypatch.setattr(stored_arrays, "CHUNK_BYTES", size)
    leaf = jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding(make_mesh(MeshConfig()), (None,) * len(shape)))
    chunk = stored_arrays.chunk_shape(leaf)
    assert all(total % part == 0 for total, part in zip(shape, chunk, strict=True))
    assert size / 8 < 4 * np.prod(chunk) <= size


def memory_of_saves(folder):
    """Saves arrays of 96 MiB eight times; prints how far memory stays above that after the second, in MiB."""
    shapes = {f"{kind}.{rows}": (rows, 512) for kind in "abc" for rows in (1024, 2048, 3072, 3073, 3074, 4096)}
    ones = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    arrays = jax.device_put(ones, sharding(make_mesh(MeshConfig()), ()))
    noise = jax.jit(lambda arrays: jax.tree.map(lambda leaf: leaf * 3 + 1, arrays), donate_argnums=0)
    resident = []
    for step in range(1, 9):
        saving = Saving(RunStore(folder), step, arrays, {}, keep=1, keep_best=False)
        for _ in range(3):
            arrays = jax.block_until_ready(noise(arrays))
        saving.wait()
        resident.append(memory("RssAnon") / MIB)
    print(min(resident[4:]) - resident[1])


@pytest.mark.faults
def test_memory_does_not_grow_with_the_number_of_saves(tmp_path):
    """In a process of its own. What grows stays grown, so the least counts: a late thread may hold a copy once."""
    process = spawn(["-c", "import sys, test_chunks; test_chunks.memory_of_saves(sys.argv[1])", str(tmp_path)], None)
    assert float(outputs([process])[0]) < 48
