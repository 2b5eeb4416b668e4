"""tools/device.py on a CPU: valid settings, what fails costs only itself, and where two trainings differ."""

import json
from types import SimpleNamespace

import pytest

from mllm.config import load as configs
from mllm.store.run_store import seal
from tools import device


@pytest.mark.parametrize("cpu", [True, False])
def test_the_training_has_valid_settings(cpu):
    configs.load("tiny_grpo.yaml", device.training(cpu)[3:])


@pytest.mark.parametrize(("codes", "exit_code"), [((0, 0, 0), 0), ((1, 0, 0), 1), ((0, 0, 1), 1)])
def test_what_fails_costs_only_itself(codes, exit_code, tmp_path, monkeypatch, capsys):
    left = list(codes)
    monkeypatch.setattr(device, "start", lambda *_: ([{"platform": "cpu"}], ""))
    monkeypatch.setattr(device.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=left.pop(0)))
    monkeypatch.setattr(device, "difference", lambda *_: "")
    assert device.main(["--out", str(tmp_path)]) == exit_code
    assert not left
    assert ("two runs: the same bits" in capsys.readouterr().out) == (codes[2] == 0)


def finished_run(folder, metrics, arrays):
    (folder / "checkpoints" / "3" / "document").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(metrics)
    document = {"arrays": arrays, "logs": {}, "digests": {}, "frozen": {}}
    (folder / "checkpoints" / "3" / "document" / "metadata").write_text(json.dumps(seal(document)))
    return folder


def test_two_runs_differ_in_metrics_or_in_arrays(tmp_path):
    one = finished_run(tmp_path / "one", "{}\n", {"a": 1, "b": 2})
    same = finished_run(tmp_path / "same", "{}\n", {"a": 1, "b": 2})
    other = finished_run(tmp_path / "other", "{ }\n", {"a": 1, "b": 3})
    assert device.difference(one, same) == ""
    assert device.difference(one, other) == "metrics.jsonl, b"


def test_a_folder_with_runs_is_refused(tmp_path, capsys):
    (tmp_path / "two").mkdir()
    assert device.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: --out: {tmp_path / 'two'} exists: give another folder\n"
