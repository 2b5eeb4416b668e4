"""Files and modules that a configuration names are found in its folder, and then in the current one."""

import sys
from pathlib import Path
from typing import Any

import pytest
from test_config import GRPO

from mllm.config import load as configs
from mllm.config import places

RUN = GRPO.replace("source: somewhere", "source: model").replace("name: arithmetic", "name: jsonl, train: train.jsonl")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a configuration in its folder `ours`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(places, "MODULES", [])
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "run.yaml").write_text(RUN)
    return tmp_path


def test_files_are_found_in_the_configurations_folder_then_in_the_current_one(here: Path) -> None:
    (here / "train.jsonl").touch()
    (here / "model").mkdir()
    config = configs.load("ours/run.yaml")
    assert (config.task.train, config.model.source) == ("train.jsonl", "model")
    (here / "ours" / "train.jsonl").touch()
    (here / "ours" / "model").mkdir()
    config = configs.load("ours/run.yaml")
    assert (config.task.train, config.model.source) == ("ours/train.jsonl", "ours/model")


def test_a_section_in_a_section_is_looked_into(here: Path) -> None:
    (here / "ours" / "heldout.jsonl").touch()
    settings: dict[str, Any] = {"data": {"source": "hub/id", "validation": {"source": "heldout.jsonl"}}}
    places.locate(settings, (Path("ours"), Path()))
    assert settings == {"data": {"source": "hub/id", "validation": {"source": "ours/heldout.jsonl"}}}
    places.locate({"data": "text"}, (Path(),))


def test_what_the_command_line_names_is_found_in_the_current_folder_first(here: Path) -> None:
    for folder in (here, here / "ours"):
        (folder / "other.jsonl").touch()
        (folder / "part-0.jsonl").touch()
    (here / "ours" / "theirs.jsonl").touch()
    for typed, meant in (
        ("other.jsonl", "other.jsonl"),
        ("part-*.jsonl", "part-*.jsonl"),
        ("theirs.jsonl", "ours/theirs.jsonl"),
        ("nowhere.jsonl", "nowhere.jsonl"),
    ):
        assert configs.load("ours/run.yaml", [f"task.train={typed}"]).task.train == meant


def test_a_resolved_configuration_names_the_same_files_from_the_folder_of_its_run(here: Path) -> None:
    (here / "ours" / "train.jsonl").touch()
    config = configs.load("ours/run.yaml")
    copy = here / "runs" / "x" / "config.yaml"
    copy.parent.mkdir(parents=True)
    copy.write_text(configs.dump(config))
    assert configs.load(str(copy)) == configs.load("runs/x/config.yaml") == config


def test_hub_ids_splits_and_words_stay_whatever_folders_there_are(here: Path) -> None:
    for name in ("test", "us/sums", "bytes"):
        (here / "ours" / name).mkdir(parents=True)
    (here / "ours" / "train").touch()
    task = "task={name: hub, id: us/sums, train: train, test: test}"
    settings = [task, "eval.test=true", "model.tokenizer=bytes"]
    config = configs.load("ours/run.yaml", settings)
    assert (config.task.id, config.task.train, config.task.test) == ("us/sums", "train", "test")
    assert config.model.tokenizer == "bytes"


def test_modules_are_found_in_both_folders_after_all_that_python_knows_while_users_code_runs(here: Path) -> None:
    before = [*sys.path]
    configs.load("ours/run.yaml")
    assert sys.path == before
    with places.importable():
        assert sys.path == [*before, str(here / "ours"), str(here)]
    assert sys.path == before
