"""The trainer as a library: two names of the package, and a console command."""

import subprocess
import sys
import tomllib
from pathlib import Path

from runs import assert_same_end, killed_after

import mllm
from mllm.config.load import load

ROOT = Path(__file__).parents[2]


def test_a_notebook_trains_as_the_command_does(finished, tmp_path):
    going_on = killed_after(finished("dpo"), 2, tmp_path / "run")
    config = mllm.load_config(f"{going_on.run_dir}/config.yaml", [f"run_dir={going_on.run_dir}"])
    assert config == load(f"{going_on.run_dir}/config.yaml", [f"run_dir={going_on.run_dir}"])
    assert mllm.train(config) == 0
    assert_same_end(config, finished("dpo"))


def test_the_package_and_its_names_need_no_jax_before_training():
    code = "import sys, mllm; mllm.load_config('tiny_sft.yaml'); assert 'jax' not in sys.modules; print(mllm.train)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "train" in done.stdout


def test_the_console_command_is_train_py(monkeypatch, capsys):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"mllm-train": "mllm:main"}
    monkeypatch.setattr(sys, "argv", ["mllm-train", "--config", "tiny_sft.yaml", "--print-config"])
    try:
        mllm.main()
    except SystemExit as left:
        assert not left.code  # noqa: PT017
    assert "algorithm: sft" in capsys.readouterr().out
