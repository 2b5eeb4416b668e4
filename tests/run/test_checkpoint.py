"""A checkpoint is Orbax's, restored to the bit, and knows the logs before it; damage or a full disk costs it alone."""

import errno
import logging
import resource
import shutil
import subprocess
import sys
import time
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from states import POSITION, like, make_state, opened, restored, save

from mllm.config.model import MeshConfig
from mllm.config.run import CheckpointConfig
from mllm.errors import UserError
from mllm.run.checkpoint import Checkpoints, restore_params
from mllm.run.metrics import RunLog
from mllm.run.state import PendingEvaluation
from mllm.run.store import RunStore

ROOT = Path(__file__).parents[2]
disk = pytest.mark.parametrize("place", ["disk"], indirect=True)


def assert_equal(state, other):
    """The same arrays to the bit, and the same everything else."""
    for mine, yours in zip(jax.tree.leaves(state.train), jax.tree.leaves(other.train), strict=True):
        np.testing.assert_array_equal(mine, yours)
    assert (state.step, state.document()) == (other.step, other.document())


def entries(store):
    """The entries of the directory of checkpoints beside Orbax's metadata."""
    return {path.name for path in store.checkpoints.iterdir()} - {"metadata"}


# Restoring


def test_every_field_of_a_state_is_restored_also_by_another_mesh(store):
    pending = PendingEvaluation({"loss": 0.5}, [{"completion": "7", "rewards": {"exact_match": 1.0}}])
    state = make_state(2, skipped_in_a_row=3, pending_evaluation=pending)
    save(store, make_state(1), state)
    assert_equal(loaded := restored(store), state)
    assert (loaded.position, loaded.skipped_in_a_row, loaded.pending_evaluation) == (POSITION, 3, pending)
    with opened(store) as checkpoints:
        loaded = checkpoints.restore(like(mesh := MeshConfig(fsdp=2, tp=4)))
    assert_equal(loaded, state)
    assert loaded.train.params["embed"].sharding == like(mesh).params["embed"].sharding


@pytest.mark.slow
@disk
def test_the_documented_lines_list_parameters_without_mllm(store):
    """A process of one device that can't import mllm reads a checkpoint of eight devices."""
    save(store, make_state(1, MeshConfig(fsdp=2, tp=4)))
    page = (ROOT / "docs/reliability.md").read_text()
    [lines] = [part.partition("```")[0] for part in page.split("```python\n") if "ocp.CheckpointManager" in part]
    program = f"import sys; sys.modules['mllm'] = sys.modules['lm_head'] = None\n{lines}"
    program = program.replace("runs/demo_seed0/sft", str(store.folder))
    done = subprocess.run([sys.executable, "-c", program], env={"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert done.stdout == "embed (64, 64) float32\nnorm (64,) float32\n", done.stderr


# Which checkpoints are kept


def test_the_newest_and_the_best_are_kept_also_after_a_resume(store):
    """Of equal scores the newest is the best. A checkpoint without a score never is."""
    scores = {4: 0.9, 8: 0.5, 12: 0.9, 16: None, 20: None}
    for steps in ((4, 8, 12), (16,), (20,)):
        save(store, *steps, accuracies=scores, keep=1, keep_best=True)
    assert entries(store) == {"12", "20"}
    assert (store.best_step([12, 20]), store.best_step([20])) == (12, None)
    save(store, 24, accuracies={24: 0.9}, keep=3, keep_best=True)
    assert store.best_step([12, 20, 24]) == 24


# Damage


def part(store, step, name=""):
    """A part of a checkpoint on a disk."""
    return store.folder / "checkpoints" / str(step) / name


def flip_bits(store, step):
    for path in part(store, step, "state/d").iterdir():
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(bytes(content))


def cut_document(store, step):
    path = part(store, step, "document/metadata")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def copy_first(store, step, name=""):
    """As `cp -r checkpoints/1 checkpoints/2` does."""
    shutil.rmtree(part(store, step, name))
    shutil.copytree(part(store, 1, name), part(store, step, name))


DAMAGE = {
    "the state is deleted": lambda store, step: shutil.rmtree(part(store, step, "state")),
    "bits are flipped": flip_bits,
    "the state is another checkpoint's": lambda store, step: copy_first(store, step, "state"),
    "the document is cut": cut_document,
    "it is another step's": copy_first,
}


@pytest.mark.slow
@disk
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_newest_checkpoint_is_put_aside(store, caplog, capfd, name):
    save(store, 1, 2)
    DAMAGE[name](store, 2)
    with caplog.at_level(logging.WARNING), opened(store) as checkpoints:
        assert_equal(checkpoints.restore(like()), make_state(1))
        checkpoints.save(make_state(2, value=7), {}, {})
        checkpoints.wait()
        assert_equal(checkpoints.restore(like()), make_state(2, value=7))
    assert "checkpoint 2 can't be read" in caplog.text
    assert "Traceback" not in capfd.readouterr().err
    assert "damaged_2" in entries(store)


@disk
def test_logs_are_cut_at_the_checkpoint(store, caplog):
    """A log that is shorter or changed is no damage."""
    store.folder.mkdir()
    with opened(store) as checkpoints:
        record = RunLog(store, -1, 9)
        for number in (1, 2, 3):
            record.write(number, {"loss": 1.0}, [{"completion": str(number)}])
            if number == 2:
                checkpoints.save(make_state(number), {}, record.sync())
            record.write_timings(number, {"tokens_per_second": 1.0}, {})
        checkpoints.wait()
        record.close()
    metrics, samples = (store.folder / f"{name}.jsonl" for name in ("metrics", "samples"))
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(lines[0].replace(b"1.0", b"7.0") + b"".join(lines[1:]))
    samples.write_bytes(samples.read_bytes()[:9])
    with opened(store) as checkpoints:
        assert checkpoints.restore(like()).step == 2
        RunLog(store, 2, 9, ends=checkpoints.ends).close()
    assert metrics.read_bytes() == lines[0].replace(b"1.0", b"7.0") + lines[1]
    assert samples.read_bytes()[9:] == b"\n"  # so that the next record is a line
    assert [record["step"] for record in store.records("timings.jsonl")] == [1, 2]  # its own, which come after the save
    assert f"{samples} lacks" in caplog.text
    assert len(caplog.records) == 1


@disk
def test_a_reader_moves_nothing_and_takes_no_damaged_or_nan_arrays(store):
    save(store, 1, 2, make_state(3, value=np.nan), keep=3)
    flip_bits(store, 2)
    with pytest.raises(UserError, match=r"2: can't be read \(.*\); name an older step"):
        restore_params(store, like().params, 2)
    with pytest.raises(UserError, match=r"3: can't be read \(embed has numbers that are not finite\); name an older"):
        restore_params(store, like().params, 3)
    params = restore_params(store, like().params, 1)
    jax.tree.map(np.testing.assert_array_equal, params, make_state(1).train.params)
    assert store.steps() == [1, 2, 3]


@disk
def test_unreadable_checkpoints_do_not_begin_a_run_anew(store):
    save(store, 1, 2)
    DAMAGE["the state is deleted"](store, 1)
    DAMAGE["it is another step's"](store, 2)
    for _ in range(2):  # nor at a second attempt
        with pytest.raises(UserError, match="none of its 2 checkpoints can be read"):
            restored(store)
        assert store.steps() == [1, 2]


@disk
def test_arrays_of_another_shape_are_no_damage_that_orbax_pads(store):
    save(store, 1)
    other = like()._replace(
        params={"embed": jax.ShapeDtypeStruct((64, 65), jnp.float32), "norm": like().params["norm"]}
    )
    with (
        opened(store) as checkpoints,
        pytest.raises(UserError, match=r"params.embed is float32\[64, 64\], not float32\[64, 65\]"),
    ):
        checkpoints.restore(other)


@disk
def test_a_disk_that_fails_damages_no_checkpoint(store):
    save(store, 1, 2)
    failure = OSError(errno.EIO, "Input/output error")
    with (
        patch.object(ocp.PyTreeCheckpointHandler, "restore", side_effect=failure),
        pytest.raises(UserError, match=r"checkpoints/2: can't be read \(Input/output error\)$"),
    ):
        restored(store)
    assert store.steps() == [1, 2]


@contextmanager
def limited_files(size):
    """Let no file of this process grow past `size` bytes: writing fails with EFBIG, as it would on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    caching = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", caching)


@pytest.mark.parametrize("method", ["check", "wait"])
def test_the_next_call_reports_that_a_checkpoint_did_not_fit(tmp_path, method, capfd):
    """Closing is silent then."""
    store = RunStore(tmp_path)
    save(store, 1)
    checkpoints = Checkpoints(store, CheckpointConfig(), frozen=None, known={})
    with limited_files(200):
        checkpoints.save(make_state(2), {}, {})
        while checkpoints.manager.is_saving_in_progress():
            time.sleep(0.01)
    with pytest.raises(UserError, match=r"checkpoints: can't be written \(File too large\); the same command"):
        getattr(checkpoints, method)()
    checkpoints.close()
    assert store.steps() == [1]
    assert "Traceback" not in capfd.readouterr().err


KNOWN, ARRAYS = {"sizes": {"layers": 2, "old": 0}, "tokens": [(1, 2)]}, make_state(1).train.params
MODEL, OTHER = ({"embed": leaf} for leaf in (ARRAYS["embed"], ARRAYS["embed"] + 1))
REFERENCE, FROZEN = {"norm": ARRAYS["norm"]}, "a run with other frozen parameters, or another reference"


@pytest.mark.parametrize(
    ("first", "then", "text"),
    [
        ((None, KNOWN), (None, {"sizes": {"layers": 2, "since": 1}, "tokens": [[1, 2]]}), None),  # of another version
        ((None, KNOWN), (None, {"sizes": {"layers": 2}}), None),
        ((None, KNOWN), (None, {"sizes": {"layers": 3}}), "sizes is not what"),
        ((None, KNOWN), (None, {"tokens": [[1, 3]]}), "tokens is not what"),
        ((MODEL, {}), (MODEL | REFERENCE, {}), None),  # grpo.beta may be raised from 0
        ((MODEL | REFERENCE, {}), (MODEL, {}), None),
        ((MODEL, {}), (OTHER, {}), FROZEN),
        ((MODEL | REFERENCE, {}), (MODEL | {"norm": ARRAYS["norm"] + 1}, {}), FROZEN),
    ],
)
def test_dependencies_are_compared_if_both_runs_recorded_them(tmp_path, first, then, text):
    for frozen, known in (first, then):
        checkpoints = Checkpoints(RunStore(tmp_path), CheckpointConfig(), frozen, known)
        with closing(checkpoints), pytest.raises(UserError, match=text) if known is then[1] and text else nullcontext():
            if checkpoints.restore(like()) is None:
                checkpoints.save(make_state(1), {}, {})
                checkpoints.wait()
