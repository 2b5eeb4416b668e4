"""Runs of DPO and kin: validation, adapters, batches and changes. Resume: tests/run/test_train.py."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import changed, records, run
from tiny import config

from mllm.algorithms.dpo.source import PreferenceSource
from mllm.errors import UserError
from mllm.parallel.processes import RowShare
from mllm.plan.programs import Programs
from mllm.run import folder as run_dir
from mllm.run.build import Run
from mllm.stopwatch import Stopwatch
from mllm.store.run_store import RunStore

LABELLED = [{"prompt": f"{n}+{n}=", "completion": str(2 * n + n % 2), "label": n % 2 == 0} for n in range(60)]
HELD_OUT = {"share": 0.2, "every": 2}


def settings(folder, loss_type="sigmoid", **sections):
    """Four updates in two micro-batches each, on a task's pairs, or on labelled completions, some of them held out."""
    data = {"max_length": 32}
    if loss_type == "kto":
        path = folder / "labelled.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in LABELLED))
        data |= {"source": str(path), "validation": HELD_OUT}
        sections["task"] = None
    dpo = {"loss_type": loss_type}
    common = {"micro_batch_size": 4, "checkpoint": {"every": 2}, "eval": None, "rollout": None}
    return config("dpo", run_dir=str(folder / "run"), data=data, dpo=dpo, **common | sections)


@pytest.mark.slow
def test_labelled_completions_are_validated(tmp_path):
    """Two processes: tests/parallel/test_processes.py."""
    labelled = settings(tmp_path, "kto")
    assert run(labelled) == 0
    lines = records(labelled)
    assert lines[-1]["step"] == 4
    assert {"kl", "rewards/margins", "logps/chosen"} < lines[-1].keys()
    measured = [line for line in lines if "validation/loss" in line]
    assert [line["step"] for line in measured] == [0, 2, 4]
    assert measured[0]["validation/loss"] == pytest.approx(0.5, abs=1e-4)  # the policy is the reference
    assert measured[0]["validation/kl"] == pytest.approx(0, abs=1e-3)


@pytest.mark.nightly
def test_adapters_are_compared_with_the_frozen_model_and_pairs_are_validated(tmp_path):
    pairs = [{"prompt": f"{n}=", "chosen": str(n), "rejected": str(n + 1)} for n in range(40)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in pairs))
    data = {"source": str(path), "max_length": 32, "validation": HELD_OUT}
    one = changed(settings(tmp_path, model={"lora": {"rank": 4, "alpha": 8}}, steps=3), data=data, task=None)
    assert run(one) == 0
    lines = records(one)
    assert lines[1]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert lines[1]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert lines[0]["validation/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert lines[3]["rewards/chosen"] != 0
    assert lines[3]["validation/rewards/margins"] != 0


@pytest.mark.parametrize(
    "loss_type", ["kto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sigmoid", "orpo"))]
)
def test_the_plan_counts_the_arrays_that_an_update_has_and_a_checkpoint_says_its_reference(
    tmp_path, loss_type, monkeypatch
):
    rows = RowShare(0, 1)  # not the constant of a process that trains alone
    monkeypatch.setattr(RowShare, "of_mesh", lambda mesh: rows)
    one = settings(tmp_path, loss_type)
    with Run.build(one) as begun:
        assert all(batches.share is rows for batches in (begun.source.batches, begun.source.heldout) if batches)
        assert (begun.source.heldout is None) == (loss_type != "kto")
        assert begun.source.position().get("reference", begun.source.checksum) == begun.source.checksum
        batch = begun.source.next(begun.trained, 0, Stopwatch(), begun.fixed).batch
        planned = Programs(one, begun.mesh).batch(one.rows.total)
    assert jax.tree.structure(batch) == jax.tree.structure(planned)


def test_the_loss_may_change_and_the_reference_may_not(tmp_path):
    one = settings(tmp_path)
    Path(one.run_dir, "checkpoints", "2").mkdir(parents=True)
    run_dir.write(RunStore(one.run_dir), one)
    found = run_dir.check(RunStore(one.run_dir), changed(one, dpo={"loss_type": "ipo", "beta": 0.5}), change=True)
    assert {change.key for change in found.changes} == {"dpo.loss_type", "dpo.beta"}
    source = PreferenceSource.__new__(PreferenceSource)
    source.checksum = "one"
    with pytest.raises(UserError, match="model: the run began with another reference"):
        source.seek({"reference": "other"})
