"""A checkpoint knows the lines of the logs before it: what is lost or changed of them is made again, or kept beside."""

import shutil

import numpy as np
import pytest
from states import damaged, like, make_state, opened, restored

from mllm.errors import UserError
from mllm.run.metrics import RECORDS, RunLog

pytestmark = pytest.mark.parametrize("place", ["disk"], indirect=True)


def logged(store, steps):
    """Write lines of steps, and save each of them; only the last two checkpoints stay."""
    with opened(store, keep=2) as checkpoints:
        log = RunLog(store, -1, 9)
        for step in steps:
            log.write(step, {"loss": 1.0}, [{"completion": str(step)}])
            log.write_timings(step, {"tokens_per_second": 1.0}, {})
            checkpoints.save(make_state(step), "")
        checkpoints.wait()
        log.close()


@pytest.mark.parametrize(("name", "damage"), [("metrics.jsonl", "flip"), ("samples.jsonl", "cut")])
def test_lines_that_are_lost_or_changed_are_made_again_from_the_checkpoint_before(store, name, damage, caplog):
    store.folder.mkdir()
    logged(store, [1, 2])
    log, first = store.folder / name, (store.folder / name).read_bytes().splitlines(keepends=True)[0]
    content = bytearray(log.read_bytes())
    if damage == "flip":
        content[-5] ^= 4
    else:
        del content[-5:]
    log.write_bytes(content)
    with opened(store) as checkpoints:
        assert checkpoints.restore(like()).step == 1
        RunLog(store, 1, 9, ends=checkpoints.ends).close()
    fault = "has changed" if damage == "flip" else "lacks its last 5 bytes"
    assert f"checkpoint 2 can't be read ({name} {fault})" in caplog.text
    assert log.read_bytes() == first
    assert (store.folder / f"{name}.until_2").read_bytes() == content


def test_timings_that_changed_are_kept_beside_and_the_run_goes_on(store, caplog):
    store.folder.mkdir()
    logged(store, [1, 2])
    log = store.folder / "timings.jsonl"
    log.write_bytes(content := log.read_bytes()[:-5])
    with opened(store) as checkpoints:
        assert checkpoints.restore(like()).step == 2
        RunLog(store, 2, 9, ends=checkpoints.ends).close()
    assert "timings.jsonl lacks its last 5 bytes since checkpoint 2" in caplog.text
    assert (store.folder / "timings.jsonl.until_2").read_bytes() == content


def test_a_run_whose_lines_are_lost_before_its_oldest_checkpoint_ends_and_deletes_nothing(store):
    store.folder.mkdir()
    logged(store, [1, 2, 3])
    (store.folder / "metrics.jsonl").write_bytes(b"")
    for _ in range(2):  # nor at a second attempt
        with pytest.raises(UserError, match=r"none of its 2 checkpoints can be read \(metrics.jsonl lacks its last"):
            restored(store)
        assert store.steps() == [2, 3]


@pytest.mark.parametrize(
    "trials", [pytest.param(30, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.nightly)]
)
def test_damage_of_any_log_is_found(store, caplog, trials):
    """One bit, a cut, or zeros: lines are made again from the checkpoint before, and what was there is kept."""
    store.folder.mkdir()
    logged(store, [1, 2])
    undamaged, dice, went_on = store.folder.with_name("undamaged"), np.random.default_rng(0), {0: 0, 1: 0, 2: 0}
    shutil.copytree(store.folder, undamaged)
    for trial in range(trials):
        log = store.folder / RECORDS[trial % len(RECORDS)]
        whole, step = log.read_bytes(), 0
        log.write_bytes(content := damaged(whole, trial // len(RECORDS), dice))
        caplog.clear()
        try:
            with opened(store) as checkpoints:
                step = checkpoints.restore(like()).step
                RunLog(store, step, 9, ends=checkpoints.ends).close()
        except UserError:
            assert store.steps() == [1, 2]
        else:
            assert f"{log.name} has changed" in caplog.text or f"{log.name} lacks its last" in caplog.text
            size, _ = store.document(step)["logs"][log.name]
            assert log.name == "timings.jsonl" or log.read_bytes() == whole[:size]
        aside = log.with_name(f"{log.name}.until_2")
        assert (aside if aside.exists() else log).read_bytes() == content
        went_on[step] += 1
        shutil.rmtree(store.folder)
        shutil.copytree(undamaged, store.folder)
    print(f"of {trials}, went on from", went_on)
    assert min(went_on.values()) > trials // 8
