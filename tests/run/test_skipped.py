"""Updates that aren't finite are skipped and counted; too many in a row stop the run."""

from contextlib import redirect_stderr
from io import StringIO

import jax
import numpy as np
import pytest
from runs import newest, records, run
from tiny import config

from mllm.run.state import RunState
from mllm.training.step import TrainState


@pytest.fixture(scope="module")
def stops(tmp_path_factory):
    """A run whose first update throws the parameters to where nothing can be computed any more, and where it stopped.

    It was called twice: step, steps that are logged, and the last line on stderr, of each.
    """
    settings = config(
        "sft",
        run_dir=str(tmp_path_factory.mktemp("stopped") / "run"),
        steps=8,
        optimizer={"learning_rate": 9e18, "max_skipped": 1},
        eval=None,
        rollout=None,
    )
    found = []
    for _ in range(2):
        with redirect_stderr(StringIO()) as errors:
            assert run(settings) == 2
        logged = [line["step"] for line in records(settings)]
        found.append((newest(settings).step, logged, errors.getvalue().splitlines()[-1]))
    return settings, found


@pytest.mark.slow
def test_too_many_skipped_updates_in_a_row_stop_the_run_and_the_same_command_counts_on(stops):
    _, found = stops
    for (stopped, logged, said), step, skipped in zip(found, (3, 4), (2, 3), strict=True):
        assert stopped == step
        assert logged == list(range(1, step + 1))
        why = f"the last {skipped} updates were not finite and skipped"
        assert said == f"error: optimizer.max_skipped: {why} (saved after step {step}: the same command resumes)"


def test_a_finite_update_ends_a_row_of_skipped_ones():
    train = TrainState({}, {}, 0)
    state, counts = RunState(0, train, {}), []
    for skipped in (True, True, False, True):
        state = state.after_update(train, {}, skipped)
        counts.append(state.skipped_in_a_row)
    assert counts == [1, 2, 0, 1]


@pytest.mark.slow
def test_a_skipped_update_changes_no_parameter(stops):
    settings = stops[0]
    lines = records(settings)
    assert [line["skipped"] for line in lines] == [0, 1, 1, 1]
    assert lines[1]["loss"] is None
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(newest(settings).train.params))
