"""A disk that is full costs a run one checkpoint and a line."""

import resource
import time
from contextlib import contextmanager

import jax
import pytest
from states import make_state, save

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
def test_the_next_call_reports_that_a_checkpoint_did_not_fit_and_closing_is_silent_then(tmp_path, method, capfd):
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
    save(store, 2)
    assert store.steps() == [1, 2]
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert "never retrieved" not in said
