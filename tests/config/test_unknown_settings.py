"""A setting under another trainer's name is answered with the name here; an error says where it was written."""

import re

import pytest
from test_config import GRPO, SFT

from mllm.config import load as configs
from mllm.config.habits import HABITS
from mllm.config.schema import Config
from mllm.config.section import keys_of
from mllm.errors import UserError

KEYS = {*keys_of(Config)}


@pytest.mark.parametrize(
    ("text", "typed", "answer"),
    [
        (GRPO, "optimizer.lr=1", "optimizer.lr: unknown setting; here: optimizer.learning_rate"),
        (GRPO, "learning_rate=1", "learning_rate: unknown setting; it is optimizer.learning_rate"),
        (GRPO, "rollout.n=8", "rollout.n: unknown setting; here: grpo.num_generations"),
        (GRPO, "optim=adamw_torch", "optim: unknown setting; here: the optimizer is AdamW"),
        (GRPO, "step=4", "step: unknown setting; it is model.step"),
        (GRPO, "grpo.num_generation=8", "grpo.num_generation: unknown setting; did you mean num_generations?"),
        (GRPO, "grpo.nothing_like_it=8", "grpo.nothing_like_it: unknown setting"),
        (SFT, "optimizer={learning_rate: -1}", "optimizer.learning_rate: Input should be greater than 0 (got -1)"),
        (SFT + "seed: -1\n", None, "seed: Input should be greater"),
        (SFT.replace("steps: 4", ""), None, "steps: this setting is required"),
        (SFT.replace("batch_size: 8", ""), None, "batch_size: Field required"),
    ],
)
def test_the_line_names_the_file_what_was_typed_and_the_key_with_a_way_out(text, typed, answer, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        configs.load(str(path), [typed] if typed else [])
    assert str(error.value).startswith(f"{path} {typed}: {answer}" if typed else f"{path}: {answer}")


def test_the_settings_that_habits_are_answered_with_exist_and_the_habits_do_not():
    named = {name for answer in HABITS.values() for name in re.findall(r"\w+\.\w+(?:\.\w+)*", answer)}
    assert named - KEYS == set()
    assert HABITS.keys() & (KEYS | {key.rpartition(".")[2] for key in KEYS}) == set()
