"""Runs of DPO and its kin, and of distillation: validation, references and teachers. Resume: test_train.py."""

from pathlib import Path

import jax
import numpy as np
import pytest
from runs import changed, newest, records, run
from tiny import METHODS, TEACHER, config

from mllm.algorithms.dpo.source import PreferenceSource
from mllm.config import load as configs
from mllm.errors import UserError
from mllm.model import tokenizer as tokenizers
from mllm.parallel.mesh import make_mesh
from mllm.parallel.processes import RowShare
from mllm.plan.programs import Programs
from mllm.run import build
from mllm.run.build import Run
from mllm.run.source_run import check_tokens, load_policy, load_teacher
from mllm.sampler.schedule import DecodeLimits
from mllm.stopwatch import Stopwatch


@pytest.mark.slow
def test_validated_pairs_are_compared_with_the_reference(finished):
    lines = records(finished("dpo"))
    assert lines[-1]["step"] == 4
    assert {"rewards/margins", "logps/chosen"} < lines[-1].keys()
    measured = [line for line in lines if "validation/loss" in line]
    assert [line["step"] for line in measured] == [0, 2, 4]
    assert measured[0]["validation/loss"] == pytest.approx(np.log(2), abs=1e-4)  # the policy is the reference
    assert measured[-1]["validation/rewards/margins"] != 0


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["sigmoid", "orpo"])
def test_the_plan_counts_the_arrays_of_an_update(tmp_path, loss_type, monkeypatch):
    """A checkpoint says which reference its run has."""
    rows = RowShare(0, 1)  # not the constant of a process that trains alone
    monkeypatch.setattr(RowShare, "of_mesh", lambda mesh: rows)
    one = changed(METHODS["dpo"], run_dir=str(tmp_path / "run"), dpo={"loss_type": loss_type})
    with Run.build(one) as built:
        assert all(batches.share is rows for batches in (built.source.batches, built.source.heldout))
        assert built.source.position().get("reference", built.source.checksum) == built.source.checksum
        batch = built.source.next(built.trained, 0, Stopwatch(), built.frozen_models).batch
        planned = Programs(one, built.mesh).batch(one.batch_shape.total)
    assert jax.tree.structure(batch) == jax.tree.structure(planned)


def test_a_run_goes_on_with_no_other_reference():
    source = PreferenceSource.__new__(PreferenceSource)
    source.checksum = "one"
    with pytest.raises(UserError, match="model: the run began with another reference"):
        source.seek({"reference": "other"})


GIVEN = {"data": {"source": "task", "max_length": 32}, "grpo": None, "rollout": None}
OWN = {"data": None, "eval": None, "grpo": {"num_generations": 2}, "distill": {}, "teacher": TEACHER}


def distilled(**sections):
    return config("distill", **{**OWN, **sections})


@pytest.mark.slow
def test_a_teacher_run_merges_its_adapters_and_pins_its_step(finished, tmp_path):
    taught = finished("distill")
    policy = load_policy(taught, make_mesh(taught.mesh))
    layers = policy.complete(newest(taught).train.params)["layers"]
    frozen, a, b = (np.asarray(layers[f"q_{name}"]) for name in ("weight", "a", "b"))
    settings = distilled(run_dir=str(tmp_path / "run"), teacher={"source": taught.run_dir, "dtype": "float32"})
    with Run.build(settings) as built:
        merged = np.asarray(built.frozen_models.teacher["layers"]["q_weight"])
    assert np.abs(merged - frozen).max() > 1e-3
    atol = 4 * 2**-24 * np.abs(merged).max()  # four roundings of numbers of this size: two products, two sums
    np.testing.assert_allclose(merged, frozen + policy.lora.scale * b @ a, rtol=0, atol=atol)
    assert configs.read(Path(settings.run_dir, "config.yaml"))["teacher"]["step"] == 4


@pytest.mark.slow
def test_given_completions_are_distilled_with_their_labels(tmp_path):
    """Own completions: tests/run/test_train.py."""
    sections = {**GIVEN, "distill": {"kind": "jsd", "label_coef": 0.1}}
    settings = distilled(run_dir=str(tmp_path / "run"), steps=2, **sections)
    assert run(settings) == 0
    for line in records(settings):
        assert line["loss"] > line["kl"] + 0.1  # labels of an untrained model have some nats
        assert line["grad_norm"] > 0
        assert "reward" not in line


def test_a_rollout_leaves_room_for_the_teacher(tmp_path, monkeypatch):
    teachers = []
    monkeypatch.setattr(build, "fitting_limits", lambda *parts, teacher: teachers.append(teacher) or DecodeLimits(8))
    with Run.build(distilled(run_dir=str(tmp_path / "run"))) as built:
        assert built.sampling.sampler.room() == DecodeLimits(8)
        assert teachers == [built.teacher]


@pytest.mark.slow
def test_every_sampled_completion_gets_the_teacher_term(tmp_path):
    settings = distilled(run_dir=str(tmp_path / "run"), steps=1, distill={"estimator": "sampled"}, log={"samples": 3})
    assert run(settings) == 0
    (line,), samples = records(settings), records(settings, "samples.jsonl")
    assert line["frac_without_gradient"] == 0
    assert line["kl"] > 1
    assert line["grad_norm"] > 0
    assert [sample["advantage"] for sample in samples] == [None] * 3


def test_a_teacher_with_another_token_is_a_one_line_error():
    student = tokenizers.bytes_tokenizer()
    check_tokens("x", student, student)
    student.add_tokens(["<more>"])
    with pytest.raises(UserError, match=r"^teacher.source: x: token 260 is None there, and '<more>' of the student's"):
        check_tokens("x", student, tokenizers.bytes_tokenizer())
    check_tokens("x", tokenizers.bytes_tokenizer(), student)  # it may have more
    for teacher, message in (
        ({"source": "nothing"}, "teacher.source: "),
        (TEACHER | {"step": 3}, "teacher.step: no run"),
    ):
        settings = distilled(teacher=teacher)
        with pytest.raises(UserError, match=f"^{message}"):
            load_teacher(settings, make_mesh(settings.mesh), student)
