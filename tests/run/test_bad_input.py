"""What the user can mend is said in one line, at once: nothing is compiled, written, or run as code.

The tables are in bad_inputs.py, bad_models.py and bad_tokenizers.py; here is how each is asked for, and what only meets
the machine.
"""

import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from bad_inputs import CONFIGS, FILES, GOOD, LINES, OVERRIDES, TOOLS
from bad_models import ARCHIVES, MODELS, archive, mark
from bad_tokenizers import TOKENIZERS
from runs import ROOT, arguments, checksums
from tiny import config

import train
from mllm.config.load import dump
from mllm.model import tokenizer, weights
from mllm.model.load import load_policy
from mllm.parallel.mesh import make_mesh


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
    return Path(shutil.copytree(exported, tmp_path / "model"))


@pytest.fixture
def refused(tmp_path, capsys):
    """Call a tool; it must refuse with one line, which is returned, and leave everything as it was."""
    compiled = []

    def listen(event: str, seconds: float, **_: object) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)

    def ask(tool, *command):
        before = checksums(tmp_path)
        assert tool.main([str(argument) for argument in command]) == 2
        output, errors = capsys.readouterr()
        assert output == ""
        assert errors.startswith("error: ")
        assert errors.endswith("\n")
        assert errors[:-1].isprintable()
        assert len(errors) < 2000
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


def learning(tmp_path, source):
    """Of a run that learns from a file."""
    data = {"source": str(source), "epochs": 1}
    return settings_in(tmp_path, "sft", data=data, task=None, eval=None, rollout=None)


# Settings


@pytest.mark.parametrize("what", CONFIGS)
def test_a_configuration_file_is_refused_that_is(what, tmp_path, refused):
    content, message = CONFIGS[what]
    path = tmp_path / "run.yaml"
    path.write_bytes(content.replace(b"{mark}", str(tmp_path / "code-was-run").encode()))
    assert message.format(path=path) in refused(train, "--config", path)


@pytest.mark.parametrize("name", ["nowhere", "a" * 300, "a\nb", "a\0b", ".", "/dev/zero", "~nobody-here/x"])
def test_a_configuration_that_is_no_file_is_answered_with_those_that_there_are(name, refused):
    said = refused(train, "--config", name)
    assert "no such file, here or in configs/; " in said
    assert "tiny_sft.yaml" in said


@pytest.mark.parametrize("override", OVERRIDES)
def test_a_setting_that_can_not_work_is_named(override, tmp_path, refused):
    assert OVERRIDES[override] in refused(train, *arguments(settings_in(tmp_path)), override)


def test_an_evaluation_prompt_that_is_too_long_is_named(tmp_path, refused):
    settings = settings_in(tmp_path, "sft", rollout={"max_prompt_length": 3})
    assert "rollout.max_prompt_length: " in refused(train, *arguments(settings))


# The model's files


def test_a_source_that_is_nowhere_is_answered_with_the_three_ways_out(tmp_path, refused):
    said = refused(train, *arguments(pretrained(tmp_path, tmp_path / "nowhere")))
    assert f"{tmp_path}/nowhere" in said
    for way in ("a local folder", "a hub id", "model.init=random"):
        assert way in said


@pytest.mark.parametrize("spoil", MODELS, ids=lambda spoil: spoil.__name__)
def test_a_model_is_refused_by_its_file(spoil, tmp_path, model, refused):
    message = spoil(model)
    assert message in refused(train, *arguments(pretrained(tmp_path, model)))


@pytest.mark.parametrize("spoil", MODELS[:3], ids=lambda spoil: spoil.__name__)
def test_by_sft_as_by_grpo(spoil, tmp_path, model, refused):
    message = spoil(model)
    assert message in refused(train, *arguments(pretrained(tmp_path, model, "sft")))


@pytest.mark.parametrize("what", TOKENIZERS)
def test_a_models_tokenizer_is_refused_that_has(what, tmp_path, model, refused, monkeypatch):
    monkeypatch.setattr(tokenizer, "TEMPLATE_SECONDS", 0.1)
    spoil, message = TOKENIZERS[what]
    spoil(model)
    assert message.format(model=model) in refused(train, *arguments(pretrained(tmp_path, model)))
    assert not mark(model).exists()


@pytest.mark.parametrize("kind", ARCHIVES)
@pytest.mark.parametrize("relative", [False, True])
def test_a_file_is_no_model(kind, relative, tmp_path, refused, monkeypatch):
    path = tmp_path / "models" / f"model.{kind}"
    path.parent.mkdir()
    path.write_bytes(archive(kind, tmp_path))
    monkeypatch.chdir(tmp_path)
    source = path.relative_to(tmp_path) if relative else path  # which might be a hub id
    said = refused(train, *arguments(pretrained(tmp_path, source)))
    assert f"{source}: is not a folder (archives and single files are never opened)" in said
    assert not mark(tmp_path).exists()


@pytest.mark.parametrize("kind", ARCHIVES)
def test_a_file_is_no_tokenizer(kind, tmp_path, refused):
    path = tmp_path / f"tokenizer.{kind}"
    path.write_bytes(archive(kind, tmp_path))
    settings = settings_in(tmp_path, model={"tokenizer": str(path)})
    assert f"model.tokenizer: none can be read from {path} (it is not a folder)" in refused(train, *arguments(settings))


def test_code_that_lies_in_a_models_folder_is_not_run(tmp_path, model):
    """A folder that asks for its own code, as those do that want trust_remote_code, and is whole without it."""
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((model / name).read_text())
        settings["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil"}
        (model / name).write_text(json.dumps(settings))
    for name in ("evil.py", "__init__.py", "conftest.py", "sitecustomize.py"):
        (model / name).write_text(f"open({str(mark(model))!r}, 'w')\nclass Evil: pass\n")
    (model / "pytorch_model.bin").write_bytes(archive("bin", model))
    settings = pretrained(tmp_path, model)
    load_policy(settings, make_mesh(settings.mesh)).initial_params()
    assert not mark(model).exists()


# The data's file


@pytest.mark.parametrize("what", LINES)
def test_a_line_of_data_is_refused_that_is(what, tmp_path, refused):
    line, message = LINES[what]
    path = tmp_path / "train.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD)
    assert f"{path}:2: " in (said := refused(train, *arguments(learning(tmp_path, path))))
    assert message in said


@pytest.mark.parametrize("what", FILES)
def test_a_source_of_data_is_refused_that_is(what, tmp_path, refused):
    name, content, message = FILES[what]
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert message.format(path=path)[:1000] in refused(train, *arguments(learning(tmp_path, path)))


@pytest.mark.parametrize("kind", sorted({*ARCHIVES} - {"jsonl"}))
def test_an_archive_is_no_data(kind, tmp_path, refused):
    path = tmp_path / f"data.{kind}"
    path.write_bytes(archive(kind, tmp_path))
    assert f"{path}:1: not JSON in UTF-8" in refused(train, *arguments(learning(tmp_path, path)))
    assert not mark(tmp_path).exists()


def test_a_folder_is_no_data(tmp_path, refused):
    (tmp_path / "data").mkdir()
    said = refused(train, *arguments(learning(tmp_path, tmp_path / "data")))
    assert f"data.source: {tmp_path}/data is a folder: give a file of JSON lines, or a hub id" in said


@pytest.mark.parametrize("name", ["data", "data.jsonl"])
def test_a_pipe_is_no_data_and_nobody_waits_for_it(name, tmp_path, refused):
    os.mkfifo(tmp_path / name)
    said = refused(train, *arguments(learning(tmp_path, tmp_path / name)))
    assert f"data.source: {tmp_path}/{name} is no regular file" in said


# The run's folder


def make_run(tmp_path):
    """A folder that looks like a run's, and its configuration."""
    settings = settings_in(tmp_path)
    folder = Path(settings.run_dir)
    (folder / "checkpoints" / "4").mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(settings))
    (folder / "metrics.jsonl").write_text('{"step": 4, "loss": 2}\n')
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
    assert message.format(folder=settings.run_dir) in refused(train, *arguments(settings), override)


def test_a_folder_of_something_else_is_left_alone(tmp_path, refused):
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter1.tex").write_text("It was a dark and stormy night.")
    said = refused(train, *arguments(settings_in(tmp_path)), f"run_dir={folder}")
    assert f"run_dir: {folder} holds other files" in said


@pytest.mark.parametrize("below", ["", "/run"])
def test_a_run_dir_that_is_or_lies_in_a_file_is_refused(tmp_path, refused, below):
    path = tmp_path / "notes.txt"
    path.write_text("to do")
    said = refused(train, *arguments(settings_in(tmp_path)), f"run_dir={path}{below}")
    assert f"run_dir: {path} is a file" in said


# The tools


@pytest.mark.parametrize(("tool", "command", "message"), TOOLS, ids=[f"{tool} {line:.40}" for tool, line, _ in TOOLS])
def test_a_tool_refuses_in_one_line(tool, command, message, tmp_path, refused, monkeypatch):
    make_run(tmp_path)
    (tmp_path / "run" / "checkpoints" / "4").rmdir()
    (tmp_path / "run" / "tiles.json").write_text('[{"by": "time", "device": ["v6e"]}]')
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.yaml").write_text("steps: &a [*a]\n")
    (tmp_path / "damaged" / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n[1]\n')
    monkeypatch.chdir(tmp_path)
    assert message in refused(importlib.import_module(f"tools.{tool}"), *shlex.split(command))


# A whole process


def process(tmp_path, program, *command):
    """What a program said and left behind when it was asked for something that it must refuse, by a whole process."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "PYTHONPATH": str(ROOT)}
    before, begin = checksums(tmp_path), time.monotonic()
    done = subprocess.run(
        [sys.executable, ROOT / program, *map(str, command)],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert time.monotonic() - begin < 60
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert checksums(tmp_path) == before
    return done.stderr


def test_without_weights_a_shipped_configuration_ends_at_once_with_one_line(tmp_path):
    said = process(tmp_path, "train.py", "--config", "qwen25_3b_grpo.yaml")
    assert said.startswith("error: Qwen/Qwen2.5-3B-Instruct: no such folder")
    assert said.count("\n") == 1
    for way in ("a local folder", "a hub id", "model.init=random"):
        assert way in said
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_wants_its_code_run_is_refused_in_a_process_too(tmp_path, model):
    spoil, message = TOKENIZERS["code of the folder's own"]
    spoil(model)
    said = process(tmp_path, "train.py", *arguments(pretrained(tmp_path, model)))
    assert said.startswith(f"error: {message.format(model=model)}")
    assert said.count("\n") == 1
    assert not mark(model).exists()


def test_what_rust_says_of_its_own_panic_comes_before_the_line(tmp_path, model):
    spoil, message = TOKENIZERS["a character map that is damaged"]
    spoil(model)
    said = process(tmp_path, "train.py", *arguments(pretrained(tmp_path, model)))
    assert said.splitlines()[-1].startswith(f"error: {message.format(model=model)}")


def test_a_tools_process_ends_with_one_line(tmp_path):
    assert process(tmp_path, "tools/export.py", "nowhere") == "error: nowhere: no config.yaml; give a run_dir\n"
