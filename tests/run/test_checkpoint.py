"""What was saved comes back to the bit; damage costs one checkpoint, never the run."""

import gc
import logging
import os
import re
import shutil
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from test_processes import ends, in_two

from mllm import progress as transfer
from mllm.config.schema import CheckpointConfig, MeshConfig, OptimizerConfig
from mllm.errors import UserError
from mllm.parallel.mesh import make_mesh, sharding
from mllm.parallel.processes import ProcessGroup, gather_objects, is_writer
from mllm.run.checkpoint import BEST, Checkpoints, items
from mllm.train.optimizer import make_optimizer
from mllm.train.step import abstract_state, init_state

POSITION = {"data": {"next_index": 3}, "num_tokens": 12}
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=0.1), 10)


def make_state(mesh_config=None, value=0.0):
    """A state whose arrays all differ, of a model of two parameters."""
    mesh = make_mesh(mesh_config or MeshConfig())
    layout = {"embed": ("vocab", "embed"), "norm": ("embed",)}
    params = {
        name: jax.device_put(jnp.arange(64.0 ** len(axes)).reshape((64,) * len(axes)) + value, sharding(mesh, axes))
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


def test_the_rate_of_a_save_is_told_once_when_it_has_ended(tmp_path):
    with closing(Checkpoints(tmp_path, CheckpointConfig())) as checkpoints:
        assert checkpoints.timings() == {}
        checkpoints.save(1, make_state(), POSITION, "seed: 0\n", {})
        checkpoints.wait()
        assert 0 < checkpoints.timings()["save/gb_per_second"] < 100
        assert checkpoints.timings() == {}


def test_another_mesh_restores_it(tmp_path):
    save(tmp_path, [1])
    mesh = MeshConfig(fsdp=2, tp=4)
    with closing(Checkpoints(tmp_path, CheckpointConfig())) as checkpoints:
        restored = checkpoints.restore(like(mesh))
    assert_equal(restored.state, make_state(value=1))
    assert restored.state.params["embed"].sharding.shard_shape((64, 64)) == (16, 32)


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


# What is kept


def test_the_newest_are_kept_and_the_best_beside_them(tmp_path):
    scores = {step: {BEST: score} for step, score in {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.3, 5: 0.4}.items()}
    save(tmp_path / "newest", range(1, 6), scores, keep=2)
    save(tmp_path / "best", range(1, 6), scores, keep=2, keep_best=True)
    assert kept(tmp_path / "newest") == [4, 5]
    assert kept(tmp_path / "best") == [2, 4, 5]


def test_the_best_is_known_to_a_run_that_resumes(tmp_path):
    scores = {step: {BEST: score} for step, score in {1: 0.1, 2: 0.9, 3: 0.2, 5: 0.3}.items()}
    for step in range(1, 7):
        save(tmp_path, [step], scores, keep=1, keep_best=True)
    assert kept(tmp_path) == [2, 6]


@pytest.mark.parametrize("settings", [{"keep": 1}, {"keep": 2}, {"keep": 1, "keep_best": True}], ids=str)
def test_the_last_sound_checkpoint_stays_until_a_newer_one_is_whole(tmp_path, settings):
    scores = {step: {BEST: score} for step, score in {1: 0.3, 2: 0.2, 3: 0.9}.items()}
    save(tmp_path, [1], scores, **settings)
    for step in (2, 3):  # written beside the last sound one, and damaged as soon as they are whole
        shutil.copytree(tmp_path / "1", tmp_path / str(step))
        flipped(tmp_path / str(step))
    with closing(Checkpoints(tmp_path, CheckpointConfig(**settings))) as checkpoints:
        assert checkpoints.restore(like()).step == 1
        checkpoints.save(2, make_state(value=2), POSITION, "", scores[2])
        assert 1 in kept(tmp_path)
        checkpoints.wait()
        assert checkpoints.restore(like()).step == 2
    assert kept(tmp_path) == ([2] if settings == {"keep": 1} else [1, 2])
    assert all((tmp_path / f"damaged_{step}").is_dir() for step in (2, 3))


# Damage


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def stored(folder):
    """The files that hold the arrays' bytes."""
    found = [path for path in files(folder) if path.parent.name == "d"]
    assert found
    return found


def deleted(name):
    return lambda folder: shutil.rmtree(folder / name)


def half_deleted(folder):
    for path in files(folder)[::2]:
        path.unlink()


def truncated(folder):
    for path in stored(folder):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(folder):
    max(files(folder), key=lambda path: path.stat().st_size).write_bytes(b"")


def exchanged(folder):
    """Whole files, of another checkpoint."""
    shutil.rmtree(folder / "params")
    shutil.copytree(folder.parent / "1" / "params", folder / "params")


def edited(folder):
    path = folder / "document" / "metadata"
    text = path.read_text()
    assert '"next_index": 3' in text
    path.write_text(text.replace('"next_index": 3', '"next_index": 4'))


def flipped(folder):
    for path in stored(folder):
        flip(path, path.stat().st_size // 2)


def flip(path, place, bit=0):
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


DAMAGE = {
    "the arrays are deleted": deleted("params"),
    "the document is deleted": deleted("document"),
    "half of the files are deleted": half_deleted,
    "files are truncated": truncated,
    "a file is empty": emptied,
    "a part is another checkpoint's": exchanged,
    "the position is another": edited,
    "a bit is flipped": flipped,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
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


def test_a_bit_flipped_anywhere_is_found_or_changes_nothing(tmp_path, caplog, capfd):
    save(tmp_path, [1, 2])
    wanted, found = like(), set()
    for path in files(tmp_path / "2"):
        size = path.stat().st_size
        for place in sorted({0, size // 3, size // 2, size - 1}):
            flip(path, place, bit=place % 8)
            with closing(Checkpoints(tmp_path, CheckpointConfig())) as checkpoints:
                restored = checkpoints.restore(wanted)
            assert restored.position == POSITION
            assert_equal(restored.state, make_state(value=restored.step))
            if restored.step == 1:
                found.add(path)
                (tmp_path / "damaged_2").rename(tmp_path / "2")
            flip(path, place, bit=place % 8)
    arrays = max(stored(tmp_path / "2"), key=lambda path: path.stat().st_size)
    assert {arrays, *(tmp_path / "2" / "document").glob("metadata")} <= found
    gc.collect()  # what Orbax had begun
    assert {record.name for record in caplog.records} == {"mllm.run.checkpoint"}
    assert "Traceback" not in capfd.readouterr().err


def test_a_checkpoint_that_only_its_checksum_finds_damaged_is_said(tmp_path, caplog):
    save(tmp_path, [1, 2])
    exchanged(tmp_path / "2")
    with closing(Checkpoints(tmp_path, CheckpointConfig())) as checkpoints:
        assert checkpoints.restore(like()).step == 1
    assert "checkpoint 2 can't be read (the checksum of params.embed and of 1 others differs)" in caplog.text


def one_s_part_is_damaged(folder):
    """In each of two processes, of which the second has a part that can't be read, and then one that is different."""
    ProcessGroup.find(None, None, None, os.environ).join(60)
    mesh = MeshConfig(fsdp=8)
    with closing(Checkpoints(folder, CheckpointConfig(keep=3))) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, make_state(mesh, value=step), POSITION, "", {})
            checkpoints.wait()
        if is_writer():
            for step, damage in ((3, truncated), (2, flipped)):
                damage(folder / str(step) / "params" / "ocdbt.process_1")
        gather_objects(None)
        assert checkpoints.restore(like(mesh)).step == 1


@pytest.mark.slow
def test_what_only_one_of_two_processes_finds_damaged_both_put_aside(tmp_path):
    program = "import sys, pathlib, test_checkpoint; test_checkpoint.one_s_part_is_damaged(pathlib.Path(sys.argv[1]))"
    said = ends(in_two(["-c", program, str(tmp_path)]))
    assert ["put aside as" in output for output in said] == [True, False]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "damaged_2", "damaged_3"]


def test_a_reader_puts_nothing_aside(tmp_path, caplog):
    save(tmp_path, [1, 2])
    flipped(tmp_path / "2")
    with closing(Checkpoints(tmp_path, CheckpointConfig(), read_only=True)) as checkpoints:
        assert checkpoints.restore(like()).step == 1
    assert "checkpoint 2 can't be read" in caplog.text
    assert kept(tmp_path) == [1, 2]


def test_a_checkpoint_of_before_there_were_checksums_is_taken_with_a_warning(tmp_path, caplog):
    arrays = {name: ocp.args.StandardSave(tree) for name, tree in items(make_state(value=5)).items()}
    documents = {"position": ocp.args.JsonSave(POSITION), "config": ocp.args.JsonSave({"yaml": "seed: 0\n"})}
    with closing(ocp.CheckpointManager(tmp_path)) as manager:
        manager.save(5, args=ocp.args.Composite(**arrays, **documents))
    with closing(Checkpoints(tmp_path, CheckpointConfig(keep_best=True))) as checkpoints:
        restored = checkpoints.restore(like())
        assert (restored.step, restored.position) == (5, POSITION)
        assert_equal(restored.state, make_state(value=5))
        assert checkpoints.restore_params(like().params, 5)[0] == 5
        checkpoints.save(6, make_state(value=6), POSITION, "", {BEST: 0.5})
        checkpoints.wait()
        assert checkpoints.restore(like()).step == 6
    assert "checkpoint 5 is of before checksums were stored" in caplog.text


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew_by_itself(tmp_path):
    save(tmp_path, [1])
    deleted("params")(tmp_path / "1")
    for _ in range(2):  # nor when it is asked again
        with (
            closing(Checkpoints(tmp_path, CheckpointConfig())) as checkpoints,
            pytest.raises(UserError, match="none of its 1 checkpoints can be read"),
        ):
            checkpoints.restore(like())
        assert kept(tmp_path) == [1]


def test_parameters_are_not_read_from_a_damaged_checkpoint(tmp_path):
    save(tmp_path, [1, 2])
    flipped(tmp_path / "2")
    with closing(Checkpoints(tmp_path, CheckpointConfig(), read_only=True)) as checkpoints:
        with pytest.raises(UserError, match=r"2: can't be read \(.*\); --step takes an older one"):
            checkpoints.restore_params(like().params, None)
        assert checkpoints.restore_params(like().params, 1)[0] == 1


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
