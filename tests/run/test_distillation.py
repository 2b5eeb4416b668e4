"""Distillation end to end: what the teacher is, both sources, and that it learns. Resume: test_train.py."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from runs import changed, newest, records, run
from tiny import TEACHER, config

from mllm.config import load as configs
from mllm.errors import UserError
from mllm.model import tokenizer as tokenizers
from mllm.parallel.mesh import make_mesh
from mllm.run import build
from mllm.run.build import Run
from mllm.run.source_run import load_policy
from mllm.run.teacher import check_tokens, load_teacher
from mllm.sampler.schedule import Room
from mllm.store.run_store import RunStore

FIXTURES = Path(__file__).parent.parent / "fixtures"
GIVEN = {"data": {"source": "task", "max_length": 32}, "grpo": None, "rollout": None}
OWN = {"data": None, "eval": None, "grpo": {"num_generations": 2}, "distill": {}, "teacher": TEACHER}


def distilled(**sections):
    return config("distill", **{**OWN, **sections})


@pytest.mark.slow
def test_the_teacher_is_the_run_with_its_adapters_merged_and_its_step_is_recorded(finished, tmp_path):
    taught = finished("distill")
    policy = load_policy(taught, make_mesh(taught.mesh))
    layers = policy.complete(newest(taught).train.params)["layers"]
    frozen, a, b = (np.asarray(layers[f"q_{name}"]) for name in ("weight", "a", "b"))
    settings = distilled(run_dir=str(tmp_path / "run"), teacher={"source": taught.run_dir, "dtype": "float32"})
    with Run.build(settings) as begun:
        merged = np.asarray(begun.fixed.teacher["layers"]["q_weight"])
    assert np.abs(merged - frozen).max() > 1e-3
    atol = 4 * 2**-24 * np.abs(merged).max()  # four roundings of numbers of this size: two products, two sums
    np.testing.assert_allclose(merged, frozen + policy.lora.scale * b @ a, rtol=0, atol=atol)
    assert configs.read(Path(settings.run_dir, "config.yaml"))["teacher"]["step"] == 4


def test_given_completions_are_distilled_and_their_labels_learned(tmp_path):
    """Own completions: tests/run/test_train.py."""
    sections = {**GIVEN, "distill": {"kind": "jsd", "label_coef": 0.1}}
    settings = distilled(run_dir=str(tmp_path / "run"), steps=2, **sections)
    assert run(settings) == 0
    for line in records(settings):
        assert line["loss"] > line["kl"] + 0.1  # labels of an untrained model have some nats
        assert line["grad_norm"] > 0
        assert "reward" not in line


@pytest.mark.slow
def test_a_run_goes_on_with_no_other_teacher(finished, tmp_path, capsys):
    settings = finished("distill")
    lines = records(settings)
    assert all(np.isfinite(line["kl"]) and "reward" in line for line in lines)
    assert len(RunStore(settings.run_dir).document(4)["frozen"]) > len(newest(settings).train.params)
    other = shutil.copytree(FIXTURES / "tiny_grpo", tmp_path / "other")
    shutil.copy(FIXTURES / "tiny_sft" / "model.safetensors", other)
    shutil.copytree(settings.run_dir, tmp_path / "run")
    capsys.readouterr()
    again = changed(settings, run_dir=str(tmp_path / "run"), steps=10, teacher={"source": str(other)})
    assert run(again) == 2
    assert "belongs to a run with other frozen parameters" in capsys.readouterr().err


def test_a_rollout_leaves_room_for_the_teacher(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(build, "room_that_fits", lambda *parts, teacher: asked.append(teacher) or Room(8))
    with Run.build(distilled(run_dir=str(tmp_path / "run"))) as begun:
        assert begun.sampler.room() == Room(8)
        assert asked == [begun.teacher]


@pytest.mark.slow
def test_every_sampled_completion_is_learned_from_with_the_teachers_term(tmp_path):
    settings = distilled(run_dir=str(tmp_path / "run"), steps=1, distill={"estimator": "sampled"})
    assert run(settings) == 0
    (line,), samples = records(settings), records(settings, "samples.jsonl")
    assert line["frac_without_gradient"] == 0
    assert line["kl"] > 1
    assert line["grad_norm"] > 0
    assert {sample["advantage"] for sample in samples} == {None}


def test_a_tokenizer_with_another_token_is_one_line(tmp_path):
    student = tokenizers.bytes_tokenizer()
    check_tokens("x", student, student)
    student.add_tokens(["<more>"])
    with pytest.raises(UserError, match=r"^teacher.source: x: token 260 is None there, and '<more>' of the student's"):
        check_tokens("x", student, tokenizers.bytes_tokenizer())
    check_tokens("x", tokenizers.bytes_tokenizer(), student)  # it may have more
    settings = distilled(teacher={"source": str(tmp_path / "nothing")})
    with pytest.raises(UserError, match=r"^teacher.source: "):
        load_teacher(settings, make_mesh(settings.mesh), student)
    settings = distilled(teacher={"source": str(FIXTURES / "tiny_grpo"), "step": 3})
    with pytest.raises(UserError, match=r"^teacher.step: no run is at "):
        load_teacher(settings, make_mesh(settings.mesh), student)


@pytest.mark.faults
def test_the_demos_grpo_model_teaches_the_half_trained_one(tmp_path):
    overrides = [
        f"model.source={FIXTURES / 'tiny_sft'}",
        "model.tokenizer=bytes",
        f"teacher.source={FIXTURES / 'tiny_grpo'}",
        f"run_dir={tmp_path / 'run'}",
        *("steps=40", "batch_size=128", "eval.every=null", "checkpoint.every=null"),
    ]
    settings = configs.load("tiny_distill.yaml", overrides)
    assert run(settings) == 0
    lines = records(settings)
    assert lines[0]["eval/greedy_accuracy"] < 0.35
    assert lines[-1]["eval/greedy_accuracy"] > 0.5
    kl = [line["kl"] for line in lines[1:]]
    assert np.mean(kl[-10:]) < 0.8 * np.mean(kl[:10])
    policy = load_policy(settings, make_mesh(settings.mesh))
    assert policy.architecture.hidden_size == 64
