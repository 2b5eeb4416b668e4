"""Runs of small configurations, in this process or in one that can be killed, and what they leave behind."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import train
from mllm.config.load import dump
from mllm.config.schema import Config
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh
from mllm.run.checkpoint import Checkpoints
from mllm.run.metrics import read_records
from mllm.train.optimizer import make_optimizer
from mllm.train.step import abstract_state

ROOT = Path(__file__).parent.parent


def changed(config: Config, **sections) -> Config:
    """The configuration with some sections' settings replaced, a level deep."""
    settings = config.model_dump()
    for name, value in sections.items():
        settings[name] = {**(settings[name] or {}), **value} if isinstance(value, dict) else value
    return Config.model_validate(settings)


def arguments(config: Config) -> list[str]:
    """Of the command that trains it; the file lies beside the run's folder."""
    path = Path(config.run_dir).with_suffix(".yaml")
    path.write_text(dump(config), encoding="utf-8")
    return ["--config", str(path)]


def run(config: Config) -> int:
    return train.main(arguments(config))


def start(config: Config, **environment: str) -> subprocess.Popen:
    """The same command in a process of its own."""
    paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "train.py", *arguments(config)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait(process: subprocess.Popen, reached, seconds: float = 120) -> None:
    """Until `reached()`; fails when the process ends before."""
    deadline = time.monotonic() + seconds
    while not reached():
        if process.poll() is not None:
            pytest.fail(f"ended with {process.returncode} before it was to be stopped:\n{process.communicate()[1]}")
        if time.monotonic() > deadline:
            kill(process)
            pytest.fail(f"not reached in {seconds} s")
        time.sleep(0.005)


def kill(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def checkpoints(config: Config) -> list[int]:
    folder = Path(config.run_dir, "checkpoints")
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.exists() else []


def records(config: Config, name: str = "metrics.jsonl") -> list[dict]:
    return read_records(Path(config.run_dir, name))


def checksums(folder: Path) -> dict[str, str]:
    """Of every file, by its path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def newest(config: Config):
    """The newest checkpoint: step, parameters with optimizer, position of the data."""
    like = abstract_state(
        load_policy(config, make_mesh(config.mesh)).params, make_optimizer(config.optimizer, config.steps)
    )
    manager = Checkpoints(Path(config.run_dir, "checkpoints"), config.checkpoint, read_only=True)
    restored = manager.restore(like)
    manager.close()
    return restored


def assert_same_end(one: Config, other: Config) -> None:
    """Parameters, optimizer and position to the bit; metrics and samples to the byte."""
    mine, yours = newest(one), newest(other)
    assert (mine.step, mine.position) == (yours.step, yours.position)
    for leaf, same in zip(jax.tree.leaves(mine.state), jax.tree.leaves(yours.state), strict=True):
        np.testing.assert_array_equal(leaf, same)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert Path(one.run_dir, name).read_bytes() == Path(other.run_dir, name).read_bytes(), name
