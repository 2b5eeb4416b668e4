"""A folder belongs to one run: what may change when it resumes, and what would make another run of it."""

import pytest
from tiny import config

from mllm import config_file as configs
from mllm import run_dir
from mllm.config import Config
from mllm.errors import UserError


def changed(settings, **values):
    return Config.model_validate({**settings.model_dump(), **values})


@pytest.mark.parametrize(
    "how",
    [
        {"mesh": {"dp": 2}},
        {"micro_batch_size": 2},
        {"head": {"impl": "reference"}},
        {"checkpoint": {"every": 2, "keep": 5}},
        {"log": {"samples": 1}},
        {"run_dir": "elsewhere"},
        {"steps": 8},
    ],
    ids=str,
)
def test_how_a_run_is_carried_out_may_change(tmp_path, how):
    run_dir.write(tmp_path, config())
    run_dir.check(tmp_path, changed(config(), **how))


@pytest.mark.parametrize(
    ("what", "key"),
    [
        ({"seed": 1}, "seed"),
        ({"steps": 2}, "steps"),
        ({"batch_size": 16}, "batch_size"),
        ({"eval": {"every": 2}}, "eval"),
        ({"grpo": {"num_generations": 2}}, "grpo.num_generations"),
        ({"rollout": {"max_prompt_length": 16, "max_completion_length": 8}}, "rollout.max_completion_length"),
    ],
    ids=str,
)
def test_what_a_run_computes_may_not(tmp_path, what, key):
    run_dir.write(tmp_path, config())
    with pytest.raises(UserError, match=f"^{key}: .* belongs to a run with "):
        run_dir.check(tmp_path, changed(config(), **what))


def test_more_steps_make_another_run_where_the_learning_rate_depends_on_them(tmp_path):
    decaying = config(optimizer={"schedule": "cosine"})
    run_dir.write(tmp_path, decaying)
    with pytest.raises(UserError, match=r"^steps: .* belongs to a run with 4, not 8"):
        run_dir.check(tmp_path, changed(decaying, steps=8))


def test_a_new_or_an_empty_folder_belongs_to_nobody(tmp_path):
    run_dir.check(tmp_path, config())
    run_dir.check(tmp_path / "new" / "run", config())
    assert not run_dir.is_run(tmp_path)
    assert not (tmp_path / "new").exists()


def test_a_folder_with_other_files_is_not_taken(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"holds other files and no config\.yaml"):
        run_dir.check(tmp_path, config())


def test_a_configuration_that_can_not_be_read_is_no_invitation(tmp_path):
    (tmp_path / "config.yaml").write_text("steps: [")
    with pytest.raises(UserError, match=r"config\.yaml: not readable as YAML"):
        run_dir.check(tmp_path, config())


def test_the_folder_is_made_with_a_configuration_that_loads_again(tmp_path):
    folder = tmp_path / "runs" / "first"
    run_dir.write(folder, config())
    assert configs.load(str(folder / "config.yaml")) == config()
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]


def test_a_folder_that_can_not_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run_dir: .* can't be written"):
        run_dir.write(tmp_path / "file" / "run", config())
