"""A setting under another trainer's name is answered with the name here; an error says where it was written."""

import re

import pytest
from test_config import GRPO, SFT

from mllm.config import load as configs
from mllm.config.habits import HABITS
from mllm.config.schema import Config
from mllm.config.section import fields_of
from mllm.errors import UserError

KEYS = dict(fields_of(Config))


@pytest.fixture
def refused(tmp_path):
    path = tmp_path / "run.yaml"

    def refused(text: str, *overrides: str) -> str:
        path.write_text(text)
        with pytest.raises(UserError) as error:
            configs.load(str(path), overrides)
        return str(error.value).replace(str(path), "FILE")

    return refused


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("optimizer.lr=1", "optimizer.lr: unknown setting; here it is optimizer.learning_rate"),
        ("learning_rate=1", "learning_rate: unknown setting; it is optimizer.learning_rate"),
        ("warmup_ratio=0.1", "warmup_ratio: unknown setting; here it is optimizer.warmup_steps (a number of updates)"),
        ("gradient_accumulation_steps=4", "here it is micro_batch_size (as many passes follow each other as make up"),
        ("model={source: x, lora: {r: 8, alpha: 1}}", "model.lora.r: unknown setting"),
        ("rollout.n=8", "rollout.n: unknown setting; here it is grpo.num_generations"),
        ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.n: unknown setting; here it is grpo.num_gen"),
        ("grpo.kl_loss_coef=0.1", "here it is grpo.beta (with grpo.reference: initial)"),
        ("report_to=wandb", "report_to: unknown setting; here it is log.wandb (the project; Tensor"),
        ("optim=adamw_torch", "optim: unknown setting; the optimizer is AdamW"),
        ("logging_steps=1", "logging_steps: unknown setting; every step is logged"),
        ("step=4", "it is model.step"),
        ("grpo.nothing_like_it=8", "grpo.nothing_like_it: unknown setting"),
    ],
)
def test_a_habit_is_answered_with_the_setting_that_does_it(typed, answer, refused):
    assert refused(GRPO, typed).startswith(f"on the command line: {typed}: ")
    assert answer in refused(GRPO, typed)


def test_the_settings_that_habits_are_answered_with_exist_and_the_habits_do_not():
    assert {setting for setting, _ in HABITS.values()} - {*KEYS, ""} == set()
    assert {name for _, hint in HABITS.values() for name in re.findall(r"\w+\.\w+(?:\.\w+)*", hint)} - {
        *KEYS,
        "metrics.jsonl",
    } == set()
    assert HABITS.keys() & (KEYS.keys() | {key.rpartition(".")[2] for key in KEYS}) == set()


@pytest.mark.parametrize(
    ("text", "overrides", "blamed"),
    [
        (SFT + "seed: -1\n", (), "FILE: seed: "),
        (SFT, ("steps=5", "seed=-1"), "on the command line: seed=-1: seed: "),
        (SFT, ("optimizer={learning_rate: -1}",), "on the command line: optimizer={learning_rate: -1}: optimizer.lea"),
        (SFT.replace("4", "0"), ("seed=-1", "run_dir=x"), "on the command line: seed=-1: seed: "),
        # the key is the file's, the value that it contradicts is not
        (GRPO, ("run_dir=x", "grpo.num_generations=3"), "on the command line: grpo.num_generations=3: batch_size"),
        (SFT, ("steps=2", "optimizer.warmup_steps=3"), "on the command line: steps=2 optimizer.warmup_steps=3: opti"),
        # the file is wrong by itself, with an override in the same section
        (GRPO + "data: {source: x, max_length: 4}\n", ("data.max_length=8",), "FILE: data: is not used"),
        (SFT.replace("steps: 4", ""), ("seed=1",), "FILE: steps: this setting is required"),
    ],
)
def test_an_error_blames_the_command_line_for_what_was_typed_there_and_the_file_for_the_rest(
    text, overrides, blamed, refused
):
    assert refused(text, *overrides).startswith(blamed)
