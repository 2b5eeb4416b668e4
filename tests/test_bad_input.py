"""What the user can mend is said in one line, at once: nothing is compiled, nothing is written."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from runs import ROOT, arguments, checksums
from safetensors.numpy import load_file, save_file
from tiny import config

import train
from mllm import weights
from mllm.config_file import dump
from mllm.mesh import make_mesh
from mllm.policy import load_policy


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A whole folder of a model."""
    settings = config()
    policy = load_policy(settings, make_mesh(settings.mesh))
    folder = tmp_path_factory.mktemp("models") / "whole"
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), policy.params)
    weights.save(folder, policy.architecture, zeros, also=policy.tokenizer.save_pretrained)
    return folder


@pytest.fixture
def model(exported, tmp_path):
    """A copy of it, to be spoilt."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in exported.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def refused(tmp_path, capsys):
    """Ask for a run; it must be refused with one line, which is returned."""
    compiled = []

    def listen(event: str, seconds: float, **_: object) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)

    def ask(settings, *overrides):
        command = arguments(settings)
        before = checksums(tmp_path)
        assert train.main([*command, *overrides]) == 2
        output, errors = capsys.readouterr()
        assert output == ""
        assert errors.startswith("error: ")
        assert errors.endswith("\n")
        assert errors.count("\n") == 1
        assert checksums(tmp_path) == before
        assert not compiled
        return errors

    yield ask
    jax.monitoring.unregister_event_duration_listener(listen)


def settings_in(tmp_path, algorithm="grpo", **sections):
    return config(algorithm, **{"run_dir": str(tmp_path / "run"), **sections})


def pretrained(tmp_path, model, algorithm="grpo", **sections):
    source = {"init": "pretrained", "source": str(model), "architecture": None}
    return settings_in(tmp_path, algorithm, model=source, **sections)


# Settings that only meet the machine or the data at run time


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.temprature=2", "rollout.temprature: unknown setting; did you mean temperature?"),
        ("grpo.num_generations=3", "batch_size: 8 is not divisible by grpo.num_generations (3)"),
        ("mesh.tp=16", "mesh: dp * fsdp * tp = 16, but there are 8 devices: set mesh.tp=8"),
        ("mesh.tp=8", "mesh.tp: 8 does not divide the model's num_attention_heads of 4; the nearest that works is 4"),
        ("rollout.max_prompt_length=3", "rollout.max_prompt_length: prompt 0 of task arithmetic has"),
        ("task.heldout=60", "task.heldout: 60 of arithmetic's 100 problems"),
        ("task.rewards=[{name: exact}]", "task.rewards: there is no reward exact:"),
        ("task.rewards=[{name: 'no_such_module:f'}]", "task.rewards: no_such_module:f can't be imported"),
        ("task.rewards=[{name: 'user_rewards:f'}]", "task.rewards: user_rewards:f can't be imported"),
        ("task.rewards=[{name: task}]", "task.rewards: this task has no scorer of its own"),
        ("task={name: gsm8k, path: nowhere}", "task.path: nowhere/test.jsonl can't be read"),
        ("model.tokenizer=nowhere", "model.tokenizer: none can be read from nowhere"),
        ("model.architecture.vocab_size=128", "model.tokenizer: its token '<|pad|>' has id 259"),
        ("model.architecture.hiden_size=8", "model.architecture: hiden_size is unknown; did you mean hidden_size?"),
        ("rollout.stop=['two tokens']", "rollout.stop: 'two tokens' is 10 tokens"),
    ],
)
def test_a_setting_that_can_not_work_is_named(tmp_path, refused, override, message):
    assert message in refused(settings_in(tmp_path), override)


def test_an_evaluation_prompt_that_is_too_long_is_named(tmp_path, refused):
    settings = settings_in(tmp_path, "sft", rollout={"max_prompt_length": 3})
    assert "rollout.max_prompt_length: " in refused(settings)


# The model's files


def test_a_source_that_is_nowhere_is_answered_with_the_three_ways_out(tmp_path, refused):
    said = refused(pretrained(tmp_path, tmp_path / "nowhere"))
    assert f"{tmp_path}/nowhere" in said
    for way in ("a local folder", "a hub id", "model.init=random"):
        assert way in said


def without_weights(model: Path) -> str:
    (model / "model.safetensors").unlink()
    return f"{model}: has neither model.safetensors nor model.safetensors.index.json"


def without_config(model: Path) -> str:
    (model / "config.json").unlink()
    return f"{model / 'config.json'}: missing"


def with_pickled_weights_alone(model: Path) -> str:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    return f"{model}: only pickled weights (pytorch_model.bin)"


def truncated(model: Path) -> str:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return f"{path}: truncated or not a safetensors file"


def without_a_shard(model: Path) -> str:
    names = load_file(model / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model.safetensors").unlink()
    return f"{model / 'model-00001-of-00001.safetensors'}: this shard is missing"


def without_a_tensor(model: Path) -> str:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors")
    return "tensor model.norm.weight is missing"


def with_a_tensor_of_another_shape(model: Path) -> str:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].copy()
    save_file(tensors, model / "model.safetensors")
    return "tensor model.norm.weight has shape [31]; by config.json it must be [32]"


def with_too_few_rows_for_the_tokenizer(model: Path) -> str:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 256}))
    return "model.tokenizer: its token '<|pad|>' has id 259, but the embedding has 256 rows"


def without_tokenizer(model: Path) -> str:
    for path in model.glob("tokenizer*"):
        path.unlink()
    return f"model.tokenizer: none can be read from {model}"


@pytest.mark.parametrize(
    "spoil",
    [
        without_weights,
        without_config,
        with_pickled_weights_alone,
        truncated,
        without_a_shard,
        without_a_tensor,
        with_a_tensor_of_another_shape,
        with_too_few_rows_for_the_tokenizer,
        without_tokenizer,
    ],
)
@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_a_model_that_is_not_whole_is_refused_by_its_file(tmp_path, model, refused, algorithm, spoil):
    message = spoil(model)
    assert message in refused(pretrained(tmp_path, model, algorithm))


# The data's file

GOOD = '{"question": "1+1=", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "data.source: {path} can't be read (No such file or directory)"),
        ("", "data.source: {path}: there is no example in it"),
        (GOOD + "{'question': 1}\n", "{path}:2: not JSON"),
        (GOOD + GOOD + '{"question": "1+1="}\n', "{path}:3: answer is missing"),
        ('{"messages": []}\n', "{path}:1: no message is the assistant's"),
        (GOOD, "data.source: {path} has 1 examples, too few for one batch in 1 epochs"),
    ],
)
def test_bad_data_is_refused_by_file_and_line(tmp_path, refused, text, message):
    path = tmp_path / "train.jsonl"
    if text is not None:
        path.write_text(text)
    data = {"source": str(path), "epochs": 1}
    settings = settings_in(tmp_path, "sft", data=data, task=None, eval=None, rollout=None)
    assert message.format(path=path) in refused(settings)


# The run's folder


def make_run(tmp_path):
    """A folder that looks like a run's, and its configuration."""
    settings = settings_in(tmp_path)
    folder = Path(settings.run_dir)
    (folder / "checkpoints" / "4").mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(settings))
    (folder / "metrics.jsonl").write_text('{"step": 4}\n')
    return settings


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.learning_rate=0.5", "optimizer.learning_rate: {folder} belongs to a run with 0.01, not 0.5"),
        ("seed=1", "seed: {folder} belongs to a run with 0, not 1"),
        ("steps=2", "steps: {folder} belongs to a run with 4, not 2"),
        ("eval={every: 2}", "eval: {folder} belongs to a run with None"),
        ("model.architecture.num_hidden_layers=3", "model.architecture.num_hidden_layers: {folder} belongs"),
    ],
)
def test_the_folder_of_a_run_with_other_settings_is_left_alone(tmp_path, refused, override, message):
    settings = make_run(tmp_path)
    assert message.format(folder=settings.run_dir) in refused(settings, override)


def test_a_folder_of_something_else_is_left_alone(tmp_path, refused):
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter1.tex").write_text("It was a dark and stormy night.")
    assert f"run_dir: {folder} holds other files" in refused(settings_in(tmp_path), f"run_dir={folder}")


@pytest.mark.parametrize("below", ["", "/run"])
def test_a_run_dir_that_is_or_lies_in_a_file_is_refused(tmp_path, refused, below):
    path = tmp_path / "notes.txt"
    path.write_text("to do")
    assert f"run_dir: {path} is a file" in refused(settings_in(tmp_path), f"run_dir={path}{below}")


# A whole process


def test_without_weights_a_shipped_configuration_ends_at_once_with_one_line(tmp_path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "PYTHONPATH": str(ROOT)}
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", "--config", "qwen25_3b_grpo.yaml"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert time.monotonic() - begin < 60
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: Qwen/Qwen2.5-3B-Instruct: no such folder")
    assert done.stderr.count("\n") == 1
    for way in ("a local folder", "a hub id", "model.init=random"):
        assert way in done.stderr
    assert not (tmp_path / "runs").exists()
