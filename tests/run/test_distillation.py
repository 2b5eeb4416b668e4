"""Distillation end to end: what the teacher is, exact resume of both sources, what is refused, and that it learns."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from runs import assert_same_end, changed, killed_after, newest, records, run
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
    """A student that begins as the teacher is, which is a run with adapters, has no divergence from it."""
    teaching = finished("distill").run_dir
    settings = distilled(
        run_dir=str(tmp_path / "run"),
        steps=1,
        model={"init": "pretrained", "source": teaching, "step": 4, "architecture": None},
        teacher={"source": teaching, "dtype": "float32"},
    )
    assert run(settings) == 0
    line = records(settings)[-1]
    assert configs.read(Path(settings.run_dir, "config.yaml"))["teacher"]["step"] == 4
    assert line["kl"] == line["loss"] == line["grad_norm"] == 0
    assert line["teacher_agreement"] == 1
    assert line["entropy"] == pytest.approx(line["teacher_entropy"], rel=1e-6)


@pytest.mark.slow
def test_given_completions_are_distilled_in_a_run_that_ends_as_one_that_was_never_killed(tmp_path):
    """Own completions: tests/run/test_train.py."""
    sections = {**GIVEN, "distill": {"kind": "jsd", "label_coef": 0.1}, "checkpoint": {"every": 2}}
    settings = distilled(run_dir=str(tmp_path / "whole"), steps=4, **sections)
    assert run(settings) == 0
    again = killed_after(settings, 2, tmp_path / "killed")
    assert run(again) == 0
    assert_same_end(again, settings)
    for line in records(settings):
        assert line["loss"] > line["kl"] + 0.1  # labels of an untrained model have some nats
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


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"distill": None}, "distill: algorithm: distill needs this section"),
        ({"teacher": None}, "teacher: algorithm: distill needs this section"),
        ({"grpo": None}, "data: algorithm: distill learns either from data, or"),
        ({"grpo": None, "data": {"source": "task", "max_length": 8}, "distill": {"estimator": "sampled"}}, "grpo: "),
        ({"data": {"source": "task", "max_length": 8}}, "data: algorithm: distill learns either from data, or"),
        ({"distill": {"beta": 0.5}}, "distill.beta: is not used with kind: reverse_kl"),
        ({"distill": {"label_coef": 0.5}}, "distill.label_coef: is for the completions of data: remove it"),
        ({"distill": {"estimator": "sampled", "kind": "jsd"}}, "distill.kind: is not used with estimator: sampled"),
        ({"grpo": {"num_generations": 2, "entropy_coef": 0.1}}, "grpo.entropy_coef: is not used by distill.estim"),
        ({"grpo": {"num_generations": 2, "scale_rewards": "none"}}, "grpo.scale_rewards: is not used by distill.estim"),
        ({"head": {"impl": "mosaic_gpu"}}, "head.impl: mosaic_gpu has no divergences"),
        ({"algorithm": "grpo", "distill": None}, "teacher: is not used by algorithm: grpo"),
        (
            {"algorithm": "grpo", "distill": None, "teacher": None, "grpo": {"num_generations": 1}},
            "grpo.num_generations: 1 leaves",
        ),
        ({"teacher": {"step": "last"}}, "teacher.step: 'last' is none of newest, best and"),
        ({"grpo": {"loss_type": "gspo", "num_iterations": 2}}, "grpo.loss_type: gspo is an objective, and distill.est"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_can_t_work_or_have_no_effect_are_one_line(sections, message, tmp_path):
    settings = distilled().model_dump(mode="json")
    for name, value in sections.items():
        settings[name] = {**(settings[name] or {}), **value} if isinstance(value, dict) else value
    with pytest.raises(UserError) as error:
        configs.validate(settings, tmp_path, ())
    assert str(error.value).startswith(f"{tmp_path}: {message}"), error.value


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
