"""tools/device.py on a CPU: valid settings, what fails costs only itself, and where two trainings differ."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from mllm.config import load as configs
from mllm.store.run_store import seal
from tools import device


def test_the_training_has_valid_settings():
    _, _, name, *settings = device.TRAINING
    large, small = (configs.load(name, [*settings, *more]) for more in ([], device.ON_A_CPU))
    assert (large.model.architecture["vocab_size"], small.model.architecture["vocab_size"]) == (151936, 1000)


def finish_run(folder, arrays):
    (folder / "checkpoints" / "3" / "document").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(f"{{}}{len(arrays) * ' '}\n")
    document = {"arrays": arrays, "logs": {}, "digests": {}, "frozen": {}}
    (folder / "checkpoints" / "3" / "document" / "metadata").write_text(json.dumps(seal(document)))


ONE, OTHER = {"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}


@pytest.mark.parametrize(
    ("codes", "arrays", "exit_code", "said"),
    [
        ((0, 0, 0), (ONE, ONE), 0, "two runs: the same bits"),
        ((1, 0, 0), (ONE, ONE), 1, "two runs: the same bits"),
        ((0, 0, 1), (ONE, ONE), 1, "--- train.py"),
        ((0, 0, 0), (ONE, OTHER), 1, "two runs: they differ in metrics.jsonl, b, c"),
    ],
)
def test_what_fails_costs_only_itself_and_runs_are_compared(
    codes, arrays, exit_code, said, tmp_path, monkeypatch, capsys
):
    left, arrays = list(codes), list(arrays)

    def run(command, **_):
        if command[1] == "train.py":
            finish_run(Path(command[-1].removeprefix("run_dir=")), arrays.pop(0))
        return SimpleNamespace(returncode=left.pop(0))

    monkeypatch.setattr(device, "start", lambda *_: ([{"platform": "cpu"}], ""))
    monkeypatch.setattr(device.subprocess, "run", run)
    assert device.main(["--out", str(tmp_path)]) == exit_code
    assert not left
    assert capsys.readouterr().out.splitlines()[-1].startswith(said)
    assert device.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: --out: {tmp_path / 'one'} exists: give another folder\n"
