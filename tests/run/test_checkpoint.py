"""A checkpoint is restored to the bit; damage costs one checkpoint, never the run."""

import gc
import logging
import os
import re
import shutil
import sys
from contextlib import closing
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import outputs, spawn, start_two

from mllm import progress
from mllm.config.model import MeshConfig, OptimizerConfig
from mllm.config.schema import CheckpointConfig
from mllm.errors import UserError
from mllm.parallel import watch
from mllm.parallel.mesh import make_mesh, sharding
from mllm.parallel.processes import ProcessGroup, gather_objects, is_writer
from mllm.run.checkpoint import Checkpoints
from mllm.run.state import PendingEvaluation, RunState
from mllm.train.optimizer import make_optimizer
from mllm.train.step import abstract_state, init_state

POSITION = {"data": {"next_index": 3}, "num_tokens": 12}
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=0.1), 10)


@cache
def first_state(mesh_config=MeshConfig()):  # noqa: B008
    """Parameters and optimizer of a model of two parameters; all arrays differ."""
    mesh = make_mesh(mesh_config)
    layout = {"embed": ("vocab", "embed"), "norm": ("embed",)}
    params = {
        name: jax.device_put(jnp.arange(64.0 ** len(axes)).reshape((64,) * len(axes)), sharding(mesh, axes))
        for name, axes in layout.items()
    }
    return jax.tree.map(lambda leaf: leaf + 1 if leaf.ndim else leaf, init_state(params, OPTIMIZER))


def make_state(step, mesh_config=MeshConfig(), value=None, **fields):  # noqa: B008
    """The state of a run after `step` updates; `value` (by default the step) makes its arrays different."""
    value = step if value is None else value
    return RunState(step, jax.tree.map(lambda leaf: leaf + value, first_state(mesh_config)), POSITION, **fields)


def like(mesh_config=MeshConfig()):  # noqa: B008
    return abstract_state(first_state(mesh_config).params, OPTIMIZER)


def opened(folder, **settings):
    return closing(Checkpoints(folder, CheckpointConfig(**settings)))


def save(folder, *states, accuracies=None, **settings):
    """Save states, or the states of steps, with the accuracies of steps."""
    with opened(folder, **settings) as checkpoints:
        for state in states:
            state = make_state(state) if isinstance(state, int) else state
            accuracy = (accuracies or {}).get(state.step)
            checkpoints.save(state, "seed: 0\n", accuracy)
        checkpoints.wait()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save(folder, 1, 2)
    return folder


@pytest.fixture
def two(saved, tmp_path):
    """A folder with the checkpoints 1 and 2."""
    return shutil.copytree(saved, tmp_path / "checkpoints")


def assert_equal(state, other):
    """The same arrays to the bit, and the same everything else."""
    for mine, yours in zip(jax.tree.leaves(state.train), jax.tree.leaves(other.train), strict=True):
        np.testing.assert_array_equal(mine, yours)
    assert (state.step, state.document()) == (other.step, other.document())


def restored(folder):
    with opened(folder) as checkpoints:
        return checkpoints.restore(like())


def steps_in(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


# What comes back


def test_every_field_of_a_state_is_restored(tmp_path):
    pending = PendingEvaluation({"loss": 0.5}, [{"completion": "7", "rewards": {"exact_match": 1.0}}])
    state = make_state(2, skipped_in_a_row=3, pending_evaluation=pending)
    save(tmp_path, make_state(1), state)
    found = restored(tmp_path)
    assert_equal(found, state)
    assert (found.position, found.skipped_in_a_row, found.pending_evaluation) == (POSITION, 3, pending)
    assert found.logged_step == 1


def test_another_mesh_can_restore_a_checkpoint(two):
    mesh = MeshConfig(fsdp=2, tp=4)
    with opened(two) as checkpoints:
        found = checkpoints.restore(like(mesh))
    assert_equal(found, make_state(2))
    assert found.train.params["embed"].sharding.shard_shape((64, 64)) == (16, 32)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    params = {"embed": jnp.arange(2.0**21).reshape(2**12, 2**9), "norm": jnp.ones(8)}
    params = jax.device_put(params, sharding(make_mesh(MeshConfig()), ()))
    train = init_state(params, OPTIMIZER)
    with opened(tmp_path) as checkpoints:
        assert checkpoints.timings() == {}
        checkpoints.save(RunState(1, train, POSITION), "seed: 0\n")
        assert steps_in(tmp_path) == []
        for leaf in jax.tree.leaves(train):
            leaf.delete()  # as the next update does
        checkpoints.wait()
        assert steps_in(tmp_path) == [1]
        assert 0 < checkpoints.timings()["save/gb_per_second"] < 100
        assert checkpoints.timings() == {}
        found = checkpoints.restore(abstract_state(params, OPTIMIZER))
    np.testing.assert_array_equal(found.train.params["embed"].ravel(), np.arange(2.0**21))
    bars = capsys.readouterr().err
    assert re.search(r"saving checkpoint 1: .*B/s\]", bars)
    assert re.search(r"checkpoint 1: 100%.* 25.2M/25.2M .*B/s\]", bars)


def test_a_transfer_without_a_terminal_is_a_line_if_it_is_large(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0)
    for size in (2**30 - 1, 3 * 2**30):
        with progress.transfer_bar("loading model", size) as bar:
            bar.update(size)
    assert capsys.readouterr().err == "loading model: 3.0 GiB\n"


def test_parameters_are_read_without_the_optimizer(two):
    shutil.rmtree(two / "1" / "optimizer")
    with closing(Checkpoints(two, CheckpointConfig(), read_only=True)) as checkpoints:
        assert checkpoints.restore_params(like().params, None)[0] == 2
        step, params = checkpoints.restore_params(like().params, 1)
        with pytest.raises(UserError, match=r"no checkpoint 3; there are \[1, 2\]"):
            checkpoints.restore_params(like().params, 3)
    assert step == 1
    jax.tree.map(np.testing.assert_array_equal, params, make_state(1).train.params)


def memory_of_saves(folder):
    """Saves a state of 96 MiB twelve times; prints how far memory stays above that after the second, in MiB."""
    params = {f"layer_{rows}": jnp.ones((rows, 512)) for rows in (1024, 2048, 3072, 3073, 3074, 4096)}
    train = init_state(jax.device_put(params, sharding(make_mesh(MeshConfig()), ())), OPTIMIZER)
    noise = jax.jit(lambda train: jax.tree.map(lambda leaf: leaf * 3 + 1, train), donate_argnums=0)
    resident = []
    with opened(folder, keep=1) as checkpoints:
        for step in range(1, 13):
            checkpoints.save(RunState(step, train, POSITION), "")
            for _ in range(3):
                train = jax.block_until_ready(noise(train))
            checkpoints.wait()
            resident.append(int(re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 2**10)
    print(*map(int, resident), file=sys.stderr)
    print(min(resident[4:]) - resident[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_number_of_saves(tmp_path):
    """In a process of its own. What grows stays grown, so the least counts: a late thread may hold a copy once."""
    call = "test_checkpoint.memory_of_saves(pathlib.Path(sys.argv[1]))"
    process = spawn(["-c", f"import sys, pathlib, test_checkpoint; {call}", str(tmp_path)], None)
    assert float(outputs([process])[0]) < 48


# Which checkpoints are kept


@pytest.mark.parametrize(("settings", "kept"), [({"keep": 2}, [4, 5]), ({"keep": 2, "keep_best": True}, [2, 4, 5])])
def test_the_newest_are_kept_and_the_best_beside_them_also_after_a_resume(tmp_path, settings, kept):
    accuracies = {1: 0.1, 2: 0.9, 3: 0.2, 5: 0.3}
    for steps in ((1, 2, 3), (4,), (5,)):
        save(tmp_path, *steps, accuracies=accuracies, **settings)
    assert steps_in(tmp_path) == kept


@pytest.mark.parametrize("settings", [{"keep": 1}, {"keep": 2}, {"keep": 1, "keep_best": True}], ids=str)
def test_the_last_undamaged_checkpoint_stays_until_a_newer_one_is_complete(tmp_path, settings):
    save(tmp_path, 1, accuracies={1: 0.3}, **settings)
    for step in (2, 3):
        shutil.copytree(tmp_path / "1", tmp_path / str(step))
        flip_bits(tmp_path / str(step))
    with opened(tmp_path, **settings) as checkpoints:
        assert checkpoints.restore(like()).step == 1
        checkpoints.save(make_state(2), "", 0.2)
        assert 1 in steps_in(tmp_path)
        checkpoints.wait()
        assert checkpoints.restore(like()).step == 2
    assert steps_in(tmp_path) == ([2] if settings == {"keep": 1} else [1, 2])
    assert all((tmp_path / f"damaged_{step}").is_dir() for step in (2, 3))


# Damage


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def array_files(folder):
    """The files that hold the arrays' bytes."""
    found = [path for path in files(folder) if path.parent.name == "d"]
    assert found
    return found


def truncate(folder):
    for path in array_files(folder):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def exchange_params(folder):
    shutil.rmtree(folder / "params")
    shutil.copytree(folder.parent / "1" / "params", folder / "params")


def edit_position(folder):
    path = folder / "document" / "metadata"
    text = path.read_text()
    assert '"next_index": 3' in text
    path.write_text(text.replace('"next_index": 3', '"next_index": 4'))


def flip_bits(folder):
    for path in array_files(folder):
        flip_bit(path, path.stat().st_size // 2)


def flip_bit(path, place, bit=0):
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


DAMAGE = {
    "the arrays are deleted": lambda folder: shutil.rmtree(folder / "params"),
    "the document is deleted": lambda folder: shutil.rmtree(folder / "document"),
    "files are truncated": truncate,
    "the parameters are another checkpoint's": exchange_params,
    "the position is another": edit_position,
    "a bit is flipped": flip_bits,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_newest_checkpoint_is_put_aside_and_the_one_before_restored(two, caplog, name):
    DAMAGE[name](two / "2")
    with caplog.at_level(logging.WARNING), opened(two) as checkpoints:
        assert_equal(checkpoints.restore(like()), make_state(1))
        checkpoints.save(make_state(2, value=7), "")
        checkpoints.wait()
        assert_equal(checkpoints.restore(like()), make_state(2, value=7))
    assert "checkpoint 2 can't be read" in caplog.text
    assert (two / "damaged_2").is_dir()
    if name == "the parameters are another checkpoint's":
        assert "(the checksum of params.embed and of 1 others differs)" in caplog.text


def test_a_flipped_bit_is_found_or_changes_nothing(two, caplog, capfd):
    found = set()
    for path in files(two / "2"):
        size = path.stat().st_size
        for place in sorted({0, size // 2, size - 1}):
            flip_bit(path, place, bit=place % 8)
            state = restored(two)
            assert_equal(state, make_state(state.step))
            if state.step == 1:
                found.add(path)
                (two / "damaged_2").rename(two / "2")
            flip_bit(path, place, bit=place % 8)
    largest = max(array_files(two / "2"), key=lambda path: path.stat().st_size)
    assert {largest, *(two / "2" / "document").glob("metadata")} <= found
    gc.collect()  # reads that Orbax had begun
    assert {record.name for record in caplog.records} == {"mllm.run.checkpoint"}
    assert "Traceback" not in capfd.readouterr().err


def damage_the_second_process_s_part(folder):
    """In each of two processes: the second one's part of 3 can't be read, and its part of 2 is another one."""
    ProcessGroup.find(None, None, None, os.environ).join(60)
    mesh = MeshConfig(fsdp=8)
    with opened(folder, keep=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(make_state(step, mesh), "")
            checkpoints.wait()
        if is_writer():
            for step, damage in ((3, truncate), (2, flip_bits)):
                damage(folder / str(step) / "params" / "ocdbt.process_1")
        gather_objects(None)
        assert checkpoints.restore(like(mesh)).step == 1
    watch.watch.finish(None)


@pytest.mark.slow
def test_both_processes_put_a_checkpoint_aside_that_only_one_finds_damaged(tmp_path):
    call = "test_checkpoint.damage_the_second_process_s_part(pathlib.Path(sys.argv[1]))"
    said = outputs(start_two(["-c", f"import sys, pathlib, test_checkpoint; {call}", str(tmp_path)]))
    assert ["put aside as" in output for output in said] == [True, False]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "damaged_2", "damaged_3"]


def test_a_reader_puts_nothing_aside_and_takes_no_parameters_from_a_damaged_checkpoint(two, caplog):
    flip_bits(two / "2")
    with closing(Checkpoints(two, CheckpointConfig(), read_only=True)) as checkpoints:
        assert checkpoints.restore(like()).step == 1
        with pytest.raises(UserError, match=r"2: can't be read \(.*\); take an older step"):
            checkpoints.restore_params(like().params, None)
        assert checkpoints.restore_params(like().params, 1)[0] == 1
    assert "checkpoint 2 can't be read" in caplog.text
    assert steps_in(two) == [1, 2]


@pytest.mark.parametrize("name", ["params", "document"])  # there is no document beside arrays without checksums
def test_a_run_whose_checkpoints_can_all_not_be_read_does_not_begin_anew(two, name):
    for step in (1, 2):
        shutil.rmtree(two / str(step) / name)
    for _ in range(2):  # nor at a second attempt
        with pytest.raises(UserError, match="none of its 2 checkpoints can be read"):
            restored(two)
        assert steps_in(two) == [1, 2]
