"""Weights & Biases knows a run by a number of its own, and is asked for before anything starts."""

import shutil
import sys

from runs import arguments, changed
from tiny import config

import train
from mllm.run.wandb import run_id
from mllm.store.run_store import RunStore

SETTINGS = config("sft", steps=4, checkpoint={"every": 2}, eval=None, rollout=None, log={"wandb": "project"})


def test_a_moved_run_keeps_its_id_and_a_copied_one_gets_another(tmp_path):
    first, copied, moved = (RunStore(tmp_path / name) for name in ("first", "copied", "moved"))
    first.folder.mkdir()
    number = run_id(first)
    shutil.copytree(first.folder, copied.folder)
    other = run_id(copied)
    assert (run_id(first), run_id(copied)) == (number, other)
    first.folder.rename(moved.folder)
    copied.folder.rename(first.folder)
    assert (run_id(moved), run_id(first)) == (number, other)
    restored = shutil.copytree(moved.folder, tmp_path / "restored")  # from a copy, at the place where it was
    shutil.rmtree(moved.folder)
    restored.rename(moved.folder)
    assert run_id(moved) == number
    assert len({number, other}) == 2


def test_without_the_package_nothing_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert train.main(arguments(changed(SETTINGS, run_dir=str(tmp_path / "mine")))) == 2
    assert capsys.readouterr().err.startswith("error: log.wandb: the package is missing: pip install wandb")
    assert not (tmp_path / "mine").exists()
