"""Helpers for runs of small configurations, in this process or in processes to be killed, and for their results."""

import functools
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import train
from mllm.algorithms.table import schema
from mllm.config.load import dump
from mllm.config.run import RunConfig
from mllm.parallel.group import join
from mllm.parallel.mesh import make_mesh
from mllm.run import build
from mllm.run.checkpoint import read_checkpoint
from mllm.run.source_run import load_own_policy
from mllm.run.state import RunState
from mllm.run.store import tool_run
from mllm.storage import is_bucket, local_place
from mllm.training import step as updates
from mllm.training.optimizer import make_optimizer
from mllm.training.recipe import Recipe
from mllm.training.step import abstract_state

ROOT = Path(__file__).parent.parent
TESTS = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("", "run", "parallel"))]
"""Where processes that tests start find modules."""


def changed(config: RunConfig, **sections) -> RunConfig:
    """The configuration with settings of some sections replaced, a level deep."""
    settings = config.model_dump()
    for name, value in sections.items():
        settings[name] = {**(settings[name] or {}), **value} if isinstance(value, dict) else value
    return schema().validate_python(settings)


def arguments(config: RunConfig) -> list[str]:
    """The arguments of train.py; the configuration's file is written beside the run's folder, not into a bucket."""
    folder = local_place(config.run_dir, "configs") if is_bucket(config.run_dir) else Path(config.run_dir)
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_suffix(".yaml")
    path.write_text(dump(config), encoding="utf-8")
    return ["--config", str(path)]


def write_lines(path: Path, records: Iterable[object]) -> str:
    """Write a file of JSON lines; returns its path as a setting."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def edit(path: Path, **changes: object) -> None:
    """Change settings in a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def run(config: RunConfig, *options: str) -> int:
    return train.main([*arguments(config), *options])


def environment(**variables: str) -> dict[str, str]:
    """This process's environment with more variables. The modules of tests are found by it."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*TESTS, os.environ.get("PYTHONPATH", "")]), **variables}


def start_group(command: list[str], processes: int = 2, devices: int = 4, **variables: str) -> list[subprocess.Popen]:
    """Start a Python command in processes of some devices each, which can join one group."""
    group = {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_NUM_PROCESSES": str(processes)}
    variables |= {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}", **group}
    return [spawn(command, subprocess.STDOUT, **variables, JAX_PROCESS_ID=str(number)) for number in range(processes)]


def join_group(**settings: object) -> None:
    """In a process that `start_group` started: connect to the other processes, and compare settings."""
    group = train.make_parser().parse_args(["--config", ""])
    join((group.coordinator, group.processes, group.process), settings)


def free_address() -> str:
    """A coordinator's address with a free port."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def spawn(command: list[str], stderr: int, **variables: str) -> subprocess.Popen:
    variables, python = environment(**variables), [sys.executable, *command]
    return subprocess.Popen(python, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=stderr, text=True)


def outputs(processes: list[subprocess.Popen], exit_code: int = 0) -> list[str]:
    """The output of each process, once every process has ended with the exit code."""
    try:
        texts = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [exit_code] * len(processes), "\n".join(texts)
    return texts


def checkpoints(config: RunConfig) -> list[int]:
    """The steps of the run's checkpoints."""
    return tool_run(config.run_dir).steps()


def records(config: RunConfig, name: str = "metrics.jsonl") -> list[dict]:
    return tool_run(config.run_dir).records(name)


def checksums(folder: Path) -> dict[str, str]:
    """The checksum of every file, by its path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def killed_after(config: RunConfig, last: int, folder: Path) -> RunConfig:
    """The configuration of a copy of a finished run, as a kill after checkpoint `last` would have left it."""
    copy = changed(config, run_dir=str(folder))
    shutil.copytree(config.run_dir, folder)
    for newer in [number for number in checkpoints(config) if number > last]:
        shutil.rmtree(folder / "checkpoints" / str(newer))
    assert checkpoints(copy)[-1] == last
    return copy


def newest(config: RunConfig) -> RunState:
    """The state in the run's newest checkpoint."""
    store = tool_run(config.run_dir)
    policy = load_own_policy(store, config, make_mesh(config.mesh))
    like = abstract_state(policy.trained, make_optimizer(config.optimizer, config.steps or 1))
    document, train = read_checkpoint(store, step := store.steps()[-1], like)
    return RunState.from_document(step, train, document)


def assert_same_end(one: RunConfig, other: RunConfig) -> None:
    """The same newest checkpoint to the bit; metrics and samples to the byte."""
    mine, yours = newest(one), newest(other)
    # Not the whole document: a run that was stopped in its last evaluation keeps a checkpoint that says so.
    assert (mine.step, mine.position) == (yours.step, yours.position), f"{mine.step}, {mine.position}"
    leaves = jax.tree_util.tree_leaves_with_path(mine.train)
    for (path, leaf), same in zip(leaves, jax.tree.leaves(yours.train), strict=True):
        assert np.asarray(leaf).tobytes() == np.asarray(same).tobytes(), jax.tree_util.keystr(path)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert tool_run(one.run_dir).read(name) == tool_run(other.run_dir).read(name), name


def assert_same_metrics(mine: RunConfig, yours: RunConfig, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """The same lines of metrics, to rounding."""
    assert len(records(mine)) == len(records(yours)) > 1
    for line, expected in zip(records(mine), records(yours), strict=True):
        assert line.keys() == expected.keys()
        for name, value in line.items():
            numbers = np.float64(value), np.float64(expected[name])  # null is NaN
            np.testing.assert_allclose(*numbers, rtol=rtol, atol=atol, err_msg=f"{name}, {line['step']}")


def share_programs() -> None:
    """Let runs of the same settings share what this process has traced, as other processes share what was compiled.

    Tracing and lowering are half of a small run's seconds.
    """
    others = dict.fromkeys(("run_dir", "steps", "checkpoint", "log", "eval", "changes"))
    own, made = Recipe.forward, {}

    def forward(self: Recipe, config: RunConfig, graphdef: Any, mesh: Any, teacher: Any = None) -> updates.Forward:
        key = str({**config.model_dump(), **others}), graphdef, mesh, teacher
        if key not in made:
            made[key] = own(self, config, graphdef, mesh, teacher)
        return made[key]

    Recipe.forward = forward
    updates.make_logprob_pass = functools.cache(updates.make_logprob_pass)
    for name in ("make_optimizer", "make_schedule", "make_train_step"):
        setattr(build, name, functools.cache(getattr(build, name)))


share_programs()
