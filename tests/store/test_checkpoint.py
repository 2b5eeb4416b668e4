"""A checkpoint is restored to the bit; damage or a full disk cost one checkpoint, never the run."""

import errno
import json
import logging
import math
import re
import sys
import threading
from contextlib import contextmanager
from itertools import product
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from states import OPTIMIZER, POSITION, like, make_state, opened, save

from mllm import progress
from mllm.config.model import MeshConfig
from mllm.errors import UserError
from mllm.parallel.mesh import make_mesh, sharding
from mllm.run.checkpoint import restore_params
from mllm.run.state import PendingEvaluation, RunState
from mllm.store import checkpoints as store_checkpoints
from mllm.store.folder import Folder
from mllm.store.run_store import RunStore, seal
from mllm.train.step import abstract_state, init_state

disk = pytest.mark.parametrize("place", ["disk"], indirect=True)
google = pytest.mark.parametrize("place", ["gs"], indirect=True)
both = pytest.mark.parametrize("place", ["disk", "gs"], indirect=True)
"""What a checkpoint's life does not depend on: which bucket it is."""


@contextmanager
def unpublished():
    """No save that begins in this block is published before its end."""
    ended = threading.Event()
    with patch.object(store_checkpoints, "wait_for_processes", lambda *_: ended.wait()):
        try:
            yield
        finally:
            ended.set()


def assert_equal(state, other):
    """The same arrays to the bit, and the same everything else."""
    for mine, yours in zip(jax.tree.leaves(state.train), jax.tree.leaves(other.train), strict=True):
        np.testing.assert_array_equal(mine, yours)
    assert (state.step, state.document()) == (other.step, other.document())


def restored(store):
    with opened(store) as checkpoints:
        return checkpoints.restore(like())


# What comes back


def test_every_field_of_a_state_is_restored_also_by_another_mesh(store):
    pending = PendingEvaluation({"loss": 0.5}, [{"completion": "7", "rewards": {"exact_match": 1.0}}])
    state = make_state(2, skipped_in_a_row=3, pending_evaluation=pending)
    save(store, make_state(1), state)
    assert_equal(found := restored(store), state)
    assert (found.position, found.skipped_in_a_row, found.pending_evaluation) == (POSITION, 3, pending)
    assert found.logged_step == 1
    assert store.folder_of(2).startswith(f"checkpoints/2-{store.token}.")  # which no other holder's saves have
    with opened(store) as checkpoints:
        found = checkpoints.restore(like(mesh := MeshConfig(fsdp=2, tp=4)))
    assert_equal(found, state)
    assert found.train.params["embed"].sharding == like(mesh).params["embed"].sharding


@both
def test_training_goes_on_while_a_checkpoint_is_written(store, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    params = {"embed": jnp.arange(2.0**21).reshape(2**12, 2**9), "norm": jnp.ones(8)}
    params = jax.device_put(params, sharding(make_mesh(MeshConfig()), ()))
    train = init_state(params, OPTIMIZER)
    with opened(store) as checkpoints:
        assert checkpoints.timings() == {}
        with unpublished():
            checkpoints.save(RunState(1, train, POSITION), "seed: 0\n")
            assert store.steps() == []
            assert checkpoints.timings() == {}
            for leaf in jax.tree.leaves(train):
                leaf.delete()  # as the next update does
        checkpoints.wait()
        assert store.steps() == [1]
        assert 0 < checkpoints.timings()["save/gb_per_second"] < 100
        assert checkpoints.timings() == {}
        found = checkpoints.restore(abstract_state(params, OPTIMIZER))
    np.testing.assert_array_equal(found.train.params["embed"].ravel(), np.arange(2.0**21))
    bars = capsys.readouterr().err
    assert re.search(r"saving checkpoint 1: .*B/s\]", bars)
    assert re.search(r"checkpoint 1: 100%.* 25.2M/25.2M .*B/s\]", bars)
    monkeypatch.undo()
    monkeypatch.setattr(progress, "SECONDS", 0)  # without a terminal a large one is a line
    for size in (2**30 - 1, 3 * 2**30):
        with progress.transfer_bar("loading model", size) as bar:
            bar.update(size)
    assert capsys.readouterr().err == "loading model: 3.0 GiB\n"


# Which checkpoints are kept


@both
def test_the_newest_are_kept_and_the_best_beside_them_also_after_a_resume(store):
    accuracies = {1: 0.1, 2: 0.9, 3: 0.2, 5: 0.3}
    for steps in ((1, 2, 3), (4,), (5,)):
        save(store, *steps, accuracies=accuracies, keep=2, keep_best=True)
    assert store.steps() == [2, 4, 5]
    assert len(store.entries("checkpoints")) == 6


@disk
def test_a_checkpoint_whose_score_is_not_finite_is_never_the_best(store):
    save(store, 4, 8, 12, 16, accuracies={4: math.nan, 8: 0.5, 12: 0.9, 16: math.inf}, keep=1, keep_best=True)
    assert store.steps() == [12, 16]
    assert store.best_step([12, 16]) == 12
    assert store.best_step([16]) is None


@disk
@pytest.mark.parametrize("settings", [{"keep": 1}, {"keep": 1, "keep_best": True}], ids=str)
def test_the_last_undamaged_checkpoint_stays_until_a_newer_one_is_complete(store, settings):
    save(store, 1, 2, 3, accuracies={1: 0.3, 2: 0.1, 3: 0.1}, keep=3)
    for step in (2, 3):
        flip_bits(store, step)
    with opened(store, **settings) as checkpoints:
        assert checkpoints.restore(like()).step == 1
        with unpublished():
            checkpoints.save(make_state(2), "", 0.2)
            assert 1 in store.steps()
        checkpoints.wait()
        assert checkpoints.restore(like()).step == 2
    assert store.steps() == ([2] if settings == {"keep": 1} else [1, 2])
    assert {"damaged_2.json", "damaged_3.json"} < {*store.entries("checkpoints")}


# Damage


def arrays_of(store, step):
    """The names of the arrays in a checkpoint."""
    return store.entries(store.folder_of(step))


def chunks(store, step, prefix=""):
    """The files of a checkpoint's arrays that hold their bytes."""
    arrays = [f"{store.folder_of(step)}/{name}" for name in arrays_of(store, step) if name.startswith(prefix)]
    return [f"{array}/{name}" for array in arrays for name in store.entries(array) if name[0] != "."]


def truncate(store, step, prefix=""):
    for name in chunks(store, step, prefix):
        content = store.read(name)
        store.write(name, content[: len(content) // 2])


def flip_bits(store, step, prefix=""):
    for name in chunks(store, step, prefix):
        store.write(name, flipped(content := store.read(name), len(content) // 2))


def flipped(content, place, bit=0):
    content = bytearray(content)
    content[place] ^= 1 << bit
    return bytes(content)


def delete(store, step, prefix=""):
    store.place.delete(chunks(store, step, prefix))


def exchange_params(store, step):
    for mine, yours in zip(chunks(store, step, "params"), chunks(store, 1, "params"), strict=True):
        store.write(mine, store.read(yours))


def edit_position(store, step):
    text = store.read(f"checkpoints/{step}.json")
    assert b'"next_index": 3' in text
    store.write(f"checkpoints/{step}.json", text.replace(b'"next_index": 3', b'"next_index": 4'))


DAMAGE = {
    "a chunk is deleted": delete,
    "arrays are deleted": lambda store, step: store.place.delete_folder(store.folder_of(step)),
    "the manifest is cut": lambda store, step: store.write(f"checkpoints/{step}.json", b"{"),
    "chunks are truncated": truncate,
    "the parameters are another checkpoint's": exchange_params,
    "the position is another": edit_position,
}
IN_A_BUCKET = ("a chunk is deleted", "chunks are truncated", "the manifest is cut")


@pytest.mark.parametrize(
    ("place", "name"), [*product(["disk"], DAMAGE), *product(["gs"], IN_A_BUCKET)], indirect=["place"], ids=str
)
def test_a_damaged_newest_checkpoint_is_put_aside_and_the_one_before_restored(store, caplog, capfd, name):
    save(store, 1, 2)
    DAMAGE[name](store, 2)
    with caplog.at_level(logging.WARNING), opened(store) as checkpoints:
        assert_equal(checkpoints.restore(like()), make_state(1))
        checkpoints.save(make_state(2, value=7), "")
        checkpoints.wait()
        assert_equal(checkpoints.restore(like()), make_state(2, value=7))
    assert "checkpoint 2 can't be read" in caplog.text
    assert {record.name for record in caplog.records} == {"mllm.store.run_store"}
    assert "Traceback" not in capfd.readouterr().err
    assert "damaged_2.json" in store.entries("checkpoints")
    if name == "the parameters are another checkpoint's":
        assert "(the checksum of params.embed and of 1 others differs)" in caplog.text


@both
def test_a_checkpoint_that_was_put_aside_is_removed_when_newer_ones_are_there_as_any_other(store):
    save(store, 1, 2, keep=2)
    flip_bits(store, 2)
    with opened(store, keep=2) as checkpoints:
        assert checkpoints.restore(like()).step == 1
        for step in (2, 3):
            checkpoints.save(make_state(step), "")
            checkpoints.wait()
        assert "damaged_2.json" in store.entries("checkpoints")
        checkpoints.save(make_state(4), "")
    left = {"3.json", "4.json", *(store.folder_of(step).rpartition("/")[2] for step in (3, 4))}
    assert {*store.entries("checkpoints")} == left


@disk
def test_a_flipped_bit_is_found_or_changes_nothing(store):
    save(store, 1, 2)
    found = set()
    names = ["checkpoints/2.json", *chunks(store, 2, "params")]
    for name in [*names, f"{store.folder_of(2)}/params.norm/.zarray"]:
        content = store.read(name)
        for place in {0, len(content) // 2, len(content) - 1}:
            store.write(name, flipped(content, place, bit=place % 8))
            state = restored(store)
            assert_equal(state, make_state(state.step))
            if state.step == 1:
                found.add(name)
                store.place.rename("checkpoints/damaged_2.json", "checkpoints/2.json", store.check)
        store.write(name, content)
    assert {*names} <= found


@both
def test_a_checkpoint_of_a_step_without_its_line_in_the_log_is_not_taken(store):
    pending = make_state(3, pending_evaluation=PendingEvaluation({}, []))  # whose line is written after its evaluation
    save(store, make_state(1), pending, make_state(4), keep=3)
    with opened(store) as checkpoints:
        with pytest.raises(UserError, match=r"none of its 3 .* lacks lines after step 0, of 4\); put back"):
            checkpoints.restore(like(), 0)
        assert checkpoints.restore(like(), 4).step == 4
        assert checkpoints.restore(like(), 2).step == 3
    assert store.steps() == [1, 3]


@google
def test_a_bucket_that_fails_damages_no_checkpoint(store, server):
    save(store, 1, 2)
    server.fault = lambda method, path: "503" if "params.embed" in path else None
    with pytest.raises(UserError, match=r"checkpoints/2: can't be read \(.*\); check the bucket"):
        restored(store)
    server.fault = lambda method, path: None
    assert store.steps() == [1, 2]


@both
def test_a_reader_puts_nothing_aside_and_takes_no_parameters_from_a_damaged_checkpoint(store):
    save(store, 1, 2)
    for name in arrays_of(store, 1):
        if not name.startswith("params."):  # of which it reads nothing
            store.place.delete_folder(f"{store.folder_of(1)}/{name}")
    assert restore_params(store, like().params)[0] == 2
    with pytest.raises(UserError, match=r"no checkpoint 3; there are \[1, 2\]"):
        restore_params(store, like().params, 3)
    flip_bits(store, 2)
    with pytest.raises(UserError, match=r"2: can't be read \(.*\); take an older step"):
        restore_params(store, like().params)
    step, params = restore_params(store, like().params, 1)
    jax.tree.map(np.testing.assert_array_equal, params, make_state(step).train.params)
    assert store.steps() == [1, 2]


@disk
@pytest.mark.parametrize("damage", [delete, edit_position])
def test_a_run_whose_checkpoints_can_all_not_be_read_does_not_begin_anew(store, damage):
    save(store, 1, 2)
    for step in (1, 2):
        damage(store, step)
    for _ in range(2):  # nor at a second attempt
        with pytest.raises(UserError, match="none of its 2 checkpoints can be read"):
            restored(store)
        assert store.steps() == [1, 2]


@disk
def test_a_checkpoint_of_an_earlier_version_is_refused_in_one_line(store):
    store.write("checkpoints/7.json", json.dumps(seal({"prefix": "x", "files": {}})).encode())
    with pytest.raises(UserError, match=r"none of its 1 checkpoints can be read \(an earlier version of this program"):
        restored(store)


def test_a_damaged_checkpoint_that_can_not_be_put_aside_is_an_error(tmp_path):
    save(store := RunStore(tmp_path), 1, 2)
    flip_bits(store, 2)
    refused = PermissionError(errno.EACCES, "Permission denied")
    message = r"2.json: can't be read .*, nor put aside as .* \(Permission denied\)"
    with patch.object(Folder, "rename", side_effect=refused), pytest.raises(UserError, match=message):
        restored(store)
    assert store.steps() == [1, 2]
    assert restored(store).step == 1
