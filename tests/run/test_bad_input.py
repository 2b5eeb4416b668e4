"""Bad input is refused in one line with exit code 2, before anything is compiled, written, or run as code.

The tables are in bad_inputs.py and bad_models.py.
"""

import importlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from bad_inputs import CONFIGS, FILES, GOOD, LINES, OVERRIDES, TOOLS
from bad_models import AUTO_MAP, EVIL, MODELS, PICKLE, edit, file, mark, pickled
from runs import ROOT, arguments, checksums
from tiny import config

import train
from mllm.config.load import dump
from mllm.model import tokenizer, weights
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The folder of a model."""
    settings = config()
    policy = load_policy(settings, make_mesh(settings.mesh))
    folder = tmp_path_factory.mktemp("models") / "whole"
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), policy.params)
    weights.save(folder, policy.architecture, zeros, also=policy.tokenizer.save_pretrained)
    return folder


@pytest.fixture
def model(exported, tmp_path):
    """A copy of the folder, to be spoilt."""
    return Path(shutil.copytree(exported, tmp_path / "model"))


@pytest.fixture
def refused(tmp_path, capsys):
    """Calls a module's `main`, which must refuse with one line and leave all files as they are; returns the line."""
    compiled = []

    def listen(event: str, seconds: float, **_: object) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)

    def call(module, *command):
        before = checksums(tmp_path)
        assert module.main([str(argument) for argument in command]) == 2
        output, errors = capsys.readouterr()
        assert output == ""
        assert errors.startswith("error: ")
        assert errors.endswith("\n")
        assert errors[:-1].isprintable()
        assert len(errors) < 2000
        assert checksums(tmp_path) == before
        assert not compiled
        return errors

    yield call
    jax.monitoring.unregister_event_duration_listener(listen)


def settings_in(tmp_path, algorithm="grpo", **sections):
    """The configuration of a tiny run in this folder."""
    return config(algorithm, **{"run_dir": str(tmp_path / "run"), **sections})


def pretrained(tmp_path, model):
    """The configuration of a run that starts from this model."""
    source = {"init": "pretrained", "source": str(model), "architecture": None}
    return settings_in(tmp_path, "sft", model=source, eval=None, rollout=None)


def finetuned(tmp_path, source):
    """The configuration of SFT on a file."""
    data = {"source": str(source), "epochs": 1}
    return settings_in(tmp_path, "sft", data=data, task=None, eval=None, rollout=None)


# Settings


@pytest.mark.parametrize("what", CONFIGS)
def test_a_bad_configuration_file_is_refused(what, tmp_path, refused):
    content, text = CONFIGS[what]
    path = tmp_path / "run.yaml"
    path.write_bytes(content.replace(b"{mark}", str(tmp_path / "code-was-run").encode()))
    assert text.format(path=path) in refused(train, "--config", path)


@pytest.mark.parametrize("name", ["nowhere", "a" * 300, "a\nb", "a\0b", ".", "/dev/zero", "~nobody-here/x"])
def test_a_configuration_that_is_no_file_is_answered_with_the_shipped_ones(name, refused):
    said = refused(train, "--config", name)
    assert "no such file, here or in configs/; " in said
    assert "tiny_sft.yaml" in said


@pytest.mark.parametrize("override", OVERRIDES)
def test_an_impossible_setting_is_named(override, tmp_path, refused):
    assert OVERRIDES[override] in refused(train, *arguments(settings_in(tmp_path)), override)


# The model's files


@pytest.mark.parametrize("what", MODELS)
def test_a_bad_model_or_tokenizer_is_refused_by_its_file(what, tmp_path, model, refused, monkeypatch):
    monkeypatch.setattr(tokenizer, "TEMPLATE_SECONDS", 0.1)
    spoil, words = MODELS[what]
    spoil(model)
    assert words.format(model=model) in refused(train, *arguments(pretrained(tmp_path, model)))
    assert not mark(model).exists()


def test_a_single_file_is_no_model_no_tokenizer_and_no_data(tmp_path, refused, monkeypatch):
    (tmp_path / "files").mkdir()
    path = tmp_path / "files" / "model.bin"
    pickled(path.name)(path.parent)
    monkeypatch.chdir(tmp_path)
    for source in (path, path.relative_to(tmp_path)):  # the second might be a hub id
        said = refused(train, *arguments(pretrained(tmp_path, source)))
        assert f"{source}: is not a folder (archives and single files are never opened)" in said
    settings = settings_in(tmp_path, model={"tokenizer": str(path)})
    assert f"model.tokenizer: {path}: is not a folder" in refused(train, *arguments(settings))
    assert f"{path}:1: not JSON in UTF-8" in refused(train, *arguments(finetuned(tmp_path, path)))
    assert not mark(path.parent).exists()


def test_code_in_a_models_folder_is_not_run(tmp_path, model):
    """The folder asks for its own code to be run, as folders do that want trust_remote_code, but is whole without."""
    for name in ("config.json", "tokenizer_config.json"):
        edit(name, auto_map=AUTO_MAP)(model)
    for name in ("evil.py", "__init__.py", "conftest.py", "sitecustomize.py"):
        file(name, EVIL)(model)
    pickled(PICKLE)(model)
    settings = pretrained(tmp_path, model)
    load_policy(settings, make_mesh(settings.mesh)).initial_params()
    assert not mark(model).exists()


# The data's file


@pytest.mark.parametrize("what", LINES)
def test_a_bad_line_of_data_is_refused(what, tmp_path, refused):
    line, text = LINES[what]
    path = tmp_path / "train.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD)
    assert f"{path}:2: " in (said := refused(train, *arguments(finetuned(tmp_path, path))))
    assert text in said


@pytest.mark.parametrize("what", FILES)
def test_a_bad_data_source_is_refused_and_not_waited_for(what, tmp_path, refused):
    name, make, text = FILES[what]
    path = tmp_path / name
    if callable(make):
        make(path)
    elif make is not None:
        path.write_bytes(make)
    assert text.format(path=path)[:1000] in refused(train, *arguments(finetuned(tmp_path, path)))


# The run's folder


@pytest.mark.parametrize(
    ("run_dir", "words"), [("thesis", "holds other files"), ("a.txt", "is a file"), ("a.txt/run", "is a file")]
)
def test_a_folder_of_something_else_is_left_alone(run_dir, words, tmp_path, refused):
    (tmp_path / "thesis").mkdir()
    for name in ("thesis/chapter1.tex", "a.txt"):
        (tmp_path / name).write_text("It was a dark and stormy night.")
    said = refused(train, *arguments(settings_in(tmp_path)), f"run_dir={tmp_path}/{run_dir}")
    assert "run_dir: " in said
    assert words in said


# The tools


@pytest.mark.parametrize(("tool", "command", "text"), TOOLS, ids=[f"{tool} {line:.40}" for tool, line, _ in TOOLS])
def test_a_tool_refuses_in_one_line(tool, command, text, tmp_path, refused, monkeypatch):
    files = {
        "run/config.yaml": dump(settings_in(tmp_path)),
        "run/metrics.jsonl": '{"step": 4, "loss": 2}\n',
        "begun/metrics.jsonl": '{"step": 0}\n',
        "damaged/config.yaml": "steps: &a [*a]\n",
        "damaged/metrics.jsonl": '{"step": 1, "loss": 2}\n[1]\n',
        "damaged/samples.jsonl": '{"step": 1}\n',
    }
    for folder in ("run/checkpoints", "begun", "damaged"):
        (tmp_path / folder).mkdir(parents=True)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    assert text in refused(importlib.import_module(f"tools.{tool}"), *shlex.split(command))


# What goes around Python's output


def test_the_line_comes_after_what_a_library_in_rust_prints_of_its_panic(tmp_path, model, capfd):
    spoil, text = MODELS["a character map that is damaged"]
    spoil(model)
    assert train.main(arguments(pretrained(tmp_path, model))) == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith(f"error: {text.format(model=model)}")


def test_without_weights_a_shipped_configuration_ends_in_a_process_with_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", "--config", "qwen25_3b_grpo.yaml", "task={name: arithmetic}"],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n"), [*tmp_path.iterdir()]) == (2, "", 1, [])
    assert done.stderr.startswith("error: model.source: Qwen/Qwen2.5-3B-Instruct: no such folder")
    for way in ("a local folder", "a hub id", "model.init=random"):
        assert way in done.stderr
