"""Distillation end to end: what the teacher is, exact resume of both sources, what is refused, and that it learns."""

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
OWN = {"data": None, "eval": None, "grpo": {"num_generations": 2}, "distill": {}, "teacher": TEACHER}


BOTH = {"data": {"source": "task", "max_length": 32}, "distill": {"data_share": 0.5}}


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
def test_a_run_with_both_sources_counts_both_and_has_no_other_teacher(finished, tmp_path, capsys):
    """That it ends as if it had not been killed: tests/run/test_train.py."""
    settings = finished("distill")
    lines = records(settings)
    assert 0 < sum(line["given"] for line in lines) < settings.steps
    tokens = [line["num_tokens"] for line in lines]
    assert tokens == sorted({*tokens})
    assert all(np.isfinite(line["kl"]) for line in lines)
    assert all(("reward" in line) == (line["given"] == 0) for line in lines)
    assert len(RunStore(settings.run_dir).document(4)["frozen"]) > len(newest(settings).train.params)
    other = shutil.copytree(FIXTURES / "tiny_grpo", tmp_path / "other")
    shutil.copy(FIXTURES / "tiny_sft" / "model.safetensors", other)
    shutil.copytree(settings.run_dir, tmp_path / "run")
    capsys.readouterr()
    again = changed(settings, run_dir=str(tmp_path / "run"), steps=10, teacher={"source": str(other)})
    assert run(again) == 2
    assert "belongs to a run with other frozen parameters" in capsys.readouterr().err


def test_both_sources_are_made_with_the_run_s_share_and_leave_room_for_the_teacher(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(build, "room_that_fits", lambda *parts, teacher: asked.append(teacher) or Room(8))
    settings = distilled(run_dir=str(tmp_path / "run"), **BOTH | {"distill": {"data_share": 0.25}})
    with Run.build(settings) as begun:
        assert [begun.source.order[rollout] for rollout in range(8)] == [False, False, False, True] * 2
        assert begun.sampler.room() == Room(8)
        assert asked == [begun.teacher]


@pytest.mark.parametrize("algorithm", ["distill", pytest.param("grpo", marks=pytest.mark.slow)])
def test_every_sampled_completion_is_learned_from_with_the_teachers_term(algorithm, tmp_path, monkeypatch):
    coefs, make = [], build.make_teacher_pass
    monkeypatch.setattr(build, "make_teacher_pass", lambda forward, coef: coefs.append(coef) or make(forward, coef))
    sections = {"run_dir": str(tmp_path / "run"), "steps": 1, "grpo": {"num_generations": 2}, "teacher": TEACHER}
    if algorithm == "distill":
        settings, name = distilled(**sections, distill={"estimator": "sampled"}), "kl"
    else:
        sections["grpo"]["teacher_coef"] = 0.5
        settings, name = config("grpo", **sections), "teacher_kl"
    assert run(settings) == 0
    (line,), samples = records(settings), records(settings, "samples.jsonl")
    assert coefs == [1.0 if algorithm == "distill" else 0.5]
    assert line["frac_without_gradient"] == 0
    assert line[name] > 1
    assert line["grad_norm"] > 0
    assert {sample["advantage"] for sample in samples} == ({None} if algorithm == "distill" else {0.0})


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
        ({"grpo": None}, "data: algorithm: distill learns from data, or"),
        ({"grpo": None, "data": {"source": "task", "max_length": 8}, "distill": {"estimator": "sampled"}}, "grpo: "),
        ({"data": {"source": "task", "max_length": 8}}, "distill.data_share: data and grpo need this setting"),
        ({"distill": {"data_share": 0.5}}, "distill.data_share: is not used without both data and grpo"),
        ({"distill": {"beta": 0.5}}, "distill.beta: is not used with kind: reverse_kl"),
        ({"distill": {"estimator": "sampled", "kind": "jsd"}}, "distill.kind: is not used with estimator: sampled"),
        ({"grpo": {"num_generations": 2, "entropy_coef": 0.1}}, "grpo.entropy_coef: is not used by distill.estim"),
        ({"grpo": {"num_generations": 2, "scale_rewards": "none"}}, "grpo.scale_rewards: is not used by distill.estim"),
        ({"head": {"impl": "full_logits"}}, "head.impl: full_logits has no divergences"),
        ({"algorithm": "grpo", "distill": None}, "teacher: is not used with grpo.teacher_coef: 0"),
        ({"algorithm": "grpo", "distill": None, "grpo": {"num_generations": 1}}, "grpo.num_generations: 1 leaves"),
        ({"teacher": {"step": "last"}}, "teacher.step: 'last' is none of newest, best and"),
        (
            {"algorithm": "grpo", "distill": None, "teacher": None, "grpo": {"num_generations": 2, "teacher_coef": 1}},
            "teacher: grpo.teacher_coef needs this section",
        ),
        ({"grpo": {"loss_type": "gspo", "num_iterations": 2}}, "grpo.loss_type: gspo is an objective, and distill.est"),
        (
            {**BOTH, "data": {**BOTH["data"], "epochs": 1}},
            "data.epochs: is not used with grpo, whose steps end the run",
        ),
        ({**BOTH, "micro_batch_size": 3}, "batch_size: 8 is not divisible by micro_batch_size (3)"),
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
