"""Updates that aren't finite are skipped and counted; too many in a row stop the run."""

import jax
import numpy as np
import pytest
from runs import newest, records, run
from tiny import config

from mllm.run.state import RunState
from mllm.training.step import TrainState


@pytest.mark.slow
def test_too_many_skipped_updates_in_a_row_stop_the_run_and_the_same_command_counts_on(tmp_path, capsys):
    """The first update throws the parameters to where nothing can be computed any more; no other changes any."""
    settings = config(
        "sft",
        run_dir=str(tmp_path / "run"),
        steps=8,
        optimizer={"learning_rate": 9e18, "max_skipped": 1},
        eval=None,
        rollout=None,
    )
    for step, skipped in ((3, 2), (4, 3)):
        assert run(settings) == 2
        why = f"the last {skipped} updates were not finite and skipped"
        said = f"error: optimizer.max_skipped: {why} (saved after step {step}: the same command resumes)"
        assert capsys.readouterr().err.splitlines()[-1] == said
        assert newest(settings).step == step
    lines = records(settings)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["skipped"] for line in lines] == [0, 1, 1, 1]
    assert lines[1]["loss"] is None
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(newest(settings).train.params))


def test_a_finite_update_ends_a_row_of_skipped_ones():
    train = TrainState({}, {}, 0)
    state, counts = RunState(0, train, {}), []
    for skipped in (True, True, False, True):
        state = state.after_update(train, {}, skipped)
        counts.append(state.skipped_in_a_row)
    assert counts == [1, 2, 0, 1]
