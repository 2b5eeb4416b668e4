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


@pytest.mark.parametrize(
    ("ours", "also", "typed", "meant"),
    [
        ("", "train.jsonl model/x", "", "/train.jsonl /model"),
        ("train.jsonl model/x", "train.jsonl model/x", "", "/ours/train.jsonl /ours/model"),
        # What the command line names is looked for in the current folder first.
        ("other.jsonl", "other.jsonl model/x", "task.train=other.jsonl", "/other.jsonl /model"),
        ("", "part-0.jsonl", "task.train=part-*.jsonl", "/part-*.jsonl model"),
        ("other.jsonl", "", "task.train=other.jsonl", "/ours/other.jsonl model"),
        ("", "", "task.train=nowhere.jsonl", "nowhere.jsonl model"),
    ],
)
def test_files_are_found_in_the_configurations_folder_and_the_current_one(here, ours, also, typed, meant) -> None:
    """`ours` are the files in the configuration's folder, `also` those in the current one; found ones are absolute."""
    for path in (*(here / "ours" / name for name in ours.split()), *(here / name for name in also.split())):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    config = configs.load("ours/run.yaml", typed.split())
    assert f"{config.task.train} {config.model.source}".replace(str(here), "") == meant


def test_what_is_missing_says_where_it_was_looked_for_and_the_nearest_name(here: Path) -> None:
    (here / "ours" / "data").mkdir()
    (here / "ours" / "data" / "train.jsonl").touch()
    configs.load("ours/run.yaml")
    assert places.missing("data/trian.jsonl") == (
        f"data/trian.jsonl: no such file in {here}/ours/data or {here}/data (did you mean train.jsonl?)"
    )
    assert places.missing("/nowhere/x") == "/nowhere/x: no such file in /nowhere"


def test_a_section_in_a_section_is_looked_into(here: Path) -> None:
    (here / "ours" / "heldout.jsonl").touch()
    settings: dict[str, Any] = {"data": {"source": "hub/id", "validation": {"source": "heldout.jsonl"}}}
    places.locate(settings, (Path("ours"), Path()))
    assert settings == {"data": {"source": "hub/id", "validation": {"source": str(here / "ours/heldout.jsonl")}}}


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
