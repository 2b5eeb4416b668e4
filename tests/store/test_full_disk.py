"""A disk that is full costs a run one checkpoint and a line."""

import re
import resource
import time
from contextlib import contextmanager
from unittest.mock import patch

import jax
import pytest
from runs import checkpoints as steps_of
from runs import run
from states import make_state, save
from tiny import config

from mllm.config.schema import CheckpointConfig
from mllm.errors import UserError
from mllm.run.checkpoint import Checkpoints
from mllm.store.run_store import RunStore


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


@pytest.mark.parametrize("method", ["timings", "wait"])
def test_the_next_call_reports_that_a_checkpoint_did_not_fit_and_closing_is_silent_then(tmp_path, method):
    store = RunStore(tmp_path)
    save(store, 1)
    checkpoints = Checkpoints(store, CheckpointConfig())
    with limited_files(200):
        checkpoints.save(make_state(2), "")
        while checkpoints.manager.is_saving_in_progress():
            time.sleep(0.01)
    with pytest.raises(UserError, match=r"checkpoints: can't be written \(.*\).* goes on from checkpoint 1$"):
        getattr(checkpoints, method)()
    checkpoints.close()
    assert store.steps() == [1]


@pytest.mark.slow
def test_a_run_whose_checkpoint_does_not_fit_ends_with_one_line_and_resumes(tmp_path, capfd):
    settings = config("sft", run_dir=str(tmp_path / "run"), steps=4, checkpoint={"every": 2}, eval=None, rollout=None)

    def save_where_nothing_fits(checkpoints, *state, save=Checkpoints.save):
        with limited_files(20_000):
            save(checkpoints, *state)
            while checkpoints.manager.is_saving_in_progress():
                time.sleep(0.01)

    with patch.object(Checkpoints, "save", save_where_nothing_fits):
        assert run(settings) == 2
    said = capfd.readouterr().err
    last_line = said.splitlines()[-1]
    assert "checkpoints: can't be written (File too large)" in last_line
    assert last_line.endswith("the same command begins again: there is no checkpoint yet")
    assert said.count("error: ") == 1
    assert not re.search("Traceback|never retrieved", said)
    assert run(settings) == 0
    assert steps_of(settings) == [2, 4]
